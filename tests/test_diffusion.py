"""Masked diffusion: against sums over everything (tiny distributions), and a full recompute with a mask from the definition."""
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pasta_lib.core import PastaError
from pasta_lib.diffusion import *
from pasta_lib.engine import Engine, Queries, Sampling, ar, replay_deviation, strategy
from pasta_lib.masks import dense_mask, layout_logits
from pasta_lib.models import add_tokens, byte_tokenizer, tiny_model
from pasta_lib.pool import check_pool
from pasta_lib.trace import timeline, to_json

TOLERANCE = 1e-4
PROMPT = [(7 * i * i + 3) % 250 for i in range(21)]


@pytest.fixture(scope='module')
def small():
    model, tok = tiny_model(seed=5, hidden=32, vocab=280)
    add_tokens(model, tok, [MASK])
    return model, tok


@strategy
def denoising(h, length=9, given=(), commit=True, after=3, bidirectional=True, share=2):
    "The first masked rows, `share` a step; a clean pass or none; then `after` tokens that read it."
    main, mask = h.line('main'), mask_id(h.tokenizer)
    yield h.prompt(main)
    tokens = [*given, *[mask] * (length - len(given))]
    span = Span(h, tokens, main.position, mask, [main.segment], 'span', masked=[False] * len(given) + [True] * (length - len(given)))
    h.counts['span'] = span
    while not span.done:
        logits = (yield span.queries()).clone()
        logits[:, mask:] = -math.inf
        span.reveal(span.rows[:share], logits[:share].argmax(-1).numpy(), logits[:share].softmax(-1).amax(-1).numpy())
    if commit: yield span.queries(want=())
    span.write()
    h.close(main.segment)
    segment, position, token = h.open([main.segment, span.segment], 'after'), main.position + length, 1
    for n in range(after):
        logits = yield Queries([token], [position + n], segment, notes=[(0, 'sampled', math.nan, False)])
        token = int(logits[0, :mask].argmax())


# ---- the forward process

@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.floats(0, 1), st.integers(0, 99), st.data())
def test_noise_touches_what_it_says_and_nothing_else(ids, t, seed, data):
    keep = data.draw(st.sets(st.integers(0, len(ids) - 1)))
    flags = np.isin(np.arange(len(ids)), list(keep))
    noisy, masked = noise(ids, t, 99, torch.Generator().manual_seed(seed), keep=sorted(keep))
    again, _ = noise(np.array(ids), t, 99, torch.Generator().manual_seed(seed), keep=flags)
    assert noisy.tolist() == again.tolist() == [99 if m else i for i, m in zip(ids, masked.tolist())]
    assert not masked[sorted(keep)].any() and noisy.dtype == torch.int64
    if t in (0, 1): assert masked.sum() == t * (len(ids) - len(keep))


def test_noise_masks_each_token_with_its_probability():
    t = torch.tensor([[.1], [.5], [.9]])
    _, masked = noise(torch.zeros(3, 20000, dtype=torch.long), t, 1, torch.Generator().manual_seed(0))
    error = (t[:, 0] * (1 - t[:, 0]) / 20000).sqrt()
    assert ((masked.float().mean(1) - t[:, 0]).abs() < 4 * error).all()
    both = (masked[:, :-1] & masked[:, 1:]).float().mean(1)                     # neighbours know nothing of each other
    assert ((both - t[:, 0] ** 2).abs() < 6 * error).all()


@pytest.mark.parametrize('t', [-.1, 1.1, math.nan, [.5, 2], 'x', None, ['a'], True])
def test_a_time_is_a_probability(t):
    with pytest.raises(DiffusionError): noise([1, 2], t, 0)


def test_the_mask_has_an_id(small):
    assert mask_id(small[1]) == small[1].convert_tokens_to_ids(MASK)
    with pytest.raises(DiffusionError, match='add_tokens'): mask_id(byte_tokenizer())
    own = byte_tokenizer()
    own.add_special_tokens(dict(mask_token='[M]'))
    assert mask_id(own) == own.mask_token_id


# ---- the bound

def toys():
    rng = np.random.default_rng(0)
    return [Toy(rng.gamma(.7, size=(v,) * n) + .01) for v, n in [(2, 1), (2, 2), (3, 3), (2, 4)]]


def inconsistent(seen, n=4, v=3):
    "Predictions that no distribution has."
    rng = np.random.default_rng(sum(7 ** i * (token + 1) for i, token in seen.items()))
    rows = rng.random((n, v)) + .05
    return rows / rows.sum(1, keepdims=True)


@pytest.mark.parametrize('toy', toys())
def test_a_perfect_denoiser_has_a_tight_bound(toy):
    for x in itertools.product(range(toy.vocab), repeat=toy.length):
        assert bound(toy, x) == pytest.approx(toy.log(x), abs=1e-10) == bound_by_orders(toy, x)


def test_the_bound_is_the_mean_over_orders_for_any_model():
    for x in [(0, 1, 2, 0), (2, 2, 2, 2)]: assert bound(inconsistent, x) == pytest.approx(bound_by_orders(inconsistent, x), abs=1e-10)


def test_the_bound_is_an_integral_over_time():
    x, total = (0, 1, 2, 0), 0.
    times = (np.arange(2000) + .5) / 2000                                       # the midpoint rule
    for k in range(1, 5):
        for hidden in itertools.combinations(range(4), k):
            rows = inconsistent({i: x[i] for i in range(4) if i not in hidden})
            total += sum(math.log(rows[i, x[i]]) for i in hidden) * (times ** (k - 1) * (1 - times) ** (4 - k)).mean()
    assert bound(inconsistent, x) == pytest.approx(total, abs=1e-5)


@pytest.mark.parametrize('by', ['time', 'count'])
@pytest.mark.parametrize('predict', [inconsistent, Toy(np.random.default_rng(1).gamma(1, size=(3,) * 4) + .1)])
def test_both_estimates_agree_with_the_exact_value(by, predict):
    x = 1, 0, 2, 1
    draws = sampled_bound(predict, x, 3000, torch.Generator().manual_seed(2), by)
    assert abs(draws.mean() - bound(predict, x)) < 4 * draws.std() / 3000 ** .5 and draws.shape == (3000,)


def test_a_draw_is_by_time_or_by_count():
    with pytest.raises(PastaError, match='time or count'): sampled_bound(inconsistent, (0,), 1, by='luck')


def test_what_a_model_thinks_impossible_is_worth_minus_infinity():
    alike = Toy([[.5, 0], [0, .5]])
    assert bound(alike, (0, 1)) == bound_by_orders(alike, (0, 1)) == alike.log((0, 1)) == -math.inf
    assert not alike({0: 0, 1: 1}).any()                       # no such text: nothing is probable
    assert sampled_bound(alike, (0, 1), 20, torch.Generator().manual_seed(0), 'count').min() == -math.inf


# ---- ordered partitions

@given(st.permutations(range(3)), st.sets(st.integers(1, 2)))
def test_one_by_one_any_order_is_exact_and_parts_factorise(order, cuts):
    toy = Toy(np.random.default_rng(4).gamma(1, size=(2, 2, 2)) + .1)
    edges = [0, *sorted(cuts), 3]
    partition = [list(order[a:b]) for a, b in zip(edges, edges[1:])]
    table = implied(toy, partition, 2)
    assert table.sum() == pytest.approx(1)
    if len(partition) == 3: assert np.allclose(table, toy.table)
    elif len(partition) == 1: assert np.allclose(table, np.einsum('a,b,c->abc', *toy({})))
    first = partition[0]                                        # what is decided in the first step has its marginals
    for i in first: assert np.allclose(table.sum(tuple(j for j in range(3) if j != i)), toy({})[i])


@pytest.mark.parametrize('partition', [[[0], [0]], [[0], [2]], [[0], []], [[1]]])
def test_no_partition(partition):
    with pytest.raises(DiffusionError): implied(toys()[1], partition, 2)


# ---- spans in the engine

def oracle(model, tok, length, given_, share, after):
    "The same decoding by full recompute: plain lists, a mask from the definition, the model's own attention."
    mask, n = mask_id(tok), len(PROMPT)
    seq = [*PROMPT, *given_, *[mask] * (length - len(given_))]
    hidden, seen = list(range(n + len(given_), n + length)), []
    def logits(tokens):
        N = len(tokens)
        role = ['p' if i < n else 's' if i < n + length else 'a' for i in range(N)]
        may = torch.tensor([[j <= i or role[i] == role[j] == 's' for j in range(N)] for i in range(N)])
        bias = torch.zeros(N, N).masked_fill(~may, torch.finfo(torch.float32).min)
        with torch.no_grad(): return model(input_ids=torch.tensor([tokens]), attention_mask=bias[None, None]).logits[0]
    while hidden:
        rows = logits(seq)
        seen.append(rows[hidden])
        for i in hidden[:share]: seq[i] = int(rows[i, :mask].argmax())
        hidden = hidden[share:]
    token = 1
    for _ in range(after):
        seq.append(token)
        token = int(logits(seq)[-1, :mask].argmax())
    return seq, seen


@pytest.mark.parametrize('length, given_, share', [(1, (), 1), (9, (), 2), (9, (5, 6), 1), (12, (), 12), (3, (4, 5, 6), 1)])
def test_a_span_is_denoised_as_by_full_recompute(small, length, given_, share):
    engine = Engine(*small, slots=512, page_size=4)
    r, = engine.run(denoising(PROMPT, length=length, given=given_, share=share), keep_logits=True)
    seq, seen = oracle(*small, length, given_, share, 3)
    assert r.error is None and r.record.token == seq
    steps = [copy.logits for copy in r.record.noisy][:len(seen)]
    assert all(torch.allclose(a, b, atol=TOLERANCE) for a, b in zip(steps, seen)) and len(r.record.noisy) == len(seen) + 1
    assert replay_noisy(small[0], r) < TOLERANCE and replay_deviation(small[0], r) < TOLERANCE and drift(small[0], r).largest < TOLERANCE
    check_pool(engine.pool)
    assert engine.pool.pages.free == len(engine.pool.pages)


def test_a_batch_is_what_each_is_alone(small):
    asked = [denoising(PROMPT, length=5), ar(PROMPT, max_new_tokens=7), denoising(PROMPT[:7], length=12, share=3), denoising([3], length=2)]
    engine = Engine(*small, slots=512, page_size=4)
    together_, alone = engine.run(asked, keep_logits=True), [engine.run(q)[0] for q in asked]
    assert [r.token_ids for r in together_] == [r.token_ids for r in alone] and not any(r.error for r in together_)
    assert all(replay_noisy(small[0], r) < TOLERANCE for r in together_)


def test_what_is_given_stays_even_if_it_is_a_mask(small):
    mask = mask_id(small[1])
    r, = Engine(*small, slots=512).run(denoising([*PROMPT, mask], length=4, given=[mask, 7]), keep_logits=True)
    span = r.counts['span']
    assert r.record.token[len(PROMPT)] == mask and span.tokens[:2].tolist() == [mask, 7] and span.done
    assert replay_noisy(small[0], r) < TOLERANCE
    given_ = [(k, s) for k, s, own in zip(r.record.kind, r.record.step, r.record.segment) if own == span.segment]
    assert [k for k, _ in given_] == ['forced', 'forced', 'sampled', 'sampled'] and given_[0][1] == 1 and given_[2][1] == 2


def test_without_a_clean_pass_the_drift_shows(small):
    r, = Engine(*small, slots=512).run(denoising(PROMPT, commit=False), keep_logits=True)
    d = drift(small[0], r)
    assert d.tokens == 3 and d.largest > 1e-3 and d.largest >= d.mean > 0 and replay_noisy(small[0], r) == pytest.approx(d.largest)
    plain, = Engine(*small, slots=512).run(ar(PROMPT, max_new_tokens=3), keep_logits=True)
    assert drift(small[0], plain) == Drift(0, 0., 0., 0) and replay_noisy(small[0], plain) < TOLERANCE


def test_replay_would_notice(small):
    r, = Engine(*small, slots=512).run(denoising(PROMPT), keep_logits=True)
    copy = r.record.noisy[1]
    r.record.noisy[1] = replace(copy, queries=replace(copy.queries, tokens=[*copy.queries.tokens[:-1], 3]))
    assert replay_noisy(small[0], r) > 1e-3
    with pytest.raises(PastaError, match='keep_logits'): replay_noisy(small[0], Engine(*small, slots=512).run(denoising(PROMPT))[0])


def test_nobody_reads_a_noisy_copy(small):
    r, = Engine(*small, slots=512).run(denoising(PROMPT))
    layout, kept, places = noisy_layout(r.record)
    mask, n = dense_mask(layout).numpy(), len(kept)
    copies = layout.segment[n:]
    assert not mask[:n, n:].any() and (mask[n:, n:] == (copies[:, None] == copies)).all()
    assert mask[n:, :len(PROMPT)].all() and not mask[n:, len(PROMPT):n].any() and sum(map(len, places)) == 9 + 7 + 5 + 3 + 1


def test_two_spans_in_one_forward_where_the_second_reads_the_first(small):
    @strategy
    def staircase(h):
        main, mask = h.line('main'), mask_id(h.tokenizer)
        yield h.prompt(main)
        a = Span(h, [mask] * 4, main.position, mask, [main.segment], 'a')
        b = Span(h, [mask] * 3, main.position + 4, mask, [a.segment], 'b')
        while not b.done:
            parts = [a.queries(), b.queries()]
            for span, rows in zip((a, b), apart(parts, (yield together(parts)))):
                if not span.done: span.reveal(span.rows[:2], rows[:2, :mask].argmax(-1).numpy())
        yield together([a.queries(()), b.queries(())])
        a.write(); b.write()
        yield Queries([1], [main.position + 7], h.open([b.segment]))
    r, = Engine(*small, slots=512, page_size=4).run(staircase(PROMPT), keep_logits=True)
    assert r.error is None and replay_noisy(small[0], r) < TOLERANCE
    layout, kept, _ = noisy_layout(r.record)
    names = [layout.table.names[s] for s in layout.segment]
    mask = dense_mask(layout).numpy()
    for i, j in itertools.product(range(len(kept), len(names)), repeat=2):
        (a, when), (b, then) = names[i].split(','), names[j].split(',')
        assert mask[i, j] == (when == then and (a == b or a == 'b'))


def test_revising_and_its_limits(small):
    engine = Engine(*small, slots=512)
    @strategy
    def revising(h):
        main, mask = h.line('main'), mask_id(h.tokenizer)
        yield h.prompt(main)
        span = Span(h, [9, mask, mask], main.position, mask, [main.segment])
        yield span.queries()
        span.reveal(span.rows[0], 4, [.5])
        with pytest.raises(DiffusionError, match='not masked'): span.reveal([1], [5])
        with pytest.raises(DiffusionError, match='not masked'): span.reveal([0], [5], revise=True)
        with pytest.raises(DiffusionError, match='mask'): span.reveal([2], [mask])
        total = h.total
        span.reveal([1, 2], [7, 8], revise=True)
        assert h.total == total + 1 == 2 and span.done and span.tokens.tolist() == [9, 7, 8] and span.prob[1] != .5
        with pytest.raises(DiffusionError, match='no tokens'): Span(h, [], 0, mask)
        span.write(clean=False, control=[9])
        assert span.segment not in h.rows
    r, = engine.run(revising(PROMPT))
    if r.error: raise r.error
    assert r.token_ids == [9, 7, 8] and r.record.slot[-3:] == [-1] * 3 and r.record.control[-3:] == [True, False, False]


@pytest.mark.parametrize('rows, tokens', [([4], [1]), ([-1], [1]), ([0, 0], [1, 2]), ([0], [1, 2]), (['a'], [1]), ([.5], [1]), ([0], ['x']), ([0], [-1]), ([0], [280]),
                                          ([[0, 1]], [[1, 2]])])
def test_rows_and_tokens_that_no_span_has(small, rows, tokens):
    @strategy
    def wrong(h):
        main, mask = h.line('main'), mask_id(h.tokenizer)
        yield h.prompt(main)
        span = Span(h, [mask] * 4, main.position, mask, [main.segment])
        yield span.queries()
        span.reveal([], [])
        with pytest.raises(DiffusionError, match='span at|vocabulary'): span.reveal(rows, tokens)
        assert len(span.rows) == 4 and h.total == 0
    r, = Engine(*small, slots=64).run(wrong([1, 2, 3]))
    if r.error: raise r.error


def test_a_full_pool_ends_the_request_alone(small):
    engine = Engine(*small, slots=64, page_size=4)
    r, other = engine.run([denoising(PROMPT, length=60, reserve=4), ar(PROMPT, max_new_tokens=4)])
    assert r.finish_reason == 'pool_full' and other.finish_reason == 'length'
    check_pool(engine.pool)
    assert engine.pool.pages.free == len(engine.pool.pages)


def test_pictures_and_traces_of_denoising(small):
    import matplotlib.pyplot as plt
    r, plain = Engine(*small, slots=512).run([denoising(PROMPT), ar(PROMPT, max_new_tokens=2)])
    grid = show_reveal(r.record, small[1]).images[0].get_array()
    assert grid.shape == (1, 9) and np.asarray(grid)[0].tolist() == [1, 1, 2, 2, 3, 3, 4, 4, 5]
    timeline(r.record, small[1])
    assert 'span' in to_json(r.record, small[1])
    with pytest.raises(DiffusionError, match='denoised segment'): show_reveal(plain.record)
    given_, = Engine(*small, slots=512).run(denoising(PROMPT, length=4, given=[9, 8]))
    ax = show_reveal(given_.record)
    assert np.ma.filled(ax.images[0].get_array(), math.nan)[0][2:].tolist() == [1, 1] and np.isnan(np.ma.filled(ax.images[0].get_array(), math.nan)[0][:2]).all()
    plt.close('all')


@pytest.mark.smollm2
def test_parity_on_smollm2(smollm2):
    import copy
    model, tok = copy.deepcopy(smollm2[0]), copy.deepcopy(smollm2[1])
    add_tokens(model, tok, [MASK])
    r, = Engine(model, tok, slots=512).run(denoising('Name a planet.', length=8, share=3, after=2), keep_logits=True)
    assert r.error is None and replay_noisy(model, r) < TOLERANCE and mask_id(tok) not in r.token_ids

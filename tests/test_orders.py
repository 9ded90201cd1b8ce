"Denoising orders, against their definitions."
import itertools, math
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from pasta_lib.core import PastaError
from pasta_lib.engine import Engine, OptionError, ar
from pasta_lib.models import add_tokens, forward
from pasta_lib.orders import (ORDERS, SETTINGS, Candidates, Counted, Denoised, OrderError, above, all_at_once, candidates, choose,
                              confidence, denoise, entropy, factor, get_order, left_to_right, margin, never, random, sampled,
                              running_set, semi_autoregressive, shares, show_reveals)

NAMES = [*ORDERS, 'semi_autoregressive:3', 'semi_autoregressive:2:entropy', 'semi_autoregressive:4:random', 'above:0.5', 'above:0', 'above:1',
         'factor:0', 'factor:0.7', 'factor:3']
generator = lambda seed=0: torch.Generator().manual_seed(seed)


def some(n, seed=0, steps=None):
    "Candidates with random numbers (few different ones, with `steps`, so that there are ties)."
    rng = np.random.default_rng(seed)
    draw = lambda: rng.random(n) if steps is None else rng.integers(0, steps, n) / steps
    rows = np.sort(rng.choice(3 * n, n, replace=False))
    return Candidates(rows, rng.integers(0, 9, n), draw(), draw(), draw())


# ---- candidates

@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 12), st.integers(0, 10 ** 6), st.data())
def test_candidates_equal_their_definition(n, vocab, seed, data):
    rng = np.random.default_rng(seed)
    logits, masked = rng.normal(0, 3, (n, vocab)), rng.random(n) < .6
    forbidden = data.draw(st.sets(st.integers(0, vocab - 1), max_size=vocab - 1))
    c = candidates(torch.tensor(logits), masked, forbidden)
    assert c.rows.tolist() == [i for i in range(n) if masked[i]] and len(c) == len(c.tokens)
    for k, row in enumerate(c.rows):
        allowed = [j for j in range(vocab) if j not in forbidden]
        e = np.exp(logits[row, allowed] - logits[row, allowed].max())
        p = e / e.sum()
        top = sorted(p, reverse=True) + [0.]
        assert c.tokens[k] == allowed[int(p.argmax())]
        assert math.isclose(c.confidence[k], p.max(), rel_tol=1e-9)
        assert math.isclose(c.margin[k], top[0] - top[1], rel_tol=1e-9, abs_tol=1e-12)
        assert math.isclose(c.entropy[k], -sum(x * math.log(x) for x in p if x > 0), rel_tol=1e-9, abs_tol=1e-12)


@pytest.mark.parametrize('temperature', [0, .3, 1., 7])
@pytest.mark.parametrize('kind', [torch.float32, torch.bfloat16, torch.float64])
def test_a_forbidden_token_is_never_proposed(temperature, kind):
    logits = torch.zeros(64, 6, dtype=kind)
    logits[:, 2], logits[:, 5] = 80, 90
    before = logits.clone()
    c = candidates(logits, [True] * 64, [2, 5, 600], temperature, generator())
    assert not {2, 5} & set(c.tokens.tolist()) and torch.equal(logits, before)
    assert np.allclose(c.confidence, .25) and c.confidence.dtype == np.float64


def test_how_sure_the_model_is_depends_neither_on_the_draw_nor_on_the_temperature():
    p = torch.tensor([.6, .3, .1]).expand(200, 3)
    c = candidates(p.log(), [True] * 200, temperature=3., generator=generator())
    assert set(c.tokens) == {0, 1, 2} and np.allclose(c.confidence, .6, atol=1e-6) and np.allclose(c.margin, .3, atol=1e-6)


@pytest.mark.parametrize('temperature', [.5, 1., 2.])
def test_draws_follow_the_softmax(temperature):
    p, n = torch.tensor([.5, .25, .15, .08, .02], dtype=torch.float64), 40000
    drawn = sampled(p.log().expand(n, 5), temperature, generator(3)).bincount(minlength=5).double()
    want = (p.log() / temperature).softmax(0)
    assert ((drawn - n * want).abs() < 4 * (n * want * (1 - want)).sqrt()).all()


def test_draws_are_float64_and_zero_temperature_divides_by_nothing():
    logits = torch.tensor([[1e30, -1e30, 0.]])
    assert sampled(logits).item() == 0 and sampled(logits, 1e-4, generator()).item() == 0
    c = candidates(logits, [True])
    assert c.confidence[0] == 1 and c.entropy[0] == 0 and np.isfinite(c.margin).all()


def test_nothing_masked_is_no_candidate():
    assert len(candidates(torch.zeros(4, 3), [False] * 4)) == 0 and len(candidates(torch.zeros(0, 3), np.zeros(0, bool), temperature=1)) == 0
    assert candidates(torch.zeros(2, 1), [True, True]).margin.tolist() == [1, 1]


@pytest.mark.parametrize('logits, masked, how, words', [
    (torch.full((2, 3), math.nan), [True] * 2, {}, 'not numbers'), (torch.tensor([[1., math.inf]]), [True], {}, 'not numbers'),
    (torch.zeros(2, 3), [True] * 2, dict(forbidden=[0, 1, 2]), 'no token is allowed'),
    (torch.full((1, 3), -math.inf), [True], {}, 'no token is allowed'),
    (torch.zeros(2, 3), [True], {}, 'masked of shape'), (torch.zeros(2, 3), [1, 0], {}, 'masked of shape'),
    (torch.zeros(2, 3), [[True, True]], {}, 'masked of shape')])
def test_candidates_that_cannot_be(logits, masked, how, words):
    with pytest.raises(OrderError, match=words): candidates(logits, masked, **how)


@pytest.mark.parametrize('temperature', [-1, math.nan, math.inf, 1e-9, '1', None, True])
def test_bad_temperatures(temperature):
    with pytest.raises(OptionError, match='temperature='): candidates(torch.zeros(1, 3), [True], temperature=temperature)


def test_logits_of_the_masked_rows_alone():
    logits, masked = torch.randn(6, 5, generator=generator()), np.array([0, 1, 1, 0, 0, 1], bool)
    for one, other in zip(vars(candidates(logits, masked)).values(), vars(candidates(logits[masked], masked)).values()): assert np.array_equal(one, other)


def test_a_row_that_is_not_masked_may_hold_anything():
    logits = torch.zeros(3, 4)
    logits[1] = math.nan
    assert candidates(logits, [True, False, True]).rows.tolist() == [0, 2]


class Gaps:
    def get_vocab(self): return dict(a=0, b=2, c=9)


def test_ids_that_may_never_be_committed(tiny):
    assert never(Gaps(), 5) == [1, 3, 4] and never(Gaps(), 5, mask=2) == [1, 2, 3, 4]
    model, tok = tiny
    assert never(tok, len(tok) + 3)[-3:] == [len(tok), len(tok) + 1, len(tok) + 2]


# ---- orders

@settings(max_examples=80, deadline=None)
@given(st.integers(1, 12), st.integers(1, 14), st.integers(0, 10 ** 6), st.sampled_from([None, 2, 4]))
def test_orders_equal_their_definition(n, share, seed, steps):
    c = some(n, seed, steps)
    first = lambda key: sorted(range(n), key=lambda i: (key(i), i))[:share]
    assert entropy(c, share).tolist() == first(lambda i: c.entropy[i])
    assert confidence(c, share).tolist() == first(lambda i: -c.confidence[i])
    assert margin(c, share).tolist() == first(lambda i: -c.margin[i])
    assert left_to_right(c, share).tolist() == list(range(n))[:share]
    assert all_at_once(c, share).tolist() == list(range(n))
    drawn = random(c, share, generator(seed)).tolist()
    assert len(set(drawn)) == len(drawn) == min(n, share) and set(drawn) <= set(range(n))


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 12), st.floats(0, 4), st.floats(0, 1), st.integers(0, 10 ** 6), st.sampled_from([None, 3, 10]))
def test_threshold_and_factor_equal_their_definition(n, f, threshold, seed, steps):
    c = some(n, seed, steps)
    ranked = sorted(range(n), key=lambda i: (-c.confidence[i], i))
    passing = [k for k in range(1, n + 1) if c.confidence[ranked[k - 1]] >= 1 - f / (k + 1)]
    assert sorted(factor(f)(c, 1)) == sorted(ranked[:max(passing, default=1)])
    sure = [i for i in range(n) if c.confidence[i] >= threshold]
    assert sorted(above(threshold)(c, 1)) == (sure or ranked[:1])
    assert sorted(above(0)(c)) == list(range(n))


def test_the_factor_rule_counts_from_one():
    sure = lambda *values: Candidates(np.arange(len(values)), np.zeros(len(values), int), np.array(values), *np.zeros((2, len(values))))
    assert len(factor(1)(sure(.9, .66, .5))) == 1 and len(factor(1)(sure(.9, .67, .5))) == 2        # 1 − 1/3, not 1 − 1/2
    assert len(factor(1)(sure(.9, .75, .8))) == 3 and len(factor(1)(sure(.9, .74, .8))) == 2        # sorted: .75 ≥ 1 − 1/4
    assert len(factor(.1)(sure(.5, .5))) == 1                                                       # never none


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 6), st.integers(0, 10 ** 6), st.sampled_from([*ORDERS]))
def test_semi_autoregressive_stays_in_the_first_block(n, block, share, seed, name):
    c = some(n, seed)
    now = semi_autoregressive(block, name)(c, share, generator(seed))
    inside = [i for i in range(n) if c.rows[i] // block == c.rows.min() // block]
    want = ORDERS[name](c.only(inside), min(share, len(inside)), generator(seed))
    assert now.tolist() == [inside[i] for i in want] and len(now)


def test_orders_by_name():
    for name in ORDERS: assert get_order(name) is ORDERS[name]
    assert get_order(margin) is margin
    c = some(8, 1)
    for text, order in {'above:0.75': above(.75), 'above:.5': above(.5), 'above:1': above(1), 'factor:2': factor(2), 'factor:0.5': factor(.5),
                        'semi_autoregressive:4': semi_autoregressive(4), 'semi_autoregressive:4:margin': semi_autoregressive(4, margin),
                        'semi_autoregressive:4:above:0.5': semi_autoregressive(4, above(.5))}.items():
        assert get_order(text)(c, 2, None).tolist() == order(c, 2, None).tolist()
        assert get_order(text).__name__ == text.split(':')[0]


@pytest.mark.parametrize('order, words', [
    ('best', 'order='), ('', 'order='), (None, 'order='), (3, 'order='), ('entropy:3', 'order='), ('above', 'order='), ('above:.5:2', 'order='),
    ('factor', 'order='), ('above:$TAU', 'threshold='), ('above:', 'threshold='), ('above:1.5', 'threshold='), ('above:nan', 'threshold='),
    ('factor:-1', 'f='), ('semi_autoregressive:0', 'block='), ('semi_autoregressive:1.5', 'block='), ('semi_autoregressive:4:best', "order='best'")])
def test_orders_that_do_not_exist(order, words):
    with pytest.raises(OptionError, match=words): get_order(order)


@pytest.mark.parametrize('make, values', [(above, [-.1, 1.1, math.nan, '0.9', None, True]), (factor, [-1, math.inf, math.nan, 'x']),
                                          (semi_autoregressive, [0, -3, 2.0, True, '8'])])
def test_bad_settings(make, values):
    for value in values:
        with pytest.raises(OptionError): make(value)


@given(st.integers(0, 60), st.integers(1, 80))
def test_shares(n, steps):
    given_ = shares(n, steps)
    assert sum(given_) == n and len(given_) == min(n, steps) and all(given_) and (not given_ or max(given_) - min(given_) <= 1)


@pytest.mark.parametrize('n, steps', [(5, 0), (5, -1), (5, 1.5), (5, '3'), (5, True), (-1, 3), (2.5, 2)])
def test_bad_shares(n, steps):
    with pytest.raises(OptionError): shares(n, steps)


@pytest.mark.parametrize('said', [[], [4], [-1], [0, 0], [[0]], 0, [True], [.5], None])
def test_an_order_that_says_nonsense_is_an_error(said):
    with pytest.raises(OrderError, match='reveals'): choose(lambda c, share, g: said, some(4))


def test_choose():
    c = some(5, 2)
    assert choose(confidence, c, 99).tolist() == list(range(5)) and choose(lambda c, s, g: [3, 0], c).tolist() == [0, 3]
    assert choose(margin, c.only([]), 1).tolist() == []
    with pytest.raises(OptionError, match='share='): choose(margin, c, 0)
    assert issubclass(OrderError, PastaError)


# ---- denoising

def noise_model(vocab, seed=0, favourite=None):
    "A made-up model: logits that depend on all ids; `favourite`: a token that it always holds for the best."
    def model(ids):
        rng = np.random.default_rng([seed, *map(int, ids)])
        logits = rng.normal(0, 2, (len(ids), vocab))
        if favourite is not None: logits[:, favourite] = 50
        return torch.tensor(logits)
    return model


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(NAMES), st.integers(0, 10), st.integers(1, 12), st.integers(0, 10 ** 6), st.sampled_from([0., 1.]))
def test_every_order_is_an_ordered_partition(name, n, steps, seed, temperature):
    rng, vocab, mask = np.random.default_rng(seed), 7, 5
    ids, masked = rng.integers(0, vocab, n), rng.random(n) < .7                   # the prompt may hold the mask itself
    before = ids.copy(), masked.copy()
    run = denoise(noise_model(vocab, seed, favourite=mask), ids, masked, mask, name, steps, [6], temperature, generator(seed))
    assert np.array_equal(ids, before[0]) and np.array_equal(masked, before[1])
    assert np.array_equal(run.ids[~masked], ids[~masked]) and not run.step[~masked].any()
    assert not {5, 6} & set(run.ids[masked].tolist()) and (run.ids >= 0).all()
    parts = run.partition
    assert all(parts) and sorted(itertools.chain(*parts)) == np.flatnonzero(masked).tolist()
    if name in ORDERS and name != 'all_at_once': assert [len(p) for p in parts] == shares(int(masked.sum()), steps)


def test_a_model_whose_best_token_is_the_mask_ends():
    run = denoise(noise_model(6, favourite=5), [5] * 9, [True] * 9, 5, 'above:0.99')
    assert run.steps <= 9 and 5 not in run.ids


@pytest.mark.parametrize('how', [dict(steps=0), dict(steps=-2), dict(steps=2.), dict(temperature=-1), dict(order='nothing')])
def test_bad_options_of_denoise(how):
    with pytest.raises(OptionError): denoise(noise_model(6), [5] * 3, [True] * 3, 5, **how)


def chain_rule(model, ids, masked, mask, key):
    "One position at a time, from scratch: `key` of (positions, distributions) says which."
    ids, masked = np.where(masked, mask, ids), list(masked)
    order = []
    while any(masked):
        logits = model(ids).double().numpy().copy()
        logits[:, mask] = -np.inf
        at = [i for i in range(len(ids)) if masked[i]]
        p = np.exp(logits[at] - logits[at].max(1, keepdims=True)); p /= p.sum(1, keepdims=True)
        k = key(at, p)
        ids[at[k]], masked[at[k]] = int(p[k].argmax()), False
        order.append([at[k]])
    return ids, order


@pytest.mark.parametrize('seed', range(5))
def test_one_position_a_step(seed):
    "Left to right is the chain rule's order; entropy takes the argmin of H each time."
    model, ids, masked = noise_model(8, seed), np.full(7, 7), np.random.default_rng(seed).random(7) < .8
    for name, key in dict(left_to_right=lambda at, p: 0, entropy=lambda at, p: int(np.argmin(-(p * np.log(np.maximum(p, 1e-300))).sum(1))),
                          confidence=lambda at, p: int(np.argmax(p.max(1)))).items():
        run, (tokens, order) = denoise(model, ids, masked, 7, name), chain_rule(model, ids, masked, 7, key)
        assert run.partition == order and np.array_equal(run.ids, tokens)


@pytest.mark.parametrize('seed', range(5))
@pytest.mark.parametrize('temperature', [0., 1.])
def test_threshold_zero_is_all_at_once(seed, temperature):
    runs = [denoise(noise_model(8, seed), [7] * 6, [True] * 6, 7, order, None, (), temperature, generator(seed)) for order in ('above:0', 'all_at_once')]
    assert np.array_equal(runs[0].ids, runs[1].ids) and runs[0].steps == runs[1].steps == 1


def test_a_block_of_all_positions_changes_nothing_and_blocks_of_one_are_left_to_right():
    model = noise_model(8, 3)
    run = lambda order: denoise(model, [7] * 6, [True] * 6, 7, order).partition
    assert run('semi_autoregressive:6:margin') == run('margin') and run('semi_autoregressive:1') == run('left_to_right')


def test_left_to_right_is_autoregressive_decoding(tiny):
    "A causal model, read with its head's shift: the tokens of the engine's `ar`."
    model, tok = tiny
    engine, prompt, n = Engine(model, tok, slots=256), list(range(40, 52)), 10
    want, = engine.run(ar(prompt, max_new_tokens=n, ignore_eos=True))
    def shifted(ids):
        row = torch.tensor([*prompt, *ids])[None]
        with torch.no_grad(): logits = forward(model, row, torch.arange(row.shape[1])[None])[0]
        return logits[len(prompt) - 1:-1]
    run = denoise(shifted, [0] * n, [True] * n, 0, 'left_to_right', forbidden=())
    assert run.ids.tolist() == want.token_ids or 0 in want.token_ids


# ---- the exact model

TEXTS = ['aab', 'aba', 'bba', 'bbb', 'cab']


def test_counted_distributions():
    model = Counted(TEXTS)
    a, b, c, m = (*model.encode('abc'), model.mask)
    p = model(np.array([m, m, m])).exp()
    assert np.allclose(p[0], [.4, .4, .2, 0]) and np.allclose(p[1], [.4, .6, 0, 0]) and np.allclose(p[2], [.4, .6, 0, 0])
    p = model(np.array([a, m, m])).exp()
    assert np.allclose(p[1], [.5, .5, 0, 0]) and np.allclose(p[2], [.5, .5, 0, 0]) and np.allclose(p[0], [1, 0, 0, 0])
    p = model(np.array([c, b, m])).exp()                        # no text begins so: cab, aba, bba and bbb are wrong once
    assert np.allclose(p[2], [.5, .5, 0, 0])
    assert model.decode([a, b, m]) == 'ab_'


@pytest.mark.parametrize('name', ['random', 'entropy', 'confidence', 'margin', 'left_to_right', 'semi_autoregressive:2', 'above:1'])
def test_one_position_a_step_samples_the_language_exactly(name):
    model, n, g = Counted(TEXTS), 600, generator(5)
    drawn = [model.decode(denoise(model, [model.mask] * 3, [True] * 3, model.mask, name, temperature=1., generator=g).ids) for _ in range(n)]
    assert set(drawn) <= set(TEXTS)
    for text in TEXTS: assert abs(drawn.count(text) - n / 5) < 4 * math.sqrt(n * .2 * .8)


def test_all_at_once_samples_the_product_of_the_marginals():
    model, n, g = Counted(TEXTS), 800, generator(6)
    drawn = [model.decode(denoise(model, [model.mask] * 3, [True] * 3, model.mask, 'all_at_once', temperature=1., generator=g).ids) for _ in range(n)]
    p = dict(zip('abc', [.4, .4, .2])), dict(a=.4, b=.6), dict(a=.4, b=.6)
    for text in map(''.join, itertools.product('abc', 'ab', 'ab')):
        q = math.prod(p[i][letter] for i, letter in enumerate(text))
        assert abs(drawn.count(text) - n * q) < 4.5 * math.sqrt(n * q * (1 - q))


def test_the_same_generator_is_the_same_text():
    model = Counted(TEXTS)
    run = lambda seed: denoise(model, [model.mask] * 3, [True] * 3, model.mask, 'random', temperature=1., generator=generator(seed))
    assert all(np.array_equal(run(s).ids, run(s).ids) and run(s).partition == run(s).partition for s in range(5))
    assert len({tuple(run(s).ids) for s in range(30)}) > 2


def test_pictures():
    import matplotlib
    matplotlib.use('Agg')
    model = Counted(TEXTS)
    given_ = np.array([*model.encode('a'), model.mask, model.mask])
    runs = {name: denoise(model, given_, given_ == model.mask, model.mask, name) for name in ('entropy', 'all_at_once')}
    ax = show_reveals(runs, model.decode)
    assert [t.get_text() for t in ax.get_yticklabels()] == ['entropy  (2)', 'all_at_once  (1)'] and len(ax.texts) == 6
    assert ax.texts[0].get_text() == 'a'
    empty = Denoised(np.array([0]), np.array([0]))
    assert empty.steps == 0 and empty.partition == [] and show_reveals({'given': empty}, model.decode)
    assert set(SETTINGS) == {'above', 'factor', 'semi_autoregressive', 'running_set'}


@pytest.mark.parametrize('text, value', [('1e-3', .001), ('1E-3', .001), ('.5', .5), ('5.e-1', .5), ('1', 1), ('0.25', .25)])
def test_thresholds_are_numbers_as_people_write_them(text, value):
    c = Candidates(np.arange(5), np.zeros(5, int), np.array([0., .0005, .002, .4, 1.]), *np.zeros((2, 5)))
    assert sorted(get_order(f'above:{text}')(c)) == sorted(above(value)(c))


@pytest.mark.parametrize('text', ['e', '1e', '.', '.e3', '-1', 'nan', 'inf', '1e-', '0x1'])
def test_what_is_no_number_is_no_threshold(text):
    with pytest.raises(PastaError): get_order(f'above:{text}')


@pytest.mark.parametrize('scale', [.1, 3., 40., 1e4])
@pytest.mark.parametrize('vocab', [1, 2, 300])
def test_sureness_is_that_of_the_distribution(scale, vocab):
    logits = scale * torch.randn(20, vocab, generator=generator(1))
    logits[0], out = 0., [] if vocab == 1 else [vocab - 1]                          # a row of ties; a forbidden token
    c = candidates(logits, [True] * 20, out)
    p = logits.double()[:, [i for i in range(vocab) if i not in out]].softmax(-1)
    best = torch.cat([p, torch.zeros(20, 1)], 1).sort(descending=True).values
    want = best[:, 0], best[:, 0] - best[:, 1], torch.special.entr(p).sum(-1)
    for got, exact in zip((c.confidence, c.margin, c.entropy), want): assert np.abs(got - exact.numpy()).max() < 2e-5


def running_by_hand(rows, sure, block, buffer, threshold, add):
    "The rule with lists: which blocks run, and which of their rows are revealed."
    first, running = rows[0] // block, [rows[0] // block]
    while len(running) < buffer and 1 - sum(r // block == running[-1] for r in rows) / block > add: running.append(running[-1] + 1)
    now = [n for n, r in enumerate(rows) if r // block in running and sure[n] > threshold]
    return now or [max((n for n, r in enumerate(rows) if r // block == first), key=lambda n: (sure[n], -n))]


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 10 ** 6))
def test_a_running_set_is_its_definition(block, buffer, seed):
    rng = np.random.default_rng(seed)
    rows = np.flatnonzero(rng.random(20) < rng.random())
    if not len(rows): return
    sure, threshold, add = rng.random(len(rows)), float(rng.choice([0, .5, 1])), float(rng.choice([0, .1, .5, 1]))
    got = running_set(block, buffer, threshold, add)(Candidates(rows, rows, sure, sure, sure))
    assert got.tolist() == running_by_hand(rows.tolist(), sure.tolist(), block, buffer, threshold, add)


def test_a_running_set_of_one_is_block_by_block():
    rng = np.random.default_rng(0)
    for _ in range(20):
        rows = np.flatnonzero(rng.random(12) < .7)
        c = Candidates(rows, rows, *rng.random((3, len(rows))))
        assert running_set(4, 1, .5)(c).tolist() == sorted(semi_autoregressive(4, lambda c, *_: np.flatnonzero(c.confidence > .5) if (c.confidence > .5).any()
                                                                               else np.array([c.confidence.argmax()]))(c).tolist())
    assert get_order('running_set:4:1')(c).tolist() == running_set(4, 1)(c).tolist()


@pytest.mark.parametrize('bad', ['running_set', 'running_set:0', 'running_set:4:x', 'running_set:4:0', 'running_set:4:2:.5', 'running_set:$B'])
def test_running_sets_that_cannot_be(bad):
    with pytest.raises(PastaError): get_order(bad)
    with pytest.raises(PastaError): running_set(4, 2, threshold=math.nan)

"""Regressions: inputs that once gave wrong tokens, lost text, a traceback or a long wait."""
import json
import threading
import time

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.generation import RepetitionPenaltyLogitsProcessor

from pasta_lib.engine import Engine, OptionError, Queries, QueryError, ar, replay_deviation, strategy
from pasta_lib.masks import MaskError, block_mask, dense_mask, mask_mod
from pasta_lib.models import cast, tiny_model
from pasta_lib.pasta import OutlineError, guided, pasta, read_outline
from pasta_lib.pool import Pool, PoolError, PoolFull, check_pool
from pasta_lib.segments import Layout, SegmentTable, pack
from pasta_lib.tags import TagVocab, lint_documents, parse

PROMPT = list(range(65, 105))


def empty(engine):
    check_pool(engine.pool)
    return engine.pool.pages.free == len(engine.pool.pages)


def test_packed_copies_follow_weights_and_biases():
    model, tok = tiny_model(attention_bias=True, mlp_bias=True)
    cast(model, torch.bfloat16)
    engine = Engine(model, tok, slots=256)
    engine.run(ar(PROMPT, max_new_tokens=4))
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.bias.add_(3.)
        model.model.layers[1].self_attn.q_proj.weight.mul_(1.5)
    kept = [e.run(ar(PROMPT, max_new_tokens=4, ignore_eos=True), keep_logits=True)[0] for e in (engine, Engine(model, tok, slots=256, pack=False))]
    assert kept[0].token_ids == kept[1].token_ids
    for i, row in kept[0].record.logits.items(): assert (row - kept[1].record.logits[i]).abs().max() < 0.2


@pytest.mark.slow
def test_a_compiled_engine_follows_weights():
    model, tok = tiny_model(layers=1, hidden=32)
    engine = Engine(model, tok, slots=256, compile=True)
    engine.run(ar(PROMPT, max_new_tokens=3))
    with torch.no_grad():
        for p in model.parameters(): p.mul_(1.5)
    request = ar(PROMPT, max_new_tokens=6, ignore_eos=True)
    assert engine.run(request)[0].token_ids == Engine(model, tok, slots=256).run(request)[0].token_ids


def test_a_strategy_that_reads_something_else_does_not_poison_the_prefix():
    @strategy
    def odd(h):
        main = h.line('main')
        yield Queries([t + 1 for t in h.ids], range(len(h.ids)), main.segment, prefill=True)
        for n in range(5): yield Queries([5], [len(h.ids) + n], main.segment)

    model, tok = tiny_model()
    engine = Engine(model, tok, slots=512, page_size=16)
    alone = Engine(model, tok, slots=512).run(ar(PROMPT, max_new_tokens=8))[0].token_ids
    assert engine.run([odd(PROMPT), ar(PROMPT, max_new_tokens=8)])[1].token_ids == alone and empty(engine)


@pytest.mark.parametrize('temperature', [0, 1])
def test_nothing_to_choose_from_is_an_error(temperature):
    model, tok = tiny_model()
    engine = Engine(model, tok, slots=512)
    bad, good = engine.run([ar(PROMPT, temperature=temperature, processors=(lambda ids, row: row - float('inf'),)), ar(PROMPT, max_new_tokens=3, ignore_eos=True)])
    assert isinstance(bad.error, QueryError) and 'logits' in str(bad.error) and good.generated_tokens == 3


def test_dropout_is_off_while_decoding():
    model, tok = tiny_model(attention_dropout=.5)
    engine = Engine(model, tok, slots=512)
    model.train()
    first, second = (engine.run(ar(PROMPT, max_new_tokens=8, ignore_eos=True))[0].token_ids for _ in range(2))
    assert first == second


def test_processors_see_the_prompt_and_change_only_a_copy():
    model, tok = tiny_model()
    engine = Engine(model, tok, slots=512)
    penalty = RepetitionPenaltyLogitsProcessor(1.5)
    r, = engine.run(ar(PROMPT, max_new_tokens=12, processors=(penalty,)), keep_logits=True)
    ids = torch.tensor([PROMPT])
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, repetition_penalty=1.5)
    assert r.token_ids == theirs[0, len(PROMPT):].tolist() and replay_deviation(model, r) < 1e-4


def test_a_prompt_that_can_not_be_encoded_fails_alone():
    model, tok = tiny_model()
    engine = Engine(model, tok, slots=512)
    good, bad = engine.run([ar('hi', max_new_tokens=3), ar('\ud800')])
    assert good.generated_tokens == 3 and bad.finish_reason == 'error' and empty(engine)


def test_learned_positions_end_one_request_only():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=261, n_positions=64, n_embd=32, n_layer=2, n_head=4)).eval()
    engine = Engine(model, slots=512)
    short, long = engine.run([ar([1] * 10, max_new_tokens=8, ignore_eos=True), ar([1] * 50, max_new_tokens=20, ignore_eos=True)])
    assert short.generated_tokens == 8 and isinstance(long.error, QueryError) and long.generated_tokens >= 14 and empty(engine)


def test_dynamic_rotary_positions_are_kept_within_the_original_length():
    model, tok = tiny_model(max_positions=64, rope_parameters={'rope_type': 'dynamic', 'factor': 8., 'rope_theta': 100.})
    short = ar(PROMPT[:12], max_new_tokens=20, ignore_eos=True)
    alone = Engine(model, tok).run(short)[0].token_ids
    together, long = Engine(model, tok).run([short, ar([70] * 300, max_new_tokens=20, ignore_eos=True)])
    assert together.token_ids == alone and isinstance(long.error, QueryError)


def test_threads_share_a_model():
    model, tok = tiny_model()
    engine, out = Engine(model, tok, slots=2048), {}
    requests = {n: ar(PROMPT[n:n + 9], max_new_tokens=20, ignore_eos=True) for n in range(4)}
    alone = {n: Engine(model, tok, slots=256).run(r)[0].token_ids for n, r in requests.items()}
    threads = [threading.Thread(target=lambda n=n, r=r: out.update({n: engine.run(r)[0].token_ids})) for n, r in requests.items()]
    for t in threads: t.start()
    for t in threads: t.join()
    assert out == alone and empty(engine)


def test_a_stop_text_leaves_the_closing_tag_whole():
    model, tok = tiny_model()
    from pasta_lib.models import add_tokens
    add_tokens(model, tok, TagVocab())
    write = lambda text: tok.encode(text, add_special_tokens=False)
    script = {'main': write('A<promise topic="t" tokens="10"/><sync/>B') + [tok.eos_token_id], 'fork 1': write('abcSTOPdef')}
    r, = Engine(model, tok, slots=512).run(pasta('x', script=script, stop='STOP'))
    assert '<async>abc</async>' in r.tagged_text and r.text == 'AabcB' and json.dumps(r.json())


@pytest.mark.parametrize('options', [dict(stop=''), dict(temperature=1e-310)])
def test_options_that_make_no_sense(options):
    with pytest.raises(OptionError): ar('x', **options)


@pytest.mark.parametrize('options', [dict(point_tokens=0), dict(closing_tokens=0), dict(closing_tokens=-3), dict(heading=' '),
                                     dict(outline='- a (99999999999)')])
def test_guided_options_that_make_no_sense(options):
    model, tok = tiny_model()
    r, = Engine(model, tok, slots=512).run(guided('x', **{'outline': '- a', **options}))
    assert isinstance(r.error, OutlineError)


def test_an_outline_with_a_byte_order_mark():
    assert [p.topic for p in read_outline('\ufeff- one\n- two')[0].points] == ['one', 'two']


def test_windows_from_one_to_huge():
    table = SegmentTable()
    layout = Layout(range(17), [table.open()] * 17, range(17), [-100] * 17, table)
    assert torch.equal(dense_mask(layout, 2**31 - 1), dense_mask(layout)) and torch.equal(dense_mask(layout, 2**40), dense_mask(layout))
    assert torch.equal(dense_mask(layout, 1), torch.eye(17, dtype=torch.bool))
    for window in (0, -1):
        with pytest.raises(MaskError): dense_mask(layout, window)


def test_spaces_inside_a_topic_cost_linear_time():
    start = time.perf_counter()
    parse(('<promise topic="a"b' + ' ' * 1990) * 250)
    assert time.perf_counter() - start < 10


def test_lint_survives_a_chat_that_is_no_list():
    assert [f['rule'] for f in lint_documents('{"messages": 5}\n')]


# ---- options, seams and files that once failed with a traceback, or silently

@pytest.mark.parametrize('options', [
    dict(temperature='0.5'), dict(temperature=None), dict(temperature=True), dict(temperature=float('nan')), dict(max_new_tokens=None),
    dict(max_new_tokens='8'), dict(max_new_tokens=2.5), dict(max_new_tokens=True), dict(max_thread_tokens='3'), dict(top_k=1.5), dict(top_k=None),
    dict(top_p='all'), dict(top_p=None), dict(stop=5), dict(stop=[5]), dict(stop=['a', '']), dict(stop={1: 2}), dict(processors=len),
    dict(processors=('x',)), dict(script=['a']), dict(seed='x'), dict(seed=None), dict(reserve='x'), dict(reserve=-1), dict(reserve=1.5)])
def test_options_of_a_wrong_type(options):
    with pytest.raises(OptionError, match=next(iter(options))) as e: ar('x', **options)
    assert '\n' not in str(e.value)


def test_options_of_numpy_types_are_fine():
    np = pytest.importorskip('numpy')
    model, tok = tiny_model()
    r, = Engine(model, tok, slots=256).run(ar(PROMPT, max_new_tokens=np.int64(3), temperature=np.float32(.5), top_k=np.int32(5), seed=np.int64(1), stop={'zz'}))
    assert r.generated_tokens == 3


@pytest.mark.parametrize('options', [dict(chunk=0), dict(chunk=None), dict(chunk=1.5), dict(slots=0), dict(slots=-4), dict(slots='64'),
                                     dict(slots=64.), dict(page_size=0), dict(page_size=None), dict(page_size=True)])
def test_engine_options_that_make_no_sense(options):
    with pytest.raises(OptionError, match=next(iter(options))): Engine(*tiny_model(), **options)


def test_no_model_and_no_weights():
    with pytest.raises(OptionError, match='type tuple'): Engine(tiny_model())
    with pytest.raises(OptionError, match='type str'): Engine('tiny')
    model, tok = tiny_model()
    with pytest.raises(OptionError, match='without weights'): Engine(model.to('meta'), tok)


@pytest.mark.parametrize('slots', [10**15, 10**17, 10**30])
def test_a_pool_larger_than_memory(slots):
    with pytest.raises(PoolError, match='no memory') as e: Engine(*tiny_model(), slots=slots)
    assert 'GB' in str(e.value) and '\n' not in str(e.value)


@pytest.mark.parametrize('sizes', [(1.5, 4), (8, '4'), (None, 4), (0, 4)])
def test_a_pool_of_no_size(sizes):
    with pytest.raises(PoolError, match='needs slots'): Pool(1, 1, 1, *sizes)


@pytest.mark.parametrize('request_', [ar([65], stop='x'), guided([65], outline='- a')])
def test_what_needs_a_tokenizer_says_so(request_):
    engine = Engine(tiny_model()[0], slots=256)
    bad, good = engine.run([request_, ar([65, 66], max_new_tokens=2, ignore_eos=True)])
    assert isinstance(bad.error, OptionError) and 'tokenizer' in str(bad.error) and good.generated_tokens == 2 and empty(engine)


def snapshot(h):
    return h.pages.used, list(h.pages.pages), h.pages.owner[:h.pages.used].tolist(), h.pages.position[:h.pages.used].tolist(), dict(h.top), h.visible.tolist()


@pytest.mark.parametrize('second', [lambda m: Queries([1], [0], 99), lambda m: Queries([1] * 200, range(200), m), lambda m: Queries([10**6], [0], m),
                                    lambda m: Queries([1, 2], [0], m), lambda m: Queries([1], [0], m, slots=[5])])
@pytest.mark.parametrize('first', [lambda m: Queries([7] * 20, range(20, 40), m), lambda m: Queries([7], [20], m, keep=False),
                                   lambda m: Queries([7, 8], [3, 4], m, slots=[3, 4])])
def test_a_step_is_all_or_nothing(first, second):
    model, tok = tiny_model()
    engine = Engine(model, tok, slots=128, page_size=16)
    a, b = engine.handle(), engine.handle()
    main, other = a.open(), b.open()
    engine.step([(a, Queries(list(range(20)), range(20), main))])
    before, free = (snapshot(a), snapshot(b)), engine.pool.pages.free
    with pytest.raises((QueryError, PoolFull)): engine.step([(a, first(main)), (b, second(other))])
    assert (snapshot(a), snapshot(b)) == before and engine.pool.pages.free == free
    check_pool(engine.pool)
    want = Engine(model, tok, slots=128).run(ar(list(range(20)), max_new_tokens=1, ignore_eos=True))[0].token_ids
    scratch = engine.step([(a, Queries([want[0]], [20], main)), (b, Queries(list(range(20)), range(20), other))])
    assert int(scratch[1][0].argmax()) == want[0]


def test_a_forward_that_fails_gives_slots_back(monkeypatch):
    engine = Engine(*tiny_model(), slots=128, page_size=16)
    h = engine.handle()
    main = h.open()
    before = snapshot(h)
    with monkeypatch.context() as m:
        m.setattr(engine, 'call', lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError): engine.step([(h, Queries([1] * 40, range(40), main))])
    assert snapshot(h) == before and engine.pool.pages.free == len(engine.pool.pages)


def test_threads_of_equal_names_are_all_there():
    @strategy
    def twins(h):
        main = h.line('main')
        logits = yield h.prompt(main)
        for n, reason in enumerate(('eos', 'length', 'stop')): h.line('twin', [main.segment], parent=0).info.finish_reason = reason
        h.line('twin (2)', [main.segment], parent=0).info.finish_reason = 'end'

    r, = Engine(*tiny_model(), slots=256).run(twins(PROMPT))
    assert r.threads == {'main': 'end', 'twin': 'eos', 'twin (2)': 'length', 'twin (3)': 'stop', 'twin (2) (2)': 'end'}


def test_forks_that_were_refused_did_not_run():
    model, tok = tiny_model()
    write = lambda text: tok.encode(text, add_special_tokens=False)
    said = 'A<promise topic="a" tokens="10"/>B<promise topic="b" tokens="10"/>C<promise topic="c" tokens="10"/><sync/>D'
    script = {'main': write(said) + [tok.eos_token_id], **{f'fork {n}': write('x</async>') for n in (1, 2, 3)}}
    for most in (0, 1, 3):
        r, = Engine(model, tok, slots=1024).run(pasta('x', tags='text', script=script, max_forks=most))
        assert (r.forks, r.refused_forks) == (most, 3 - most) and len(r.threads) == 4
        assert r.json()['forks'] == most and r.json()['refused_forks'] == 3 - most


# ---- masks

def test_masks_of_nothing():
    nothing = pack([])
    assert dense_mask(nothing).shape == (0, 0)
    with pytest.raises(MaskError, match='no tokens'): block_mask(nothing)
    with pytest.raises(MaskError, match='no tokens'): block_mask([nothing, nothing])
    for masks in (dense_mask, block_mask, mask_mod):
        with pytest.raises(MaskError, match='without rows'): masks([])
    table = SegmentTable()
    one = Layout([5], [table.open()], [0], [-100], table)
    with pytest.raises(MaskError, match='blocks of 0'): block_mask(one, block_size=0)
    assert block_mask(one).to_dense().shape[-1] == 1

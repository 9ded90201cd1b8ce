"""Engine: against HF `generate`, numpy, and full recomputes under masks; and everything that may go wrong in a batch.

Oracles come from the definitions: a step's logits are those of one pass over all tokens so far under the table's mask."""
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.generation import NoRepeatNGramLogitsProcessor, SuppressTokensLogitsProcessor

from pasta_lib import engine as E
from pasta_lib.core import PastaError
from pasta_lib.engine import *
from pasta_lib.masks import layout_logits
from pasta_lib.models import byte_tokenizer, tiny_model
from pasta_lib.pool import PoolFull, check_pool
from pasta_lib.segments import Layout, IGNORE

SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=512, head_dim=8, pad_token_id=257, bos_token_id=None, eos_token_id=256,
             initializer_range=0.2)
LAYERS = ['sliding_attention', 'full_attention']
ARCHITECTURES = dict(llama={}, qwen2={}, qwen3={}, gemma={}, gemma3_text=dict(sliding_window=8, layer_types=LAYERS),
                     mistral=dict(sliding_window=8), phi3={}, smollm3=dict(no_rope_layers=[1, 0]))
WINDOWED = ['gemma3_text', 'mistral']
PROMPTS = [[(7 * i * i + 3 * n) % 250 for i in range(length)] for n, length in enumerate((20, 3, 41, 9))]


def build(kind, seed=0, **more):
    config = {**SMALL, **ARCHITECTURES.get(kind, {}), **more}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=300, **config)).eval()


def generate(model, ids, n, **options):
    "HF's greedy tokens, eos included."
    with torch.no_grad():
        out = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                             max_new_tokens=n, do_sample=False, **options)
    return out[0, len(ids):].tolist()


def empty(engine):
    "After everything, the pool is as new."
    check_pool(engine.pool)
    assert engine.pool.pages.free == len(engine.pool.pages) and not engine.pool.tables and not engine.pool.prefixes


def once(model, record, upto=None):
    "Logits of one pass over a record's tokens."
    kept = [i for i, s in enumerate(record.slot) if s >= 0]
    column = lambda name: [getattr(record, name)[i] for i in kept]
    layout = Layout(column('token'), column('segment'), column('position'), [IGNORE] * len(kept), record.table)
    return dict(zip(kept, layout_logits(model, layout)))


def deviation(model, result):
    expected = once(model, result.record)
    assert result.record.logits
    return max(float((expected[i] - row).abs().max()) for i, row in result.record.logits.items())


@pytest.fixture(scope='module')
def small():
    model, tokenizer = tiny_model(seed=3, layers=2, hidden=32)
    return model, tokenizer


def engine_of(small, **options): return Engine(*small, **{**dict(slots=512, page_size=16), **options})


def tokens(results): return [r.token_ids for r in results]


# ---- plain decoding is HF generate

@pytest.mark.parametrize('kind', ARCHITECTURES)
def test_equals_generate(kind):
    model = build(kind)
    engine = Engine(model, slots=512, page_size=7, chunk=16)
    expected = [generate(model, ids, 24) for ids in PROMPTS]
    assert tokens(engine.run([ar(ids, max_new_tokens=24) for ids in PROMPTS])) == expected
    for ids, e in zip(PROMPTS[:2], expected): assert tokens(engine.run(ar(ids, max_new_tokens=24))) == [e]
    empty(engine)


def test_softcaps():
    model = build('gemma2', sliding_window=8, layer_types=LAYERS, attn_logit_softcapping=5.0)
    model.set_attn_implementation('eager')
    r, = Engine(model, slots=64, page_size=8).run(ar(PROMPTS[0], max_new_tokens=12), keep_logits=True)
    assert r.token_ids == generate(model, PROMPTS[0], 12) and deviation(model, r) < 1e-4


@pytest.mark.smollm2
def test_smollm2_equals_generate(smollm2):
    model, tokenizer = smollm2
    prompts = ['How do bees make honey?', 'Write a haiku about rain.', 'Name three uses of a brick, and say why each works.']
    engine = Engine(model, tokenizer, slots=1024)
    batch = engine.run([ar(p, max_new_tokens=32) for p in prompts])
    for p, r in zip(prompts, batch):
        assert r.token_ids == generate(model, r.record.token[:r.prompt_tokens], 32, pad_token_id=0)
    single, = engine.run(ar(prompts[1], max_new_tokens=32))
    assert single.token_ids == batch[1].token_ids and single.text == batch[1].text
    assert tokenizer.decode(batch[0].token_ids, skip_special_tokens=True) == batch[0].text
    empty(engine)


def test_more_requests_than_the_pool_holds(small):
    "Waiting requests are admitted as others end; all come back in order, with the tokens of single runs."
    model, _ = small
    engine = engine_of(small, slots=128)
    requests = [ar(PROMPTS[n % 4], max_new_tokens=5 + n, seed=n, temperature=1.) for n in range(12)]
    results = engine.run(requests)
    assert [r.number for r in results] == list(range(12))
    for request, r in zip(requests, results): assert tokens(engine_of(small).run(request)) == [r.token_ids]
    empty(engine)


# ---- chunks, pages, fragments, neighbours change nothing

def test_scheduling_changes_nothing(small):
    request = lambda: ar(PROMPTS[2], max_new_tokens=20, temperature=1., seed=11)
    expected = tokens(engine_of(small).run(request()))[0]
    for chunk, page in [(1, 16), (7, 1), (40, 3), (41, 64), (512, 5)]:
        engine = engine_of(small, chunk=chunk, page_size=page)
        assert tokens(engine.run(request()))[0] == expected
        others = [ar(PROMPTS[n], max_new_tokens=9 + n, temperature=2., seed=n) for n in range(4)]
        assert tokens(engine.run([*others[:2], request(), *others[2:]]))[2] == expected
        holes = [engine.pool.table() for _ in range(6)]            # every other page is somebody's
        for t in holes: t.take(page)
        for t in holes[::2]: t.release()
        r, = engine.run(request())
        assert r.token_ids == expected
        for t in holes[1::2]: t.release()
        empty(engine)


def test_chunked_prefill_has_the_logits_of_one_chunk(small):
    ask = lambda chunk: engine_of(small, chunk=chunk).run(ar(PROMPTS[2], max_new_tokens=1), keep_logits=True)[0].record
    whole, parts = ask(100), ask(6)
    assert parts.logits.keys() == whole.logits.keys() == {40}
    assert torch.allclose(parts.logits[40], whole.logits[40], atol=1e-5)
    assert (parts.token, parts.position, parts.slot) == (whole.token, whole.position, whole.slot)


def test_counts(small):
    r, = engine_of(small, chunk=16).run(ar(PROMPTS[2], max_new_tokens=10, ignore_eos=True))
    assert (r.prompt_tokens, r.generated_tokens, r.forwards, r.prefill_forwards) == (41, 10, 9, 3)
    assert r.critical_path == 10 and r.parallelism == 1 and r.forks == 0 and r.finish_reason == 'length'
    assert r.record.step == [0] * 41 + list(range(1, 11)) and r.record.slot == [*range(50), -1]
    assert r.record.kind == ['prompt'] * 41 + ['sampled'] * 10 and r.threads == {'main': 'length'}
    assert len(r.record.seconds) == 9 and r.seconds > 0 and r.prefill_seconds > 0
    assert {'text', 'token_ids', 'finish_reason', 'forwards', 'critical_path', 'parallelism', 'forks', 'seconds',
            'prompt_tokens', 'generated_tokens'} <= r.json().keys() and r.json()['strategy'] == 'ar'


# ---- sampling

def numpy_probabilities(logits, temperature, top_k, top_p):
    z = logits.astype(np.float64) / temperature
    if top_k: z[np.argsort(-z, kind='stable')[top_k:]] = -np.inf
    p = np.exp(z - z.max())
    p /= p.sum()
    kept, total = np.zeros(len(p), bool), 0.
    for i in np.argsort(-p, kind='stable'):
        if total >= top_p: break
        kept[i], total = True, total + p[i]
    p[~kept] = 0
    return p / p.sum()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([.3, 1., 2.]), st.sampled_from([0, 1, 3, 50]), st.sampled_from([.1, .5, .95, 1.]))
def test_draw_has_the_right_distribution(seed, temperature, top_k, top_p):
    logits = np.random.default_rng(seed).normal(size=12) * 2
    p = numpy_probabilities(logits, temperature, min(top_k, 12), top_p)
    s, n = Sampling(temperature=temperature, top_k=top_k, top_p=top_p), 400
    drawn = np.bincount([draw(torch.tensor(logits), s, (k + .5) / n) for k in range(n)], minlength=12) / n
    assert np.abs(drawn - p).max() <= 1.01 / n and not drawn[p == 0].any()


def test_draw_at_the_edges():
    logits = torch.tensor([-torch.inf, 1., 1., -torch.inf])
    for u in (0., 1 - 2**-53): assert draw(logits, Sampling(temperature=1.), u) in (1, 2)
    assert draw(logits, Sampling(), .9) == 1
    assert draw(torch.tensor([0., 5., 1.]), Sampling(temperature=1., top_p=1e-9), .999) == 1


def test_uniform_numbers():
    u = np.array([uniform(s, t, i) for s in range(5) for t in range(5) for i in range(400)])
    assert len(set(u)) == len(u) and 0 <= u.min() and u.max() < 1 and abs(u.mean() - .5) < .01
    assert np.abs(np.histogram(u, 10, (0, 1))[0] / 1000 - 1).max() < .15
    assert uniform(1, 2, 3) == uniform(1, 2, 3) != uniform(1, 3, 2)


def test_seeds(small):
    engine = engine_of(small)
    request = ar(PROMPTS[0], max_new_tokens=12, temperature=1.5, seed=4)
    many = engine.run(samples(request, 5))
    assert [r.request.seed for r in many] == [4, 5, 6, 7, 8] and len(set(map(tuple, tokens(many)))) == 5
    for r in many: assert tokens(engine.run(r.request)) == [r.token_ids]
    assert tokens(engine.run(ar(PROMPTS[0], max_new_tokens=12, temperature=1.5, top_k=1, seed=9))) == \
        tokens(engine.run(ar(PROMPTS[0], max_new_tokens=12)))


def test_probabilities(small):
    model, _ = small
    r, = engine_of(small).run(ar(PROMPTS[0], max_new_tokens=8, probabilities=True))
    with torch.no_grad(): logits = model(torch.tensor([PROMPTS[0] + r.token_ids])).logits[0].softmax(-1)
    expected = [float(logits[19 + n, i]) for n, i in enumerate(r.token_ids)]
    assert np.allclose(r.record.prob[20:], expected, atol=1e-5) and np.isnan(r.record.prob[:20]).all()
    assert np.isnan(engine_of(small).run(ar(PROMPTS[0], max_new_tokens=2))[0].record.prob).all()


@pytest.mark.parametrize('bad', [dict(max_new_tokens=0), dict(temperature=-1), dict(temperature=float('inf')), dict(top_k=-1),
                                 dict(top_p=0), dict(top_p=1.5), dict(max_thread_tokens=0), dict(nonsense=1)])
def test_options_that_make_no_sense(bad):
    with pytest.raises(OptionError, match=next(iter(bad))): ar('x', **bad)


# ---- ends: eos, stop texts, limits, processors

def test_eos(small):
    model, tokenizer = small
    engine = engine_of(small)
    plain = engine.run(ar(PROMPTS[0], max_new_tokens=20, ignore_eos=True))[0].token_ids
    new = next(i for i in range(1, 20) if plain[i] not in plain[:i])           # a token that comes for the first time
    model.generation_config.eos_token_id = [9999, plain[new]]
    try:
        r, long = engine.run([ar(PROMPTS[0], max_new_tokens=20), ar(PROMPTS[0], max_new_tokens=20, ignore_eos=True)])
    finally: model.generation_config.eos_token_id = tokenizer.eos_token_id
    assert r.token_ids == plain[:new + 1] and r.finish_reason == 'eos' and r.record.slot[-1] == -1 and r.record.control[-1]
    assert long.token_ids == plain and long.finish_reason == 'length'
    assert r.text == tokenizer.decode(plain[:new]) == r.tagged_text


def spelled(tokenizer, text): return {'main': tokenizer.encode(text, add_special_tokens=False)}


@pytest.mark.parametrize('text, stop, expected', [
    ('one two three', 'two', 'one '), ('one two three', ['three', 'wo'], 'one t'), ('one two', 'zzz', 'one two'),
    ('aab', 'ab', 'a'), ('abcabd', 'abd', 'abc'), ('ein süß und', 'ß', 'ein sü'), ('x', 'x', ''), ('a b\n\nc', '\n\n', 'a b')])
def test_stop_texts(small, text, stop, expected):
    script = spelled(small[1], text)
    r, = engine_of(small).run(ar('Hi', stop=stop, script=script, max_new_tokens=len(script['main'])))
    assert r.text == expected and r.finish_reason == ('length' if 'zzz' in stop else 'stop')
    assert r.token_ids == script['main'][:len(r.token_ids)]


def test_one_token(small):
    r, = engine_of(small).run(ar(PROMPTS[0], max_new_tokens=1))
    assert len(r.token_ids) == 1 and r.forwards == 0 and r.critical_path == 1 and r.finish_reason == 'length'


def test_processors(small):
    model, _ = small
    engine = engine_of(small)
    plain = engine.run(ar(PROMPTS[0], max_new_tokens=10))[0].token_ids
    seen = []
    def own(ids, row):
        seen.append(list(ids))
        row = row.clone()
        row[plain[0]] = -torch.inf
        return row
    a, b = engine.run([ar(PROMPTS[0], max_new_tokens=10, processors=(own,)),
                       ar(PROMPTS[0], max_new_tokens=10, processors=(SuppressTokensLogitsProcessor([plain[0]]),))])
    assert a.token_ids == b.token_ids == generate(model, PROMPTS[0], 10, suppress_tokens=[plain[0]])
    assert seen == [a.token_ids[:n] for n in range(10)]
    script = [5, 6, 5]
    bias = NoRepeatNGramLogitsProcessor(2)
    r, = engine.run(ar([1], script={'main': script}, max_new_tokens=12, processors=(bias, lambda ids, row: row + 50 * torch.eye(len(row))[6])))
    pairs = list(zip(r.token_ids, r.token_ids[1:]))
    assert len(set(pairs)) == len(pairs)


# ---- prompts

def test_prompts(small):
    model, tokenizer = small
    engine = engine_of(small)
    ids = lambda prompt, **o: (r := engine.run(ar(prompt, max_new_tokens=1, **o))[0]).record.token[:r.prompt_tokens]
    chat = tokenizer.apply_chat_template([dict(role='user', content='Hi')], add_generation_prompt=True)
    chat = chat['input_ids'] if hasattr(chat, 'keys') else chat
    assert ids('Hi') == ids([dict(role='user', content='Hi')]) == list(chat)
    assert ids('Hi', raw=True) == tokenizer.encode('Hi', add_special_tokens=False) == ids(list(b'Hi'))
    assert ids(np.array([1, 2]).tolist()) == [1, 2] == ids((1, 2))
    assert tokenizer.eos_token_id not in ids('<|end|>', raw=True)


@pytest.mark.parametrize('prompt, words', [('', 'empty'), ([], 'empty'), ([1, 300], '300'), ([-1], '-1'), ([1] * 999, 'larger'),
                                           (7, 'type int'), (None, 'NoneType'), ([dict(role='user')], 'message'), ([1, 'x'], '')])
def test_bad_prompts_end_alone(small, prompt, words):
    engine = engine_of(small, slots=128)
    good, bad, again = engine.run([ar([1, 2], max_new_tokens=4), ar(prompt, raw=True, max_new_tokens=4), ar([1, 2], max_new_tokens=4)])
    assert good.token_ids == again.token_ids and len(good.token_ids) == 4
    assert bad.finish_reason == ('pool_full' if words == 'larger' else 'error') and words in str(bad.error)
    assert isinstance(bad.error, PastaError) and bad.token_ids == [] and bad.text == ''
    empty(engine)


def test_words_need_a_tokenizer(small):
    engine = Engine(small[0], slots=64)
    r, s = engine.run([ar('Hi'), ar([1, 2], max_new_tokens=2)])
    assert 'tokenizer' in str(r.error) and len(s.token_ids) == 2 and s.text == ''


def test_not_a_request(small):
    with pytest.raises(OptionError, match='str'): engine_of(small).run(['Hi'])


# ---- shared prefixes

@strategy
def counted(h, log):
    "As `ar`, and notes how many prompt tokens it asks about, and the references to its pages."
    main = h.line('main')
    q = h.prompt(main)
    logits = yield q
    log.append((len(q.tokens), max(h.pages.pool.pages.refs[p] for p in h.pages.pages)))
    while not main.done:
        token, = pick(h, [main], logits)
        push(main, token, 'sampled', main.prob)
        if not main.done: logits = yield feed([main])


def test_a_common_prefix_is_stored_once(small):
    log, ids = [], PROMPTS[2]                                      # 41 tokens: two whole pages of 16
    engine, alone = engine_of(small), engine_of(small, share_prefix=False)
    requests = [counted(ids, log=log, max_new_tokens=6, temperature=1., seed=n, reserve=16) for n in range(3)]
    requests.append(counted(ids[:33] + [7], log=log, max_new_tokens=6, reserve=16))
    requests.append(counted([8] + ids[1:], log=log, max_new_tokens=6, reserve=16))
    shared = engine.run(requests, keep_logits=True)
    assert sorted(n for n, _ in log) == [2, 9, 9, 41, 41] and max(refs for _, refs in log) == 4
    assert tokens(shared) == tokens(alone.run(requests)) and all(n == len(r.request.prompt) for (n, _), r in zip(log[5:], shared))
    for r in shared: assert deviation(small[0], r) < 1e-4
    empty(engine), empty(alone)


def test_a_shared_prefix_with_windows():
    model, log = build('gemma3_text'), []
    engine = Engine(model, slots=256, page_size=8)
    both = engine.run([counted(PROMPTS[2] + [n], log=log, max_new_tokens=6) for n in range(2)], keep_logits=True)
    assert sorted(n for n, _ in log) == [2, 42] and max(deviation(model, r) for r in both) < 1e-4
    assert tokens(both) == [generate(model, PROMPTS[2] + [n], 6) for n in range(2)]


def test_a_prompt_is_forgotten_with_its_last_reader(small):
    log, engine = [], engine_of(small)
    for _ in range(2): engine.run(counted(PROMPTS[2], log=log, max_new_tokens=2))
    assert [n for n, _ in log] == [41, 41]


# ---- blocks: in place, bidirectional, scratch

@strategy
def blocks(h, model, size, rounds, way, worst):
    "Denoises blocks in place, with scratch rows between; compares every step with a full recompute."
    rng, main, prompt = np.random.default_rng(way), h.line('main'), h.ids
    yield h.prompt(main)
    h.close(main.segment)
    parts = [(main.segment, list(prompt), list(range(len(prompt))))]
    def expect(logits, segment, ids, positions):
        runs = parts + [(segment, ids, positions)]
        row = lambda n: [x for run in runs for x in (run[n] if n else [run[0]] * len(run[1]))]
        full = layout_logits(model, Layout(row(1), row(0), row(2), [IGNORE] * len(row(1)), h.table))
        worst.append(float((full[-len(ids):] - logits).abs().max()))
    for b in range(3):
        segment = h.open([main.segment], f'block {b}', causal=False, reads=[p[0] for p in parts])
        positions = list(range(len(prompt) + b * size, len(prompt) + (b + 1) * size))
        for n in range(rounds):
            ids, slots = rng.integers(0, 250, size).tolist(), None if n == 0 else slots
            logits = yield Queries(ids, positions, segment, 'all', slots)
            if n == 0: slots = list(range(h.pages.used - size, h.pages.used))
            expect(logits, segment, ids, positions)
            used, k = h.pages.used, int(rng.integers(1, 5))
            side = h.open([main.segment], causal=bool(n % 2))
            words, places = rng.integers(0, 250, k).tolist(), rng.permutation(k).tolist()
            logits = yield Queries(words, places, side, 'all', keep=False)
            keep, parts[1:] = parts[1:], []
            expect(logits, side, words, places)
            parts[1:] = keep
            h.close(side)
            assert h.pages.used == used
        parts.append((segment, ids, positions))
        h.close(segment)


@pytest.mark.parametrize('kind', ['llama', *WINDOWED])
def test_blocks_in_place_and_scratch(kind):
    model, worst = build(kind), []
    engine = Engine(model, slots=256, page_size=4)
    r, other = engine.run([blocks(PROMPTS[0], model=model, size=6, rounds=4, way=1, worst=worst), ar(PROMPTS[1], max_new_tokens=30)])
    assert r.error is None and len(worst) == 24 and max(worst) < 1e-4
    assert other.token_ids == generate(model, PROMPTS[1], 30)
    empty(engine)


def handle_of(small, n=20, **options):
    engine = engine_of(small, page_size=4, **options)
    h = engine.handle()
    main = h.open((), 'main')
    engine.step([(h, Queries(list(range(n)), range(n), main))])
    return engine, h, main


def test_rewriting_under_another_segment(small):
    "What is rewritten belongs to its new segment: readers of the old one no longer see it, readers of the new one do."
    engine, h, main = handle_of(small)
    noisy, clean = h.open([main], causal=False), h.open([main], causal=False)
    old, new = h.open([noisy]), h.open([clean])
    engine.step([(h, Queries([1, 2, 3], [20, 21, 22], noisy))])
    engine.step([(h, Queries([4, 5, 6], [20, 21, 22], clean, slots=[20, 21, 22]))])
    got = engine.step([(h, Queries([7, 8], [23, 23], [old, new], 'all'))])[0]
    row = lambda s, extra: layout_logits(small[0], Layout([*range(20), *extra, 7 if s == old else 8], [main] * 20 + [clean] * len(extra) + [s],
                                         [*range(20), *[20, 21, 22][:len(extra)], 23], [IGNORE] * (21 + len(extra)), h.table))[-1]
    assert torch.allclose(got[0], row(old, []), atol=1e-4)
    assert torch.allclose(got[1], row(new, [4, 5, 6]), atol=1e-4)


@pytest.mark.parametrize('query, words', [
    (lambda m: Queries([1], [20], 9), 'not open'), (lambda m: Queries([1], [20], [m + 5]), 'not open'),
    (lambda m: Queries([1], [3], m, slots=[20]), 'never taken'), (lambda m: Queries([1], [3], m, slots=[-1]), 'never taken'),
    (lambda m: Queries([1, 2], [3, 4], m, slots=[3]), '2 tokens for 1 slots')])
def test_queries_that_can_not_be_placed_change_nothing(small, query, words):
    engine, h, main = handle_of(small)
    before = h.visible.copy(), h.pages.used, h.pages.owner[:20].copy()
    with pytest.raises(QueryError, match=words): place(h, query(main))
    assert (h.visible[:, :20] == before[0][:, :20]).all() and h.pages.used == before[1] and (h.pages.owner[:20] == before[2]).all()
    check_pool(engine.pool)


def test_a_shared_page_is_not_rewritten(small):
    @strategy
    def rewriter(h):
        main = h.line('main')
        yield h.prompt(main)
        yield Queries([1], [0], main.segment, slots=[0])
    engine = engine_of(small)
    keeper, bad = engine.run([ar(PROMPTS[2], max_new_tokens=30), rewriter(PROMPTS[2])])
    assert isinstance(bad.error, QueryError) and len(keeper.token_ids) == 30
    alone, after = engine.run([rewriter(PROMPTS[2]), ar(PROMPTS[2], max_new_tokens=8)])
    assert after.token_ids == keeper.token_ids[:8]                 # nobody reads a prompt that was written over
    empty(engine)


# ---- any graph of segments

@strategy
def wander(h, way, steps=8):
    "Opens random segments and asks from several at once; what others read is written no more."
    rng, main = np.random.default_rng(way), h.line('main')
    yield h.prompt(main)
    h.close(main.segment)
    frozen, live, some = [main.segment], {}, lambda xs: [x for x in xs if rng.random() < .6]
    for _ in range(steps):
        final = set(some(list(live)))                              # these are written a last time: children may open now
        while len(live) < 1 or rng.random() < .5:
            s = h.open(some(frozen + list(final)), None, bool(rng.random() < .7), some(some(frozen)),
                       some(frozen) if rng.random() < .2 else None)
            live[s] = int(rng.integers(0, 60))
            if not h.table.causal[s]: final.add(s)                 # all of it in one forward
        rows = []
        for s in live:
            n = int(rng.integers(1, 5))
            rows += [(int(rng.integers(0, 250)), live[s] + int(p), s) for p in rng.permutation(n)]
            live[s] += n
        rows = [rows[i] for i in rng.permutation(len(rows))]
        ids, positions, segments = zip(*rows)
        one = len(set(segments)) == 1 and rng.random() < .5
        want = [None, 'all', sorted(rng.permutation(len(rows))[:2].tolist()), []][rng.integers(4)]
        logits = yield Queries(ids, positions, segments[0] if one else segments, want)
        assert len(logits) == len({None: [0], 'all': rows}.get(want, want) if not isinstance(want, list) else want)
        for s in final:
            h.close(s)
            frozen.append(s)
            live.pop(s)


@pytest.mark.parametrize('kind', ['llama', 'smollm3', *WINDOWED])
def test_any_graph_of_segments(kind):
    "4 x 16 random runs, three at a time beside plain ones: the logits are those of one pass under the table."
    model = build(kind, seed=5)
    engine = Engine(model, slots=2048, page_size=5, chunk=9)
    requests = [wander(PROMPTS[n % 4][:15], way=n) for n in range(16)]
    worst = 0.
    for start in range(0, 16, 4):
        results = engine.run([*requests[start:start + 4], ar(PROMPTS[0], max_new_tokens=5)], keep_logits=True)
        for r in results:
            assert r.error is None, r.error
            worst = max(worst, deviation(model, r), replay_deviation(model, r))
    assert worst < 1e-4
    empty(engine)


# ---- forgetting

@strategy
def forgetful(h, n):
    "Writes A, then B that reads it; forgets A; C reads B and the prompt."
    main = h.line('main')
    yield h.prompt(main)
    at, free = len(h.ids), h.engine.pool.pages.free
    a = h.open([main.segment], 'A')
    yield Queries(range(n), range(at, at + n), a)
    b = h.open([a], 'B')
    yield Queries([1, 2, 3], range(at + n, at + n + 3), b)
    h.counts['freed'], h.counts['free'] = h.drop([a]), h.engine.pool.pages.free
    check_pool(h.engine.pool)
    c = h.open([b], 'C', without=[a])
    for k in range(10): yield Queries([k], [at + n + 3 + k], c)
    h.counts['live'] = len(np.arange(h.pages.used)[h.pages.live()])


@pytest.mark.parametrize('kind', ['llama', *WINDOWED])
def test_forgetting_is_a_row_without(kind):
    model = build(kind)
    engine = Engine(model, slots=256, page_size=4)
    r, _ = engine.run([forgetful(PROMPTS[1], n=21), ar(PROMPTS[0], max_new_tokens=12)], keep_logits=True)
    assert r.error is None and deviation(model, r) < 1e-4
    assert r.counts['freed'] == 5 and r.counts['live'] == 3 + 21 + 3 + 10 - 20
    empty(engine)


# ---- what goes wrong ends alone

def unruly(kind):
    def misbehave(h):
        main = h.line('main')
        yield h.prompt(main)
        push(main, 5, 'sampled')
        yield feed([main])
        n, s = main.position, main.segment
        bad = dict(nonsense='hello', none=None, no_tokens=Queries([], [], s), positions=Queries([1, 2], [n], s), segments=Queries([1], [n], [s, s]),
                   negative=Queries([1], [-1], s), want=Queries([1], [n], s, [1]), want_below=Queries([1], [n], s, [-1]),
                   token=Queries([300], [n], s), token_below=Queries([-1], [n], s), closed=Queries([1], [n], 77),
                   slot=Queries([1], [n], s, slots=[400]), words=Queries(['a'], [n], s), want_words=Queries([1], [n], s, ['a']),
                   want_half=Queries([1], [n], s, [.5]), slot_words=Queries([1], [n], s, slots=['a']), segment_words=Queries([1], [n], ['a']),
                   far=Queries([1], [10**30], s), notes=Queries([1, 2], [n, n + 1], s, notes=[(0, 'sampled', 0., False)]),
                   bad_notes=Queries([1], [n], s, notes=[None]), scratch_slots=Queries([1], [n], s, slots=[0], keep=False),
                   position_words=Queries([1], ['a'], s))
        if kind == 'raises': raise ValueError('my own mistake')
        if kind == 'pasta_error': raise PastaError('a mistake')
        yield bad[kind]
    return strategy(misbehave)


def never(h): yield from ()
def nothing(h): return None
def at_once(h): raise RuntimeError('before the first step')
def needs(h, outline): yield h.prompt(h.line('main'))
def odd_first(h): yield 5
def no_line(h):
    s = h.open()
    yield Queries([1, 2], [0, 1], s)


KINDS = ['raises', 'pasta_error', 'nonsense', 'none', 'no_tokens', 'positions', 'segments', 'negative', 'want', 'want_below', 'token',
         'token_below', 'closed', 'slot', 'words', 'want_words', 'want_half', 'slot_words', 'segment_words', 'far', 'notes',
         'bad_notes', 'scratch_slots', 'position_words']


@pytest.mark.parametrize('kind', KINDS)
def test_a_failing_strategy_ends_alone(small, kind):
    engine = engine_of(small)
    good = ar(PROMPTS[0], max_new_tokens=8)
    expected = engine.run(good)[0].token_ids
    a, bad, b = engine.run([good, unruly(kind)([1, 2]), replace(good)])
    assert a.token_ids == b.token_ids == expected
    assert bad.finish_reason == 'error' and bad.error is not None and 5 in bad.token_ids
    assert bad.json()['error']
    empty(engine)


def test_a_missing_option_is_said_at_once():
    with pytest.raises(OptionError, match='needs needs an outline: outline=N'): strategy(needs)([1, 2])
    assert strategy(needs)([1, 2], outline='x').options == dict(outline='x')


@pytest.mark.parametrize('fn', [never, nothing, at_once, odd_first, no_line])
def test_a_strategy_that_never_starts_ends_alone(small, fn):
    engine = engine_of(small)
    good = ar(PROMPTS[0], max_new_tokens=8)
    a, bad, b = engine.run([good, strategy(fn)([1, 2]), replace(good)])
    assert a.token_ids == b.token_ids and len(a.token_ids) == 8
    assert (bad.error is None) == (fn in (never, no_line)) and bad.token_ids == [1, 2] * (fn is no_line)
    empty(engine)


def test_a_full_pool_ends_one_request(small):
    engine = engine_of(small, slots=64, page_size=4, share_prefix=False)
    long, short = ar(PROMPTS[0], max_new_tokens=200, reserve=0, ignore_eos=True), ar(PROMPTS[3], max_new_tokens=20, reserve=30)
    whole = engine_of(small, slots=1024).run([long, short])
    cut, fine = engine.run([long, short])
    assert cut.finish_reason == 'pool_full' and isinstance(cut.error, PoolFull) and cut.threads == {'main': 'pool_full'}
    n = len(cut.token_ids)
    assert 2 < n < 60 and cut.token_ids == whole[0].token_ids[:n] and len(cut.text) > 0 and cut.record.slot[-1] == -1
    assert fine.token_ids == whole[1].token_ids and fine.error is None
    empty(engine)


def test_a_full_pool_during_a_prompt(small):
    engine = engine_of(small, slots=48, page_size=4, chunk=8, share_prefix=False)
    holder = ar(PROMPTS[3], max_new_tokens=20, reserve=0)
    late, ok = engine.run([ar(PROMPTS[2], max_new_tokens=4, reserve=0), holder])
    assert [late.finish_reason, ok.finish_reason] == ['length', 'length']
    @strategy
    def two_prompts(h):
        main = h.line('main')
        yield h.prompt(main)
        yield Queries([3] * 60, range(60), main.segment, prefill=True)
    r, ok = engine.run([two_prompts([1, 2]), holder])
    assert r.finish_reason == 'pool_full'
    empty(engine)


def test_a_strategy_may_survive_a_full_pool(small):
    @strategy
    def frugal(h):
        main = h.line('main')
        yield h.prompt(main)
        h.close(main.segment)
        last = main.segment
        for k in range(30):
            s = h.open([last] if k else [main.segment])
            q = Queries([k] * 4, range(40 + 4 * k, 44 + 4 * k), s)
            try: yield q
            except PoolFull:
                h.counts['full'] = h.counts.get('full', 0) + 1
                h.drop(set(range(1, s)))
                yield q
            last = s
    engine = engine_of(small, slots=48, page_size=4)
    r, = engine.run(frugal([1, 2, 3, 4], reserve=0))
    assert r.error is None and r.counts['full'] >= 2
    empty(engine)


# ---- cancelling, Ctrl-C, leaving early

def test_cancel(small):
    engine = engine_of(small)
    request, other = ar('Hi', max_new_tokens=100, ignore_eos=True), ar('Ho', max_new_tokens=30, ignore_eos=True)
    heard = []
    def listen(chunk):
        heard.append(chunk)
        if chunk.request is request and sum(c.request is request for c in heard) == 7: request.cancel()
    a, b = engine.run([request, other], listen=listen)
    assert a.finish_reason == 'cancelled' and 7 <= len(a.token_ids) <= 8 and b.finish_reason == 'length' and len(b.token_ids) == 30
    assert ''.join(c.text for c in heard if c.request is other) == b.text
    dead = ar('Hi')
    dead.cancel()
    assert engine.run(dead)[0].finish_reason == 'cancelled'
    empty(engine)


@pytest.mark.parametrize('when', [1, 5, 12])
def test_ctrl_c_ends_all_with_what_they_have(small, when):
    engine = engine_of(small, slots=128)
    count = [0]
    def listen(chunk):
        count[0] += 1
        if count[0] == when: raise KeyboardInterrupt
    requests = [ar('Hi', max_new_tokens=20, ignore_eos=True), ar('Ho', max_new_tokens=20, ignore_eos=True), ar('He', max_new_tokens=90)]
    results = engine.run(requests, listen=listen)
    assert [r.finish_reason for r in results] == ['cancelled'] * 3 and len(results[2].token_ids) == 0
    assert 1 <= when - 1 <= sum(len(r.token_ids) for r in results) or when == 1
    whole = engine_of(small).run([replace(r) for r in requests])
    for r, w in zip(results, whole): assert r.token_ids == w.token_ids[:len(r.token_ids)]
    empty(engine)


def test_leaving_a_stream_early(small):
    engine = engine_of(small)
    requests = [ar(PROMPTS[0], max_new_tokens=n, ignore_eos=True) for n in (3, 3, 9)]
    results = engine.stream(requests)
    assert next(results).number in (0, 1)
    results.close()
    empty(engine)
    assert [r.number for r in engine.stream(requests)][2] == 2
    engine.stream(requests)                                        # never begun
    empty(engine)


def test_a_listener_that_fails(small):
    engine = engine_of(small)
    def listen(chunk):
        if chunk.request is bad: raise ValueError('my screen is broken')
    good, bad = ar('Hi', max_new_tokens=5, ignore_eos=True), ar('Ho', max_new_tokens=5)
    a, b = engine.run([good, bad], listen=listen)
    assert len(a.token_ids) == 5 and b.finish_reason == 'error'
    empty(engine)


def test_streamed_text(small):
    text, heard = 'Grüße, 世界! 🙂 ok', []
    script = spelled(small[1], text)
    r, = engine_of(small).run(ar('Hi', script=script, max_new_tokens=len(script['main'])), listen=heard.append)
    assert ''.join(c.text for c in heard) == r.text == text and [c.token for c in heard] == r.token_ids
    assert [c.step for c in heard] == list(range(1, len(heard) + 1)) and heard[0].thread == 'main' and heard[0].request is r.request


# ---- books, and the cost of keeping them

@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 10**6))
def test_rows_of_a_handle(small, seed):
    "After any opens, writes, drops and closes, each open segment's row is what the table and the owners say."
    rng = np.random.default_rng(seed)
    engine = engine_of(small, page_size=3)
    h = engine.handle()
    h.open()
    for _ in range(25):
        live, action = list(h.rows), rng.integers(0, 5)
        if action == 0 or not live: h.open(rng.integers(0, len(h.table), 2).tolist(), without=rng.integers(0, len(h.table), 1).tolist() if rng.random() < .3 else ())
        elif action == 1 and len(live) > 1: h.close(live[rng.integers(len(live))])
        elif action == 2: h.drop(rng.integers(0, len(h.table), 1).tolist())
        else:
            segments = [live[i] for i in rng.integers(0, len(live), int(rng.integers(1, 5)))]
            q = Queries([1] * len(segments), rng.integers(0, 9, len(segments)), segments, keep=bool(rng.random() < .7))
            placed = place(h, q)
            if not q.keep: erase(h, placed)
        owner = h.pages.owner[:h.pages.used]
        for s, row in h.rows.items():
            expected = [o >= 0 and bool(h.table.reads[s, o]) for o in owner]
            assert h.visible[row, :len(owner)].tolist() == expected and not h.visible[row, len(owner):].any()
        check_pool(engine.pool)


def place_seconds(small, slots):
    engine = Engine(*small, slots=slots, page_size=16)
    h = engine.handle()
    main = h.open()
    place(h, Queries([1] * 200, range(200), main))
    threads, best = [h.open([main]) for _ in range(32)], []
    for _ in range(40):
        start = time.perf_counter()
        erase(h, place(h, Queries([1] * 32, [200] * 32, threads, 'all', keep=False)))
        best.append(time.perf_counter() - start)
    return min(best)


def test_keeping_books_does_not_cost_more_in_a_larger_pool(small):
    assert place_seconds(small, 8192) < 3 * place_seconds(small, 512)


def test_record_order():
    "Each fork right after its promise, forks of a prompt first, loose threads last."
    from pasta_lib.segments import SegmentTable
    r = Record(SegmentTable(), [Thread('main', 0), Thread('f1', 1, 0, 2), Thread('f2', 2, 0, 0), Thread('f3', 3, 1, 4), Thread('loose', 4)])
    for token, (thread, kind) in enumerate([(0, 'prompt'), (0, 'sampled'), (0, 'sampled'), (0, 'sampled'), (1, 'forced'), (3, 'forced'),
                                            (2, 'forced'), (1, 'sampled'), (4, 'sampled')]):
        r.add(token, 0, 0, token, 0, thread, 0., kind, False)
    assert r.order == [6, 1, 2, 4, 5, 7, 3, 8]


def test_replay_needs_logits(small):
    r, = engine_of(small).run(ar([1], max_new_tokens=2))
    with pytest.raises(OptionError, match='keep_logits'): replay_deviation(small[0], r)


def test_scratch_rows_leave_no_logits_behind(small):
    "Scratch and rewritten rows are no tokens of the record: their logits are not kept under another token's number."
    @strategy
    def peeks(h):
        main = h.line('main')
        logits = yield h.prompt(main)
        for k in range(3):
            yield Queries([1, 2], [50, 51], main.segment, 'all', keep=False)
            yield Queries([k], [main.position + k], main.segment, [] if k == 1 else None)
        yield Queries([5, 6], [main.position, main.position + 1], main.segment, 'all', slots=[len(h.ids), len(h.ids) + 1])
    r, = engine_of(small).run(peeks([1, 2, 3]), keep_logits=True)
    assert r.error is None and set(r.record.logits) == {2, 3, 5}


def test_the_model_is_left_as_it_was(small):
    model, _ = small
    before = model.config._attn_implementation
    engine_of(small).run(ar([1], max_new_tokens=2))
    assert model.config._attn_implementation == before


def wide_queries(h):
    "Eighty rows at once, as a buffer of blocks has them."
    main = h.line('main')
    yield h.prompt(main)
    yield Queries([1] * 80, range(main.position, main.position + 80), main.segment, 'all')


@pytest.mark.slow
def test_compiled_equals_eager():
    model, tokenizer = tiny_model(seed=3, layers=1, hidden=32)
    eager, compiled = Engine(model, tokenizer, slots=128, page_size=16), Engine(model, tokenizer, slots=128, page_size=16, compile=True)
    ask = lambda engine: engine.run([ar([3], max_new_tokens=9, temperature=1.), ar([5], max_new_tokens=4)])
    try: got = ask(compiled)
    except Exception as e:
        if 'compiler' in str(e).lower() or 'InvalidCxx' in type(e).__name__: pytest.skip('no C++ compiler')
        raise
    assert [r.error for r in got] == [None, None]
    assert tokens(got) == tokens(ask(eager))
    assert sorted(shape[0] for shape in compiled.compiled.shapes) == [1, 2]     # two requests, then a lone one; prompts are not compiled
    wide = strategy(wide_queries)
    a, b = (engine.run(wide([1, 2, 3]), keep_logits=True)[0] for engine in (compiled, eager))
    assert a.error is b.error is None and (1, 128) in {shape[:2] for shape in compiled.compiled.shapes}
    for token, logits in b.record.logits.items(): assert torch.allclose(a.record.logits[token], logits, atol=1e-5)
    empty(compiled)


def test_a_strategy_that_will_not_take_no_for_an_answer(small):
    from pasta_lib.pool import PoolFull

    @strategy
    def stubborn(h):
        main = h.line('main')
        yield h.prompt(main)
        while True:
            try: yield Queries([1] * 1000, range(4, 1004), main.segment)
            except PoolFull: pass

    engine = engine_of(small)
    r, = engine.run(stubborn([1, 2, 3, 4], reserve=1))
    assert r.finish_reason == 'pool_full' and engine.pool.pages.free == len(engine.pool.pages)


# ---- where attention reads

@settings(max_examples=200, deadline=None)
@given(st.sets(st.integers(0, 2000), min_size=1, max_size=300), st.integers(0, 10**6))
def test_runs_hold_every_slot_once(slots, seed):
    "Stretches are as few as they can be: cut only where more than 64 slots in a row are not ours."
    physical = np.random.default_rng(seed).permutation(sorted(slots))
    runs, columns = E._runs(physical)
    read = np.concatenate([np.arange(a, a + n) for a, n in runs])
    assert (read[columns] == physical).all() and len(set(columns.tolist())) == len(slots)
    for (a, n), (b, _) in zip(runs, runs[1:]): assert b - (a + n) >= 64 and {a, a + n - 1, b} <= slots
    assert all(np.diff(sorted(slots & set(range(a, a + n)))).max(initial=0) <= 64 for a, n in runs)


def test_a_shared_prompt_far_away_is_read_in_two_stretches(small):
    "Each of several samples reads the common pages and its own: the logits of a request that has them all to itself."
    prompt = [(5 * i + 1) % 250 for i in range(70)]
    engine, kinds, answer = engine_of(small, slots=2048), [], Engine.answer
    engine.answer = lambda placed, wanted: (kinds.extend(p.runs and len(p.runs) for p in placed), answer(engine, placed, wanted))[1]
    results = engine.run(samples(ar(prompt, max_new_tokens=30, temperature=1., ignore_eos=True), 4), keep_logits=True)
    assert kinds.count(2) > 50 and kinds.count(None) > 20
    for r in results:
        alone, = engine_of(small).run(r.request, keep_logits=True)
        a, b = (torch.stack(list(x.record.logits.values())) for x in (r, alone))
        assert r.token_ids == alone.token_ids and float((a - b).abs().max()) < 1e-4
        assert deviation(small[0], r) < 1e-4
    empty(engine)


def test_pages_of_a_request_that_fails_are_free_in_the_same_turn(small):
    "One asks for more than there is and ends; the next in line gets its pages at once."
    engine = engine_of(small, slots=64)
    first, second = engine.run([ar(PROMPTS[n][:10], max_new_tokens=40, reserve=4, ignore_eos=True) for n in (0, 2)])
    assert first.finish_reason == 'pool_full' and first.generated_tokens > 10 and second.finish_reason == 'length'
    assert second.token_ids == tokens(engine_of(small).run(second.request))[0]
    empty(engine)


def test_what_a_request_may_still_take_is_promised(small):
    "No more than its room has left, and no more than its tokens to come can fill, whatever it has given back."
    engine = engine_of(small, slots=1024)
    h = Decoding(engine, ar(PROMPTS[0], max_new_tokens=100), PROMPTS[0])
    assert h.pages.room == h.pages.most == h.pages.promised == 8
    s = h.open()
    place(h, Queries(range(60), range(60), s))
    assert h.pages.held == 4 and h.pages.promised == 4
    h.drop([s])
    assert h.pages.held == 1 and h.pages.promised == 4            # 120 tokens, 64 of them written, need four pages more
    h.pages.room = 3
    assert h.pages.promised == 2
    h.pages.release()
    h = Decoding(engine, ar(PROMPTS[0], max_new_tokens=100, reserve=30), PROMPTS[0])
    assert (h.pages.room, h.pages.most, h.pages.promised) == (4, 8, 4)
    h.pages.release()


@pytest.mark.parametrize('processor', [lambda ids, row: row[:5], lambda ids, row: row[None], lambda ids, row: None, lambda ids, row: row.tolist()])
def test_a_processor_that_changes_the_shape(small, processor):
    r, = engine_of(small).run(ar([1], max_new_tokens=2, processors=(processor,)))
    assert isinstance(r.error, QueryError) and 'a processor made logits of shape' in str(r.error)


@pytest.mark.parametrize('n', [0, -1, 1.5, 'two', None])
def test_so_many_samples_cannot_be(n):
    with pytest.raises(OptionError, match='at least 1'): samples(ar([1]), n)

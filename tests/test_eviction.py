"""Eviction: against a cache from which forgotten tokens are deleted one by one, the definition of the rule, and HF's attentions.

The oracle knows no segments, pages, masks or pools: a list of kept tokens, each with its position, beside HF's own cache."""
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from pasta_lib.core import PastaError
from pasta_lib.engine import *
from pasta_lib.engine import CompiledStep
from pasta_lib.eviction import *
from pasta_lib.masks import dense_mask
from pasta_lib.models import add_tokens, tiny_model
from pasta_lib.pool import check_pool
from pasta_lib.registers import encode_steps, register_text, register_tokens, tip_layout

REGISTERS = {200 + n: n for n in range(16)}            # token id -> register
PROMPT = [(7 * i * i + 3) % 190 for i in range(37)]
TOLERANCE = 1e-4


@pytest.fixture(scope='module')
def small():
    return tiny_model(seed=3, layers=2, hidden=32)


def engine_of(small, **options): return Engine(*small, **{**dict(slots=4096, page_size=16), **options})


def empty(engine):
    check_pool(engine.pool)
    assert engine.pool.pages.free == len(engine.pool.pages) and not engine.pool.tables and (engine.pool.pages.aside == -1).all()


def trace(seed, tokens, registers=16, longest=12, preamble=5):
    "A random answer: a preamble, then steps of random length in random registers."
    rng = random.Random(seed)
    word = lambda: rng.randrange(190)
    out = [word() for _ in range(preamble)]
    while len(out) < tokens: out += [200 + rng.randrange(registers), *(word() for _ in range(rng.randrange(longest)))]
    return out[:tokens]


def says(request, answer, **options):
    "A request that is told what to say."
    return replace(request, sampling=Sampling(script={'main': answer}, max_new_tokens=len(answer), ignore_eos=True, **options))


def tokens(results): return [r.token_ids for r in results]


# ---- the oracle

class Deleting:
    "HF's cache, from which what is forgotten is deleted; beside it, what each column is."
    def __init__(self, model, prompt):
        self.model, self.cache, self.kept, self.attended, self.rows = model, DynamicCache(config=model.config), [], [], []
        self.feed(prompt, range(len(prompt)))

    def feed(self, ids, positions):
        self.kept += list(positions)
        self.attended += [0.] * len(ids)
        mask = torch.ones(1, len(self.kept), dtype=torch.long)
        with torch.no_grad():
            out = self.model(input_ids=torch.tensor([ids]), position_ids=torch.tensor([list(positions)]), attention_mask=mask,
                             past_key_values=self.cache, use_cache=True, output_attentions=True)
        mass = torch.stack(out.attentions)[:, 0].sum((1, 2)).mean(0)        # layers, heads, queries, keys
        self.attended = [a + float(m) for a, m in zip(self.attended, mass)]
        self.rows.append(out.logits[0, -1])

    def delete(self, positions):
        left = [n for n, p in enumerate(self.kept) if p not in set(positions)]
        self.kept, self.attended = [self.kept[n] for n in left], [self.attended[n] for n in left]
        for layer in self.cache.layers: layer.keys, layer.values = layer.keys[:, :, left], layer.values[:, :, left]


def eager(small):
    model = small[0]
    model.set_attn_implementation('eager')
    return model


def tip_rule(registers=REGISTERS):
    "Which positions a token kills, read off the definition: those of the step that began with the same register last."
    begun = []                                          # (register, position), in order
    def rule(oracle, prompt, token, position):
        if token not in registers: return []
        begun.append((registers[token], position))
        old = [p for r, p in begun[:-1] if r == registers[token]]
        if not old: return []
        end = next(p for _, p in begun if p > old[-1])
        return range(old[-1], end)
    return rule


def window_rule(size, window, sinks=4, keep_prompt=False):
    def rule(oracle, prompt, token, position):
        if position % size and position > prompt: return []
        stays = lambda p: p // size * size < sinks or p // size >= (position - window + 1) // size or keep_prompt and p // size * size < prompt
        return [p for p in oracle.kept if not stays(p)]
    return rule


def h2o_rule(size, budget, score='sum', keep_prompt=False):
    def rule(oracle, prompt, token, position):
        if position % size and position > prompt: return []
        new, most = position // size, budget // size
        pages = {}
        for p, mass in zip(oracle.kept, oracle.attended):
            if p // size < new and not (keep_prompt and p // size * size < prompt): pages.setdefault(p // size, []).append((mass, position - p))
        value = {n: sum(m for m, _ in slots) / (1 if score == 'sum' else sum(age for _, age in slots)) for n, slots in pages.items()}
        newest = {n for n in pages if n > new - most // 2}
        best = sorted((n for n in pages if n not in newest), key=lambda n: -value[n])[:most - most // 2]
        return [p for p in oracle.kept if p // size in pages and p // size not in newest | set(best)]
    return rule


def reference(model, prompt, answer, rule):
    "The oracle's last logits before each token of the answer, and how many tokens each fed token saw."
    oracle, live = Deleting(model, prompt), []
    for n, token in enumerate(answer[:-1]):
        oracle.delete(rule(oracle, len(prompt), token, len(prompt) + n))
        oracle.feed([token], [len(prompt) + n])
        live.append(len(oracle.kept))
    return torch.stack(oracle.rows), live


def seen(result): return torch.stack([result.record.logits[i] for i in sorted(result.record.logits)])


# ---- each policy is what its rule says

@pytest.mark.parametrize('page', [1, 16, 64])
@pytest.mark.parametrize('layout', ['packed', 'aligned'])
def test_tip_is_a_cache_from_which_dead_steps_are_deleted(small, page, layout):
    answer = trace(1, 160, registers=6, longest=9)
    engine = engine_of(small, page_size=page)
    r, = engine.run(says(tip(PROMPT, layout=layout, registers=REGISTERS), answer), keep_logits=True)
    rows, live = reference(eager(small), PROMPT, answer, tip_rule())
    assert r.token_ids == answer and float((seen(r) - rows).abs().max()) < TOLERANCE
    assert r.counts['usage'].live == live and r.counts['peak'] == max(live) and max(live) < 100
    assert replay_deviation(small[0], r) < TOLERANCE
    empty(engine)


@pytest.mark.parametrize('page, options', [(1, dict(window=40)), (16, dict(window=40)), (16, dict(window=48, sinks=17)), (5, dict(window=5, sinks=0)),
                                           (16, dict(window=33, keep_prompt=True)), (64, dict(window=64)), (8, dict(window=16, sinks=60))])
def test_streaming_llm_is_its_rule(small, page, options):
    answer = trace(2, 130)
    r, = engine_of(small, page_size=page).run(says(streaming_llm(PROMPT, **options), answer), keep_logits=True)
    rows, live = reference(eager(small), PROMPT, answer, window_rule(page, **options))
    assert float((seen(r) - rows).abs().max()) < TOLERANCE and r.counts['usage'].live == live
    assert replay_deviation(small[0], r) < TOLERANCE


@pytest.mark.parametrize('page, options', [(1, dict(budget=40)), (16, dict(budget=64)), (16, dict(budget=100, score='mean')), (4, dict(budget=8)),
                                           (16, dict(budget=48, keep_prompt=True)), (5, dict(budget=37, score='mean', keep_prompt=True))])
def test_h2o_chooses_as_hf_attentions_say(small, page, options):
    answer = trace(3, 120)
    r, = engine_of(small, page_size=page, chunk=10).run(says(paged_h2o(PROMPT, **options), answer), keep_logits=True)
    rows, live = reference(eager(small), PROMPT, answer, h2o_rule(page, **options))
    assert r.error is None and r.counts['usage'].live == live and float((seen(r) - rows).abs().max()) < TOLERANCE
    assert replay_deviation(small[0], r) < TOLERANCE
    if not options.get('keep_prompt'): assert max(live) <= options['budget']


@pytest.mark.parametrize('page', [1, 16, 64])
def test_nothing_forgotten_is_plain_decoding(small, page):
    "Dense, TIP without a register said twice, a window and a budget that are never full: the tokens of `ar`."
    engine = engine_of(small, page_size=page)
    bound = dict(max_new_tokens=40, temperature=1., seed=4)
    asks = [ar, dense, lambda *a, **k: tip(*a, registers={}, **k), lambda *a, **k: streaming_llm(*a, window=200, **k),
            lambda *a, **k: paged_h2o(*a, budget=256, **k), lambda *a, **k: evicting(*a, policy=PagePolicy(), **k)]
    results = [engine.run(ask(PROMPT, **bound))[0] for ask in asks]
    assert len({tuple(r.token_ids) for r in results}) == 1 and len(results[0].token_ids) > 20
    for r in results[1:]:
        assert r.counts['ratio'] == 1 and r.counts['evictions'] == 0 and r.counts['live'] == r.counts['dense']
    empty(engine)


def test_tip_without_reuse_is_dense(small):
    "Sixteen registers, each said once."
    answer = [w for n in range(16) for w in (200 + n, *trace(n, 7, preamble=7))]
    engine = engine_of(small)
    requests = [says(ask(PROMPT, **o), answer, temperature=.5) for ask, o in ((ar, {}), (dense, {}), (tip, dict(registers=REGISTERS)))]
    plain, all_, steps = engine.run(requests, keep_logits=True)
    for r in (all_, steps): assert float((seen(r) - seen(plain)).abs().max()) < TOLERANCE
    assert steps.counts['evictions'] == 0 and len(steps.record.table) == 17 and len(all_.record.table) == 1


# ---- one rule for mask, runtime and log-probs

@pytest.mark.parametrize('page', [1, 16, 64])
@pytest.mark.parametrize('layout', ['packed', 'aligned'])
def test_replay_after_thousands_of_reuses(small, page, layout):
    "Eight requests together in a pool whose pages pass from one to the other."
    answers = [trace(n, 130, registers=2 + n % 15, longest=4, preamble=n % 4) for n in range(8)]
    prompts = [PROMPT[:1 + 3 * n] for n in range(8)]
    engine = engine_of(small, page_size=page, slots=16384)
    results = engine.run([says(tip(p, layout=layout, registers=REGISTERS), a) for p, a in zip(prompts, answers)], keep_logits=True)
    assert sum(r.counts['evictions'] for r in results) > 250
    for p, a, r in zip(prompts, answers, results):
        row, (mine, _) = tip_layout(p, a, REGISTERS), replay(r.record)
        assert r.record.segment == row.segment.tolist()
        assert torch.equal(dense_mask(mine), dense_mask(row)[:-1, :-1])
    assert max(replay_deviation(small[0], r) for r in results[::4]) < TOLERANCE
    empty(engine)


@pytest.mark.smollm2
def test_smollm2(smollm2):
    "A short answer in steps, forced; then the rule read off HF's cache."
    model, tok = smollm2
    ids = tok.encode('Two and three is five. Take the five. Add nine, that makes fourteen. Halve it.')
    registers = {tok.convert_tokens_to_ids('.'): 0, ids[9]: 1}
    answer, engine = (ids + ids)[:20], Engine(model, tok, slots=512, page_size=8)
    requests = [tip('How much?', registers=registers), tip('How much?', layout='aligned', registers=registers), paged_h2o('How much?', budget=32)]
    results = engine.run([says(request, answer) for request in requests], keep_logits=True)
    for r in results: assert r.counts['evictions'] > 1
    assert replay_deviation(model, results[2]) < TOLERANCE          # the others: below
    model.set_attn_implementation('eager')
    try: rows, live = reference(model, results[0].record.token[:results[0].prompt_tokens], answer, tip_rule(registers))
    finally: model.set_attn_implementation('sdpa')
    for r in results[:2]: assert r.counts['usage'].live == live and float((seen(r) - rows).abs().max()) < TOLERANCE
    empty(engine)


# ---- company

def mixed(n, **options):
    "A request of any policy with its answer."
    prompt = PROMPT[:5 + 3 * n] if n % 3 else PROMPT[:29]
    ask = [lambda: tip(prompt, registers=REGISTERS, **options), lambda: tip(prompt, layout='aligned', registers=REGISTERS, **options),
           lambda: streaming_llm(prompt, window=24, **options), lambda: paged_h2o(prompt, budget=32, **options), lambda: dense(prompt, **options)][n % 5]
    return says(ask(), trace(n, 40 + 9 * n, registers=4))


def test_company_changes_nothing(small):
    "Ragged requests of all policies in a crowded pool, with admission: the logits of single runs."
    engine = engine_of(small, page_size=8, slots=900)
    crowd = [mixed(n) for n in range(7)]
    together = engine.run(crowd, keep_logits=True)
    for request, r in zip(crowd, together):
        alone, = engine_of(small, page_size=8).run(replace(request), keep_logits=True)
        assert r.error is None and r.finish_reason == 'length' and r.token_ids == alone.token_ids
        assert float((seen(r) - seen(alone)).abs().max()) < TOLERANCE
        ours, theirs = r.counts['usage'], alone.counts['usage']
        assert (ours.live, ours.dense, ours.pages, ours.evictions) == (theirs.live, theirs.dense, theirs.pages, theirs.evictions)
    empty(engine)


def test_samples_have_a_policy_each(small):
    "One request many times: what one has forgotten is not forgotten by the others. Their prompt is shared where it may be."
    engine = engine_of(small, page_size=8)
    for request in (tip(PROMPT, registers={n: n % 4 for n in range(190)}), streaming_llm(PROMPT, window=16), paged_h2o(PROMPT, budget=24)):
        request = replace(request, sampling=Sampling(max_new_tokens=30, temperature=1., ignore_eos=True))
        several = engine.run(samples(request, 3))
        assert tokens(several) == [tokens(engine_of(small, page_size=8).run(r.request))[0] for r in several] and len({*map(tuple, tokens(several))}) == 3
    empty(engine)


def test_erased_pages_hold_nothing_of_their_former_owner(small):
    "Pages pass from a long request to the next ones, poisoned in between: whoever looked at a slot it has not written would say so."
    engine = engine_of(small, page_size=8, slots=400)
    alone = [seen(engine_of(small, page_size=8).run(mixed(n), keep_logits=True)[0]) for n in range(4)]
    for round_ in range(2):
        for n in range(4):
            r, = engine.run(mixed(n), keep_logits=True)
            assert float((seen(r) - alone[n]).abs().max()) < TOLERANCE
        for store in (*engine.pool.keys, *engine.pool.values): store.fill_(1e4 * (-1) ** round_)
    empty(engine)


def test_freed_pages_let_others_in(small):
    "A pool with room for one request as it begins: the second starts once the first has freed pages, long before it ends."
    answer = trace(5, 240, registers=3, longest=8)
    order = []
    engine = engine_of(small, page_size=8, slots=400)
    both = [says(tip(PROMPT, registers=REGISTERS, reserve=240), answer) for _ in range(2)]
    results = engine.run(both, listen=lambda chunk: order.append(both.index(chunk.request)))
    first_of_second, last_of_first = order.index(1), len(order) - 1 - order[::-1].index(0)
    assert tokens(results) == [answer, answer] and 40 < first_of_second < last_of_first - 40
    plain = [says(dense(PROMPT, reserve=240), answer) for _ in range(2)]
    order.clear()
    engine.run(plain, listen=lambda chunk: order.append(plain.index(chunk.request)))
    assert order == sorted(order)
    empty(engine)


def test_a_small_reserve_lets_more_in_at_once(small):
    answer = trace(6, 100, registers=2, longest=6)
    def most_at_once(**options):
        engine, running = engine_of(small, page_size=8, slots=800), []
        requests = [says(tip(PROMPT[n:], registers=REGISTERS, **options), answer) for n in range(8)]
        for r in engine.run(requests, listen=lambda chunk: running.append(len(engine.pool.tables))): assert r.finish_reason == 'length'
        return max(running)
    assert most_at_once(reserve=60) == 8 > most_at_once() > 2


def test_a_full_pool_harms_nobody_else(small):
    engine = engine_of(small, page_size=8, slots=120)
    answer = trace(7, 120, registers=2)
    greedy = [says(dense(PROMPT[:9], reserve=20), answer), says(tip(PROMPT[:10], registers={**REGISTERS}, reserve=60), answer)]
    cut, whole = engine.run(greedy, keep_logits=True)
    alone, = engine_of(small, page_size=8).run(replace(greedy[1]), keep_logits=True)
    assert cut.finish_reason == 'pool_full' and whole.finish_reason == 'length' and whole.token_ids == alone.token_ids
    assert float((seen(whole) - seen(alone)).abs().max()) < TOLERANCE
    assert '5 of 15 free, 5 of them promised to others' in str(cut.error) and cut.token_ids == answer[:len(cut.token_ids)] and cut.generated_tokens > 40
    assert cut.counts['live'] > 0                       # what it had counted is told
    empty(engine)


def test_aligned_steps_starve_nobody(small):
    "Short steps on pages of their own, beside a neighbour that was promised its pages."
    steps = [t for n in range(20) for t in (200 + n % 6, 65, 66)]
    for reserve in (None, 60):
        engine = engine_of(small, slots=128)
        plain, aligned = engine.run([dense([66], script={'main': [67] * 50}, max_new_tokens=50, ignore_eos=True),
                                     tip([66], layout='aligned', registers={200 + n: n for n in range(6)}, reserve=reserve,
                                         script={'main': steps}, max_new_tokens=60, ignore_eos=True)])
        assert plain.token_ids == [67] * 50 and plain.finish_reason == 'length'
        assert aligned.finish_reason == ('length' if reserve is None else 'pool_full')
        empty(engine)


def any_request(rng):
    "A request of any strategy, with its answer; `honest`: it keeps to the reserve that it has by default."
    prompt, new = PROMPT[:rng.randint(1, 37)] * rng.choice((1, 1, 2)), rng.randint(1, 70)
    answer, honest = trace(rng.random(), new, registers=rng.choice((1, 4, 16)), longest=rng.choice((1, 3, 12))), rng.random() < .7
    kind = rng.choice(('ar', 'dense', 'packed', 'aligned', 'aligned', 'window', 'moved', 'h2o', 'mine'))
    o = dict(max_new_tokens=new) | ({} if honest else dict(reserve=rng.randint(0, new)))
    request = dict(ar=ar, dense=dense, packed=tip, aligned=tip, window=streaming_llm, moved=streaming_llm, h2o=paged_h2o, mine=evicting)[kind](
        prompt, **o, **dict(packed=dict(registers=REGISTERS), aligned=dict(registers=REGISTERS, layout='aligned'),
                            window=dict(window=rng.randint(8, 40), keep_prompt=rng.random() < .3), moved=dict(window=rng.randint(8, 40), reindex=True),
                            h2o=dict(budget=rng.randint(16, 48)), mine=dict(policy=rng.choice((Recent, Dice)))).get(kind, {}))
    return says(request, answer), honest


@pytest.mark.parametrize('seed', range(8))
def test_who_keeps_to_its_reserve_never_runs_out(seed):
    "Whatever the others do; and the books balance at every turn: no more is promised than is free."
    rng, model = random.Random(seed), tiny_model(seed=3, layers=1, hidden=8)
    engine = Engine(*model, slots=rng.choice((160, 240, 400)), page_size=rng.choice((4, 8)), chunk=16)
    asked = [any_request(rng) for _ in range(9)]
    driver, results = Driver(engine, [request for request, _ in asked]), []
    while driver.waiting or driver.running:
        driver.turn()
        check_pool(engine.pool)
        results += driver.finished()
    assert len(results) == 9
    for r in results:
        fits = room_of(r.request, r.prompt_tokens, engine.pool.page_size) <= len(engine.pool.pages)
        assert r.finish_reason == 'length' or r.finish_reason == 'pool_full' and not (asked[r.number][1] and fits), (r.request.name, r.error)
    empty(engine)


def test_a_forgotten_page_that_others_read_is_no_new_page(small):
    "Whoever drops a shared prompt gets no page for it, and is promised none."
    engine = engine_of(small, page_size=4)
    dropping, keeping = engine.run([says(evicting(PROMPT, policy=Answering([0])), trace(1, 30)), says(dense(PROMPT), trace(1, 30))])
    assert {dropping.finish_reason, keeping.finish_reason} == {'length'}
    a, b = (engine.pool.table(room=4) for _ in range(2))
    a.take(8)
    b.adopt(a.pages, 0)
    b.most = 6
    assert b.promised == 2
    b.drop(np.arange(8))
    check_pool(engine.pool)
    assert b.promised == 2 and b.room == 2
    a.release(), b.release()
    empty(engine)


def test_compiled_steps_see_the_same(small):
    "Padded shapes, spans and gathered pages, without the compiler itself."
    requests = [mixed(n) for n in range(5)]
    engine, plain = engine_of(small, page_size=8), engine_of(small, page_size=8)
    engine.compiled = CompiledStep(engine)
    engine.compiled.graph = torch.no_grad()(engine.compiled._forward)
    calls = []
    forward = engine.compiled.graph
    engine.compiled.graph = lambda *a: (calls.append(a[4] is None), forward(*a))[1]
    for batch in ([requests[0]], [requests[1]], requests[1:3], [requests[3]]):
        for r, e in zip(engine.run(batch, keep_logits=True), plain.run([replace(b) for b in batch], keep_logits=True)):
            assert float((seen(r) - seen(e)).abs().max()) < TOLERANCE
    kinds = Counter(calls)
    assert kinds[True] > 60 and kinds[False] > 30      # as a view, and gathered
    before = len(calls)
    engine.run(requests[3])
    assert len(calls) == before                         # observed steps are not compiled


# ---- what attention reads

def test_a_request_reuses_its_own_holes(small):
    "However long it goes on, its pages stay within a stretch of the pool about as long as the most it held at once."
    engine, answer = engine_of(small, page_size=4, slots=4096), trace(8, 400, registers=3, longest=9)
    r, = engine.run(says(tip(PROMPT, registers=REGISTERS), answer))
    homes = r.counts['usage'].homes
    assert max(home[0] for home in homes) - min(home[0] for home in homes) < 1.3 * max(r.counts['usage'].pages) and len(homes) > 100


def reads_of(engine, request):
    "What each decode step read, as (slots read, is it a view)."
    found, answer = [], engine.answer
    def watch(placed, wanted):
        found.extend((p.span[1] if p.span else len(p.index), p.span is not None) for p in placed if len(p.tokens) == 1)
        return answer(placed, wanted)
    engine.answer = watch
    r, = engine.run(request)
    return found, r


@pytest.mark.parametrize('page', [1, 16])
def test_attention_reads_little_more_than_what_lives(small, page):
    answer = trace(9, 200, registers=4, longest=10)
    found, r = reads_of(engine_of(small, page_size=page), says(tip(PROMPT, registers=REGISTERS), answer))
    live = r.counts['usage'].live
    assert all(n <= 2 * l for (n, _), l in zip(found, live)) and sum(view for _, view in found) > .3 * len(found)


# ---- observed attention

KINDS = dict(llama={}, gemma3_text=dict(sliding_window=8, layer_types=['sliding_attention', 'full_attention']),
             gemma2=dict(sliding_window=8, layer_types=['sliding_attention', 'full_attention'], attn_logit_softcapping=5.0))


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('chunk', [512, 7])
def test_observed_attention_is_hf_attention(kind, chunk):
    config = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                  vocab_size=220, initializer_range=.2, pad_token_id=0, bos_token_id=None, eos_token_id=None)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config, **KINDS[kind]), attn_implementation='eager').eval()
    engine, masses = Engine(model, slots=256, page_size=8, chunk=chunk), []
    @strategy
    def watched(h):
        line = h.line('main')
        logits = yield h.prompt(line, share=False, observe=True)
        while True:
            push(line, pick(h, [line], logits)[0], 'sampled')
            masses.append(h.mass[:h.pages.used].copy())
            if line.done: return
            queries = feed([line])
            queries.observe = True
            logits = yield queries
    r, = engine.run(watched(PROMPT, max_new_tokens=20))
    with torch.no_grad(): out = model(torch.tensor([PROMPT + r.token_ids[:-1]]), output_attentions=True)
    wseverals = torch.stack(out.attentions)[:, 0].sum(1).mean(0).double()          # queries, keys: over heads, mean over layers
    for n, mass in enumerate(masses):
        assert np.abs(mass - wseverals[:len(mass), :len(mass)].sum(0).numpy()).max() < 1e-5
        assert len(mass) == len(PROMPT) + n


def test_only_who_asks_pays(small, monkeypatch):
    from pasta_lib import engine as module
    calls, true = [], module.attention_mass
    monkeypatch.setattr(module, 'attention_mass', lambda *a: (calls.append(1), true(*a))[1])
    engine = engine_of(small)
    engine.run([says(tip(PROMPT, registers=REGISTERS), trace(1, 20)), says(streaming_llm(PROMPT, window=16), trace(1, 20))])
    assert not calls
    engine.run(says(paged_h2o(PROMPT, budget=32), trace(1, 20)))
    assert len(calls) == 20 * 2                         # a prompt and 19 steps, two layers


def test_scratch_can_not_be_observed(small):
    h = engine_of(small).handle()
    with pytest.raises(QueryError, match='scratch can not be observed'):
        engine_of(small).step([(h, Queries([1], [0], h.open(), keep=False, observe=True))])


def test_rewinding_forgets_what_was_observed(small):
    engine = engine_of(small, page_size=4)
    h = engine.handle()
    s = h.open()
    engine.step([(h, Queries([1, 2, 3], [0, 1, 2], s, observe=True))])
    mark, before = h.mark(), h.mass.copy()
    engine.step([(h, Queries([4, 5], [3, 4], s, observe=True))])
    assert (h.mass[:3] > before[:3]).all() and h.mass[4] > 0
    h.rewind(mark)
    assert (h.mass == before).all()


# ---- re-indexing

def one_layer(**more):
    config = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                  vocab_size=220, initializer_range=.2, pad_token_id=0, bos_token_id=None, eos_token_id=None)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model('llama', **{**config, **more})).eval()


@pytest.mark.parametrize('page, window, sinks', [(1, 30, 4), (8, 30, 4), (8, 16, 20), (16, 40, 4), (4, 8, 0)])
def test_reindexed_positions_are_places_in_the_cache(page, window, sinks):
    "In a model of one layer a key depends on its token and position only: the kept tokens, counted from 0, give the same logits."
    model, answer = one_layer(), trace(4, 120)
    r, = Engine(model, slots=512, page_size=page).run(says(streaming_llm(PROMPT, window=window, sinks=sinks, reindex=True), answer), keep_logits=True)
    assert r.error is None
    rule, kept, text = window_rule(page, window, sinks), list(range(len(PROMPT))), PROMPT + answer
    for n, row in enumerate(seen(r)[1:]):
        at = len(PROMPT) + n
        book = type('Book', (), dict(kept=kept))
        kept = [p for p in kept if p not in set(rule(book, len(PROMPT), text[at], at))] + [at]
        with torch.no_grad(): expected = model(torch.tensor([[text[p] for p in kept]])).logits[0, -1]
        assert float((row - expected).abs().max()) < TOLERANCE


def test_reindexing_touches_no_page_of_others(small):
    engine = engine_of(small, page_size=8)
    first, _, again = [engine.run([says(ask(PROMPT, **o), trace(1, 60)) for ask, o in pair], keep_logits=True)[0] for pair in
                       ([(dense, {})], [(dense, {}), (streaming_llm, dict(window=16, reindex=True))], [(dense, {})])]
    together = engine.run([says(ask(PROMPT, **o), trace(1, 60)) for ask, o in
                           [(streaming_llm, dict(window=16, reindex=True)), (dense, {}), (streaming_llm, dict(window=16, reindex=True))]], keep_logits=True)
    assert float((seen(together[1]) - seen(first)).abs().max()) < TOLERANCE and float((seen(again) - seen(first)).abs().max()) < TOLERANCE
    assert float((seen(together[0]) - seen(together[2])).abs().max()) < TOLERANCE
    empty(engine)


def test_turns_of_partly_rotary_and_positionless_layers():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model('smollm3', hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=220, no_rope_layers=[1, 0], pad_token_id=0, bos_token_id=None, eos_token_id=None)).eval()
    assert [len(angles) for angles in key_turns(Engine(model, slots=32))] == [4, 0]


def test_reindexing_needs_rotary_positions():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model('gpt2', n_embd=32, n_layer=2, n_head=4, vocab_size=220, n_positions=256,
                                                                  bos_token_id=None, eos_token_id=None)).eval()
    r, = Engine(model, slots=128).run(streaming_llm(PROMPT, window=64, reindex=True))
    assert isinstance(r.error, OptionError) and 'no rotary positions' in str(r.error)


# ---- edges

def test_a_register_in_the_prompt_evicts_nothing(small):
    prompt = [200, 5, 6, 200, 7, 201, 8]
    r, = engine_of(small).run(says(tip(prompt, registers=REGISTERS), [1, 200, 2, 201, 3]), keep_logits=True)
    assert r.counts['evictions'] == 0 and r.record.segment == [0] * 8 + [1, 1, 2, 2] and replay_deviation(small[0], r) < TOLERANCE
    r, = engine_of(small).run(says(tip(prompt, registers=REGISTERS), [200, 2, 200, 3]))
    assert r.counts['evictions'] == 1 and r.counts['usage'].live == [8, 9, 8]


@pytest.mark.parametrize('page', [1, 2, 64])
@pytest.mark.parametrize('layout', ['packed', 'aligned'])
@pytest.mark.parametrize('answer, live', [([200, 200, 200, 200], [38, 38, 38]),          # the register just opened, again and again
                                          ([200, 1, 2, 200, 201], [38, 39, 40, 38]),     # a register as first and as last token
                                          ([1, 2, 3], [38, 39]), ([200], []), ([200, 200], [38])])
def test_edges_of_registers(small, page, layout, answer, live):
    engine = engine_of(small, page_size=page)
    r, = engine.run(says(tip(PROMPT, layout=layout, registers=REGISTERS), answer), keep_logits=True)
    assert r.token_ids == answer and r.counts['usage'].live == live and replay_deviation(small[0], r) < TOLERANCE
    assert r.record.segment == tip_layout(PROMPT, answer, REGISTERS).segment.tolist()
    empty(engine)


def test_eos_inside_a_step(small):
    model, tokenizer = small
    eos = min(eos_ids(model, tokenizer))
    request = replace(tip(PROMPT, registers=REGISTERS), sampling=Sampling(script={'main': [200, 4, 5, eos, 6, 7]}, max_new_tokens=9))
    r, = engine_of(small).run(request)
    assert r.finish_reason == 'eos' and r.token_ids == [200, 4, 5, eos] and r.forwards == 3


def test_a_page_larger_than_everything(small):
    engine = engine_of(small, page_size=10_000, slots=64)
    for request in (tip(PROMPT, registers=REGISTERS), tip(PROMPT, layout='packed', registers=REGISTERS)):
        r, = engine.run(says(request, trace(1, 100, registers=3)), keep_logits=True)
        assert r.counts['pages'] == 1 and r.counts['evicted_pages'] == 0 < r.counts['evictions'] and replay_deviation(small[0], r) < TOLERANCE
    empty(engine)


BAD = [(streaming_llm, dict(window=15), 'a window of 15 tokens'), (streaming_llm, dict(window=0), 'window=0'), (streaming_llm, dict(window=1.5), 'window=1.5'),
       (streaming_llm, dict(window=64, sinks=-1), 'sinks=-1'), (paged_h2o, dict(budget=0), 'budget=0'), (paged_h2o, dict(budget=31), 'a budget of 31 tokens'),
       (paged_h2o, dict(budget=64, score='max'), "score='max'"), (tip, dict(layout='loose', registers={}), "layout='loose'"), (tip, {}, 'no registers'),
       (evicting, dict(policy=3), 'policy=3'), (evicting, dict(policy=int), "policy=<class 'int'>"),
       (evicting, dict(policy=StreamingLLM), 'StreamingLLM needs a window: window=N'), (evicting, dict(policy=PagedH2O), 'PagedH2O needs a budget'),
       *((tip, dict(registers=bad), 'registers=') for bad in ([1, 2], {'<reg_0>': 0}, {5: 'a'}, {5: -1}, {-1: 0}, {5: True}, {5: 1.}))]


@pytest.mark.parametrize('ask, options, words', BAD)
def test_bad_options(small, ask, options, words):
    engine = engine_of(small)
    bad, good = engine.run([ask(PROMPT, max_new_tokens=4, **options), dense(PROMPT, max_new_tokens=4, ignore_eos=True)])
    assert isinstance(bad.error, PastaError) and words in str(bad.error) and '\n' not in str(bad.error) and bad.finish_reason == 'error'
    assert good.finish_reason == 'length'
    empty(engine)


@pytest.mark.parametrize('ask, words', [(streaming_llm, 'streaming_llm needs a window: window=N'), (paged_h2o, 'paged_h2o needs a budget: budget=N')])
def test_what_is_missing_is_said_at_once(ask, words):
    with pytest.raises(OptionError, match=words): ask(PROMPT)


def test_no_policy_keeps_all(small):
    a, b = engine_of(small).run([evicting(PROMPT, max_new_tokens=9), dense(PROMPT, max_new_tokens=9)])
    assert a.error is None and a.token_ids == b.token_ids and a.counts['ratio'] == 1


class Answering(Policy):
    "Names the same segments again and again."
    def __init__(self, dead): self.dead = dead
    def evict(self, h, line, token): return self.dead


@pytest.mark.parametrize('dead', [[99], [-1], ['a'], [1.5], [True], 3.0, 'main', [0, 99], [None], [[0]]])
def test_segments_that_are_none(small, dead):
    engine = engine_of(small)
    r, = engine.run(says(evicting(PROMPT, policy=Answering(dead)), [1, 2, 3]))
    assert isinstance(r.error, OptionError) and 'evict named segment' in str(r.error) and r.counts['evictions'] == 0
    empty(engine)


def test_only_the_living_die(small):
    "Named five times, dead once."
    r, = engine_of(small).run(says(evicting(PROMPT, policy=Answering(np.array([0, 0]))), [1, 2, 3, 4, 5]), keep_logits=True)
    assert r.counts['evictions'] == 1 and r.counts['usage'].live == [1, 2, 3, 4] and replay_deviation(small[0], r) < TOLERANCE


class Saying(PagePolicy):
    "Keeps what a function of the number of pages says."
    def __init__(self, say): self.say = say
    def keep(self, h, line, pages, new): return self.say(len(pages))


@pytest.mark.parametrize('kind', [lambda f: f, lambda f: f.astype(int), lambda f: f.tolist(), lambda f: f.astype(np.int8).tolist(), torch.tensor])
def test_keep_says_true_or_one(small, kind):
    flags = lambda n: np.arange(n) % 3 > 0
    plain, r = [engine_of(small, page_size=4).run(says(evicting(PROMPT, policy=Saying(say)), trace(1, 40)))[0] for say in (flags, lambda n: kind(flags(n)))]
    assert r.error is None and r.counts['usage'].live == plain.counts['usage'].live and r.counts['evicted_pages'] > 3


@pytest.mark.parametrize('say', [lambda n: None, lambda n: [1.] * n, lambda n: np.ones(n), lambda n: np.ones(n + 1, bool), lambda n: [True],
                                 lambda n: [2] * n, lambda n: [-1] * n, lambda n: True, lambda n: 'x' * n, lambda n: [[1]] * n, lambda n: [[1], [1, 2]]])
def test_keep_says_nonsense(small, say):
    engine = engine_of(small, page_size=4)
    r, = engine.run(says(evicting(PROMPT, policy=Saying(say)), trace(1, 40)))
    assert isinstance(r.error, OptionError) and 'keep gave' in str(r.error) and '\n' not in str(r.error)
    empty(engine)


def test_registers_of_no_tokenizer(small):
    r, = Engine(small[0], slots=64).run(tip(PROMPT))
    assert isinstance(r.error, OptionError) and 'no tokenizer' in str(r.error)


def test_registers_of_a_tokenizer():
    "Registers are found by name, unseen by readers of the text, and in the tagged text."
    model, tokenizer = tiny_model(seed=3, layers=2, hidden=32)
    first, second = add_tokens(model, tokenizer, register_tokens(2))
    answer = [first, *b'a', second, *b'b', first, *b'c.']
    r, = Engine(model, tokenizer, slots=64, page_size=4).run(says(tip('Go', raw=True), answer), keep_logits=True)
    assert r.text == 'abc.' and r.tagged_text == '<reg_0>a<reg_1>b<reg_0>c.' and r.counts['evictions'] == 1
    assert [life.name for life in lifetimes(r.record)] == ['main', 'step 1: reg_0', 'step 2: reg_1', 'step 3: reg_0']


def test_tagged_text_is_read_back():
    "What only looks like a register is text again; a stop text is cut; eos is no text."
    model, tokenizer = tiny_model(seed=3, layers=2, hidden=32)
    first, second = add_tokens(model, tokenizer, register_tokens(2))
    engine = Engine(model, tokenizer, slots=256, page_size=16)
    for answer in ([*b'a<reg_0>b'], [first, *b'a<reg_0>b&lt;', second, *b'</x> & <reg_1>', first], [first], [*b'caf\xc3\xa9 <'], [first, first, *b'x']):
        r, = engine.run(says(tip('Go'), answer))
        assert encode_steps(r.tagged_text, tokenizer) == r.token_ids == answer and r.tagged_text == register_text(answer, tokenizer)
    eos = min(eos_ids(model, tokenizer))
    r, = engine.run(tip('Go', script=dict(main=[first, *b'a<b', eos])))
    assert r.finish_reason == 'eos' and encode_steps(r.tagged_text, tokenizer) == r.token_ids[:-1]
    r, = engine.run(says(tip('Go'), [first, *b'1 < 2 STOP'], stop=('STOP',)))
    assert r.finish_reason == 'stop' and encode_steps(r.tagged_text, tokenizer) == [first, *b'1 < 2 '] and r.text == '1 < 2 '


def test_cancelled_and_interrupted_tell_what_they_counted(small):
    request = says(tip(PROMPT, registers=REGISTERS), trace(1, 100))
    r, = engine_of(small).run(request, listen=lambda chunk: request.cancel() if chunk.step == 30 else None)
    assert r.finish_reason == 'cancelled' and 0 < r.counts['live'] and len(r.counts['usage'].live) == 29


# ---- counters, pictures, one's own

def test_counters(small):
    answer = trace(2, 90, registers=3)
    r, = engine_of(small, page_size=8).run(says(tip(PROMPT, registers=REGISTERS), answer))
    usage, said = r.counts['usage'], r.json()
    assert len(usage.live) == r.forwards == 89 and usage.dense == list(range(len(PROMPT) + 1, len(PROMPT) + 90))
    assert said['live'] == np.mean(usage.live) and said['dense'] == np.mean(usage.dense) and said['ratio'] == sum(usage.live) / sum(usage.dense)
    assert said['peak'] == max(usage.live) and said['pages'] == np.mean(usage.pages) and 'usage' not in said
    assert said['fragmentation'] == pytest.approx(8 * np.mean(usage.pages) / np.mean(usage.live)) and said['fragmentation'] > 1
    gone = [home for home in usage.homes if home[2] is not None]
    assert said['evicted_pages'] == len(gone) > 0 and all(0 <= since < until <= 89 for _, since, until in gone)
    held = [sum(since <= n and (until is None or n < until) for _, since, until in usage.homes) for n in range(89)]
    assert held == usage.pages


def test_a_single_token(small):
    r, = engine_of(small).run(says(tip(PROMPT, registers=REGISTERS), [3]))
    assert r.counts['live'] == r.counts['peak'] == r.counts['dense'] == 37 and r.counts['pages'] == 3
    assert r.counts['ratio'] == 1 and r.counts['fragmentation'] == pytest.approx(48 / 37) and r.counts['usage'].live == []


def test_cancelled_before_the_first_step(small):
    "The prompt is counted, or what was read of it."
    request = says(tip(PROMPT, registers=REGISTERS), trace(1, 100))
    r, = engine_of(small).run(request, listen=lambda chunk: request.cancel())
    assert r.finish_reason == 'cancelled' and r.counts['live'] == r.counts['peak'] == 37 and r.counts['usage'].live == []
    engine, request = engine_of(small, chunk=10), dense(PROMPT)
    driver = Driver(engine, [request])
    driver.turn()
    driver.turn()
    request.cancel()
    r, = driver.results()
    assert r.finish_reason == 'cancelled' and r.counts['live'] == 20
    empty(engine)


def test_the_last_token_may_forget_too(small):
    r, = engine_of(small, page_size=4).run(says(tip([1, 2, 3, 4], registers=REGISTERS), [200, 1, 2, 3, 200]))
    assert r.counts['evictions'] == 1 == r.counts['evicted_pages'] and r.counts['usage'].homes[1][2] == 4
    assert [life.died for life in lifetimes(r.record)] == [None, 5, None]


def test_pages_dropped_before_the_first_step_had_a_home(small):
    r, = engine_of(small, page_size=4).run(says(streaming_llm(PROMPT, window=4), trace(2, 20)))
    assert all(home >= 0 for home, _, _ in r.counts['usage'].homes) and r.counts['usage'].homes[2][1:] == [0, 0]


def test_lifetimes(small):
    r, = engine_of(small).run(says(tip(PROMPT, registers=REGISTERS), [9, 200, 1, 201, 2, 200, 3, 3, 201]))
    found = [(life.segment, life.tokens, life.born, life.written, life.died) for life in lifetimes(r.record)]
    assert found == [(0, 38, 0, 1, None), (1, 2, 2, 3, 6), (2, 2, 4, 5, 9), (3, 3, 6, 8, None), (4, 1, 9, 9, None)]


def test_pictures(small):
    import matplotlib.pyplot as plt
    engine = engine_of(small, page_size=8)
    results = engine.run([mixed(n) for n in range(5)])
    for r in results[1:4]:
        ax = show_pages(r)
        held = [home[0] for home in r.counts['usage'].homes]
        assert ax.get_ylim() == (8 * min(held), 8 * max(held) + 8)
        ax = show_lifetimes(r)
        assert ax.get_xlabel() == 'decode step' and len(ax.patches) == 2 * len(lifetimes(r.record))
    ax = show_live({r.request.name: r for r in results[1:]})
    assert len(ax.lines) == 5 and ax.get_legend().get_texts()[0].get_text().startswith('tip: ')
    plt.close('all')


def test_pictures_of_next_to_nothing(small):
    import matplotlib.pyplot as plt
    engine = engine_of(small)
    one, plain, failed = engine.run([says(tip(PROMPT, registers=REGISTERS), [200]), ar(PROMPT, max_new_tokens=3), tip([999999])])
    for draw in (show_pages, show_lifetimes, lambda r: show_live({'one': r})): assert draw(one).get_xlabel() == 'decode step'
    for draw in (show_pages, lambda r: show_live({'ar': r})):
        for r in (plain, failed):
            with pytest.raises(OptionError, match='counts no live tokens'): draw(r)
    with pytest.raises(OptionError, match='no results to draw'): show_live({})
    plt.close('all')


class Recent(Policy):
    "A step ends after each token 7; the last two steps are kept."
    def begin(self, h, line): self.steps = []
    def evict(self, h, line, token):
        if line.ids[-2:-1] != [7]: return None
        self.steps.append(line.segment)
        return self.steps[-3:-2] if self.steps[-3:-2] != [0] else []


class Dice(PagePolicy):
    "Any page may go."
    def keep(self, h, line, pages, new): return np.random.default_rng(new).random(len(pages)) < .7


@pytest.mark.parametrize('policy', [Recent, Dice])
@pytest.mark.parametrize('page', [1, 8])
def test_policies_of_ones_own(small, policy, page):
    answer = [t % 9 for t in trace(3, 150)]
    engine = engine_of(small, page_size=page)
    r, = engine.run(says(evicting(PROMPT, policy=policy()), answer), keep_logits=True)
    assert r.counts['evictions'] > 5 and r.counts['ratio'] < .8 and replay_deviation(small[0], r) < TOLERANCE
    empty(engine)

"""Block decoding against a decoder without engine, pool, segments or cache: lists of tokens, and one full pass per forward under
a block-causal mask written out by hand. And the promises: exact commits, replay, fixed shapes, identities."""
import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from pasta_lib.buffer import *
from pasta_lib.buffer import BlockTrace, _say
from pasta_lib.core import PastaError
from pasta_lib.diffusion import MASK, apart, replay_noisy, together
from pasta_lib.engine import *
from pasta_lib.models import add_tokens, tiny_model
from pasta_lib.orders import Candidates, OrderError, candidates
from pasta_lib.pool import PoolFull, check_pool

TOLERANCE = 1e-4
HIDE = 300                                             # the mask's id where there is no tokenizer
PROMPT = [(7 * i * i + 3) % 250 for i in range(70)]


def sharp(seed=3, vocab=320, **config):
    "A random model that is sure of some tokens."
    model, tok = tiny_model(seed=seed, layers=2, hidden=32, vocab=vocab, **config)
    with torch.no_grad(): model.lm_head.weight *= 4
    return model, tok


@pytest.fixture(scope='module')
def model(): return sharp()[0]


@pytest.fixture(scope='module')
def engine(model): return Engine(model, slots=8192, page_size=16)


def empty(engine):
    check_pool(engine.pool)
    assert engine.pool.pages.free == len(engine.pool.pages) and not engine.pool.tables and (engine.pool.pages.aside == -1).all()


def decode(engine, request, **options):
    result, = engine.run(request, **options)
    if result.error: raise result.error
    return result


def ask(strategy, prompt=PROMPT[:5], **options):
    return strategy(prompt, **dict(block=4, mask=HIDE, max_new_tokens=18, ignore_eos=True) | options)


def with_eos(request, *eos):
    "The same request, where other tokens end an answer."
    def generator(h, **options):
        h.eos = set(eos)
        yield from request.strategy(h, **options)
    return replace(request, strategy=generator)


def watched(request, look):
    "The same request, with a look at its handle after every commit."
    def generator(h, **options):
        steps, logits, seen = request.strategy(h, **options), None, 0
        while True:
            try: asked = steps.send(logits)
            except StopIteration: asked = None
            done = h.counts['trace'].commits if 'trace' in h.counts else ()
            if len(done) > seen: look(h)
            if asked is None: return
            seen, logits = len(done), (yield asked)
    return replace(request, strategy=generator)


# ---- the oracle

class Plain:
    """Block diffusion on a list of tokens. `text` holds the prompt and every block begun so far, masks included; a forward is one
    pass over all of it. Blocks are counted from the start of the text, and a block's state is worked out from scratch."""
    def __init__(self, model, prompt, block, limit, eos=(), tau_m2t=.95, tau_t2t=None, dmax=False, tau_add=.1, tau_stable=.5,
                 tau_semi=.9, eager=False):
        self.__dict__.update(locals())
        self.size, self.first = len(prompt) + limit, len(prompt) // block
        self.text, self.began, self.cached = list(prompt[:self.first * block]), self.first, self.first
        self.waiting, self.forwards, self.revised, self.revealed_at = [], 0, {}, {}

    def begin(self):
        start = len(self.text)
        self.text += (list(self.prompt[start:]) + [HIDE] * self.block)[:self.block]
        self.began += 1

    def places(self, n): return [i for i in range(n * self.block, (n + 1) * self.block) if len(self.prompt) <= i < self.size]

    def end(self):
        "One behind the last wanted place: the first EOS that is there, else the limit."
        return next((i + 1 for i in range(len(self.prompt), min(self.size, len(self.text))) if self.text[i] in self.eos), self.size)

    def wanted(self, n): return [i for i in self.places(n) if i < self.end()]
    def holes(self, n): return [i for i in self.wanted(n) if self.text[i] == HIDE]
    def progress(self, n): return 1 - len(self.holes(n)) / len(self.wanted(n)) if self.wanted(n) else 1.
    def stability(self, n): return 1 - self.revised.get(n, 0) / max(1, sum(self.text[i] != HIDE for i in self.places(n)))

    @torch.no_grad()
    def probabilities(self):
        n = len(self.text)
        of = [i // self.block for i in range(n)]
        mask = torch.tensor([[of[j] <= of[i] for j in range(n)] for i in range(n)])[None, None]
        logits = self.model(input_ids=torch.tensor([self.text]), position_ids=torch.arange(n)[None],
                            attention_mask=torch.zeros(1, 1, n, n).masked_fill(~mask, -1e30), use_cache=False).logits[0]
        logits[:, HIDE] = -math.inf
        self.forwards += 1
        return logits.softmax(-1).max(-1)

    def forward(self, running):
        "One pass, and what it reveals and revises in the blocks that are not clean."
        sure, best = (v.tolist() for v in self.probabilities())
        before, semi = list(self.text), {n: n == self.cached or self.progress(n - 1) >= self.tau_semi for n in running}
        todo = {n: (self.holes(n), self.wanted(n)) for n in running if n not in self.waiting}
        revise = self.tau_t2t if self.tau_t2t is not None else 0. if self.dmax else None
        for n, (holes, wanted) in todo.items():
            if self.dmax:
                now = []
                for i in holes:
                    if sure[i] < self.tau_m2t or i != holes[0] + len(now): break
                    now.append(i)
                fallback = holes[:1]
            else:
                now = [i for i in holes if sure[i] > self.tau_m2t]
                fallback = sorted(holes, key=lambda i: (-sure[i], i))[:1]
            if not now and semi[n]: now = fallback
            old = [] if revise is None else [i for i in wanted if before[i] not in (HIDE, best[i]) and sure[i] > revise]
            self.revised[n] = len(old)
            for i in [*now, *old]:
                self.text[i] = best[i]
                self.revealed_at[i] = self.forwards

    def answer(self, upto): return self.text[len(self.prompt):upto]

    def single(self, commit):
        while True:
            self.begin()
            n = self.began - 1
            while True:
                self.waiting = [w for w in range(self.first, n)]
                self.forward([n])
                if not self.holes(n): break
            if self.end() <= (n + 1) * self.block: return self.answer(self.end())
            if commit == 'separate': self.forwards += 1
            self.cached = n + 1

    def multi(self, buffer):
        self.waiting, far = [], 0
        while True:
            slots = range(self.cached, self.cached + buffer)
            for n in slots:                                                  # begin what may be begun
                if n < far or n * self.block >= self.end(): continue
                ready = n == self.cached or self.progress(n - 1) > self.tau_add and self.stability(n - 1) > self.tau_stable
                if ready or self.eager:
                    if n >= self.began: self.begin()
                    far = n + 1
                if not self.eager: break
            running, clean = list(range(self.cached, far)), list(self.waiting)
            for n in clean: self.revised[n] = 0
            self.forward(running)
            for n in running[len(clean):]:
                if self.holes(n): break
                self.waiting.append(n)
                if self.end() <= (n + 1) * self.block: return self.answer(self.end())
            cut = -(-self.end() // self.block)                                # blocks behind an EOS are forgotten
            if cut < far:
                for n in range(max(cut, self.cached), far):
                    for i in self.places(n): self.text[i] = HIDE
                far = max(cut, self.cached)
            self.waiting = self.waiting[len(clean):]
            self.cached += len(clean)


RULES = [dict(), dict(tau_m2t=.3), dict(tau_m2t=.3, tau_add=.6), dict(tau_m2t=.3, tau_semi=.3), dict(tau_m2t=.4, tau_t2t=.2),
         dict(tau_m2t=.2, tau_t2t=.1, tau_stable=.8), dict(tau_m2t=.3, eager=True), dict(tau_m2t=.3, dmax=True),
         dict(tau_m2t=.2, dmax=True, eager=True), dict(tau_m2t=.3, tau_semi=0., tau_add=0., eager=True)]
SINGLE = ('tau_m2t', 'tau_t2t', 'dmax')


@pytest.mark.parametrize('rules', RULES, ids=str)
def test_multi_block_equals_the_oracle(model, engine, rules):
    for prompt, block, buffer, limit in [(5, 4, 3, 18), (8, 4, 2, 16), (2, 3, 4, 13), (1, 1, 3, 5), (7, 6, 1, 10)]:
        plain = Plain(model, PROMPT[:prompt], block, limit, **rules)
        expected = plain.multi(buffer)
        r = decode(engine, ask(multi_block, PROMPT[:prompt], block=block, buffer=buffer, max_new_tokens=limit, **rules))
        assert (r.token_ids, r.forwards) == (expected, plain.forwards), (prompt, block, buffer)
        at = {place: forward for forward, place, _ in r.counts['trace'].reveals}
        assert at == {i - prompt: f for i, f in plain.revealed_at.items()}
    empty(engine)


@pytest.mark.parametrize('rules', [r for r in RULES if set(r) <= set(SINGLE)], ids=str)
@pytest.mark.parametrize('commit', ['separate', 'fused'])
def test_single_block_equals_the_oracle(model, engine, rules, commit):
    for prompt, block, limit in [(5, 4, 18), (8, 4, 16), (2, 3, 7), (1, 1, 4), (3, 6, 5)]:
        plain = Plain(model, PROMPT[:prompt], block, limit, **rules)
        expected = plain.single(commit)
        r = decode(engine, ask(single_block, PROMPT[:prompt], block=block, max_new_tokens=limit, commit=commit, **rules))
        assert (r.token_ids, r.forwards) == (expected, plain.forwards), (prompt, block)
    empty(engine)


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 4), st.integers(1, 14), st.sampled_from(RULES), st.integers(0, 10 ** 6))
@settings(max_examples=40, deadline=None)
def test_any_answer_with_an_eos_equals_the_oracle(model, engine, prompt, block, buffer, limit, rules, pick):
    "Tokens that the answer holds are declared to end it: the oracle and the buffer agree where, and in how many forwards."
    free = decode(engine, ask(multi_block, PROMPT[:prompt], block=block, buffer=buffer, max_new_tokens=limit, **rules)).token_ids
    eos = {free[pick % len(free)], free[pick // 7 % len(free)]}
    plain = Plain(model, PROMPT[:prompt], block, limit, eos, **rules)
    expected = plain.multi(buffer)
    r = decode(engine, with_eos(ask(multi_block, PROMPT[:prompt], block=block, buffer=buffer, max_new_tokens=limit, **rules), *eos))
    assert (r.token_ids, r.forwards) == (expected, plain.forwards)
    assert r.finish_reason == ('eos' if expected[-1] in eos else 'length') and not set(r.token_ids[:-1]) & eos


# ---- identities

@pytest.mark.parametrize('rules', [r for r in RULES if set(r) <= set(SINGLE)], ids=str)
def test_a_buffer_of_one_is_native_single_block(engine, rules):
    for prompt, block, limit in [(1, 4, 9), (4, 4, 8), (7, 3, 5), (2, 1, 4)]:
        options = dict(block=block, max_new_tokens=limit, **rules)
        one, native = (decode(engine, ask(s, PROMPT[:prompt], **options, **more))
                       for s, more in ((multi_block, dict(buffer=1)), (single_block, {})))
        assert one.token_ids == native.token_ids and one.forwards == native.forwards
        assert one.counts['trace'].blocks == native.counts['trace'].blocks and one.counts['trace'].reveals == native.counts['trace'].reveals


def test_fused_saves_a_forward_per_committed_block(engine):
    native, fused = (decode(engine, ask(single_block, commit=commit, tau_m2t=.3)) for commit in ('separate', 'fused'))
    assert native.token_ids == fused.token_ids and native.forwards == fused.forwards + native.counts['blocks']
    assert native.counts['rows'] == fused.counts['rows'] and fused.counts['tpf'] > native.counts['tpf']


@pytest.mark.parametrize('strategy, options', [(single_block, {}), (multi_block, dict(buffer=3)), (multi_block, dict(buffer=2, tau_m2t=.1))])
def test_blocks_of_one_token_have_an_autoregressive_order(engine, strategy, options):
    r = decode(engine, ask(strategy, block=1, **options))
    assert [place for _, place, _ in r.counts['trace'].reveals] == list(range(18))
    assert all(a < b for a, b in zip(r.record.step[5:], r.record.step[6:]))


@pytest.mark.parametrize('rules', RULES, ids=str)
def test_without_dummies_the_same_with_fewer_rows(engine, rules):
    static, moving = (decode(engine, ask(multi_block, buffer=4, static=static, **rules)) for static in (True, False))
    assert static.token_ids == moving.token_ids and static.forwards == moving.forwards
    assert static.counts['rows'] == static.forwards * 16 and moving.counts['dummy_rows'] == 0
    assert static.counts['rows'] - static.counts['dummy_rows'] == moving.counts['rows'] < static.counts['rows']


def test_every_forward_has_one_shape(engine, monkeypatch):
    shapes, answer = [], engine.answer
    monkeypatch.setattr(engine, 'answer', lambda placed, wanted: shapes.extend(len(p.tokens) for p in placed) or answer(placed, wanted))
    r = decode(engine, ask(multi_block, PROMPT[:3], buffer=3, tau_m2t=.3, max_new_tokens=30))
    assert shapes == [12] * r.forwards and r.prefill_forwards == 0


@pytest.mark.parametrize('strategy, options', [(single_block, {}), (single_block, dict(commit='fused')), (multi_block, dict(buffer=3)),
                                               (multi_block, dict(buffer=4, eager=True, tau_t2t=.2, tau_m2t=.3))])
def test_batched_is_single(model, engine, strategy, options):
    requests = [ask(strategy, PROMPT[n:n + 3 + 5 * n], max_new_tokens=6 + 3 * n, temperature=.7 * (n % 2), **options) for n in range(5)]
    requests.append(ar(PROMPT[:9], max_new_tokens=8, ignore_eos=True))
    for request in requests[:2]: requests.append(replace(request, seed=5))
    together = [(r.token_ids, r.forwards) for r in engine.run(requests)]
    assert together == [(r.token_ids, r.forwards) for request in requests for r in engine.run(request)]
    empty(engine)


def test_temperature_draws_by_seed(engine):
    answers = {seed: decode(engine, ask(multi_block, temperature=1., seed=seed)).token_ids for seed in (0, 1, 0)}
    assert answers[0] != answers[1] and answers[0] == decode(engine, ask(multi_block, temperature=1., seed=0)).token_ids


# ---- the cache, and replay

@pytest.mark.parametrize('rules', RULES, ids=str)
@pytest.mark.parametrize('strategy, options', [(single_block, {}), (single_block, dict(commit='fused')), (multi_block, dict(buffer=2)),
                                               (multi_block, dict(buffer=4, static=False))])
def test_committed_keys_are_those_of_a_clean_pass(model, engine, strategy, options, rules):
    if strategy is single_block: rules = {k: v for k, v in rules.items() if k in SINGLE}
    seen = []
    def look(h):
        record = h.record
        kept = [i for i in range(len(record.token)) if record.slot[i] >= 0]
        assert [record.position[i] for i in kept] == list(range(len(kept)))
        assert len(kept) == 4 * (1 + h.counts['trace'].commits[-1][1] + 1)          # a prompt block, and those committed
        n = len(kept)
        block = torch.arange(n) // 4
        mask = torch.zeros(1, 1, n, n).masked_fill(block[None] > block[:, None], -1e30)
        with torch.no_grad():
            cache = model(input_ids=torch.tensor([[record.token[i] for i in kept]]), position_ids=torch.arange(n)[None],
                          attention_mask=mask, use_cache=True)[1]
        where = torch.from_numpy(h.pages.index[[record.slot[i] for i in kept]])
        for layer, keys, values in zip(cache.layers, h.pages.pool.keys, h.pages.pool.values):
            assert (layer.keys[0] - keys[0][:, where]).abs().max() < TOLERANCE
            assert (layer.values[0] - values[0][:, where]).abs().max() < TOLERANCE
        assert cache_deviation(h) < TOLERANCE
        seen.append(n)
    r = decode(engine, watched(ask(strategy, PROMPT[:6], **options, **rules), look))
    assert len(seen) == len({f for f, _ in r.counts['trace'].commits}) and r.counts['blocks'] >= 3


def test_what_is_not_committed_has_no_slot(engine):
    r = decode(engine, ask(multi_block, buffer=3, tau_m2t=.3))
    blocks = r.counts['blocks']
    assert [slot >= 0 for slot in r.record.slot] == [n < 4 * (1 + blocks) for n in range(len(r.record.slot))]
    h = engine.handle()
    assert cache_deviation(h) == 0.
    h.pages.release()


@pytest.mark.parametrize('rules', RULES, ids=str)
def test_replay_parity(model, engine, rules):
    for prompt, options in [(6, dict(buffer=3)), (2, dict(buffer=4, static=False)), (9, dict(buffer=1, block=3))]:
        r = decode(engine, ask(multi_block, PROMPT[:prompt], **options, **rules), keep_logits=True)
        assert len(r.record.noisy) == r.forwards and replay_noisy(model, r) < TOLERANCE
    if set(rules) <= set(SINGLE):
        for commit in ('separate', 'fused'):
            r = decode(engine, ask(single_block, commit=commit, **rules), keep_logits=True)
            assert replay_noisy(model, r) < TOLERANCE


def test_replay_parity_with_sliding_windows():
    from transformers import MistralConfig, MistralForCausalLM
    torch.manual_seed(0)
    config = MistralConfig(vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                           num_key_value_heads=2, sliding_window=7, initializer_range=.2, bos_token_id=None, eos_token_id=None)
    model = MistralForCausalLM(config).eval()
    r = decode(Engine(model, slots=512), ask(multi_block, PROMPT[:13], tau_m2t=.3, tau_t2t=.3), keep_logits=True)
    assert replay_noisy(model, r) < TOLERANCE


@pytest.mark.smollm2
def test_smollm2_decodes_and_replays(smollm2):
    model, tok = smollm2
    engine = Engine(model, tok, slots=1024)
    prompt = tok.encode('The three largest cities of Italy are')
    seen = []
    request = multi_block(prompt, block=4, buffer=3, mask=17, max_new_tokens=14, tau_m2t=.3, tau_t2t=.6)
    r, single = decode(engine, request, keep_logits=True), decode(engine, single_block(prompt, block=4, mask=17, max_new_tokens=14))
    decode(engine, watched(request, lambda h: seen.append(cache_deviation(h))))
    one = decode(engine, multi_block(prompt, block=4, buffer=1, mask=17, max_new_tokens=14))
    print(f'replay {replay_noisy(model, r):.1e}, cache {max(seen):.1e}')
    largest = max(float(copy.logits.abs().max()) for copy in r.record.noisy if len(copy.logits))      # about 30: float32 is coarser there
    assert replay_noisy(model, r) < 1e-5 * largest and max(seen) < TOLERANCE
    assert one.token_ids == single.token_ids and one.forwards == single.forwards and 17 not in r.token_ids + one.token_ids


@strategy
def side_by_side(h, block: int, buffer: int, rooms: tuple):
    "Runs of text behind one prompt that don't see each other, in common forwards."
    main, at = h.line('main'), len(h.ids)
    parent, runs = (yield from read_prompt(h, main, block)), []
    for n, room in enumerate(rooms):
        runs.append(BlockBuffer(h, h.line(f'run {n}', [parent]), block, Rules(.3), HIDE, parent, at, limit=room, buffer=buffer))
        at += room
    while live := [r for r in runs if not r.line.done]:
        asked = [r.queries() for r in live]
        for r, logits in zip(live, apart(asked, (yield together(asked)))): r.answer(logits)
    main.info.finish_reason = 'end'


def test_buffers_share_a_forward_and_do_not_see_each_other(model, engine):
    both, alone = (decode(engine, side_by_side(PROMPT[:8], block=4, buffer=2, rooms=rooms, ignore_eos=True), keep_logits=True)
                   for rooms in ((10, 7), (10,)))
    said = lambda r, thread: [t for t, n, kind in zip(r.record.token, r.record.thread, r.record.kind) if n == thread and kind == 'sampled']
    assert said(both, 1) == said(alone, 1) and len(said(both, 2)) == 7 and replay_noisy(model, both) < TOLERANCE
    assert both.forwards < alone.forwards + 7 and both.threads['run 1'] == 'length'
    empty(engine)


# ---- prompts

@pytest.mark.parametrize('page, block', [(16, 4), (16, 6), (4, 16), (8, 12)])
def test_a_common_prompt_is_stored_once(model, page, block):
    "Whatever pages and blocks have to do with each other: the same answers, and later requests read less."
    engine, asked = Engine(model, slots=4096, page_size=page), []
    requests = [ask(multi_block, p, block=block, max_new_tokens=9, tau_m2t=.3, reserve=0)
                for p in (PROMPT[:50], PROMPT[:50], PROMPT[:37] + [1, 2, 3], PROMPT[:64], [1] + PROMPT[:20])]
    alone = [decode(Engine(model, slots=4096, page_size=page, share_prefix=False), r).token_ids for r in requests]
    answer = engine.answer
    def spy(placed, wanted):
        asked.append(sum(len(p.tokens) for p, w in zip(placed, wanted) if not w))
        return answer(placed, wanted)
    engine.answer = spy
    holder = ask(multi_block, PROMPT[:50], block=block, max_new_tokens=60)
    results = engine.run([holder, *requests])
    assert [r.token_ids for r in results[1:]] == alone
    assert [r.prefill_forwards for r in results][:2] == [1, int(50 // block * block % page > 0)]
    empty(engine)


def test_an_autoregressive_prompt_is_another_prompt(model):
    engine = Engine(model, slots=4096, page_size=16)
    both = [ar(PROMPT, max_new_tokens=5, ignore_eos=True), ask(multi_block, PROMPT), ask(multi_block, PROMPT, block=8)]
    alone = [decode(Engine(model, slots=4096, page_size=16), r).token_ids for r in both]
    assert [r.token_ids for r in engine.run(both)] == alone and [r.token_ids for r in engine.run(both[::-1])] == alone[::-1]


def test_a_long_prompt_comes_in_chunks_of_whole_blocks(model):
    whole, parts = (Engine(model, slots=512, chunk=chunk) for chunk in (512, 14))
    a, b = (decode(e, ask(multi_block, PROMPT, block=6), keep_logits=True) for e in (whole, parts))
    assert a.token_ids == b.token_ids and (a.prefill_forwards, b.prefill_forwards) == (1, 6)
    assert replay_noisy(model, b) < TOLERANCE
    refused, = Engine(model, slots=512, chunk=4).run(ask(multi_block, PROMPT, block=6))
    assert isinstance(refused.error, OptionError) and 'chunk' in str(refused.error)


def test_the_tail_of_a_prompt_is_never_touched(engine):
    for prompt in range(1, 10):
        r = decode(engine, ask(multi_block, PROMPT[:prompt], tau_m2t=.1, tau_t2t=0.))
        given = [i for i, kind in enumerate(r.record.kind) if kind == 'prompt']
        assert [r.record.token[i] for i in given] == PROMPT[:prompt] and r.prompt_tokens == prompt
        assert [r.record.position[i] for i in given] == list(range(prompt)) and not any(r.record.step[i] for i in given)
        assert HIDE not in r.token_ids and r.generated_tokens == len(r.token_ids) == 18 and r.finish_reason == 'length'


# ---- ends

def test_eos_cuts_and_later_blocks_are_dropped(engine):
    free = decode(engine, ask(multi_block, buffer=4, tau_m2t=.1, eager=True))
    eos = free.token_ids[5]
    r = decode(engine, with_eos(ask(multi_block, buffer=4, tau_m2t=.1, eager=True), eos))
    assert r.token_ids[-1] == eos and r.token_ids.count(eos) == 1 and r.finish_reason == 'eos' and r.forwards <= free.forwards
    assert r.record.control[-1] and r.threads == {'main': 'eos'}


def test_stop_texts_and_listening():
    model, tok = sharp(vocab=None)
    add_tokens(model, tok, [MASK])
    engine, heard = Engine(model, tok, slots=512), []
    free = decode(engine, multi_block('Hi', block=4, raw=True, max_new_tokens=20, ignore_eos=True), listen=heard.append)
    assert [c.token for c in heard] == free.token_ids and ''.join(c.text for c in heard) in free.text + '\ufffd' * 9
    letters = [n for n, i in enumerate(free.token_ids) if 32 < i < 127]
    if letters:
        stop = chr(free.token_ids[letters[0]])
        r = decode(engine, multi_block('Hi', block=4, raw=True, max_new_tokens=20, ignore_eos=True, stop=stop))
        assert r.finish_reason == 'stop' and stop not in r.text and r.generated_tokens == letters[0] + 1


def test_cancelled_and_interrupted_requests_keep_what_is_decided(engine):
    request = ask(multi_block, PROMPT[:6], buffer=3, tau_m2t=.3, max_new_tokens=40)
    whole = decode(engine, request).token_ids
    for after in range(0, 12):
        again, steps = ask(multi_block, PROMPT[:6], buffer=3, tau_m2t=.3, max_new_tokens=40), []
        def generator(h, **options):
            inner, logits = again_strategy(h, **options), None
            while True:
                try: asked = inner.send(logits)
                except StopIteration: return
                steps.append(1)
                if len(steps) > after: again.cancel()
                try: logits = yield asked
                except PastaError as e: logits = None; inner.throw(e)
        again_strategy, again.strategy = again.strategy, generator
        r, = engine.run(again)
        assert r.finish_reason == 'cancelled' and HIDE not in r.token_ids and r.token_ids == whole[:len(r.token_ids)]
        assert [t for t, k in zip(r.record.token, r.record.kind) if k == 'prompt'] == PROMPT[:6 if after else len([k for k in r.record.kind if k == 'prompt'])]
    empty(engine)


def test_a_full_pool_ends_one_request_with_its_text(model):
    engine = Engine(model, slots=48, page_size=16)
    r, = engine.run(ask(multi_block, PROMPT[:5], buffer=2, tau_m2t=.3, max_new_tokens=200, reserve=8))
    assert r.finish_reason == 'pool_full' and isinstance(r.error, PoolFull) and 20 <= r.generated_tokens < 48 and r.counts['blocks']
    empty(engine)


def test_the_reserve_is_enough(model):
    for prompt, block, buffer, limit in product((1, 5), (3, 8), (1, 4), (1, 17)):
        request = ask(multi_block, PROMPT[:prompt], block=block, buffer=buffer, max_new_tokens=limit, tau_m2t=.2, eager=True)
        r = decode(Engine(model, slots=prompt + request.reserve, page_size=1), request)
        assert r.finish_reason == 'length' and r.generated_tokens == limit


def test_an_answer_ends_where_the_model_does():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=320, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None)).eval()
    engine = Engine(model, slots=256)
    r = decode(engine, ask(multi_block, PROMPT[:21], block=5, max_new_tokens=50), keep_logits=True)
    assert r.finish_reason == 'length' and r.generated_tokens == 11 and replay_noisy(model, r) < TOLERANCE
    late, = engine.run(ask(multi_block, PROMPT[:32], block=5))
    assert isinstance(late.error, PastaError)


# ---- counters, pictures, errors

def test_counters_add_up(engine):
    r = decode(engine, ask(multi_block, buffer=3, tau_m2t=.3, tau_t2t=.2))
    c, trace = r.counts, r.counts['trace']
    assert c['tpf'] == r.generated_tokens / r.forwards and c['token_efficiency'] == r.generated_tokens / c['rows']
    assert c['rows'] == 12 * r.forwards == trace.rows() and c['running'] == (c['rows'] - c['dummy_rows']) / 4 / r.forwards
    last = {place: token for _, place, token in trace.reveals}
    assert [last[n] for n in range(18)] == r.token_ids and c['revisions'] == len(trace.reveals) - len(last)
    assert r.critical_path == r.forwards + 1 and r.json()['tpf'] == c['tpf'] and 'trace' not in r.json()
    assert max(r.record.step) == r.forwards + 1 and [r.record.step[5 + n] for n in range(18)] == [1 + max(f for f, p, _ in trace.reveals if p == n) for n in range(18)]
    states = [{number: state for number, state, _ in step} for step in trace.blocks]
    allowed = {('dummy', 'dummy'), ('dummy', 'active'), ('active', 'active'), ('active', 'to-cache'), ('dummy', 'to-cache')}
    for number in range(c['blocks']):
        mine = [step[number] for step in states if number in step]
        assert set(zip(mine, mine[1:])) <= allowed and mine[-1] == 'to-cache'
    assert BlockTrace(4).summary()['tpf'] == 0


def test_slot_ratios(engine):
    r = decode(engine, ask(multi_block, buffer=3, tau_m2t=.3))
    ratios = slot_ratios([r, r])
    assert slot_ratios([decode(engine, ask(multi_block, buffer=1))]).shape[1] == 1
    assert ratios.shape[0] == 2 * r.forwards and 2 <= ratios.shape[1] <= 3 and ratios[0, 0] == 1 and np.isnan(ratios[0, 1:]).all()
    assert np.nanmin(ratios) >= 0 and np.nanmax(ratios) <= 1 and slot_ratios([]).shape == (0, 0)
    with pytest.raises(OptionError): slot_ratios([decode(engine, ar(PROMPT[:4], max_new_tokens=2))])


def test_pictures(engine):
    import matplotlib.pyplot as plt
    r = decode(engine, ask(multi_block, buffer=3, tau_m2t=.3))
    assert len(show_blocks(r).patches) == 3 * r.forwards and show_blocks(r, plt.subplots()[1]).get_xlabel() == 'forward'
    plt.close('all')


def test_revealed_by_definition():
    "All choices over four masked places with a coarse confidence."
    for sure in product((.1, .5, .9), repeat=4):
        c = Candidates(np.array([0, 1, 2, 5]), np.arange(4), np.array(sure), np.zeros(4), np.zeros(4))
        above = [n for n in range(4) if sure[n] > .5]
        assert revealed(c, Rules(tau_m2t=.5)).tolist() == (above or [sure.index(max(sure))])
        assert revealed(c, Rules(tau_m2t=.5), 0).tolist() == above
        run = next((n for n in range(4) if sure[n] < .5 or n == 3), 4)
        assert revealed(c, Rules(tau_m2t=.5, dmax=True)).tolist() == (list(range(run)) or [0])


def test_confident_is_what_candidates_says():
    logits, rows = torch.randn(5, 30, generator=torch.Generator().manual_seed(0)), np.array([1, 2, 4, 6, 7])
    for temperature in (0., .8):
        draws = [torch.Generator().manual_seed(1) for _ in range(2)]
        ours, theirs = confident(logits, rows, [3, 4], temperature, draws[0]), candidates(logits, np.ones(5, bool), [3, 4], temperature, draws[1])
        assert ours.tokens.tolist() == theirs.tokens.tolist() and np.allclose(ours.confidence, theirs.confidence, atol=1e-6)
        assert ours.rows is rows
    for broken in (logits * torch.nan, torch.full((5, 30), -torch.inf)):
        with pytest.raises(OrderError): confident(broken, rows, [3])


@pytest.mark.parametrize('options', [
    dict(block=0), dict(block=True), dict(block=2.), dict(buffer=0), dict(buffer=1.5), dict(tau_m2t=1.5), dict(tau_m2t=None), dict(tau_t2t=-1),
    dict(tau_add='x'), dict(dmax=1), dict(eager=None), dict(mask=-1), dict(mask=320), dict(mask=None), dict(mask=PROMPT[0]), dict(top_k=3),
    dict(top_p=.5), dict(processors=(lambda ids, logits: logits,)), dict(script={'main': [1]})], ids=lambda options: next(iter(options)))
def test_options_that_cannot_be(engine, options):
    r, = engine.run(ask(multi_block, **options))
    assert isinstance(r.error, PastaError) and '\n' not in str(r.error) and r.generated_tokens == 0
    empty(engine)


def test_single_block_refuses_too(engine):
    r, = engine.run(ask(single_block, commit='later'))
    assert isinstance(r.error, OptionError)
    with pytest.raises(OptionError): multi_block(PROMPT)
    with pytest.raises(OptionError): single_block(PROMPT, block=4, buffer=2)


def test_names_of_blocks_know_their_size_and_their_tokens():
    assert block_names(PROMPT[:10], 4)[:4] == block_names(PROMPT[:5], 4) and len(block_names(PROMPT[:10], 4)) == 8
    assert not set(block_names(PROMPT[:8], 4)) & set(block_names(PROMPT[:8], 8)) and len(set(block_names(PROMPT[:8], 4))) == 2
    assert block_names(PROMPT[:3], 4) == [] and all(0 <= name < 1 << 62 for name in block_names(PROMPT, 4))


def test_reveal_pictures_leave_out_the_prompt_and_count_forwards(engine):
    "Thirteen letters of prompt in blocks of four: three are only read, one letter is given in the first block of the answer."
    import matplotlib.pyplot as plt
    from pasta_lib.diffusion import show_reveal
    for strategy in (single_block, multi_block):
        r = decode(engine, ask(strategy, PROMPT[:13], tau_m2t=.3))
        ax = show_reveal(r.record)
        grid = np.ma.filled(ax.images[0].get_array().astype(float), math.nan)
        assert [t.get_text() for t in ax.get_yticklabels()] == [f'block {n}' for n in range(5)]
        assert np.isnan(grid[0, 0]) and np.isnan(grid[4, 3]) and np.isnan(grid).sum() == 2 and np.nanmin(grid) == 1 and np.nanmax(grid) <= r.forwards
        last = {place: forward for forward, place, _ in r.counts['trace'].reveals}
        assert grid.flatten()[1:19].tolist() == [last[n] for n in range(18)]
    plt.close('all')

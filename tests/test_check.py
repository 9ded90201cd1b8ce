"The checks themselves: they pass on sound models of several kinds, and each fails when what it watches is broken."
import copy
import json
import math

import matplotlib
import numpy as np
import pytest
import torch

import pasta_lib.check as check_module
import pasta_lib.engine as engine_module
from pasta_lib.check import (CHECKS, Check, Report, Row, Subject, borrowed_voice, check, differing, examine, gap, generate,
                             script_of, script_pieces, self_check, show_report, unfold)
from pasta_lib.engine import ar
from pasta_lib.models import UnsupportedModel, add_tokens, tiny_model
from pasta_lib.pasta import Voice
from pasta_lib.pool import PageTable, Pool
from pasta_lib.tags import TagVocab

KEYS = {'name', 'system', 'deviation', 'tolerance', 'passed'}


@pytest.fixture(scope='module')
def subject(tiny): return Subject(*tiny)


def measure(name, subject):
    "A fresh row of one check."
    return examine(CHECKS[name], subject)


# ---- sound models
def test_every_promise_is_kept_on_tiny(tiny):
    seen = []
    report = self_check(*tiny, report=seen.append, name='tiny')
    assert report.passed, str(report)
    assert seen == report.rows and len(seen) == sum(not c.slow for c in CHECKS.values()) >= 20
    out = json.loads(json.dumps(report.json(), allow_nan=False))
    assert out['model'] == 'tiny' and out['passed'] is True and all(KEYS <= set(row) for row in out['checks'])
    assert str(report).endswith(report.summary()) and f'{len(seen)} of {len(seen)} promises kept' in report.summary()


def test_the_users_model_stays_as_it_is():
    model, tokenizer = tiny_model(seed=3)
    model.train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    words, config = len(tokenizer), model.config.to_dict()
    assert self_check(model, tokenizer, only='replay').passed
    assert model.training and len(tokenizer) == words and model.config.to_dict() == config
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_a_bf16_model_is_checked_in_fp32_and_stays_bf16():
    model, tokenizer = tiny_model(seed=4)
    model.to(torch.bfloat16)
    assert self_check(model, tokenizer, only='forks').passed
    assert model.dtype == torch.bfloat16


def test_a_model_with_tag_tokens_of_its_own():
    model, tokenizer = tiny_model(seed=5)
    add_tokens(model, tokenizer, TagVocab('compact', 40))
    on = Subject(model, tokenizer)
    assert on.voice.ids.sync == tokenizer.get_vocab()['<sync/>']
    for name in ('training layout as decoded', 'replay of forks and joins', 'a fork unheard before the sync'):
        assert measure(name, on).passed


@pytest.mark.parametrize('kind', ['qwen2', 'gemma3'])
def test_other_architectures(kind):
    from transformers import (Gemma3ForCausalLM, Gemma3TextConfig, Qwen2Config, Qwen2ForCausalLM)
    sizes = dict(vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=2048, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    torch.manual_seed(0)
    if kind == 'qwen2': model = Qwen2ForCausalLM(Qwen2Config(**sizes))
    else:
        model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, head_dim=8, sliding_window=16, query_pre_attn_scalar=8,
                                                   layer_types=['sliding_attention', 'full_attention']))
    tokenizer = tiny_model()[1]
    for only in ('replay of forks', 'outline', 'generate, batched', 'leak', 'unheard', 'layout', 'denoised', 'commits'):
        report = self_check(model, tokenizer, only=only)
        assert report.passed, str(report)


def test_without_a_tokenizer():
    model, _ = tiny_model(seed=6)
    report = self_check(model)
    assert report.passed and set(report.skipped) == {c.name for c in CHECKS.values() if c.words}
    assert 'not tested without a tokenizer' in str(report)
    assert not self_check(model, only='pasta').passed                     # nothing tested is nothing shown


def test_a_model_that_cannot_be_driven_says_so():
    from transformers import MambaConfig, MambaForCausalLM
    with pytest.raises(UnsupportedModel):
        self_check(MambaForCausalLM(MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4)))


def test_full_takes_more_prompts_and_lists_compiled_code(tiny):
    on = Subject(*tiny, full=True)
    assert (len(on.prompts), on.new) == (20, 128)
    slow = [c.name for c in CHECKS.values() if c.slow]
    assert slow and all('compiled' in name for name in slow)


# ---- tools, against definitions
def test_generate_is_greedy(tiny):
    model, ids = tiny[0], [5, 6, 7, 8]
    want = []
    for _ in range(6):
        with torch.no_grad(): want.append(int(model(torch.tensor([ids + want])).logits[0, -1].argmax()))
    assert generate(model, ids, 6) == want
    assert generate(model, ids, 6, {want[2]}) == want[:want.index(want[2]) + 1]


def test_tokens_are_compared_up_to_a_near_tie(tiny, monkeypatch):
    model, prompt = tiny[0], [1, 2, 3]
    want = generate(model, prompt, 5)
    other = want[:2] + [(want[2] + 1) % 256] + want[3:]
    assert differing(model, prompt, want, other) == 1 and differing(model, prompt, want, want[:3]) == 2
    monkeypatch.setitem(check_module.TIE, torch.float32, gap(model, prompt + want[:2]) + 1e-3)
    assert differing(model, prompt, want, other) == 0


def test_a_script_says_what_its_pieces_say(subject):
    voice = Voice(subject.tokenizer, 'text')
    for v in (voice, subject.voice):
        script = script_of(script_pieces(v), len(v.opening))
        assert set(script) == {'main', 'fork 1', 'fork 2', 'fork 3'}
        assert all(script[f'fork {n}'][-len(v.closing):] == v.closing for n in (1, 2, 3))
    text = subject.tokenizer.decode(script_of(script_pieces(voice), len(voice.opening))['main'])
    assert text == ('Two plans. <promise topic="sea" tokens="20"/> Or <promise topic="hills" tokens="10"/> so<sync/>'
                    ' Then home. <promise topic="bread" tokens="10"/><sync/> Done.')


def test_borrowed_tags_are_ordinary_tokens_that_nobody_says(subject):
    voice, tokenizer = borrowed_voice(subject.tokenizer, 261), subject.tokenizer
    tags = set(voice.ids.ids.values())
    assert len(tags) == 6 and not tags & set(tokenizer.all_special_ids)
    said = {i for _, text, *_ in check_module.STORY for i in tokenizer.encode(text)}
    assert not tags & said and len(tokenizer) == 261


def test_checks_can_be_added_and_replaced(subject):
    try:
        @check('mine', 'test', 2)
        def _(on): return 3
        assert not measure('mine', subject).passed
        @check('mine', 'test', 2)
        def _(on): return 2, 'at the edge'
        assert measure('mine', subject).passed and measure('mine', subject).note == 'at the edge'
    finally: CHECKS.pop('mine', None)


@pytest.mark.parametrize('found', [math.nan, math.inf, 1.0001])
def test_too_much_is_too_much(found, subject):
    row = examine(Check('x', 's', 1.0, lambda on: found), subject)
    assert not row.passed and not Report('m', [row]).passed
    json.dumps(Report('m', [row]).json(), allow_nan=False)


@pytest.mark.parametrize('error', [ValueError('two\nlines'), RuntimeError(), KeyError('k')])
def test_a_crash_is_a_failed_check_in_one_line(error, subject):
    def measure(on): raise error
    row = examine(Check('x', 's', 1.0, measure), subject)
    assert not row.passed and row.deviation is None and '\n' not in str(row) and type(error).__name__ in row.note
    assert Report('m', [row]).json()['checks'][0]['deviation'] is None


def test_picture(tiny):
    rows = [Row('a', 's', 0.0, 0.0, True), Row('b', 's', 1e-5, 1e-4, True), Row('c', 's', None, 0, False), Row('d', 's', math.inf, 1, False)]
    ax = show_report(Report('m', rows))
    assert len(ax.patches) == 4 and [t.get_text() for t in ax.get_yticklabels()] == ['s: d', 's: c', 's: b', 's: a']
    widths = [p.get_x() + p.get_width() for p in ax.patches]
    assert widths[3] == pytest.approx(1e-9) and widths[0] == widths[1] == pytest.approx(1e3)
    matplotlib.pyplot.close(ax.figure)


def test_unfolding_a_block_mask_sees_an_error():
    from pasta_lib.masks import block_mask, dense_mask
    layout = check_module.random_layout(np.random.default_rng(1))
    from pasta_lib.segments import pack
    layout = pack([layout], 64)
    mask = block_mask(layout, 16)
    assert torch.equal(unfold(mask, 64), dense_mask(layout))
    mask.kv_num_blocks.zero_()
    assert not torch.equal(unfold(mask, 64), dense_mask(layout))


# ---- broken on purpose: each fault must be found by the check that is there for it
def gossip(monkeypatch):
    honest = engine_module.place
    def place(h, q):
        placed = honest(h, q)
        return placed if q.prefill else engine_module.replace(placed, masks=dict.fromkeys(placed.masks))
    monkeypatch.setattr(engine_module, 'place', place)

def late(monkeypatch):
    honest = engine_module.place
    def place(h, q): return honest(h, engine_module.replace(q, positions=[p + (not q.prefill) for p in q.positions]))
    monkeypatch.setattr(engine_module, 'place', place)

def wrong_prefix(monkeypatch):
    honest = Pool.prefix
    monkeypatch.setattr(Pool, 'prefix', lambda self, ids: honest(self, ids)[:1] * len(honest(self, ids)))

def pages_kept(monkeypatch):
    monkeypatch.setattr(PageTable, 'release', lambda self: None)

def draws_by_turn(monkeypatch):
    turns = iter(np.random.default_rng(0).random(10_000))
    monkeypatch.setattr(engine_module, 'uniform', lambda *args: next(turns))

def shifted_layout(monkeypatch):
    honest = check_module.pasta_layout
    monkeypatch.setattr(check_module, 'pasta_layout', lambda ids, pieces: honest(ids, pieces, 'constant', constant=7))

def deaf_layout(monkeypatch):
    from pasta_lib import masks
    monkeypatch.setattr(masks, 'hf_mask', lambda model, layout, *a, **k: torch.ones(1, 1, len(layout), len(layout), dtype=bool).tril())

def windowless_blocks(monkeypatch):
    honest = check_module.block_mask
    monkeypatch.setattr(check_module, 'block_mask', lambda layout, size, window: honest(layout, size))

def pieces_misplaced(monkeypatch):
    honest = engine_module._part
    def part(q, start, size):
        out = honest(q, start, size)
        return engine_module.replace(out, positions=[p - start for p in out.positions])
    monkeypatch.setattr(engine_module, '_part', part)

def pages_mixed(monkeypatch):
    honest = PageTable._append
    def append(self, page):
        honest(self, page)
        if self.pool.page_size == 16: self.index[:self.capacity] = self.index[:self.capacity][::-1] % 16
    monkeypatch.setattr(PageTable, '_append', append)

def row_swap(monkeypatch):
    honest = engine_module.Engine.answer
    def answer(self, placed, wanted):
        logits = honest(self, placed, wanted)
        return logits[::-1] if len({len(rows) for rows in wanted}) == 1 else logits
    monkeypatch.setattr(engine_module.Engine, 'answer', answer)


def stale_commits(monkeypatch):
    honest = check_module.planned
    monkeypatch.setattr(check_module, 'planned', lambda prompt, **options: honest(prompt, **options | dict(commit='fast')))

def one_forward_more(monkeypatch):
    honest = check_module.single_block
    monkeypatch.setattr(check_module, 'single_block', lambda prompt, **options: honest(prompt, **options | dict(commit='fused')))

def dummies_that_speak(monkeypatch):
    from pasta_lib.buffer import BlockBuffer
    honest = BlockBuffer.answer
    monkeypatch.setattr(BlockBuffer, 'answer', lambda self, logits: honest(self, logits.roll(int(self.static), -1)))

def from_the_right(monkeypatch):
    from pasta_lib.buffer import BlockTrace
    honest = BlockTrace.summary
    def summary(self, *args):
        self.reveals.reverse()
        return honest(self, *args)
    monkeypatch.setattr(BlockTrace, 'summary', summary)


@pytest.mark.parametrize('fault, name', [
    (gossip, 'replay of forks and joins'), (gossip, 'a fork unheard before the sync'), (gossip, 'replay along an outline'),
    (late, 'as generate, one by one'), (late, 'as without a cache'), (late, 'replay of plain decoding'),
    (wrong_prefix, 'a shared beginning'), (pages_kept, "the pool's books"), (draws_by_turn, 'samples alone as in company'),
    (shifted_layout, 'training layout as decoded'), (deaf_layout, 'no leak under the training mask'),
    (deaf_layout, 'replay, tags spelled out'), (windowless_blocks, 'three masks, one table'),
    (pieces_misplaced, 'a prompt read in pieces'), (pages_mixed, 'pages of 1, 16 and 64 slots'),
    (row_swap, 'a mixed batch as alone'), (row_swap, 'as generate, batched by 8'),
    (gossip, 'replay of denoised blocks'), (late, 'replay of denoised spans'), (late, 'the cache after commits'), (row_swap, 'plans alone as in company'),
    (stale_commits, 'exact commits of spans'), (one_forward_more, 'a buffer of one block'), (dummies_that_speak, 'dummies change nothing'),
    (from_the_right, 'blocks of one token, in order')])
def test_a_fault_is_found(fault, name, tiny, subject, monkeypatch):
    on = Subject(*tiny)
    on.__dict__['reference'] = subject.reference               # before the fault
    fault(monkeypatch)
    row = measure(name, on)
    assert not row.passed, str(row)


def test_a_crashing_engine_fails_the_check_and_the_rest_goes_on(tiny, monkeypatch):
    def place(h, q): raise RuntimeError('no such kernel')
    monkeypatch.setattr(engine_module, 'place', place)
    report = self_check(*tiny, only='replay')
    assert len(report.rows) > 3 and not any(row.passed for row in report.rows)
    assert all('no such kernel' in row.note for row in report.rows)


def test_a_different_model_is_found(tiny, subject):
    "The reference of one model does not pass for another's."
    other = copy.copy(subject)
    other.model = tiny_model(seed=9)[0]
    other.__dict__['reference'] = subject.reference
    assert not measure('as generate, one by one', other).passed


@pytest.mark.smollm2
@pytest.mark.parametrize('only', ['replay of forks', 'layout', 'denoised'])
def test_smollm2(smollm2, only):
    report = self_check(*smollm2, only=only)
    assert report.passed, str(report)


def test_float64_judges_where_the_replay_itself_rounds(tiny, monkeypatch):
    on, asked = Subject(*tiny), []
    honest = check_module.replay_deviation
    def deviation(model, result):
        asked.append(model.dtype)
        return honest(model, result) + (2e-4 if model.dtype == torch.float32 else 0)
    monkeypatch.setattr(check_module, 'replay_deviation', deviation)
    row = measure('replay of plain decoding', on)
    assert row.passed and 'float64' in row.note and {torch.float32, torch.float64} == set(asked)
    assert on.model.dtype == torch.float32


def test_denoising_that_deviates_is_measured_again_in_float64(tiny, monkeypatch):
    "Rounding ends there, and the tolerance stays; a fault does not end."
    honest = check_module.replay_noisy
    monkeypatch.setattr(check_module, 'replay_noisy', lambda model, r: honest(model, r) + (2e-4 if model.dtype == torch.float32 else 0))
    row = measure('replay of denoised spans', Subject(*tiny))
    assert row.passed and row.deviation < 1e-10 and row.note == 'in float64; 0.0002 in float32'
    monkeypatch.setattr(check_module, 'replay_noisy', lambda model, r: honest(model, r) + 2e-4)
    on = Subject(*tiny)
    row = measure('replay of denoised spans', on)
    assert not row.passed and 'in float64' in row.note and on.model.dtype == torch.float32


def test_borrowed_ids_are_ordinary_and_unused(subject):
    from pasta_lib.check import borrowed
    ids, tokenizer = borrowed(subject, 7, 'azure 1'), subject.tokenizer
    assert len(set(ids)) == 7 and not {*ids} & {*tokenizer.added_tokens_decoder, *tokenizer.encode('azure 1'), *(i for p in subject.prompts for i in p)}
    assert max(ids) < min(subject.facts.vocab, len(tokenizer))

"The experiment of multi-block diffusion: its task against an interpreter of our own, its areas and clocks by hand, and the whole run, small."
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from pasta_lib import experiment_blocks, models
from pasta_lib.engine import Engine
from pasta_lib.experiment_blocks import (ABLATIONS, BINS, BLOCK, DECODERS, FUNCTIONS, METHODS, TAU, RealScale, TinyScale, ablation_table, areas, beside, bound,
                                         chain_rows, clocked, columns, compare_tiny, decode, draw_curves, draw_slots, evaluate_real, evaluate_tiny,
                                         format_table, fresh_rows, histograms, is_right, make_chain, point, real_claims, request_of, run_real, run_tiny,
                                         stacked, tiny_claims)
from pasta_lib.experiment_pasta import read_table
from pasta_lib.jobs import write_jsonl
from pasta_lib.metrics import aup_trapezoid, aup_weighted
from pasta_lib.models import load, save, tiny_model
from pasta_lib.train import prepare

seeds = st.integers(0, 10 ** 6)


def interpret(prompt: str) -> str:
    "The answer, straight from the prompt."
    out, last = [], None
    for k in range(0, len(prompt), 4):
        results = [last if prompt[k] == '^' else prompt[k]]
        for call in prompt[k + 1:k + 4].rstrip('.'): results.append(FUNCTIONS[call][int(results[-1])])
        out, last = out + results, results[-1]
    return ''.join(out)


@settings(max_examples=200, deadline=None)
@given(seeds, st.integers(1, 20))
def test_chains_mean_what_an_interpreter_says(seed, items):
    prompt, answer = make_chain(random.Random(seed), items)
    assert answer == interpret(prompt) and len(prompt) == 4 * items == len(answer) + 1 and prompt[0] != '^' and prompt[-1] == '.'


def test_functions_are_permutations():
    assert all(sorted(values) == list('0123456789') for values in FUNCTIONS.values()) and len({tuple(v) for v in FUNCTIONS.values()}) == len(FUNCTIONS)


def test_rows_are_the_same_for_the_same_seed():
    assert chain_rows(5, 1) == chain_rows(5, 1) != chain_rows(5, 2) and chain_rows(5, 1)[:3] == chain_rows(3, 1)
    share = np.mean([c == '^' for row in chain_rows(300, 3) for c in row['prompt'][4::4]])
    assert abs(share - .25) < 4 * (.25 * .75 / 3300) ** .5


def test_fresh_chains_were_never_read():
    first = fresh_rows(9, 3)
    fresh = fresh_rows(9, 3, seen=[row['prompt'] for row in first[:5]])
    assert first == fresh_rows(9, 3) != fresh_rows(9, 4) and len(fresh) == 9 and fresh[:4] == first[5:]
    assert not {row['prompt'] for row in first[:5]} & {row['prompt'] for row in fresh}


@pytest.mark.parametrize('text, right', [('1234567', True), ('12345678', False), ('123456', False), ('', False), ('1234568', False)])
def test_a_chain_is_right_as_a_whole(text, right): assert is_right(dict(reference='1234567'), text) is right


# --- decoding -----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope='module')
def engine(): return Engine(*prepare('tiny', 'mask', layers=1, hidden=32, heads=2, kv_heads=2), slots=8192, page_size=BLOCK)


@pytest.mark.parametrize('decoder', DECODERS)
def test_decoders_decode(engine, decoder):
    rows = fresh_rows(3, 0, 3)
    found, alone = decode(engine, decoder, rows), [decode(engine, decoder, [row])[0] for row in rows]
    assert [a['id'] for a in found] == [row['id'] for row in rows] and [a['text'] for a in found] == [a['text'] for a in alone]
    for a in found: assert a['forwards'] >= 1 and 0 < a['tokens'] <= a['rows'] and a['ratios'].shape[1] <= experiment_blocks.BUFFER


def test_decoders_are_the_strategies_that_they_say():
    assert request_of('native', 'x').options['commit'] == 'separate' and request_of('fused', 'x').options['commit'] == 'fused'
    assert request_of('eager', 'x').options['eager'] is True and request_of('t2t', 'x', tau=.8).options | dict(tau_t2t=.5, tau_m2t=.8) == request_of('t2t', 'x', tau=.8).options
    assert request_of('multi', 'x').options['buffer'] == experiment_blocks.BUFFER


def answer(k, correct, tokens=10, forwards=5, rows=40): return dict(id=str(k), correct=correct, tokens=tokens, forwards=forwards, rows=rows)


def test_a_point_adds_up():
    answers = [answer(k, k % 4 > 0, 10 + k, 5) for k in range(20)]
    found = point(answers)
    assert found['accuracy'] == 75 and found['tpf'] == sum(10 + k for k in range(20)) / 100 and found['forwards'] == 5 and found['n'] == 20
    assert found['efficiency'] == sum(10 + k for k in range(20)) / 800 and found['accuracy_low'] < 75 < found['accuracy_high'] and found['tpf_low'] < found['tpf'] < found['tpf_high']


def test_areas_are_those_of_the_points():
    slow, fast = [answer(k, True, 10, 10) for k in range(10)], [answer(k, k < 8, 10, 4) for k in range(10)]
    found = areas({.9: slow, .5: fast}, best=100)
    assert found['aup'] == pytest.approx(aup_trapezoid([1, 2.5], [100, 80])) and found['aup_weighted'] == pytest.approx(aup_weighted([1, 2.5], [100, 80], 100))
    assert found['aup_low'] <= found['aup'] <= found['aup_high']
    assert areas({.9: [answer(k, False) for k in range(4)]}) == dict.fromkeys(found, 0.)


def test_clocks():
    seconds, tokens, forwards = np.array([[1., 2], [.5, 1]]), np.array([[10., 20], [10, 20]]), np.array([[4., 8], [1, 2]])
    first, second = (clocked(seconds, tokens, forwards, m) for m in (0, 1))
    assert first['speedup'] == first['step_ratio'] == 1 and first['tokens_per_second'] == 10 and first['step_ms'] == 250
    assert second['speedup'] == second['speedup_low'] == 2 and second['step_ratio'] == 2 and second['tpf'] == 10


def test_histograms_keep_the_counts():
    ratios = np.array([[0., 1.], [.5, np.nan], [.26, .99]])
    rows = histograms('x', ratios, 3)
    assert [row['slot'] for row in rows] == [0, 1] and rows[0]['n'] == 3 and rows[1]['mean'] == pytest.approx(.995) and rows[0]['seed'] == 3
    counts = [int(n) for n in rows[0]['counts'].split()]
    assert len(counts) == BINS and sum(counts) == 3 and counts[0] == counts[12] == counts[6] == 1
    assert [ax.get_title() for ax in draw_slots(rows)] == ['x']
    assert np.isnan(stacked([np.ones(2), np.ones(3)])).tolist() == [[False, False], [False, False], [True, False]]


# --- claims -------------------------------------------------------------------------------------------------------------
def fabricated(mbd=99., tpf=4., free=300., both=500., chain=500.):
    "A table of the tiny experiment."
    row = lambda method, decoder, accuracy, tpf, area: [dict(method=method, decoder=decoder, tau=TAU, seed=float(s), accuracy=accuracy, accuracy_high=accuracy, tpf=tpf + s, aup=1., aup_weighted=area) for s in (0, 1)]
    rows = row('control', 'native', 99., 1., 100.) + row('control', 'fused', 99., 1.5, 150.) + row('control', 'multi', 90., 4., free)
    rows += row('mbd', 'multi', mbd, tpf, 400.) + row('mbd', 'eager', 98., 5., 450.) + row('d2f', 'multi', 98., 5., 450.)
    for name in ABLATIONS: rows += row(name, 'multi', 98., 4., both if name == 'layouts both' else chain - 10)
    return rows


@pytest.mark.parametrize('change, held', [
    (dict(), [True] * 4), (dict(mbd=97.9), [False, True, True, True]), (dict(tpf=2.1), [False, True, True, True]), (dict(free=401.), [True, False, True, True]),
    (dict(both=480.), [True, True, False, False])])
def test_claims_follow_the_table(change, held):
    assert [c['verdict'] == 'holds' for c in tiny_claims(fabricated(**change))] == held
    assert {c['system'] for c in tiny_claims(fabricated())} == {'blocks'} and tiny_claims([]) == [] == real_claims([])


@pytest.mark.parametrize('speedup, held', [(1.5, 'holds'), (1.4, 'does not hold')])
def test_the_clock_decides(speedup, held):
    timing = [dict(method='mbd', decoder='multi', speedup=speedup, step_ratio=1.3)]
    assert [c['verdict'] for c in tiny_claims(fabricated(), timing)][2] == held


def test_ablation_tables_and_pictures():
    rows = fabricated()
    layouts, schedulers = ablation_table(rows, 'layouts'), ablation_table(rows, 'scheduler')
    assert [row['layouts'] for row in layouts] == ['systematic', 'random', 'both'] and layouts[2]['aup_weighted'] == '500.00 [500.00, 500.00]'
    assert [row['scheduler'] for row in schedulers] == ['d2f', 'random', 'sorted_uniform', 'chain_uniform'] and layouts[0]['tpf'] == '4.50 [4.00, 5.00]'
    assert ablation_table([], 'layouts') == []
    assert len(draw_curves(rows).lines) == 6
    assert 'no table yet: pasta experiment blocks --scale smollm2' == format_table([], 'smollm2') and 'tpf_low' not in format_table(rows)


def test_the_real_claim():
    row = lambda method, decoder, tpf, accuracy: dict(set='gsm8k', method=method, decoder=decoder, tpf=tpf, accuracy=accuracy, accuracy_high=accuracy + 2, speedup=1.2)
    of = lambda tpf: [row('control', 'fused', 1., 3.), row('control', 'multi', 2., 1.), row('mbd', 'multi', tpf, 2.)]
    assert [real_claims(of(tpf))[0]['verdict'] for tpf in (1.4, 1.6)] == ['does not hold', 'holds']


# --- the bound ----------------------------------------------------------------------------------------------------------
def test_a_model_that_knows_nothing_has_the_bound_of_its_vocabulary():
    model, tok = prepare('tiny', 'mask', layers=1, hidden=32, heads=2, kv_heads=2)
    with torch.no_grad(): model.get_output_embeddings().weight.zero_()
    row = dict(id='a', prompt='1+1=', response='2, as two ones are')
    assert bound(model, tok, row) == pytest.approx(np.log(model.get_output_embeddings().weight.shape[0]), rel=1e-5)


def test_with_blocks_of_one_token_the_bound_is_the_likelihood():
    from pasta_lib.blocks import TrainingState, dual_stream
    from pasta_lib.masks import layout_logits
    from pasta_lib.train import read_config
    from pasta_lib.train_diffusion import block_texts
    model, tok = prepare('tiny', 'mask', layers=1, hidden=32, heads=2, kv_heads=2)
    row = dict(id='a', prompt='1+1=', response='2, so')
    (text,), _ = block_texts([row], tok, read_config(dict(tags='mask', block=1)))
    nats = []
    for k in range(text.prompt, len(text)):                        # one token at a time
        masked = np.arange(len(text)) == k
        layout = dual_stream(text.ids, 1, TrainingState(np.where(masked, text.mask, text.ids), masked, np.ones(0), (1,) * text.noisy_blocks, text.prompt))
        at = int((layout.label >= 0).argmax())
        nats.append(-float(layout_logits(model, layout)[at].log_softmax(-1)[text.ids[k]]))
    assert bound(model, tok, row, draws=1, block=1) == pytest.approx(np.mean(nats), rel=1e-4)


# --- the whole run, small -----------------------------------------------------------------------------------------------
def test_the_tiny_run_resumes(tmp_path, monkeypatch):
    small = dict(layers=1, hidden=32, heads=2, kv_heads=2, tie=True)
    monkeypatch.setattr(experiment_blocks, 'START', experiment_blocks.START | dict(model_options=small))
    scale, said, table = TinyScale(base_rows=16, rows=16, ablation_rows=16, items=2, tests=2, timed=1, rounds=1, taus=(.5, TAU)), [], tmp_path / 'table.csv'
    rows = run_tiny(tmp_path / 'run', (4,), scale, table, said.append)
    assert [line.split(':')[0] for line in said] == [f'seed 4, {name}' for name in ('base', *METHODS, *ABLATIONS)]
    assert len(rows) == 2 * (sum(map(len, experiment_blocks.ASK.values())) + len(ABLATIONS)) and len(read_table(table)) == len(rows)
    assert [(row['method'], row['decoder']) for row in read_table(beside(table, 'timing'))] == list(experiment_blocks.TIMED)
    sources = {row['source'] for row in read_table(beside(table, 'slots'))}
    assert sources == {'control, trained', 'mbd, trained', 'd2f, trained', 'base, decoding', 'mbd, decoding'}
    assert run_tiny(tmp_path / 'run', (4,), scale, None, said.append) == rows and len(said) == 2 * (1 + len(METHODS) + len(ABLATIONS))
    again = evaluate_tiny(2, 4, tmp_path / 'run')
    assert {row['tau'] for row in again} == {TAU} and {row['method'] for row in again} == {'base', *METHODS} and len(tiny_claims(rows)) == 4


SUM = 'Tom has 2 x 3 = <<2*3=6>>6 eggs.\nHe sells 4, so 6 - 4 = <<6-4=2>>2 stay.\n#### 2'


def test_the_real_path_runs_and_resumes(tmp_path, monkeypatch):
    base, table = tmp_path / 'model', tmp_path / 'table.csv'
    save(*tiny_model(layers=1, hidden=32, heads=2, kv_heads=2), base)
    source = models._source
    monkeypatch.setattr(models, '_source', lambda name, *a, **kw: str(base) if name == 'smollm2' else source(name, *a, **kw))
    questions = tmp_path / 'gsm.jsonl'
    write_jsonl(questions, [dict(question=f'Tom {n} has eggs?', answer=SUM) for n in range(8)])
    scale, said, asked = RealScale(rows=8, post_rows=8, limit=2, max_new_tokens=16, draws=1), [], f'gsm8k={questions}'
    rows = run_real(tmp_path / 'run', scale, asked, (asked,), table, said.append)
    assert [(row['method'], row['decoder']) for row in rows] == list(experiment_blocks.REAL_ASK) and rows[0]['speedup'] == 1 and all(np.isfinite(row['nats']) for row in rows)
    assert [line.split(':')[0] for line in said] == ['base', 'control', 'mbd', 'gsm8k'] and read_table(table)[0]['set'] == 'gsm8k' and len(real_claims(rows)) == 1
    assert run_real(tmp_path / 'run', scale, asked, (asked,), None, said.append) == rows
    prompts = [dict(id='a', prompt='Tom?', reference=SUM, answer='2')]
    monkeypatch.setattr(experiment_blocks, 'RealScale', lambda: scale)
    assert len(evaluate_real(prompts, folder=tmp_path / 'run')) == len(rows)

"The benchmark on the exported package: turns and ratios under a fake clock, tables, rows of every kind on the tiny model."
import csv
import dataclasses
import subprocess

import pytest
import torch

from pasta_lib import bench as B
from pasta_lib.bench import (QUICK, Bench, Rounds, bench, better, burst, format_rows, hardware, hf_generate, interleave, ragged, read_rows, row,
                             sample_prompt, save_rows, show_results, slots_for, stream_weights, weights_of)
from pasta_lib.core import PastaError
from pasta_lib.engine import Engine, run

SMALL = dataclasses.replace(QUICK, prompt=20, new=4, rounds=1, batch=3, lengths=(5, 20), batch_rounds=1, threads=(1, 3), thread_prompt=8,
                            thread_tokens=2, pools=(256, 512), most=4, prompts=1)


class Clock:
    "Only work moves it."
    def __init__(self): self.now, self.log = 0., []
    def __call__(self): return self.now
    def job(self, name, seconds):
        def work():
            self.log.append(name)
            self.now += next(seconds)
        return work


def test_interleave_takes_turns_and_drops_the_warm_round():
    clock = Clock()
    a, b = iter([9., 1., 2., 4.]), iter([9., 3., 4., 4.])
    rounds = interleave(dict(a=clock.job('a', a), b=clock.job('b', b)), rounds=3, clock=clock)
    assert clock.log == ['b', 'a', 'a', 'b', 'b', 'a', 'a', 'b']
    assert rounds.values == dict(a=[1., 2., 4.], b=[3., 4., 4.])
    assert rounds.median('a') == 2. and rounds.ratio('b', 'a') == 2.    # of 3, 2, 1: not median over median by accident


def test_ratio_is_the_median_of_ratios():
    rounds = Rounds(dict(a=[1., 10., 100.], b=[2., 40., 100.]))
    assert rounds.ratio('b', 'a') == 2. and rounds.median('b') / rounds.median('a') == 4.


def test_interleave_keeps_what_contestants_say():
    rounds = interleave(dict(a=lambda: dict(step=7.), b=lambda: None), rounds=2, warm=0)
    assert rounds.values['a.step'] == [7., 7.] and set(rounds.values) == {'a', 'a.step', 'b'}
    with pytest.raises(PastaError, match='a.step'): rounds.median('c')


@pytest.mark.parametrize('contestants, rounds', [({}, 1), (dict(a=int), 0)])
def test_interleave_refuses(contestants, rounds):
    with pytest.raises(PastaError): interleave(contestants, rounds)


def test_rows():
    assert row('x', 2, 'ms', 4) == dict(name='x', value=2., unit='ms', baseline=4., ratio=.5)
    assert row('x', 2, 'ms')['ratio'] is None and row('x', 2, 'ms', 4, .7)['ratio'] == .7
    assert [better(u) for u in ('tokens/s', '×', 'ms', 'MB', '%')] == ['more', 'more', 'less', 'less', 'less']


def test_csv_round_trip(tmp_path):
    result = dict(rows=[row('a, "b"', 1.5, 'ms', 3), row('c', 1e6, 'tokens/s')], hardware=hardware('tiny', 'float32', 3))
    path = save_rows(result, tmp_path / 'deep' / 'a.csv')
    again = read_rows(path)
    assert again['rows'] == result['rows'] and again['hardware']['seed'] == '3' and again['hardware']['model'] == 'tiny'
    lines = list(csv.DictReader(path.open()))
    assert all({'commit', 'cpu', 'threads', 'seed', 'date'} <= line.keys() for line in lines)
    assert read_rows(tmp_path / 'none.csv') == dict(rows=[], hardware={})


def test_format_says_what_a_stranger_needs():
    result = dict(rows=[row('long name of a row', 12345.6, 'tokens/s', 10), row('b', .123456, 'ms')], hardware=hardware())
    text = format_rows(result)
    assert '12,346' in text and '0.123' in text and 'more' in text and 'less' in text and 'ratio = value / baseline' in text
    assert 'interrupted' not in text and 'interrupted' in format_rows(result | dict(interrupted=True))
    starts = {line.index(unit) for line, unit in zip(text.splitlines()[1:3], ('tokens/s', 'ms'))}
    assert len(starts) == 1                                              # columns stand under each other


def test_hardware(monkeypatch):
    h = hardware('m', 'bfloat16', 1)
    assert h['threads'] == torch.get_num_threads() and h['torch'] == torch.__version__ and h['dtype'] == 'bfloat16'
    monkeypatch.setattr(subprocess, 'run', lambda *a, **k: (_ for _ in ()).throw(FileNotFoundError('git')))
    monkeypatch.setattr(B.Path, 'read_text', lambda *a, **k: (_ for _ in ()).throw(OSError()))
    assert hardware()['commit'] is None and isinstance(hardware()['cpu'], str)


def test_commit_only_of_our_own_repository(monkeypatch, tmp_path):
    monkeypatch.setattr(B, '__file__', str(tmp_path / 'site-packages' / 'bench.py'))
    assert B._git('status') is None


def test_prompts(tiny):
    ids = sample_prompt(tiny[1], 1000)
    assert len(ids) == 1000 and sample_prompt(tiny[1], 999, 1) == ids[1:]
    for n in (1, 2, 5, 16):
        lengths = ragged(n, 64, 512)
        assert len(lengths) == n and min(lengths) == 64 and (n == 1 or max(lengths) == 512)
    assert slots_for([64, 65], 64) == 64 * (2 + 3)


def test_floor_reads_each_weight_once(tiny):
    weights = weights_of(tiny[0])
    linear = sum(p.numel() for n, p in tiny[0].named_parameters() if p.dim() == 2 and 'embed' not in n)
    assert sum(w.numel() for w in weights) == linear
    assert stream_weights(weights, passes=1)['step'] > 0


def test_generate_is_left_as_it_was(tiny):
    before = tiny[0].generation_config
    out = hf_generate(tiny[0], [[1, 2, 3], [4]], 5)
    assert [len(o) for o in out] == [5, 5] and tiny[0].generation_config is before


def test_burst(tiny):
    r, = run(Engine(*tiny, slots=512), burst('Hi', threads=5, tokens=3, ignore_eos=True))
    assert (r.forks, r.forwards, r.critical_path, r.generated_tokens) == (5, 3, 4, 16)
    assert 0 < r.counts['model'] < r.seconds and 0 < r.counts['sampling'] < r.seconds
    full, = run(Engine(*tiny, slots=64), burst([1] * 60, threads=5, tokens=3, ignore_eos=True))
    assert full.finish_reason == 'pool_full'
    with pytest.raises(PastaError): B.burst_ms(Engine(*tiny, slots=64), [1] * 60, 5, 3)


def test_bench_step():
    told = []
    result = bench('step', 'tiny', report=told.append, dtype='float32', scale=SMALL)
    names = [r['name'] for r in result['rows']]
    assert names[:2] == ['generate', 'eager, against generate'] and len(names) == 10 and told
    assert all(set(r) == {'name', 'value', 'unit', 'baseline', 'ratio'} and r['value'] >= 0 for r in result['rows'])
    same = next(r for r in result['rows'] if r['unit'] == 'tokens')
    assert same['value'] == SMALL.new                                    # fp32: token for token
    assert not any('compiled' in n for n in names) and 'interrupted' not in result


def test_bench_threads(monkeypatch):
    monkeypatch.setattr(B, 'memory_of', lambda name, threads, *rest: 100. + threads)       # its own test is below
    result = bench('threads', 'tiny', dtype='float32', scale=SMALL)
    by = {r['name']: r for r in result['rows']}
    assert by['step, 1 thread']['ratio'] == 1 and by['step, 3 threads']['baseline'] == by['step, 1 thread']['value']
    assert by['bookkeeping, 4 threads in a pool of 512']['baseline'] == by['bookkeeping, 4 threads in a pool of 256']['value']
    assert 0 < by['bookkeeping of a step, 4 threads in a full pool of 512']['value'] < 100
    assert by['peak memory, 8 threads against 1']['ratio'] == pytest.approx(108 / 101)
    real = by['guided, realised speedup, against theoretical']
    assert real['baseline'] == by['guided, theoretical speedup']['value'] > 1


def test_bench_eviction():
    scale = dataclasses.replace(SMALL, live=256, batch=2)
    rows = bench('eviction', 'tiny', dtype='float32', scale=scale)['rows']
    names = ['Dense', 'TIP', 'StreamingLLM', 'H2O']
    assert [r['name'].partition(',')[0].partition(':')[0] for r in rows] == names * 3
    assert rows[0]['ratio'] == 1 and all(r['value'] > 0 for r in rows)
    live = {name: r['value'] for name, r in zip(names, rows[4:])}
    after = (scale.thread_tokens + 1) / 2                                            # tokens decoded so far, on average
    assert live['Dense'] == 64 + 256 + after and live['TIP'] == 64 + 128 + after and max(live['StreamingLLM'], live['H2O']) < live['Dense'] - 64


@pytest.mark.parametrize('dtype,lora', [('float32', None), ('bfloat16', 8)])
def test_bench_training(monkeypatch, dtype, lora):
    import pasta_lib.train as T
    asked, measure = {}, T.bench_training
    monkeypatch.setattr(T, 'bench_training', lambda name, tokens, documents, rounds, **how: asked.update(how, documents=documents) or
                        measure(name, tokens, 1, 1, **how))
    result = bench('training', 'tiny', dtype=dtype, scale=SMALL)
    causal, ours = result['rows']
    assert [causal['name'], ours['name'], ours['unit']] == ['causal attention', 'our masks', 'tokens/s']
    assert causal['baseline'] is None and ours['baseline'] == causal['value'] and ours['ratio'] > 0
    assert asked == dict(lora=lora, dtype=dtype, quick=dtype != 'float32', documents=SMALL.batch // 2)
    assert result['hardware']['dtype'] == dtype


def test_compiled_contestant(monkeypatch, tiny):
    "Without a compiler in the test: an engine that is only called compiled gives the same rows."
    made = []
    monkeypatch.setattr(Bench, 'engine', lambda self, slots, **kw: made.append(kw) or Engine(self.model, self.tokenizer, slots=slots))
    b = Bench('tiny', *tiny, dataclasses.replace(SMALL, compile=True), 'float32', 0, lambda text: None)
    names = [r['name'] for r in B.plain_rows(b)]
    assert made == [{}, dict(compile=True)] and 'compiled, against generate' in names
    assert 'compiled: a step, against streaming the weights' in names


def test_memory_in_its_own_process():
    assert B.memory_of('tiny', 2, 2, 8, 256, 'float32') > 50
    with pytest.raises(PastaError, match='memory run failed'): B.memory_of('tiny', 2, 2, 8, 256, 'float33')


def test_interrupt_keeps_rows(monkeypatch):
    def kind(b):
        yield row('done', 1, 'ms')
        raise KeyboardInterrupt
    monkeypatch.setitem(B.KINDS, 'broken', kind)
    result = bench('broken', 'tiny')
    assert [r['name'] for r in result['rows']] == ['done'] and result['interrupted']


def test_ctrl_c_in_the_engine_ends_the_benchmark(monkeypatch):
    "The driver turns Ctrl-C into a cancelled result; a benchmark must stop all the same."
    step, calls = Engine.answer, []
    def answer(self, *a):
        calls.append(1)
        if len(calls) == 25: raise KeyboardInterrupt
        return step(self, *a)
    monkeypatch.setattr(Engine, 'answer', answer)
    result = bench('step', 'tiny', dtype='float32', scale=SMALL)
    assert result['interrupted'] and 1 <= len(result['rows']) < 10 and len(calls) == 25


def test_unknown_kind():
    with pytest.raises(PastaError, match='step'): bench('lunch')


def test_pictures(tmp_path):
    import matplotlib.pyplot as plt
    rows = [row('step, 1 thread', 2, 'ms', 2), row('step, 8 threads', 3, 'ms', 2), row('speed', 3, '×', 2), row('slow', 1, '×', 2), row('alone', 1, 'ms')]
    ax = B.plot_ratios(dict(rows=rows))
    colours = [p.get_facecolor() for p in ax.patches]
    assert len(colours) == 4 and colours[0] == colours[2] != colours[1] == colours[3]
    assert B.plot_threads(dict(rows=rows)).lines[0].get_xydata().tolist() == [[1, 2], [8, 3]]
    assert not B.plot_threads(dict(rows=[])).lines
    assert "bench('step')" in show_results(tmp_path, 'step')
    save_rows(dict(rows=rows, hardware=hardware()), tmp_path / 'bench_step.csv')
    assert 'speed' in show_results(tmp_path, 'step')
    plt.close('all')

"The experiment of Planned Diffusion: its task against a reader of our own, one-span decoding, its tables and claims, and the whole run, small."
import math
import random

import pytest
from hypothesis import given, settings, strategies as st
from pasta_lib import experiment_planned, models
from pasta_lib.core import PastaError
from pasta_lib.engine import Engine, OptionError
from pasta_lib.experiment_pasta import read_table, save_table
from pasta_lib.experiment_planned import (BY, CHECKPOINTS, KINDS, SIZES, Contestant, RealScale, TinyScale, answer, beaten, by_knob, claims, compare_real,
                                          contestants, draw_epochs, draw_front, draw_knobs, evaluate_real, evaluate_tiny, format_table, fresh_rows, front, grade,
                                          in_one_span, length_facts, make_problem, measure, needed, one_span, points, problem_rows, real_claims,
                                          request_of, run_real, run_tiny, start_rows, tens, tiny_claims)
from pasta_lib.judge import ExactJudge
from pasta_lib.jobs import read_jsonl, write_jsonl
from pasta_lib.models import load, save, tiny_model
from pasta_lib.planned import plan_ids, plan_pieces, to_plan
from pasta_lib.diffusion import replay_noisy
from pasta_lib.tags import Async, Sync, Topic, parse, plain
from pasta_lib.train import prepare

seeds = st.integers(0, 10 ** 6)
ALPHABET = 'abcdefghijklmnopqrstuvwxyz'


def solve(prompt: str, answer: str) -> float:
    "The share of right lines, straight from the prompt: each line is rewritten from its own first digit."
    lines, right = dict((line[0], line) for line in answer.splitlines() if line), 0
    asks = prompt.rstrip('?').split(';')
    for ask in asks:
        line = lines.get(ask[0], '')
        if ask == 'S=all': want = 'S:' + ''.join((lines.get(one[0], '') + '???')[2] for one in asks[:-1])
        else:
            size, needs = ALPHABET.index(ask[2]) + 1, ask[3:]
            first = (lines.get(needs, '') + '???')[2] if needs else line[2:3]
            want = f'{ask[0]}:' + ''.join(f'{(int(first) + k) % 10}{ALPHABET[k]}' for k in range(size)) if first.isdigit() else None
        right += line == want
    return right / len(asks)


@settings(max_examples=200, deadline=None)
@given(seeds, st.sampled_from(sorted(KINDS)))
def test_a_problem_is_what_its_prompt_says(seed, kind):
    problem = make_problem(random.Random(seed), kind)
    assert solve(problem.prompt, problem.answer) == grade(problem.answer, problem.prompt) == 1
    asks = [ask for ask in problem.prompt.rstrip('?').split(';') if ask != 'S=all']
    assert 2 <= len(asks) <= 4 and all(ALPHABET.index(ask[2]) + 1 in SIZES for ask in asks)
    assert ('S=all' in problem.prompt) == (kind == 'join') and any(ask[3:] for ask in asks) == (kind == 'mixed')
    assert needed(problem.prompt) == {part.label: len(part.text) for part in problem.parts if part.label != 'S'}


@settings(max_examples=200, deadline=None)
@given(seeds, st.data())
def test_a_spoilt_answer_loses_what_was_spoilt(seed, data):
    problem = make_problem(random.Random(seed))
    at = data.draw(st.integers(0, len(problem.answer) - 1))
    spoilt = problem.answer[:at] + data.draw(st.sampled_from('0123456789abl:AS\n')) + problem.answer[at + 1:]
    assert (grade(spoilt, problem.prompt) == 1) == (solve(problem.prompt, spoilt) == 1)


def test_rows_have_plans():
    tok = prepare('tiny', 'plan', layers=1, hidden=16, heads=1, kv_heads=1)[1]
    for row in problem_rows(60, 1):
        doc = parse(to_plan(row, tok)['tagged_text'], 'plan', 'strict')
        assert plain(doc) == row['response']
        topics, spans = ([node for node in doc.nodes if isinstance(node, kind)] for kind in (Topic, Async))
        assert [10 * topic.length for topic in topics] == [10 * tens(len(span.text)) for span in spans] and len(topics) >= 1
        assert any(isinstance(node, Sync) for node in doc.nodes) == (row['kind'] != 'parts')
        whole = parse(in_one_span(row)['tagged_text'], 'plan', 'strict').nodes
        assert [type(node) for node in whole] == [Topic, Async] and whole[1].text == row['response'] and 10 * whole[0].length >= len(row['response']) > 10 * whole[0].length - 10
    assert problem_rows(9, 1) == problem_rows(9, 1) != problem_rows(9, 2)


def test_a_start_reads_both_ways():
    rows = start_rows(6)
    assert [row['tagged_text'] == row['response'] for row in rows] == [True, False] * 3


def test_fresh_problems_were_never_read():
    first = fresh_rows(20, 3)
    fresh = fresh_rows(20, 3, [row['prompt'] for row in first[:5]])
    assert len(fresh) == 20 and first == fresh_rows(20, 3) != fresh_rows(20, 4) and not {row['prompt'] for row in first[:5]} & {row['prompt'] for row in fresh}


# --- decoding -----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope='module')
def engine():
    return Engine(*prepare('tiny', 'plan', layers=2, hidden=32, heads=2, kv_heads=2), slots=4096)


@pytest.mark.parametrize('knobs, steps', [(dict(), 40), (dict(steps_ratio=.5), 20), (dict(steps_ratio=.01), 1), (dict(order='all_at_once'), 1),
                                          (dict(order='left_to_right', steps_ratio=.25), 10), (dict(order='semi_autoregressive:10:random'), 40),
                                          (dict(confidence_threshold=1., steps_ratio=.1), 40)], ids=str)
def test_one_span_is_denoised_as_told(engine, knobs, steps):
    result, = engine.run([one_span('Say it.', length=4, raw=True, **knobs)], keep_logits=True)
    assert result.error is None and result.finish_reason == 'end' and result.counts['steps'] == result.forwards == steps
    assert (result.counts['spans'], result.counts['lengths'][0].masks, result.prefill_forwards) == (1, 40, 1)
    assert plan_ids(engine.tokenizer).mask not in result.token_ids and result.tagged_text.startswith('<topic> all 4 </topic><async>')
    assert replay_noisy(engine.model, result) < 1e-4


def test_one_span_says_its_script_and_refuses_nonsense(engine):
    said = engine.tokenizer.encode('all of it', add_special_tokens=False)
    result, = engine.run([one_span('Q', length=2, raw=True, script={'span 1': said})])
    assert result.text == 'all of it'
    for wrong in (dict(steps_ratio=0), dict(order='nonsense'), dict(confidence_threshold=2)):
        bad, = engine.run([one_span('Q', length=2, raw=True, **wrong)])
        assert isinstance(bad.error, OptionError)
    with pytest.raises(OptionError, match='needs a length'): one_span('Q')


@pytest.mark.parametrize('way', ['ar', 'planned', 'diffusion'])
def test_requests_answer_the_prompt(engine, way):
    row = problem_rows(1, 5)[0]
    request = request_of(way, row, engine.tokenizer, script=dict(main=[engine.tokenizer.eos_token_id]))
    if way != 'diffusion': assert request.prompt == row['prompt']
    else:
        topic, = plan_pieces(f'<topic> all {tens(len(row["response"]))} </topic><async></async>', plan_ids(engine.tokenizer), engine.tokenizer)[:1]
        assert engine.tokenizer.decode(request.prompt[:len(row['prompt'])]) == row['prompt'] and request.prompt[len(row['prompt']):] == topic.ids
    result, = engine.run([request])
    assert result.error is None and result.prompt_tokens == len(row['prompt']) + (len(topic.ids) if way == 'diffusion' else 0)


def test_an_answer_keeps_what_it_cost(engine):
    row, tok = problem_rows(8, 6)[0], engine.tokenizer
    plan = to_plan(row | dict(tagged_text=row['tagged_text'].partition('<sync/>')[0]), tok)['tagged_text']
    pieces = plan_pieces(plan, plan_ids(tok), tok)
    main = [i for piece in pieces if piece.kind == 'topic' for i in piece.ids] + [tok.eos_token_id]
    spans = {f'span {n + 1}': piece.ids[1:-1] for n, piece in enumerate(p for p in pieces if p.kind == 'async')}
    found = answer(engine, Contestant('planned', 'x', 'planned', dict(steps_ratio=.25, script=dict(main=main) | spans)), row)
    assert found['lengths'] == [(title, 10 * tens(n), n) for title, n in needed(row['prompt']).items()][:len(spans)] and found['problems'] == []
    assert found['steps'] == round(.25 * max(p for _, p, _ in found['lengths'])) and found['seconds'] > 0 and found['grade'] == grade(found['text'], row['prompt'])


# --- tables -------------------------------------------------------------------------------------------------------------
def test_contestants_cover_the_grid():
    scale = TinyScale(rounds=2, orders=('entropy', 'above:0.9'))
    found = contestants(scale, control=True)
    grid = [c for c in found if c.method == 'planned']
    assert len(grid) == len(scale.steps_ratios) * len(scale.confidence_thresholds) * len(scale.length_scales) == len({tuple(c.knobs.items()) for c in grid}) and found[0].name == 'ar ' and len({c.name for c in found}) == len(found)
    assert [c.knobs for c in found if c.method == 'diffusion'] == [dict(order='entropy', steps_ratio=r) for r in scale.steps_ratios] + [dict(order='above:0.9', steps_ratio=1.)]
    assert [(c.checkpoint, c.epochs) for c in found if 'epochs' in c.method] == [('ar-1', 1), ('planned-1', 1), ('ar-2', 2), ('planned-2', 2)]
    assert {c.checkpoint for c in found if c.method.startswith('unpadded')} == {'unpadded'} and not any(c.checkpoint == 'unpadded' for c in contestants(scale))


def fabricated(ar=96., fast=(2., 95.), careful=(1.5, 96.), pure=(1.2, 60.), epochs=((90., 95., 95.), (80., 90., 94.)), unsure=0., error=0., cut=5., long=95.):
    "A table of the tiny experiment: two seeds; the planned grid is two values of each knob."
    blank = dict(epochs='', order='', steps_ratio='', confidence_threshold='', length_scale='', length_error=math.nan, too_short=math.nan, seconds=1., parts_right=99.)
    one = lambda method, speed, accuracy, **more: [blank | dict(method=method, speedup=float(speed), accuracy=float(accuracy)) | more | dict(seed=float(s)) for s in (0, 1)]
    rows = one('ar', 1, ar) + one('pasta', 1.6, 95)
    for ratio in (1., .3):
        for threshold in (0., .5):
            for scale in (.8, 1., 1.25):
                speed, accuracy = fast if ratio == .3 else careful
                accuracy = cut if scale == .8 else accuracy
                speed = speed * {.8: 1.1, 1.: 1., 1.25: .9}[scale] - .1 * (threshold > 0)
                accuracy = accuracy + .5 * (threshold > 0) - unsure * (threshold > 0)
                rows += one('planned', speed, accuracy, order='entropy', steps_ratio=ratio, confidence_threshold=threshold, length_scale=scale, length_error=error, too_short=0.)
    rows += one('diffusion', *pure, order='random', steps_ratio=1.) + one('diffusion', 9, 20, order='random', steps_ratio=.1)
    for n, (a, p) in enumerate(zip(*epochs)): rows += one('ar by epochs', 1, a, epochs=n + 1.) + one('planned by epochs', 2, p, epochs=n + 1.)
    for method, accuracy in (('planned', long), ('unpadded', 10.)):
        rows += one(f'{method}, too long', 2, 95., length_scale=1.) + one(f'{method}, too long', 2, accuracy, length_scale=1.25)
    return rows


@pytest.mark.parametrize('change, broken', [
    (dict(), []), (dict(fast=(1.7, 95.)), [0]), (dict(ar=99.), [0, 1]), (dict(careful=(1.2, 96.), fast=(2., 92.)), [0, 1]), (dict(pure=(1.6, 98.)), [2]), (dict(pure=(1.2, 30.)), []),
    (dict(fast=(2., 98.), careful=(1.5, 96.)), [3]), (dict(unsure=3.), [4]), (dict(cut=95.5), [5]), (dict(epochs=((90., 92., 95.), (80., 90., 92.))), [6]),
    (dict(epochs=((90., 95., 95.), (80., 95., 95.))), [6]), (dict(error=3.), [7]), (dict(long=90.), [8])], ids=str)
def test_claims_follow_the_table(change, broken):
    found = tiny_claims(fabricated(**change))
    assert [n for n, c in enumerate(found) if c['verdict'] != 'holds'] == broken
    assert {c['system'] for c in found} == {'planned'} and all('seeds: 2' in c['ours'] for c in found) and tiny_claims([]) == [] == real_claims([])


def test_orders_are_counted_one_by_one():
    rows = points(fabricated())
    assert beaten(rows, 48.) == {'random': (1, 1)} and beaten(rows, 10.) == {'random': (1, 2)} and beaten(rows, 99.) == {}
    best = front(rows, 'planned')
    for name, falls in (('accuracy', True), ('speedup', False)): assert [row[name] for row in best] == sorted((row[name] for row in best), reverse=falls)
    assert len(best) > 2 and all(any(b['speedup'] >= row['speedup'] and b['accuracy'] >= row['accuracy'] for b in best) for row in rows if row['method'] == 'planned')
    assert [row['value'] for row in by_knob(fabricated(), 'length_scale')] == [.8, 1., 1.25]


def test_lengths_are_compared_with_what_was_needed():
    problems = [dict(prompt='A=l;B=r;S=all?', answers=dict(x=dict(lengths=[('A', 30, 28), ('B', 30, 30), ('Z', 90, 4)])))]
    assert length_facts(problems, 'x') == dict(length_error=5., too_short=50.)
    assert all(math.isnan(value) for value in length_facts([dict(prompt='A=l?', answers=dict(x=dict(lengths=[])))], 'x').values())


def test_tables_for_people():
    text = format_table(fabricated())
    assert 'diffusion, random' in text and 'ar by epochs, 2' in text and 'parts_right' not in text
    assert format_table([], 'smollm2') == 'no table yet: pasta experiment planned --scale smollm2'


def test_pictures_show_every_method():
    import matplotlib.pyplot as plt
    rows = fabricated()
    assert [text.get_text() for text in draw_front(rows).get_legend().get_texts()] == ['AR', 'PASTA', 'Planned Diffusion', 'diffusion, one span']
    assert len(draw_knobs(rows)) == 3 and [len(ax.lines) for ax in draw_epochs(rows)] == [2, 2]
    plt.close('all')


# --- the whole run, small -----------------------------------------------------------------------------------------------
QUICK = TinyScale(start_rows=16, rows=16, rounds=2, tests=2, steps_ratios=(.1,), confidence_thresholds=(0., .5), length_scales=(1.,), orders=('entropy', 'all_at_once'))


def test_the_tiny_run_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment_planned, 'START', experiment_planned.START | dict(model_options=dict(layers=1, hidden=32, heads=2, kv_heads=2, tie=True)))
    monkeypatch.setattr(experiment_planned, 'LIMITS', dict(raw=True, max_new_tokens=30))
    monkeypatch.setattr(experiment_planned, 'MAIN', dict(steps_ratio=.1, confidence_threshold=0.))
    said, table = [], tmp_path / 'table.csv'
    rows = run_tiny(tmp_path / 'run', (4,), QUICK, table, said.append)
    names = ['start', 'ar-1', 'ar-2', 'planned-1', 'planned-2', 'diffusion', 'pasta']
    assert [line.split(':')[0] for line in said] == [f'seed 4, {name}' for name in [*names, 'unpadded']]
    assert [row['method'] for row in rows[:6]] == ['ar', 'pasta', 'planned', 'planned', 'diffusion', 'diffusion'] and rows[0]['speedup'] == 1 and {row['n'] for row in rows} == {2}
    assert len(read_table(table)) == len(rows) == len(contestants(QUICK, True)) and set(BY) <= set(read_table(table)[0])
    assert len(tiny_claims(read_table(table))) == 9
    assert str(run_tiny(tmp_path / 'run', (4,), QUICK, None, said.append)) == str(rows)
    seen = {row['prompt'] for path in (tmp_path / 'run').rglob('*rows.jsonl') for row in read_jsonl(path)} | {row['prompt'] for row in read_jsonl(tmp_path / 'run' / 'start.jsonl')}
    assert not seen & {row['prompt'] for row in read_jsonl(tmp_path / 'run' / '4' / 'answers.jsonl')}
    for name in ('ar', 'planned'): (tmp_path / 'run' / '4' / f'{name}-{TinyScale().rounds}').symlink_to(tmp_path / 'run' / '4' / f'{name}-2')
    found = evaluate_tiny(1, 4, tmp_path / 'run')
    assert {row['method'] for row in found} == {'ar', 'pasta', 'planned', 'diffusion'} and {row['n'] for row in found} == {1}
    monkeypatch.setattr(experiment_planned, 'CHECKPOINTS', {name: str(tmp_path / 'run' / '4' / name) for name in CHECKPOINTS})
    assert [row['method'] for row in evaluate_tiny(1)] == [row['method'] for row in found]


# --- SmolLM2's path, on a stand-in --------------------------------------------------------------------------------------
PROMISED = 'Two of them.<promise topic="cats" tokens="20"/><async> Cats purr.</async><promise topic="dogs" tokens="20"/><async> Dogs bark.</async><sync/> That is all.'


def test_the_real_path_runs_and_resumes(tmp_path, monkeypatch):
    base, run, table = tmp_path / 'base', tmp_path / 'runs' / 'planned-smollm2', tmp_path / 'table.csv'
    save(*tiny_model(layers=2, hidden=32, heads=2, kv_heads=2), base)
    source = models._source
    monkeypatch.setattr(models, '_source', lambda name, *a, **kw: str(base) if name == 'smollm2' else source(name, *a, **kw))
    monkeypatch.setattr(experiment_planned, 'BASELINE', str(base))
    write_jsonl(tmp_path / 'runs' / 'pasta-smollm2' / 'train.jsonl', [dict(id=f'r{n}', prompt=f'Tell me {n} things.', tagged_text=PROMISED) for n in range(8)])
    write_jsonl(asked := tmp_path / 'asked.jsonl', [dict(id=f'q{n}', prompt=f'Give me {n} tips.') for n in range(3)])
    scale, said = RealScale(max_new_tokens=24, limit=3, timed=1, rounds=1, batch=2, epochs=1), []
    rows = run_real(run, scale, sets=(str(asked),), table=table, report=said.append)
    assert [row['method'] for row in rows] == ['baseline', 'planned'] and rows[0]['win_rate'] == 50 and rows[0]['speedup'] == 1 and {row['n'] for row in rows} == {3}
    assert [row['set'] for row in read_table(table)] == ['asked'] * 2 and [line.split(':')[0] for line in said] == ['planned', 'asked']
    assert load(str(run / 'planned'))[0].pasta.base == 'smollm2' and len(real_claims(rows)) == 3
    before = (run / 'asked-planned.jsonl').read_bytes()
    assert run_real(run, scale, sets=(str(asked),), report=said.append) == rows and (run / 'asked-planned.jsonl').read_bytes() == before
    monkeypatch.setattr(experiment_planned, 'RealScale', lambda: scale)
    monkeypatch.setattr(experiment_planned, 'REAL_CHECKPOINTS', dict(baseline=str(base), planned=str(run / 'planned')))
    for folder in (None, run): assert [row['method'] for row in evaluate_real(read_jsonl(asked), 0, folder)] == ['baseline', 'planned']


def test_rows_are_made_where_chapter_50_has_not_run(tmp_path, monkeypatch):
    from pasta_lib import experiment_pasta, train
    asked = []
    monkeypatch.setattr(experiment_pasta, 'self_answers', lambda folder, scale, instructions: iter([('answers', asked.append((folder, instructions)))]))
    monkeypatch.setattr(train, 'train', lambda recipe, config, out, resume, overrides: (recipe, config.name, overrides))
    found = list(experiment_planned.real_path(tmp_path / 'own', RealScale(), 'mine'))
    assert asked == [(tmp_path / 'own', 'mine')] and found[-1] == ('planned', ('planned-sft', 'planned_sft_smollm2.yaml', dict(data=str(tmp_path / 'own' / 'train.jsonl'), epochs=2)))


def test_the_real_comparison():
    one = lambda n, text, **more: dict(id=str(n), prompt=f'p{n}', text=text, tagged_text=text, tokens=20, forwards=20, steps=0, spans=0, rows=0, finish_reason='eos', problems=[],
                                       masks=0, used=0) | more
    base = [one(n, 'It is 7') for n in range(8)]
    own = [one(n, 'It is 7' if n % 2 else 'It is 8', forwards=10, spans=n % 4, steps=4, problems=['topic-empty'] if n == 3 else [], masks=20, used=15) for n in range(7)]
    judge = ExactJudge({f'p{n}': '7' for n in range(8)})
    rows = compare_real(dict(baseline=base, planned=own), judge)
    assert rows[0]['n'] == rows[1]['n'] == 7 and rows[1]['win_rate'] < 50 == rows[0]['win_rate'] and rows[1]['per_forward'] == pytest.approx(2.) and rows[1]['used'] == 75
    assert rows[1]['plans'] == pytest.approx(500 / 7) and rows[1]['malformed'] == pytest.approx(100 / 7)
    found = real_claims([dict(set='v', speedup=s) | row for row, s in zip(rows, (1., 1.3))])
    assert [c['verdict'] for c in found][:2] == ['does not hold', 'holds']
    with pytest.raises(PastaError, match='no prompt that both'): compare_real(dict(baseline=base[:1], planned=own[2:]), judge)


def test_claims_of_a_folder(tmp_path):
    assert claims(tmp_path) == []
    save_table(fabricated(), tmp_path / 'planned_tiny.csv')
    assert len(claims(tmp_path)) == 9

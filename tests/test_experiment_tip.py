"The experiment of Thinking in Place: its task against an interpreter of our own, its policies' caps, its tables, and the whole run, small."
import random
import re
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from pasta_lib import experiment_tip, models
from pasta_lib.core import PastaError
from pasta_lib.engine import Engine
from pasta_lib.experiment_pasta import read_table
from pasta_lib.experiment_tip import (CALLS, FUNCTIONS, PAGE, RealScale, TinyScale, caps_from, compare_real, decode, describe, draw_batches,
                                      evaluate_tiny, fresh_rows, graded, is_right, make_program, program_rows, real_claims, reasoning_rows, replaced,
                                      request_of, run_real, run_tiny, solution_nats, tiny_claims)
from pasta_lib.jobs import read_jsonl, write_jsonl
from pasta_lib.models import load, save, tiny_model
from pasta_lib.registers import encode_steps, register_ids, tip_layout
from pasta_lib.train import prepare

seeds = st.integers(0, 10 ** 6)


def interpret(prompt: str) -> tuple[list[str], str]:
    "What a program's calls set, step by step, and the value asked for, straight from the prompt."
    start, calls, asked = prompt.rstrip('?').split(';')
    now, alive, lines = {start[i]: int(start[i + 1]) for i in range(0, len(start), 2)}, set(start[::2]), []
    for call, function, x, y, z in calls.split(','):
        assert {x, y, z} <= alive and len({x, y, z}) == 3 and call not in alive
        scratch = dict(x=now[x], y=now[y])
        for name, formula in zip(('t', 'u', call), FUNCTIONS[function]):
            scratch[name] = now[name] = eval(formula, {}, scratch) % 10
            lines.append(f'{name}{now[name]}')
        alive = alive - {z} | {call}
    assert asked in alive
    return lines, f'{asked}{now[asked]}.'


@settings(max_examples=200, deadline=None)
@given(seeds, st.integers(1, 15))
def test_programs_mean_what_an_interpreter_says(seed, calls):
    program = make_program(random.Random(seed), calls)
    lines, answer = interpret(program.prompt)
    assert [step.split('=')[1].rstrip(';') for step in program.steps] == lines and program.answer == answer
    assert program.solution == ''.join(program.steps) + answer and len(program.slots) == 3 * calls


@settings(max_examples=200, deadline=None)
@given(seeds, st.integers(1, 15))
def test_each_step_names_the_values_that_it_reads(seed, calls):
    program = make_program(random.Random(seed), calls)
    start, asked, _ = program.prompt.split(';')
    now = dict(re.findall(r'([a-d])(\d)', start))
    for n, step in enumerate(program.steps):
        head, a, va, _, b, vb, target, value = re.fullmatch(r'(.....:)?(.)(\d)(.)(.)(\d)=(.)(\d);', step).groups()
        assert head == (f'{asked.split(",")[n // 3]}:' if n % 3 == 0 else None) and now[a] == va and now[b] == vb
        now[target] = value


@given(st.text(alphabet='abtu', max_size=30))
def test_a_step_dies_as_its_slot_is_taken(slots):
    want = []
    for n, name in enumerate(slots):
        later = [k for k in range(n + 1, len(slots)) if slots[k] == name]
        want.append(later[0] - 1 if later else len(slots) - 1)
    assert replaced(slots) == want


@pytest.mark.parametrize('wasteful', [0, 1, .5])
@pytest.mark.parametrize('calls', [(1, 1), (2, 10), (15, 15)])
def test_no_row_forgets_a_value_that_is_read_later(calls, wasteful):
    for row in program_rows(12, 3, calls, wasteful):
        assert re.sub('<reg_[0-9]+>', '', row['tagged_text']) == row['response']
        held, newest = {}, dict.fromkeys(row['prompt'][:8:2])      # register -> its step; name -> the step that set it last (None: the prompt)
        for n, (register, step) in enumerate(re.findall(r'<reg_(\d+)>([^<]*)', row['tagged_text'])):
            held[register] = n                                     # what it held is forgotten before the step is written
            for name in re.findall(r'([a-uA-O])\d', step.split(':')[-1].split('=')[0]): assert newest[name] is None or newest[name] in held.values()
            if '=' in step: newest[step.split('=')[1][0]] = n


@pytest.mark.parametrize('wasteful', [0, 1])
def test_what_a_step_reads_is_visible_under_the_training_mask(wasteful):
    tok = prepare('tiny', 'registers', layers=1, hidden=16, heads=1, kv_heads=1)[1]
    for row in program_rows(6, 4, (5, 12), wasteful):
        prompt, ids = tok.encode(row['prompt'], add_special_tokens=False), encode_steps(row['tagged_text'], tok)
        layout, words = tip_layout(prompt, ids, register_ids(tok)), [tok.decode([i]) for i in [*prompt, *ids]]
        place, seen = {name: 2 * n for n, name in enumerate('abcd')}, 0
        for n in range(len(prompt), len(words) - 1):
            name, after = words[n], words[n + 1]
            if words[n - 1] == '=': place[name] = n
            elif name in place and after.isdigit():
                assert layout.table.reads[layout.segment[n], layout.segment[place[name]]]
                seen += 1
        assert seen == 6 * row['calls'] + 1


def test_rows_are_the_same_for_the_same_seed():
    assert program_rows(5, 1) == program_rows(5, 1) != program_rows(5, 2)
    plain, other = program_rows(20, 1), program_rows(20, 1, wasteful=1.)
    assert [row['prompt'] for row in plain] == [row['prompt'] for row in other] and [row['response'] for row in plain] == [row['response'] for row in other]
    assert max(row['registers'] for row in plain) <= 7 < max(row['registers'] for row in other)


@pytest.mark.parametrize('text, right', [('Aa1+b2=t3;t3.', True), ('t3.', True), ('Aa1+b2=t3;t3', False), ('Aa1+b2=t3;', False), ('', False), ('Aa1+b2=t3;t3..', False),
                                         ('t3.Aa1', False), (';t3.', True), ('t4.', False), ('t3.;', False)])
def test_an_answer_is_its_end(text, right):
    row = dict(reference='t3.')
    assert is_right(row, text) is right and graded(row, text) == right


def test_fresh_programs_were_never_read():
    scale = TinyScale(tests={2: 9, 5: 4})
    first = fresh_rows(scale, 3)
    fresh = fresh_rows(scale, 3, [row['prompt'] for row in first[:5]])
    assert [row['calls'] for row in fresh] == [row['calls'] for row in first] == [2] * 9 + [5] * 4 and first == fresh_rows(scale, 3) != fresh_rows(scale, 4)
    assert not {row['prompt'] for row in first[:5]} & {row['prompt'] for row in fresh}


# --- decoding -----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope='module')
def engine():
    return Engine(*prepare('tiny', 'registers', layers=2, hidden=32, heads=2, kv_heads=2), slots=8192, page_size=PAGE)


@pytest.mark.parametrize('policy', ['dense', 'tip', 'streaming', 'h2o'])
def test_a_policy_holds_no_more_than_its_cap(engine, policy):
    rows, cap = fresh_rows(TinyScale(tests={2: 1, 6: 1}), 0), 100
    found = decode(engine, policy, rows, 3, {2: cap, 6: cap}, max_new_tokens=90, ignore_eos=True)
    assert [(a['calls'], a['sample']) for a in found] == [(c, s) for c in (2, 6) for s in range(3)] and all(a['tokens'] == 90 for a in found)
    for a in found:
        assert a['live'] <= a['peak'] and a['live'] <= a['dense']
        if policy in ('streaming', 'h2o'): assert a['peak'] <= cap + 2 * PAGE
        if policy == 'dense': assert a['live'] == a['dense']
    alone = decode(engine, policy, rows, 3, {2: cap, 6: cap}, max_new_tokens=90, ignore_eos=True, batch=2)
    if policy != 'h2o': assert [a['text'] for a in alone] == [a['text'] for a in found]         # (its scores are sums, which round)


def test_tables_add_up():
    answers = [dict(id=f'{c}-{n}', calls=c, sample=s, text='', correct=(n + s) % 2 == 0, tokens=10 * c, live=c + s, peak=2 * c, dense=30, pages=3, fragmentation=1.5, seconds=.5)
               for c in (2, 4) for n in range(3) for s in range(2)]
    rows = describe(answers, method='x', budget='', seed=7)
    assert [row['calls'] for row in rows] == ['all', 2, 4] and all(row['accuracy'] == 50 and row['seed'] == 7 for row in rows)
    assert rows[1]['live'] == 2.5 and rows[2]['peak'] == 8 and rows[0]['n'] == 12 and rows[0]['seconds'] == 6 and rows[0]['tokens_per_second'] == 360 / 6
    assert caps_from(answers, 'live') == {2: 2.5, 4: 4.5} and caps_from(answers, 'peak', 2) == {2: 8, 4: 16}


def fabricated(tip=99., dense=99., live=100., rival=50., grpo=(70., 99.)):
    "A table of the tiny experiment."
    point = lambda method, accuracy, live, budget='': [dict(method=method, budget=budget, calls=c, seed=s, accuracy=accuracy, live=live * (1 if c == 'all' else c / 14))
                                                       for c in ('all', 6., 14.) for s in (0., 1.)]
    rows = point('dense', dense, 300.) + point('tip', tip, live) + point('wasteful', 98., 140.) + point('grpo-0.3', grpo[1], grpo[0])
    for method in ('streaming', 'h2o'):
        for budget in ('mean', 'peak'): rows += point(method, rival, live, budget)
    return rows


@pytest.mark.parametrize('change, held', [
    (dict(), [True] * 4), (dict(tip=97.9), [False, True, True, True]), (dict(live=151.), [True, False, True, True]), (dict(rival=89.5), [True, True, False, True]),
    (dict(grpo=(120., 99.)), [True, True, True, False]), (dict(grpo=(100., 96.)), [True, True, True, False]), (dict(grpo=(139., 101.)), [True, True, True, True])])
def test_claims_follow_the_table(change, held):
    assert [c['verdict'] == 'holds' for c in tiny_claims(fabricated(**change))] == held
    assert {c['system'] for c in tiny_claims(fabricated())} == {'tip'} and tiny_claims([]) == [] == real_claims([])


def test_the_real_comparison():
    own = lambda right, live: [dict(id=str(n), correct=n % 4 < right, tokens=10, live=live, peak=live, dense=60., prompt_tokens=20, finish_reason='eos') for n in range(40)]
    rows = compare_real(dict(dense=own(2, 60.), tip=own(1, 40.)), dict(dense=[1.] * 9, tip=[1.1] * 9))
    dense, tip = rows
    assert dense['accuracy'] == 50 and tip['accuracy'] == 25 and tip['difference'] == -25 and tip['difference_low'] < -25 < tip['difference_high'] < 0
    assert dense['kept'] == 1 and tip['kept'] == .5 and tip['more_nats'] == pytest.approx(.1) and tip['ended'] == 100
    assert [c['verdict'] for c in real_claims([dict(set='gsm8k') | row for row in rows])] == ['does not hold', 'holds']


@pytest.mark.parametrize('options, words', [
    (dict(policy='lru'), '--policy lru (fix: use dense, tip, streaming, h2o)|use dense, tip'), (dict(budget=90), 'without a policy'), (dict(policy='tip', budget=90), 'have none'),
    (dict(policy='h2o'), 'have a budget'), (dict(policy='streaming', budget=20), 'a budget of 20 tokens')])
def test_what_makes_no_sense_is_refused(options, words, monkeypatch):
    monkeypatch.setattr(experiment_tip, 'fresh_rows', lambda scale, seed: program_rows(3, 1, (2, 2)))
    with pytest.raises(PastaError, match=words.replace('(', r'\(').replace(')', r'\)')) as error: evaluate_tiny(3, **options)
    assert '\n' not in str(error.value)


# --- the whole run, small -----------------------------------------------------------------------------------------------
def test_the_tiny_run_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment_tip, 'MODEL', dict(layers=1, hidden=32, heads=2, kv_heads=2, tie=True))
    monkeypatch.setattr(experiment_tip, 'START', experiment_tip.START | dict(model_options=experiment_tip.MODEL))
    monkeypatch.setattr(experiment_tip, 'GRPO', experiment_tip.GRPO | dict(batch=2, samples=2, micro_batch=4, max_new_tokens=24, slots=2048))
    monkeypatch.setattr(experiment_tip, 'request_of', partial(request_of, max_new_tokens=40))
    scale, said, table = TinyScale(plain_rows=16, rows=16, late_rows=16, calls=(1, 2), tests={2: 2}, samples=2, grpo_rows=2, lams=(.3,)), [], tmp_path / 'table.csv'
    rows = run_tiny(tmp_path / 'run', (4,), scale, table, said.append)
    assert [line.split(':')[0] for line in said] == [f'seed 4, {name}' for name in ('start', 'dense', 'tip', 'wasteful', 'grpo-0.3')]
    methods = [(row['method'], row['budget']) for row in rows if row['calls'] == 'all']
    assert methods == [('dense', ''), ('tip', ''), *((m, b) for b in ('mean', 'peak', 'twice') for m in ('streaming', 'h2o')), ('grpo-0.3', ''), ('wasteful', '')]
    assert [row['method'] for row in read_table(table)] == [row['method'] for row in rows] and load(str(tmp_path / 'run' / '4' / 'tip'))[0].pasta.registers == 16
    batches, logged = read_table(tmp_path / 'table_grpo.csv'), [row for row in read_jsonl(tmp_path / 'run' / '4' / 'grpo-0.3' / 'log.jsonl') if 'reward' in row]
    assert [(row['lam'], row['step'], row['seed']) for row in batches] == [(.3, row['step'], 4) for row in logged] and logged
    assert [row['share'] for row in batches] == pytest.approx([row['live'] for row in logged], rel=1e-4)
    assert [tuple(line.get_ydata()) for line in draw_batches(batches)[1].lines] == [tuple(row['accuracy'] for row in batches)]
    again = run_tiny(tmp_path / 'run', (4,), scale, None, said.append)
    timeless = lambda rows: [{k: v for k, v in row.items() if k not in ('seconds', 'tokens_per_second')} for row in rows]
    assert timeless(again) == timeless(rows) and len(said) == 10


SUM = 'Tom has 2 x 3 = <<2*3=6>>6 eggs.\nHe sells 4, so 6 - 4 = <<6-4=2>>2 stay.\nAt $5 each he gets 4 x 5 = $<<4*5=20>>20.\nWith 2 more: 20 + 2 = <<20+2=22>>22.\n#### 22'


def test_steps_of_a_worked_solution():
    row, = reasoning_rows([dict(id='a', prompt='Tom has eggs.', reference=SUM, answer='22')])
    assert re.sub('<reg_[0-9]+>', '', row['tagged_text']) == re.sub('<<[^>]*>>', '', SUM) and row['answer'] == '22'
    assert not list(reasoning_rows([dict(id='b', prompt='1 + 1?', reference='2', answer='2')]))


def test_the_real_path_runs_and_resumes(tmp_path, monkeypatch):
    base, table = tmp_path / 'base', tmp_path / 'table.csv'
    save(*tiny_model(layers=2, hidden=32, heads=2, kv_heads=2), base)
    source = models._source
    monkeypatch.setattr(models, '_source', lambda name, *a, **kw: str(base) if name == 'smollm2' else source(name, *a, **kw))
    questions = tmp_path / 'gsm.jsonl'
    write_jsonl(questions, [dict(question=f'Tom {n} has eggs?', answer=SUM) for n in range(8)])
    scale, said = RealScale(rows=8, limit=3, max_new_tokens=30, batch=4), []
    rows = run_real(tmp_path / 'run', scale, f'gsm8k={questions}', (f'gsm8k={questions}',), table, said.append)
    assert [row['method'] for row in rows] == ['dense', 'tip'] and rows[0]['more_nats'] == 0 and all(row['n'] == 3 and np.isfinite(row['nats']) for row in rows)
    assert len(said) == 4 and [row['method'] for row in read_table(table)] == ['dense', 'tip'] and read_table(table)[0]['set'] == 'gsm8k'
    assert run_real(tmp_path / 'run', scale, f'gsm8k={questions}', (f'gsm8k={questions}',), None, said.append) == rows


def test_nats_of_a_solution_leave_registers_out(engine):
    row, = reasoning_rows([dict(id='a', prompt='Tom?', reference=SUM, answer='22')])
    one = solution_nats(engine.model, engine.tokenizer, row, 'tip')
    never = solution_nats(engine.model, engine.tokenizer, row, 'dense')
    assert one > 0 and never > 0 and one != never

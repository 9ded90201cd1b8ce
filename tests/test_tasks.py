"Tasks: every loader on a small file of its set's shape, made prompts, the model's own, answers that resume, filters."
import json
import math
import random
import re
import time
import warnings
from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from pasta_lib import tasks
from pasta_lib.core import PastaError
from pasta_lib.engine import Engine, ar, run, strategy
from pasta_lib.jobs import Drop, read_jsonl, write_jsonl
from pasta_lib.models import chat_ids
from pasta_lib.pasta import pasta
from pasta_lib.pool import PoolFull, check_pool
from pasta_lib.tasks import (KINDS, MANNERS, MOST_MADE, READERS, SOURCES, TEMPLATES, TOPICS, Seen, TaskError, answer_row, draw_prompts, final_number, flow, number_text,
                             in_order, load_prompts, loop_share, made_prompts, messages, row_seed, sample_answers, self_prompts, usable,
                             usable_answer, usable_prompt, user_turn)


@pytest.fixture
def engine(tiny): return Engine(*tiny, slots=2048)


# the number at the end

@pytest.mark.parametrize('text, number', [
    ('#### 1,234', 1234), ('#### 1,234,567.5', 1234567.5), ('####18', 18), ('#### -3', -3), ('#### \u22123', -3), ('#### $-5', -5),
    ('#### -$5.25', -5.25), ('#### **42**', 42), ('####\n7', 7), ('#### 5 apples and 6 pears', 5), ('#### 20%', 20), ('#### .5', .5),
    ('x #### 3 y #### 4', 4), ('#### none, so 9', 9), ('#### Step 4: add\nThe answer is 12.', 12),
    (r'\boxed{7}', 7), (r'$\boxed{\frac{3}{4}}$ of 10', .75), (r'\boxed{x = 1{,}200\text{ cm}}', 1200), (r'\boxed{5} then \boxed{6} of 7', 6),
    (r'\boxed{\$12.50}', 12.5), (r'\boxed{\dfrac{6}{3}}', 2), (r'\boxed{{3}}', 3), (r'\boxed{8', None), (r'\boxed{7} or \boxed{8', None), (r'the answer: 5\boxed{', None), (r'\boxed{} so 4', 4), (r'\boxed{1\,024}', 1024),
    ('The answer is 5 because 3 + 2.', 5), ('the final answer is: **$18** per 3 days', 18), ('Answer: -7. (Not 8.)', -7), ('ANSWER = 2.5 of 9', 2.5),
    ('The answer is 3. No, the answer is 4, I checked 10 times.', 4),
    ('She has 12.', 12), ('He pays 12, not more', 12), ('1,2345', 2345), ('lists 1, 2, 3', 3), ('3-4', 4), ('from 5 - 3', 3), ('it is -3 degrees', -3),
    ('(7)', 7), ('a-5', 5), ('H2O', None), ('x=5', 5), ('1/2', .5), ('6 / 3', 2), ('3/0', 3), ('£1,000 a year', 1000), ('18km', 18), ('the 5th', 5),
    ('007', 7), ('12345678901234567890', 12345678901234567890), ('3.0', 3), ('', None), ('none', None), ('...', None), ('\u0665', 5)])
def test_final_number(text, number):
    found = final_number(text)
    assert found == number and type(found) is type(number)


@settings(max_examples=100, deadline=None)
@given(st.integers(-10 ** 7, 10 ** 7), st.integers(0, 99), st.sampled_from(['#### {}', '\\boxed{{{}}}', 'The answer is {}.', 'so {}', 'costs {} dollars']))
def test_final_number_reads_what_was_written(whole, cents, frame):
    assert final_number(frame.format(f'{whole:,}')) == final_number(frame.format(whole)) == whole
    assert final_number(frame.format(f'{whole:,}.{cents:02}')) == float(f'{whole}.{cents:02}')


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet='0123456789.,-/$#{}\\boxedfrac answer is:'))
def test_final_number_takes_any_text(text):
    found, written = final_number(text), number_text(text)
    assert isinstance(found, (int, float, type(None))) and (written is None or final_number(written) == found)


@pytest.mark.parametrize('text, written', [
    ('so 50%', '50%'), (r'so 50\%.', '50%'), ('so 50 % of it', '50%'), ('$1,200 each', '1,200'), ('so \u22123', '-3'), ('is 3/4', '3/4'), (r'\frac{3}{4}', '3/4'),
    ('12:30', None), ('2x+1', None), ('2 * 3', None), ('2*3 = 6', '6'), ('Answer: 5', '5'), (r'\boxed{7', None), ('none', None), ('9' * 301, None)])
def test_numbers_as_they_are_written(text, written): assert number_text(text) == written


@pytest.mark.parametrize('text', ['9' * 5000, '9' * 400 + '.5', '1/' + '9' * 5000, '#### ' + '9' * 5000, '\\boxed{' + '9' * 301 + '}', '.' + '9' * 5000])
def test_numbers_that_nothing_holds(text): assert final_number(text) is None


def test_the_longest_number():
    assert final_number('9' * 300) == int('9' * 300) and final_number('so 3, not ' + '9' * 400) is None and final_number('9' * 300 + '.5') is None
    assert final_number('9' * 298 + '.5') == float('9' * 298)


# public sets

TALK = [dict(value='Be brief.', weight=None, **{'from': 'system'}), dict(value=' Why? ', weight=0.0, **{'from': 'human'}),
        dict(value='Because.', weight=1.0, **{'from': 'gpt'})]
SETS = dict(
    slimorca=([dict(conversations=TALK), dict(conversations=TALK[1:2] + [TALK[2] | dict(weight=None)])],
              [dict(id='slimorca-0', prompt='Why?', reference='Because.', source='slimorca', weight=1.0, system='Be brief.'),
               dict(id='slimorca-1', prompt='Why?', reference='Because.', source='slimorca')]),
    alpaca_eval=([dict(instruction='Sing.', output='La.', generator='davinci', dataset='koala')],
                 [dict(id='alpaca_eval-0', prompt='Sing.', reference='La.', source='alpaca_eval', category='koala')]),
    vicuna80=([dict(question_id=81, category='math', turns=['One?', 'Two?'], reference=['1', '2']), dict(question_id=9, category='roleplay', turns=['Hi'], reference=[])],
              [dict(id='vicuna80-81', prompt='One?', reference='1', source='vicuna80', category='math', turns=['One?', 'Two?']),
               dict(id='vicuna80-9', prompt='Hi', reference=None, source='vicuna80', category='roleplay')]),
    gsm8k=([dict(question='2+2?', answer='It is <<2+2=4>>4.\n#### 1,004')],
           [dict(id='gsm8k-0', prompt='2+2?', reference='It is <<2+2=4>>4.\n#### 1,004', source='gsm8k', answer=1004)]),
    self_instruct=([dict(id='seed_task_3', name='n', instruction='Do.', instances=[dict(input='this', output='done')], is_classification=False),
                    dict(id='seed_task_4', name='m', instruction='Do!', instances=[dict(input='', output='ok')], is_classification=False)],
                   [dict(id='self_instruct-seed_task_3', prompt='Do.\n\nthis', reference='done', source='self_instruct', category='n'),
                    dict(id='self_instruct-seed_task_4', prompt='Do!', reference='ok', source='self_instruct', category='m')]),
    math500=([dict(problem='x?', solution='1', answer='1', subject='Algebra', unique_id='test/1.json')],
             [dict(id='math500-test/1.json', prompt='x?', reference='1', source='math500', answer='1', category='Algebra')]),
    prompts=([dict(id='a', prompt=' Hello ', reference=None, source='mine', kind='prose')],
             [dict(id='a', prompt='Hello', reference=None, source='mine', kind='prose')]))


@pytest.mark.parametrize('name', SETS)
@pytest.mark.parametrize('named', [True, False])
def test_each_set(tmp_path, name, named):
    rows, want = SETS[name]
    write_jsonl(tmp_path / 'some.jsonl', rows)
    assert load_prompts(f'{name}={tmp_path}/some.jsonl' if named else tmp_path / 'some.jsonl') == want


def test_the_user_oriented_format(tmp_path):
    row = dict(id='user_oriented_task_0', motivation_app='Mail', instruction='Write.', instances=[dict(input='', output='x')])
    write_jsonl(tmp_path / 'a.jsonl', [row])
    assert load_prompts(tmp_path / 'a.jsonl')[0]['category'] == 'Mail'


@pytest.mark.parametrize('kind', ['json', 'parquet', 'csv', 'folder'])
def test_file_types(tmp_path, kind):
    import datasets
    rows, want = SETS['gsm8k']
    path = tmp_path / f'set.{kind}'
    if kind == 'json': path.write_text(json.dumps(rows))
    elif kind == 'folder':
        path.mkdir()
        write_jsonl(path / 'train.jsonl', rows)
        write_jsonl(path / 'test.jsonl', [dict(question='Other?', answer='#### 1')])
        assert load_prompts(path, split='test')[0]['answer'] == 1
    else: getattr(datasets.Dataset.from_list(rows), f'to_{kind}')(str(path))
    assert load_prompts(path) == want


@pytest.mark.parametrize('name, split', [('slimorca', 'train'), ('gsm8k', 'test'), ('alpaca_eval', 'train'), ('vicuna80', 'train'), ('self_instruct', 'train')])
def test_names_of_the_hub_with_a_folder_in_its_place(tmp_path, monkeypatch, name, split):
    rows, want = SETS[name]
    write_jsonl(tmp_path / f'{split}.jsonl', rows)
    if SOURCES[name]['path'] == 'json': where = SOURCES[name] | dict(data_files=str(tmp_path / f'{split}.jsonl'))
    else: where = {k: v for k, v in SOURCES[name].items() if k != 'name'} | dict(path=str(tmp_path))
    monkeypatch.setitem(SOURCES, name, where)
    assert load_prompts(name) == want


def test_hub_out_of_reach(monkeypatch):
    import datasets
    def fails(*a, **kw): raise ConnectionError('no route\nto host')
    monkeypatch.setattr(datasets, 'load_dataset', fails)
    with pytest.raises(TaskError, match='gsm8k: no route.*write gsm8k=PATH'): load_prompts('gsm8k')


def test_limit(tmp_path):
    write_jsonl(tmp_path / 'a.jsonl', [dict(question=f'{i}?', answer=f'#### {i}') for i in range(50)])
    everything = load_prompts(tmp_path / 'a.jsonl')
    some = load_prompts(tmp_path / 'a.jsonl', limit=10)
    assert len(some) == 10 and some == [r for r in everything if r in some]
    assert some == load_prompts(tmp_path / 'a.jsonl', limit=10) != load_prompts(tmp_path / 'a.jsonl', limit=10, seed=1)
    assert load_prompts(tmp_path / 'a.jsonl', limit=99) == everything
    for wrong in (0, -1):
        with pytest.raises(PastaError, match=f'limit={wrong}: at least 1'): load_prompts(tmp_path / 'a.jsonl', limit=wrong)
    assert len({r['id'] for r in everything}) == 50


def test_rows_without_a_prompt(tmp_path):
    write_jsonl(tmp_path / 'a.jsonl', [dict(conversations=TALK[:1]), dict(conversations=TALK), dict(conversations=[])])
    with pytest.warns(UserWarning, match='2 of 3 rows'): rows = load_prompts(tmp_path / 'a.jsonl')
    assert [r['id'] for r in rows] == ['slimorca-1']
    write_jsonl(tmp_path / 'b.jsonl', [dict(prompt=None), dict(prompt='  '), dict(prompt='x')])
    with pytest.warns(UserWarning): assert [r['id'] for r in load_prompts(tmp_path / 'b.jsonl')] == ['b-2']
    write_jsonl(tmp_path / 'c.jsonl', [dict(conversations=[dict(value='a', **{'from': 'human'}), dict(value='b', **{'from': 'human'})])])
    assert load_prompts(tmp_path / 'c.jsonl')[0]['reference'] is None


def test_errors_name_what_was_found(tmp_path):
    path = tmp_path / 'a.jsonl'
    write_jsonl(path, [dict(frage='x', antwort='y')])
    for source in (path, f'gsm8k={path}'):
        with pytest.raises(TaskError, match='columns frage, antwort.*question and answer'): load_prompts(source)
    with pytest.raises(TaskError, match='no such prompt set.*vicuna80'): load_prompts('vicuna8')
    with pytest.raises(TaskError, match='no such prompt set'): load_prompts(f'gsm8k={tmp_path}/none.jsonl')
    path.write_text('{"question": "x", "ans\n')
    with pytest.raises(TaskError, match="can't read"): load_prompts(path)
    path.write_text('')
    with pytest.raises(TaskError, match='an empty file .*a.jsonl.*a row a line'): load_prompts(path)
    (tmp_path / 'a.txt').write_text('x')
    with pytest.raises(TaskError, match="type '.txt'.*jsonl"): load_prompts(tmp_path / 'a.txt')


def test_a_path_with_an_equals_sign(tmp_path):
    folder = tmp_path / 'x=1'
    folder.mkdir()
    write_jsonl(folder / 'a.jsonl', SETS['gsm8k'][0])
    assert load_prompts(folder / 'a.jsonl') == load_prompts(f'gsm8k={folder}/a.jsonl') == SETS['gsm8k'][1]


# made prompts

def test_made_prompts_are_deterministic_and_distinct():
    rows = made_prompts(2000)
    assert rows[:100] == made_prompts(100) != made_prompts(100, seed=1)
    assert len({r['prompt'] for r in rows}) == len({r['id'] for r in rows}) == 2000
    assert len({r['prompt'].lower() for r in rows}) == 2000
    assert set(rows[0]) == {'id', 'prompt', 'reference', 'source', 'kind'}
    share = Counter(r['kind'] for r in rows)
    assert set(share) == set(KINDS) and sum(KINDS.values()) == pytest.approx(1)
    for kind, want in KINDS.items(): assert share[kind] / 2000 == pytest.approx(want, abs=.05)
    assert all(usable_prompt(r['prompt']) == r['prompt'] for r in rows if r['kind'] != 'maths')


def test_there_are_enough_topics_and_templates():
    assert all(len(set(topics)) == len(topics) for topics in TOPICS.values()) and sum(map(len, TOPICS.values())) >= 150
    assert len(TEMPLATES['parts'].splitlines()) >= 15 and sum(len(t.splitlines()) for t in TEMPLATES.values()) >= 25
    assert all(topic == topic.strip() and topic and '  ' not in topic for topics in TOPICS.values() for topic in topics)
    assert not [r['prompt'] for r in made_prompts(1500) if re.search(r'[{}]|  |\n', r['prompt'])]


def test_one_seed_does_not_touch_the_global_one():
    random.seed(5)
    state = random.getstate()
    made_prompts(20)
    assert random.getstate() == state


def test_more_prompts_than_there_are():
    start = time.perf_counter()
    for n in (MOST_MADE + 1, 10 ** 9):
        with pytest.raises(TaskError, match=f'{MOST_MADE} at most.*ask for fewer'): made_prompts(n)
    assert time.perf_counter() - start < 1
    for n in (0, -3):
        with pytest.raises(PastaError, match='at least 1'): made_prompts(n)


def test_the_most_is_what_some_kind_allows():
    "Counted over templates, topics and manners: the scarcest kind's texts are all there for so many prompts, and not for many more."
    def count(kind):
        fields = [set(re.findall(r'{(\w+)}', template)) for template in TEMPLATES[kind].splitlines()]
        return len(set(MANNERS[kind])) * sum(math.prod(4 if f == 'n' else len(TOPICS[f]) for f in names) for names in fields)
    least = min(count(kind) / KINDS[kind] for kind in TEMPLATES)
    assert .9 * least < MOST_MADE <= least


def test_maths_answers_are_right():
    "Each reference from the numbers in the text, by a second reading of the problem."
    solve = [(r'(\d+) \w+ at (\d+) dollars each and has a voucher for (\d+)', lambda a, b, h: a * b - h),
             (r'(\d+) boxes of \w+ with (\d+) in each. It sells (\d+) boxes', lambda a, b, c: a * b - b * c),
             (r'reads (\d+) pages a weekday and (\d+) more', lambda b, c: 20 * b + 8 * (b + c)),
             (r'travels (\d+) kilometres every (\d+) minutes.*in (\d+) hours', lambda a, b, hours: a * (hours * 60) // b),
             (r'bags of (\d+). After filling (\d+) bags, (\d+) are', lambda b, a, c: a * b + c),
             (r'earns (\d+) dollars an hour and works (\d+) hours a day.*in (\d+) days', lambda a, b, c: a * b * c),
             (r'garden of (\d+) by (\d+) metres.*gate of (\d+)', lambda a, b, h: a + a + b + b - h),
             (r'has (\d+) \w+\. \w+ has (\d+) times as many, and gives (\d+) away', lambda a, b, h: a * b - h),
             (r'holds (\d+) litres more than (\d+) buckets of (\d+)', lambda a, h, b: a + h * b),
             (r'^(\d+) friends bring (\d+)', lambda b, a: (a * b) % (b + 1))]
    used = Counter()
    for row in (r for r in made_prompts(2500, seed=3) if r['kind'] == 'maths'):
        (n, found), = [(n, m) for n, (pattern, _) in enumerate(solve) if (m := re.search(pattern, row['prompt']))]
        used[n] += 1
        assert int(row['reference']) == solve[n][1](*map(int, found.groups())) >= 0
    assert len(used) == len(solve) == len(tasks._MATHS)


# filters

def brute_loop_share(text, n):
    words, again = re.findall(r'\w+|[^\w\s]', text), 0
    grams = [tuple(words[i:i + n]) for i in range(len(words) - n + 1)]
    for i, gram in enumerate(grams): again += gram in grams[:i]
    return again / len(grams) if grams else 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(['a', 'b', 'cat', '.']), max_size=40).map(' '.join), st.integers(1, 7))
def test_loop_share_by_definition(text, n): assert loop_share(text, n) == pytest.approx(brute_loop_share(text, n))


def test_loop_share_of_plain_cases():
    assert loop_share('') == loop_share('one two three') == 0
    assert loop_share('It goes on. ' * 30) > .95 and loop_share('ab' * 200) > .95 and loop_share('好的' * 100) > .95
    assert loop_share(' '.join(r['prompt'] for r in made_prompts(30))) < .15


LONG = ' '.join(f'word{i}' for i in range(30))


@pytest.mark.parametrize('text, finish, reason', [
    (LONG, 'eos', None), (LONG, 'end', None), (LONG, 'stop', None), (LONG, 'length', 'cut by length'), (LONG, 'pool_full', 'cut by length'),
    ('', 'eos', 'empty'), (' \n', 'length', 'empty'), ('Yes.', 'eos', 'too short'), (LONG + ' so be it and so on now' * 5, 'eos', 'loops'),
    ('so be it ' * 30, 'length', 'loops')])
def test_usable_answer(text, finish, reason):
    row = dict(id='a', text=text, finish_reason=finish)
    if reason is None: assert usable_answer(row) is row
    else:
        with pytest.raises(Drop) as e: usable_answer(row)
        assert e.value.reason == reason
    assert usable([row] * 3) == ([row] * 3, {}) if reason is None else ([], {reason: 3})


@pytest.mark.parametrize('row', [dict(text=None), dict(text=['a', 'list']), dict(text=5), {}, dict(response=None), dict(text=None, response=[])])
def test_an_answer_that_is_no_text(row):
    with pytest.raises(Drop) as e: usable_answer(dict(id='a', finish_reason='eos') | row)
    assert e.value.reason == 'no response'
    assert usable_answer(dict(response=LONG, text=None, finish_reason='eos'))


def test_usable_limits():
    row = dict(text='Yes, it is.', finish_reason='eos')
    assert usable_answer(row, words=3) is row
    assert usable([row, dict(text='', finish_reason='eos'), row]) == ([], {'too short': 2, 'empty': 1})
    assert usable([row], lambda r: usable_answer(r, words=1)) == ([row], {})


@pytest.mark.parametrize('text, reason', [
    ('What do owls eat at night?', None), ('  What do owls eat?\n', None), ('', 'empty'), ('Hi there', 'too short'), ('word ' * 121, 'too long'),
    ('Что едят совы ночью в лесу?', 'not English'), ('1 + 2 + 3 + 4 = 10 ; 5', 'few letters'), ('tell me more and tell me more and tell me more', 'repeats itself'),
    ("I'm sorry, but I can't do that.", 'refuses'), ('As an AI language model, I think', 'refuses'), ('I cannot open this file for you', 'refuses'),
    ('I can answer all these questions, can you?', None),
    ('Sure, here is a poem about owls', 'speaks as the assistant'), ("Here's a list of owls for you", 'speaks as the assistant'),
    ('How can I help you today?', 'speaks as the assistant'), ('How can I bake bread at home?', None), ('Hello! How may I assist you today?', 'speaks as the assistant'),
    ('Summarise the following text for me:', 'unfinished'), ('Hereby I ask you what owls eat', None)])
def test_usable_prompt(text, reason):
    if reason is None: assert usable_prompt(text) == text.strip()
    else:
        with pytest.raises(Drop) as e: usable_prompt(text)
        assert e.value.reason == reason


def pairs(text):
    words = ['', *re.findall(r'\w+', text.lower()), '']
    return set(zip(words, words[1:]))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.sampled_from('abcd'), max_size=6).map(' '.join), max_size=12), st.sampled_from([.2, .5, .9, 1.]))
def test_seen_against_all_pairs(texts, similar):
    seen, kept = Seen(similar), []
    for text in texts:
        nearest = max((len(pairs(text) & pairs(k)) / len(pairs(text) | pairs(k)) for k in kept), default=0)
        assert seen.nearest(text) == pytest.approx(nearest)
        assert seen.add(text) == (nearest <= similar)
        if nearest <= similar: kept.append(text)
    assert len(seen) == len(kept)


# answers

PROMPTS = [dict(id=f'p{i}', prompt=f'prompt number {i}', reference=None, source='test', kind='prose') for i in range(5)]


def sample(engine, prompts, out, **kw):
    return sample_answers(engine, prompts, out=out, progress=False, **dict(max_new_tokens=12) | kw)


def by_key(path): return {(r['id'], r['sample']): r for r in read_jsonl(path)}


@pytest.mark.parametrize('name', ['ar', 'pasta'])
def test_answers_are_what_the_engine_says(engine, tmp_path, name):
    report = sample(engine, PROMPTS, tmp_path / 'a.jsonl', n=3, strategy=name, seed=4, batch=4, top_k=20)
    assert (report.rows, report.written, report.dropped, report.resumed) == (15, 15, {}, 0)
    make = dict(ar=ar, pasta=pasta)[name]
    for (id, s), row in by_key(tmp_path / 'a.jsonl').items():
        result, = run(engine, [make(row['prompt'], temperature=1.0, max_new_tokens=12, top_k=20, seed=row['seed'])])
        assert row['seed'] == row_seed(4, id, s)
        for field in ('text', 'tagged_text', 'finish_reason', 'token_ids', 'generated_tokens', 'critical_path', 'parallelism', 'forks'):
            assert row[field] == getattr(result, field), field
        assert {k: row[k] for k in PROMPTS[0] if k not in ('id', 'prompt')} == dict(reference=None, source='test', kind='prose')
    assert len({r['seed'] for r in by_key(tmp_path / 'a.jsonl').values()}) == 15
    check_pool(engine.pool)
    assert engine.pool.pages.free == len(engine.pool.pages)


def test_batch_shards_and_order_change_nothing(engine, tmp_path):
    sample(engine, PROMPTS, tmp_path / 'a.jsonl', n=2, batch=1)
    sample(engine, PROMPTS[::-1], tmp_path / 'b.jsonl', n=2, batch=7)
    for i in (1, 2): sample(engine, PROMPTS, tmp_path / 'c.jsonl', n=2, batch=3, shard=f'{i}/2')
    assert by_key(tmp_path / 'a.jsonl') == by_key(tmp_path / 'b.jsonl') == by_key(tmp_path / 'c.jsonl')


def test_resumed_by_id_and_sample(engine, tmp_path):
    out = tmp_path / 'a.jsonl'
    whole = sample(engine, PROMPTS, tmp_path / 'whole.jsonl', n=3)
    sample(engine, PROMPTS[:2], out, n=2)
    report = sample(engine, PROMPTS, out, n=3)
    assert (report.written, report.resumed) == (11, 4) and whole.written == 15
    assert by_key(out) == by_key(tmp_path / 'whole.jsonl') and len(read_jsonl(out)) == 15


def test_interrupted_in_the_middle(engine, tmp_path):
    out, calls = tmp_path / 'a.jsonl', []
    def stop(ids, logits):
        calls.append(1)
        if len(calls) == 60: raise KeyboardInterrupt
        return logits
    try: sample(engine, PROMPTS, out, n=3, batch=2, processors=(stop,))
    except KeyboardInterrupt: pass
    done = len(read_jsonl(out))
    assert done < 15
    check_pool(engine.pool)
    sample(engine, PROMPTS, out, n=3, batch=2)
    sample(engine, PROMPTS, tmp_path / 'whole.jsonl', n=3)
    got, want = by_key(out), by_key(tmp_path / 'whole.jsonl')
    assert got.keys() == want.keys()
    assert all(got[k]['token_ids'] == want[k]['token_ids'] for k in list(want)[done:])


def test_samples_of_one_prompt_share_its_prefix(tiny, tmp_path):
    long, rows = [dict(id='p', prompt='a long prompt ' * 30)], []
    for name, share in (('a', True), ('b', False)):
        engine, read = Engine(*tiny, slots=4096, share_prefix=share), []
        answer = engine.answer
        engine.answer = lambda placed, wanted: (read.append(sum(len(p.tokens) for p in placed)), answer(placed, wanted))[1]
        sample(engine, long, tmp_path / f'{name}.jsonl', n=6, batch=6, max_new_tokens=4)
        rows.append(sum(read))
    prompt = len(chat_ids(tiny[1], long[0]['prompt']))
    assert rows[1] - rows[0] == 5 * (prompt // 64 * 64)
    tokens = {k: r['token_ids'] for k, r in by_key(tmp_path / 'a.jsonl').items()}
    assert tokens == {k: r['token_ids'] for k, r in by_key(tmp_path / 'b.jsonl').items()}


def test_a_system_message(tiny):
    assert messages(dict(prompt='x')) == messages(dict(prompt='x', system='')) == messages(dict(prompt='x', system=None)) == 'x'
    assert messages(dict(prompt='x', system='y')) == [dict(role='system', content='y'), dict(role='user', content='x')]


def test_prompts_that_can_not_be_asked_are_dropped(engine, tmp_path):
    rows = [dict(id='odd', prompt='\ud800'), dict(id='small', prompt='x'), dict(id='number', prompt=5), dict(id='empty', prompt='')]
    report = sample(engine, rows, tmp_path / 'a.jsonl')
    assert report.written == 2 and report.dropped == {'error': 2}
    drops = {row['id']: row for row in read_jsonl(tmp_path / 'a.jsonl.dropped.jsonl')}
    assert drops.keys() == {'odd', 'number'} and 'type int' in drops['number']['detail']
    assert drops['odd']['made_by'] == dict(strategy='ar', temperature=1.0, max_new_tokens=12)


@pytest.mark.parametrize('batch', [1, 8])
def test_settings_that_fail_mark_no_row(engine, tmp_path, batch):
    out = tmp_path / 'a.jsonl'
    for _ in range(2):
        with pytest.raises(PastaError, match="unknown grammar 'bogus'"): sample(engine, PROMPTS, out, strategy='pasta', grammar='bogus', batch=batch)
        assert read_jsonl(out) == [] and [p.name for p in tmp_path.iterdir()] == ['a.jsonl']
    check_pool(engine.pool)
    assert engine.pool.pages.free == len(engine.pool.pages)
    assert sample(engine, PROMPTS, out, strategy='pasta', grammar='off', batch=batch).written == 5


def test_a_strategy_with_a_mistake_stops_the_job(engine, tmp_path):
    @strategy
    def broken(h):
        if 'number 3' in h.request.prompt: raise ValueError('my mistake')
        yield from ar.generator(h)
    with pytest.raises(ValueError, match='my mistake'): sample(engine, PROMPTS, tmp_path / 'a.jsonl', strategy=broken, batch=1)
    assert [row['id'] for row in read_jsonl(tmp_path / 'a.jsonl')] == ['p0', 'p1', 'p2'] and not list(tmp_path.glob('*.dropped.jsonl'))


def test_a_prompt_larger_than_the_pool_stops_the_job(tiny, tmp_path):
    engine, out = Engine(*tiny, slots=128), tmp_path / 'a.jsonl'
    rows = [dict(id='small', prompt='x'), dict(id='big', prompt='x' * 500), dict(id='last', prompt='y')]
    with pytest.raises(PoolFull, match=r'pool of 128 slots.*Engine\(slots=…\)'): sample(engine, rows, out, batch=1)
    assert [row['id'] for row in read_jsonl(out)] == ['small'] and not list(tmp_path.glob('*.dropped.jsonl'))
    assert sample(Engine(*tiny, slots=1024), rows, out).written == 2


def test_a_full_pool_cuts_an_answer(tiny, tmp_path):
    engine, rows = Engine(*tiny, slots=128), [dict(id='big', prompt='x' * 500), dict(id='small', prompt='x')]
    sample(engine, rows[1:2], tmp_path / 'b.jsonl', max_new_tokens=500, ignore_eos=True)
    row, = read_jsonl(tmp_path / 'b.jsonl')
    assert row['finish_reason'] == 'pool_full' and row['text'] and usable([row])[1] in ({'cut by length': 1}, {'loops': 1})


def test_answers_come_before_failures(tiny):
    "Of requests that end in one turn, the failed one is told last, so that the others are kept."
    engine = Engine(*tiny, slots=128)
    asked = [(dict(n=0), ar('x' * 500)), (dict(n=1), ar('x', max_new_tokens=1))]
    assert [row['n'] for row, _ in flow(engine, asked, 2)] == [1, 0]


def test_settings_are_not_mixed(engine, tmp_path):
    out = tmp_path / 'a.jsonl'
    sample(engine, PROMPTS[:2], out, made_by=dict(model='tiny'), top_k=20, stop=['x'])
    assert read_jsonl(out)[0]['made_by'] == dict(strategy='ar', top_k=20, stop=['x'], temperature=1.0, max_new_tokens=12, model='tiny')
    for change, said in ((dict(top_k=5), 'top_k was 20 and is now 5'), (dict(max_new_tokens=9), 'max_new_tokens was 12'), (dict(strategy='pasta'), "strategy was 'ar'"),
                         (dict(made_by=dict(model='other')), "model was 'tiny'"), (dict(temperature=.5), 'temperature was 1.0')):
        with pytest.raises(PastaError, match=said): sample(engine, PROMPTS, out, **dict(made_by=dict(model='tiny'), top_k=20, stop=['x']) | change)
    assert sample(engine, PROMPTS, out, made_by=dict(model='tiny'), top_k=20, stop=('x',), batch=1).resumed == 2
    assert all(row['made_by']['model'] == 'tiny' for row in read_jsonl(out))


def test_a_strategy_of_ones_own(engine, tmp_path):
    @strategy
    def shout(h):
        yield from ar.generator(h)
    assert sample(engine, PROMPTS[:1], tmp_path / 'a.jsonl', strategy=shout, temperature=0).written == 1


def test_wrong_wishes(engine, tmp_path):
    with pytest.raises(TaskError, match="no strategy 'tip'.*ar, pasta"): sample(engine, PROMPTS, tmp_path / 'a.jsonl', strategy='tip')
    with pytest.raises(TaskError, match='all the same'): sample(engine, PROMPTS, tmp_path / 'a.jsonl', n=2, temperature=0)
    with pytest.raises(PastaError, match='no option'): sample(engine, PROMPTS, tmp_path / 'a.jsonl', warmth=3)
    for wrong, said in ((dict(n=0), 'n=0: at least 1'), (dict(n=-3), 'n=-3'), (dict(batch=0), 'batch=0'), (dict(batch=-1), 'batch=-1')):
        with pytest.raises(PastaError, match=said): sample(engine, PROMPTS, tmp_path / 'b.jsonl', **wrong)
        with pytest.raises(PastaError, match=said): self_prompts(engine, wrong.get('n', 1), out=tmp_path / 'b.jsonl', batch=wrong.get('batch', 1))
    for row, said in ((dict(prompt='x'), "without 'id' .row 6 has prompt"), (dict(id='x', text='y'), "without 'prompt' .row 6 has id, text"), ({}, 'has nothing')):
        with pytest.raises(TaskError, match=said): sample(engine, PROMPTS + [row], tmp_path / 'b.jsonl')
    assert [p.name for p in tmp_path.iterdir()] == ['a.jsonl']


@pytest.mark.parametrize('batch', [1, 2, 3, 9])
def test_flow_keeps_that_many_in_flight(engine, batch):
    asked, seen = [], []
    def requests():
        for i in range(7):
            asked.append(i)
            yield dict(n=i), ar('x', max_new_tokens=2 + 3 * (i % 3), ignore_eos=True)
    for row, result in flow(engine, requests(), batch):
        seen.append(row['n'])
        assert len(asked) - len(seen) < batch + 1
        assert result.generated_tokens == 2 + 3 * (row['n'] % 3)
    assert sorted(seen) == list(range(7)) and list(flow(engine, [], 3)) == []
    with pytest.raises(PastaError, match='batch=0'): next(flow(engine, requests(), 0))


def test_a_stopped_flow_gives_its_pages_back(engine):
    free = engine.pool.pages.free
    stream = flow(engine, [({}, ar('x', max_new_tokens=5 + 50 * i, ignore_eos=True)) for i in range(4)], 4)
    next(stream)
    stream.close()
    assert engine.pool.pages.free == free


def test_in_order(engine):
    asked = [(dict(n=i), ar('x', max_new_tokens=9 - i, ignore_eos=True)) for i in range(6)]
    assert [row['n'] for row, _ in flow(engine, asked, 6)] != list(range(6))
    assert [row['n'] for row, _ in in_order(flow(engine, asked, 4))] == list(range(6))


def test_row_seeds():
    assert row_seed(0, 'a', 1) == row_seed(0, 'a', 1) != row_seed(0, 'a', 2)
    assert len({row_seed(0, f'p{i}', s) for i in range(300) for s in range(10)}) == 3000
    assert all(0 <= row_seed(i) < 2 ** 31 for i in range(100))


# prompts from the model itself

def test_user_turn(tiny):
    ids, ending = user_turn(tiny[1])
    assert tiny[1].decode(ids) == '<|user|>' and ending == '<|end|>'


def test_templates_that_do_not_fit(tiny):
    class Tok:
        chat_template = None
        def apply_chat_template(self, turns, tokenize): return 'no user here'
    with pytest.raises(TaskError, match='no chat template'): user_turn(Tok())
    Tok.chat_template = 'x'
    with pytest.raises(TaskError, match="doesn't say"): user_turn(Tok())


SAID = ['How do owls hunt at night?', 'How do owls hunt at night', 'Hi', 'Sure, here are five tips for you.', 'Name the parts of a violin.', '', 'Why is the sea salty, really?',
        'What makes bread rise in the oven?', 'Tell me about the oldest bridge in town.', 'How far away is the nearest star?']


@pytest.fixture
def speaker(tiny, monkeypatch):
    "An engine whose attempt k says SAID[k]: the script takes the place of the model's draws."
    engine, made = Engine(*tiny, slots=2048), tasks.ar
    def scripted(prompt, seed, **options):
        scripted.asked += 1
        text = scripted.said[seed]
        ids = tiny[1].encode(text, add_special_tokens=False) + [tiny[1].eos_token_id]
        return made(prompt, seed=seed, **options, script=dict(main=ids))
    scripted.asked, scripted.said = 0, SAID
    monkeypatch.setattr(tasks, 'ar', scripted)
    monkeypatch.setattr(tasks, 'row_seed', lambda kind, id: int(id.split('-')[-1]))
    engine.scripted = scripted
    return engine


def test_self_prompts_judges_in_order(speaker, tmp_path):
    for batch in (1, 3, 10):
        out = tmp_path / f'{batch}.jsonl'
        report = self_prompts(speaker, 4, out=out, batch=batch, progress=False, attempts=10)
        assert [r['prompt'] for r in read_jsonl(out)] == [SAID[i] for i in (0, 4, 6, 7)]
        assert report.written == 4 and report.dropped == {'near duplicate': 1, 'too short': 1, 'speaks as the assistant': 1, 'empty': 1}
    made_by = dict(temperature=1.0, top_k=100, max_new_tokens=128, similar=.5)
    assert read_jsonl(out)[1] == dict(id='self-0-4', prompt=SAID[4], reference=None, source='self', seed=4, made_by=made_by)
    with pytest.raises(PastaError, match='similar was 0.5'): self_prompts(speaker, 5, out=out, similar=.9, progress=False)
    assert [r['reason'] for r in read_jsonl(f'{out}.dropped.jsonl')][0] == 'near duplicate'


def test_self_prompts_resumes(speaker, tmp_path):
    out = tmp_path / 'a.jsonl'
    self_prompts(speaker, 2, out=out, batch=2, progress=False, attempts=10)
    before = speaker.scripted.asked
    report = self_prompts(speaker, 5, out=out, batch=2, progress=False, attempts=10)
    assert [r['prompt'] for r in read_jsonl(out)] == [SAID[i] for i in (0, 4, 6, 7, 8)]
    assert (report.written, report.resumed) == (3, 5) and before >= 5
    assert self_prompts(speaker, 5, out=out, progress=False, attempts=10).rows == 0


def test_self_prompts_gives_up(speaker, tmp_path):
    report = self_prompts(speaker, 50, out=tmp_path / 'a.jsonl', progress=False, attempts=10)
    assert (report.rows, report.written) == (10, 6)


def test_self_prompts_cut_or_failed(speaker, tmp_path):
    speaker.scripted.said = ['How do owls hunt at night, and why? ' * 3] + SAID
    report = self_prompts(speaker, 1, out=tmp_path / 'a.jsonl', batch=1, progress=False, attempts=2, max_new_tokens=60)
    assert report.dropped == {'too long': 1} and report.written == 1
    small = Engine(speaker.model, speaker.tokenizer, slots=64)
    report = self_prompts(small, 1, out=tmp_path / 'b.jsonl', batch=1, progress=False, attempts=1, max_new_tokens=300)
    assert report.written == 0 and sum(report.dropped.values()) == 1


@pytest.mark.smollm2
def test_smollm2_asks_in_english(smollm2, tmp_path):
    engine = Engine(*smollm2, slots=2048)
    report = self_prompts(engine, 1, out=tmp_path / 'a.jsonl', batch=2, max_new_tokens=32, progress=False, attempts=8)
    assert report.written == 1 and user_turn(smollm2[1])[1] == '<|im_end|>'
    sample(engine, read_jsonl(tmp_path / 'a.jsonl')[:1], tmp_path / 'b.jsonl', max_new_tokens=5)
    assert len(read_jsonl(tmp_path / 'b.jsonl')) == 1


# the picture

def test_draw_prompts():
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    rows = made_prompts(60)
    left, right = draw_prompts(rows, dict(empty=20, loops=20))
    assert sum(p.get_height() for c in left.containers[-1:] for p in c) <= 60
    assert {t.get_text().split(' (')[0] for t in left.get_legend().get_texts()} == {r['kind'] for r in rows}
    assert [round(p.get_width()) for p in right.patches] == [20, 20, 60]
    assert [round(p.get_width()) for p in draw_prompts(rows, dict(empty=3), kept=1)[1].patches] == [75, 25]
    draw_prompts([dict(id='a', prompt='x y', source='s')])
    draw_prompts([])
    plt.close('all')


@pytest.mark.parametrize('row,prompt', [
    (dict(turns='hello there'), 'hello there'), (dict(turns=[]), None), (dict(conversations=[dict(role='x')]), None),
    (dict(question='q', answer=None), 'q'), (dict(instruction='do', instances=[]), 'do'), (dict(instruction=None, input='a text'), None),
    (dict(instruction='do', input='a text'), 'do\n\na text')])
def test_rows_with_holes(row, prompt, tmp_path):
    write_jsonl(tmp_path / 'a.jsonl', [row])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        found = load_prompts(tmp_path / 'a.jsonl')
    assert [r['prompt'] for r in found] == [prompt] * (prompt is not None)
    assert any('1 of 1 rows' in str(w.message) for w in said) == (prompt is None)


@pytest.mark.parametrize('row', [dict(turns=3), dict(instruction='do', instances=3), dict(conversations='abc'), dict(question=3, answer=4)])
def test_rows_of_other_types(row, tmp_path):
    write_jsonl(tmp_path / 'a.jsonl', [row])
    with pytest.raises(TaskError, match='row 1 has fields of other types .*a.jsonl'): load_prompts(tmp_path / 'a.jsonl')

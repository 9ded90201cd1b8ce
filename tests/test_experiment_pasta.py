"The PASTA experiment: problems against a checker of their description, points and gains against the engine, tables and claims by hand."
import math
import random
import re
from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st

from pasta_lib import experiment_pasta, models
from pasta_lib.annotate import Structural, find_paragraphs, find_parts, read_lines, verify
from pasta_lib.engine import Engine, ar, replay_deviation
from pasta_lib.experiment_pasta import (BON_KINDS, KINDS, SIZES, START_KINDS, Annotator, RealScale, TinyScale, apar_tree, averaged, claims, compare_real, decode, describe_answers, format_claims, fresh_rows, gain, grade,
                                        make_problem, marks, measure, pairs_for, percent, points_at_once, problem_rows, read_table, real_claims,
                                        repeats_itself, run_real, save_table, time_real, tiny_claims, training_rows)
from pasta_lib.jobs import Drop, write_jsonl
from pasta_lib.judge import ExactJudge
from pasta_lib.models import add_tokens, load, save, tiny_model
from pasta_lib.pasta import pasta
from pasta_lib.tags import Async, Promise, Sync, TagVocab, encode_promise, lint, parse, plain
from pasta_lib.tasks import MANNERS, TEMPLATES, TOPICS, made_prompts, open_prompt, row_seed, without_loops

TAGS = re.compile(r'<promise topic="[^"]*" tokens="\d+"/>|</?async>|<sync/>')
STEP = dict(u=1, d=9, t=2, h=3)
problems = st.builds(lambda seed, kind: make_problem(random.Random(seed), kind), st.integers(0, 10**6), st.sampled_from(list(KINDS)))


def write(tokenizer, text): return tokenizer.encode(text, add_special_tokens=False)


# --- problems ---------------------------------------------------------------------------------------------------------
def row_of(start: str, rule: str, size: int) -> str:
    digits = start
    while len(digits) < size: digits += str(int(digits[-1]) + STEP[rule])[-1]
    return digits


def is_right(prompt: str, answer: str) -> list[bool]:
    "The description of a problem, word by word; of two lines with one label the later counts."
    rows = {}
    for line in answer.split('\n'):
        label, colon, digits = line.partition(':')
        if colon and digits and set(digits) <= set('0123456789'): rows[label] = digits
    asks, out = dict(ask.split('=') for ask in prompt.removesuffix('?').split(';')), []
    for label, asked in asks.items():
        digits, firsts = rows.get(label, ''), [rows.get(other, '?')[0] for other in asks if other != 'S']
        if asked == 'all': wanted = '' if '?' in firsts else ''.join(firsts)
        else:
            rule, size, needs = re.fullmatch('([udth])([0-9]{2})([A-F]?)', asked).groups()
            start = rows.get(needs or label, '')[:1]
            wanted = row_of(start, rule, int(size)) if start else ''
        out.append(bool(wanted) and digits == wanted)
    return out


@settings(max_examples=150, deadline=None)
@given(problems)
def test_problems_are_as_described(problem):
    asks, labels = problem.prompt.removesuffix('?').split(';'), [part.label for part in problem.parts]
    rows, needs = [label for label in labels if label != 'S'], {part.label: part.needs for part in problem.parts}
    assert problem.prompt.endswith('?') and [ask[0] for ask in asks] == labels and rows == list('ABCDEF')[:len(rows)] and 3 <= len(rows) <= 6
    assert all(is_right(problem.prompt, problem.answer)) and all(int(ask[3:5]) in SIZES for ask in asks[:len(rows)])
    assert problem.answer == ''.join(f'{part.label}:{part.digits}\n' for part in problem.parts)
    assert [ask[5:] for ask in asks[:len(rows)]] == [needs[label] for label in rows]
    assert ('S' in labels) == (problem.kind == 'join') and needs.get('S', ''.join(rows)) == ''.join(rows)
    leaning = {label: need for label, need in needs.items() if need and label != 'S'}
    if problem.kind == 'chain': assert leaning == dict(zip(rows[1:], rows))
    elif problem.kind == 'mixed': assert list(leaning) == rows[-1:] and leaning[rows[-1]] in rows[:-1]
    else: assert not leaning


def test_kinds_come_as_often_as_they_should():
    rng = random.Random(0)
    found = [make_problem(rng, kinds=dict(chain=.25, parts=.75)).kind for _ in range(1000)]
    assert set(found) == {'chain', 'parts'} and 200 < found.count('chain') < 300
    assert {make_problem(rng).kind for _ in range(200)} == set(KINDS)


def spoil(rng: random.Random, answer: str) -> str:
    "An answer with one mistake, or what looks like one."
    lines, way = answer.splitlines(), rng.randrange(9)
    if not lines: return rng.choice(['', '\n', 'A:', ':', 'A:1', 'é:²³'])
    a, b, at = rng.randrange(len(lines)), rng.randrange(len(lines)), rng.randrange(len(answer))
    other = re.sub(r'\d', lambda m: str((int(m[0]) + 1) % 10), lines[a], count=1)
    if way == 0: answer = answer[:at] + rng.choice('0123456789') + answer[at + 1:]
    elif way == 1: answer = '\n'.join(lines[:a] + lines[a + 1:]) + '\n'
    elif way == 2:
        lines[a], lines[b] = lines[b], lines[a]
        answer = '\n'.join(lines)
    elif way == 3: answer = '\n'.join([*lines[:a], rng.choice([lines[a][:-1], lines[a] + '0', lines[a] + lines[a][-8:]]), *lines[a + 1:]])
    elif way == 4: answer = '\n'.join([*lines[:b], rng.choice([other, lines[a]]), *lines[b:]])
    elif way == 5: answer = answer[:at]
    elif way == 6: answer = answer[:at] + rng.choice(['é', '²', '\u2028', '\r', ' ', ':', '\n', 'A:1\n', '\x00', '日本', '<sync/>', '\x0b', 'S']) + answer[at:]
    elif way == 7: answer = '\n'.join(lines[b][:2] + line[2:] if n == a else line for n, line in enumerate(lines))
    else: answer = rng.choice(['', answer.lower(), answer.replace('\n', '\r\n'), answer.replace('\n', ' '), answer * 2, answer[::-1], answer + 'Z:9\nbye'])
    return answer


@settings(max_examples=300, deadline=None)
@given(problems, st.integers(0, 10**6), st.integers(0, 3))
def test_marks_are_the_checkers(problem, seed, mistakes):
    rng, answer = random.Random(seed), problem.answer
    for _ in range(mistakes): answer = spoil(rng, answer)
    wanted = is_right(problem.prompt, answer)
    assert marks(problem.prompt, answer) == wanted and grade(answer, problem.prompt) == sum(wanted) / len(wanted)
    if not mistakes: assert all(wanted)


@settings(max_examples=100, deadline=None)
@given(problems, st.text())
def test_any_text_has_marks(problem, text): assert grade(text, problem.prompt) == 0


@settings(max_examples=60, deadline=None)
@given(problems, st.integers(0, 10**6))
def test_one_wrong_digit_costs_its_row_and_what_reads_it(problem, seed):
    rng = random.Random(seed)
    part = rng.choice(problem.parts)
    at = rng.randrange(len(part.digits))
    wrong = part.digits[:at] + str((int(part.digits[at]) + rng.randint(1, 9)) % 10) + part.digits[at + 1:]
    found = marks(problem.prompt, ''.join(f'{p.label}:{wrong if p is part else p.digits}\n' for p in problem.parts))
    assert found == [p is not part and not (at == 0 and part.label in p.needs) for p in problem.parts]


def test_digits_of_another_script_are_not_the_answer():
    assert marks('A=u16?', 'A:0123456789012345\n') == [True]
    assert marks('A=u16?', 'A:' + ''.join(chr(0x660 + k % 10) for k in range(16)) + '\n') == [False]


# --- annotation -------------------------------------------------------------------------------------------------------
def walk(tagged: str):
    "(label, is it a block?, labels that nobody has joined yet) of every row, and the text of each block with its promise."
    rows, blocks, open_, promise = [], [], set(), None
    for node in parse(tagged).nodes:
        if isinstance(node, Promise): promise = node
        elif isinstance(node, Sync): open_ = set()
        elif isinstance(node, Async):
            rows.append((node.text[0], True, open_))
            blocks.append((promise, node.text))
            open_ = open_ | {node.text[0]}
        else: rows += [(line[0], False, open_) for line in node.text.splitlines()]
    return rows, blocks


@settings(max_examples=200, deadline=None)
@given(problems, st.sampled_from([0, .3, 1]), st.sampled_from([0, .25, 1]), st.integers(0, 10**6))
def test_annotations(problem, reckless, timid, seed):
    tagged = Annotator(reckless, timid)(problem, random.Random(seed))
    (rows, blocks), needs = walk(tagged), {part.label: part.needs for part in problem.parts}
    assert plain(parse(tagged)) == TAGS.sub('', tagged) == problem.answer and not lint(tagged)
    assert tagged == Annotator(reckless, timid)(problem, random.Random(seed))
    assert [label for label, _, _ in rows] == list(needs) and ('S', True) not in [row[:2] for row in rows]
    for promise, text in blocks:
        assert (promise.topic, text.count('\n')) == (text[0], 1) and promise.tokens % 10 == 0 and 0 <= promise.tokens - len(text) - 2 < 10
    for label, block, open_ in rows:
        if not reckless or label == 'S': assert not open_ & set(needs[label])
        if not timid and not needs[label] and problem.kind != 'chain': assert block
        if reckless == 1 and not timid and label != 'S': assert block
        if reckless == 0 and needs[label]: assert not block
    if reckless == 1 and problem.kind != 'join': assert '<sync/>' not in tagged


def test_the_timid_leave_half_and_the_reckless_come_as_often_as_they_should():
    rng = random.Random(0)
    share = lambda annotator, kind: [[block for _, block, _ in walk(annotator(make_problem(rng, kind), rng))[0]] for _ in range(300)]
    blocks = sum(share(Annotator(timid=1), 'parts'), [])
    assert .4 < sum(blocks) / len(blocks) < .6
    assert .15 < sum(not all(rows) for rows in share(Annotator(timid=.25), 'parts')) / 300 < .33
    assert .2 < sum(map(any, share(Annotator(reckless=.3, timid=0), 'chain'))) / 300 < .4


def test_rows_are_the_same_for_the_same_seed():
    rows = problem_rows(40, 3)
    assert rows == problem_rows(40, 3) and rows[:15] == problem_rows(15, 3) and [r['prompt'] for r in rows] != [r['prompt'] for r in problem_rows(40, 4)]
    assert len({row['id'] for row in rows + problem_rows(40, 4)}) == 80
    assert {row['kind'] for row in problem_rows(30, 0, dict(chain=1.))} == {'chain'}
    assert not any('<sync' in row['tagged_text'] for row in problem_rows(30, 0, dict(chain=1.), Annotator(1, 0)))
    for row in rows: assert all(is_right(row['prompt'], row['response'])) and TAGS.sub('', row['tagged_text']) == row['response']


def spoken(tree) -> str: return ''.join(node['text'] + spoken(node['child'] or []) for node in tree)


@settings(max_examples=50, deadline=None)
@given(problems)
def test_apars_tree_says_the_answer(problem):
    tree = apar_tree(problem)
    assert spoken(tree) == problem.answer and [node['text'] for node in tree] == [f'{part.label}:' for part in problem.parts]


# --- points at once ---------------------------------------------------------------------------------------------------
PROMPT = 'A=u16;B=d24;C=t16?'
digit_rows = st.lists(st.text('0123456789', max_size=12), min_size=1, max_size=5)


def at_once(tiny, script: dict[str, str], **options):
    "Points that say this, and what they said: by thread, the logits of each of its positions."
    engine = Engine(*tiny, slots=2048, page_size=16)
    said = {f'point {label}': write(tiny[1], text) for label, text in script.items()}
    result, = engine.run(points_at_once(PROMPT, labels=list(script), raw=True, script=said, **options), keep_logits=True)
    record, seen = result.record, {}
    for i, row in record.logits.items(): seen.setdefault(record.threads[record.thread[i]].name, {})[record.position[i]] = row
    return result, seen


@settings(max_examples=25, deadline=None)
@given(digit_rows)
def test_points_by_definition(tiny, rows):
    script = {label: f'{row}\n' for label, row in zip('ABCDE', rows)}
    result, _ = at_once(tiny, script)
    assert result.text == result.tagged_text == ''.join(f'{label}:{text}' for label, text in script.items())
    assert result.generated_tokens == len(result.text) and result.forks == len(rows) and set(result.threads.values()) == {'end'}
    assert result.critical_path == 1 + max(map(len, script.values()))        # a label is written in one step
    assert replay_deviation(tiny[0], result) < 1e-4


def test_no_point_reads_another(tiny):
    script = dict(A='0123456789\n', B='98765\n', C='2468024\n')
    _, together = at_once(tiny, script)
    for label, text in script.items():
        name = f'point {label}'
        for others in ({label: text}, {k: text if k == label else '5' * len(v[:-1]) + '\n' for k, v in script.items()}):
            _, seen = at_once(tiny, others)
            assert seen[name].keys() == together[name].keys() and len(seen[name]) == len(text)
            for at, row in seen[name].items(): assert torch.allclose(row, together[name][at], atol=1e-5)


def test_a_point_is_what_the_model_says_alone(tiny):
    engine = Engine(*tiny, slots=2048)
    result, = engine.run(points_at_once(PROMPT, labels='ABC', raw=True, max_thread_tokens=9, ignore_eos=True))
    for n, label in enumerate('ABC', 1):
        alone, = engine.run(ar(f'{PROMPT}{label}:', raw=True, max_new_tokens=9, ignore_eos=True))
        said = [t for t, thread, kind in zip(result.record.token, result.record.thread, result.record.kind) if thread == n and kind == 'sampled']
        assert said and alone.token_ids[:len(said)] == said


@pytest.mark.parametrize('most', [4, 5, 9, 11, 13])
def test_points_that_are_cut_keep_what_they_said(tiny, most):
    "The points take turns until so many tokens are said; each of them is in the text."
    script, left = dict(A='123\n', B='45678\n', C='\n'), most
    said = dict.fromkeys(script, '')
    for step in range(6):
        for label, text in script.items():
            if step < len(text) and left: said[label], left = said[label] + text[step], left - 1
    result, _ = at_once(tiny, script, max_new_tokens=most)
    assert result.text == result.tagged_text == ''.join(f'{label}:{text}' for label, text in said.items())


def test_points_end_with_the_text_or_never_begin(tiny):
    result, = Engine(*tiny, slots=512).run(points_at_once(PROMPT, labels=[], raw=True))
    assert (result.text, result.forks, result.error) == ('', 0, None)
    eos = tiny[1].eos_token_id
    result, = Engine(*tiny, slots=512).run(points_at_once(PROMPT, labels='AB', raw=True, script={'point A': [eos], 'point B': write(tiny[1], '7\n')}))
    assert result.text == 'A:B:7\n' and result.threads == {'main': 'end', 'point A': 'eos', 'point B': 'end'}


def test_labels_have_their_room(tiny):
    "Where the pool has room for one request at a time, the other one waits."
    engine = Engine(*tiny, slots=56, page_size=1, share_prefix=False)
    for result in engine.run([points_at_once(PROMPT, labels='ABC', raw=True, max_new_tokens=9, ignore_eos=True) for _ in range(2)]):
        assert result.error is None and result.generated_tokens == 9 + 6


@pytest.mark.parametrize('method', ['baseline', 'sot'])
def test_decoding_keeps_the_order_of_the_rows(tiny, method):
    rows, engine = problem_rows(6, 1), Engine(*tiny, slots=4096)
    found = decode(engine, method, rows, batch=3, max_new_tokens=10)
    assert [row['id'] for row in found] == [row['id'] for row in rows] and all(row['response'] for row in found)
    assert [row['text'] for row in found] == [decode(engine, method, [row], max_new_tokens=10)[0]['text'] for row in rows]


# --- measures ---------------------------------------------------------------------------------------------------------
def answer(text='one two three', tagged=None, forks=0, path=10, tokens=10, parallelism=1., **more):
    return dict(id='i', sample=0, prompt='p', text=text, tagged_text=text if tagged is None else tagged, forks=forks, critical_path=path,
                generated_tokens=tokens, parallelism=parallelism) | more


def test_measures_by_hand():
    asked, right = 'A=u16;B=d16?', 'A:0123456789012345\nB:5432109876543210\n'
    own = [answer(right, prompt=asked, path=10, forks=2, parallelism=4., tokens=40),
           answer(right[:19], prompt=asked, path=20, forks=0, parallelism=1., tokens=20)]
    found = measure(own, [answer(tokens=40), answer(tokens=20)])
    assert found == pytest.approx(dict(accuracy=50, parts_right=75, speedup=2, speedup_arithmetic=2.5, parallelism=2, forks=1, tokens=30, n=2))


PROMISE = '<promise topic="a" tokens="10"/><async>x</async>'
BY_HAND = [answer('one two three', f'x{PROMISE}{PROMISE}<sync/>y', 2, 10, 30, 2., category='coding', grammar_needed=1, grammar_tokens=30),
           answer('one', 'one</async>', path=20, parallelism=1., grammar_needed=0, grammar_tokens=20),
           answer('one two three four five six ' * 10, PROMISE, 1, 5, 40, 8.), answer('one two', path=10, kind='code')]
BEFORE = [answer(tokens=40), answer('a', tokens=20), answer('', tokens=20), answer('seven eight nine ten eleven twelve ' * 10, tokens=10)]


def test_descriptions_by_hand():
    found = describe_answers(BY_HAND, BEFORE)
    assert found == pytest.approx(dict(
        n=4, promise=50, promise_on_code=50, sync=50, mask_needed=25, mask_needed_tokens=2, malformed=25, speedup=2, speedup_arithmetic=2.5, speedup_promised=4, parallelism=2,
        parallelism_promised=4, words=66 / 4, words_of_baseline=64 / 4, loops=25, loops_of_baseline=25))


def test_descriptions_where_nothing_forked():
    found = describe_answers(BEFORE[:3], BEFORE[:3])
    nothing = {name for name, value in found.items() if math.isnan(value)}
    assert nothing == {'promise_on_code', 'sync', 'speedup_promised', 'parallelism_promised'} and found['promise'] == 0 and found['n'] == 3
    assert all(math.isfinite(value) for name, value in found.items() if name not in nothing)
    assert math.isnan(percent([])) and percent([1, 0, 'x', None]) == 50


@pytest.mark.parametrize('said', ['describe', 'measure'])
def test_an_empty_answer_costs_no_evaluation(tiny, said):
    "A model that ends at once has a parallelism of 0; the other answers still have their means."
    empty, = Engine(*tiny, slots=512).run(ar('p', raw=True, script=dict(main=[tiny[1].eos_token_id])))
    assert (empty.text, empty.generated_tokens, empty.critical_path, empty.parallelism) == ('', 1, 1, 0)
    rows, before = [answer(prompt='A=u16?', path=5), answer('', prompt='A=u16?', path=1, tokens=1, parallelism=0.)], [answer(), answer()]
    found = describe_answers(rows, before) if said == 'describe' else measure(rows, before)
    assert found['speedup'] == pytest.approx(20 ** .5) and found['n'] == 2


def test_comparison_with_the_baseline_by_hand():
    numbers = dict(baseline='3 5 3 5', pasta='3 3 5 3', better='3 3 3 3')
    found = compare_real({name: [answer(f'It is {n}', prompt=f'q{k}', path=5) for k, n in enumerate(row.split())] for name, row in numbers.items()},
                         ExactJudge({f'q{k}': '3' for k in range(4)}))
    assert [row['method'] for row in found] == list(numbers)
    assert [row['win_rate'] for row in found] == [50, 62.5, 75]                           # a tie, two wins and a loss; two wins of four
    for row in found:
        assert row['win_rate_low'] <= row['win_rate'] <= row['win_rate_high'] and row['speedup'] == 2
        assert row['win_rate_length_controlled'] == pytest.approx(row['win_rate'], abs=.1)           # all are equally long
        assert {name for name, value in row.items() if name != 'method' and math.isnan(value)} == {
            'promise_on_code', 'sync', 'speedup_promised', 'parallelism_promised'}
    assert found[0]['win_rate_low'] == found[0]['win_rate_high'] == 50


def test_answers_that_repeat_themselves():
    other = PROMISE.replace('"a"', '"A"')
    assert repeats_itself(answer('x' * 9, PROMISE + other)) and repeats_itself(answer('one two three four five six ' * 10))
    assert not repeats_itself(answer('xx', PROMISE + other.replace('"A"', '"b"')))


def test_pairs_and_what_gave_none():
    sample = lambda n, speedup, quality, id='g': dict(id=id, prompt='p', sample=n, tagged_text=f'{id}{n}', speedup=speedup, quality=quality)
    group = [sample(2, 3., 1.), sample(0, 1., 1.), sample(1, 1., 2.)]
    groups = [group, [], [sample(0, 1., 1.)], [sample(0, 1., 1.), sample(1, 1., 1.)], [sample(1, 2., 9., 'h'), sample(0, 1., 9., 'h')]]
    for lam, chosen, rejected in ((0, ['g2', 'h1'], ['g0', 'h0']), (10, ['g1', 'h1'], ['g0', 'h0']), (math.inf, ['g1'], ['g0'])):
        pairs, dropped = pairs_for(groups, lam)
        assert ([pair['chosen'] for pair in pairs], [pair['rejected'] for pair in pairs]) == (chosen, rejected)
        assert dropped == {'fewer than two samples': 2, 'all samples score the same': 1 + (lam == math.inf)}
    assert pairs_for([], 1) == ([], {})


# --- gain and the rows of stage 1 -------------------------------------------------------------------------------------
@pytest.fixture(scope='module')
def talker():
    model, tokenizer = tiny_model(seed=1, layers=1, hidden=32)
    add_tokens(model, tokenizer, TagVocab())
    return model, tokenizer


def promise(topic, text, tokens=10): return f'<promise topic="{topic}" tokens="{tokens}"/><async>{text}</async>'


@st.composite
def tagged_texts(draw):
    "Up to four stretches of main, each with up to three blocks and perhaps a join."
    out, free = draw(st.text('w', min_size=1, max_size=6)), False
    for _ in range(draw(st.integers(0, 4))):
        for _ in range(draw(st.integers(0, 3))):
            text = promise(draw(st.text('t', min_size=1, max_size=5)), 'z' * draw(st.integers(0, 30)), draw(st.sampled_from([10, 30, 160])))
            out, free = out + text + 'm' * draw(st.integers(0, 4)), True
        if free and draw(st.booleans()): out, free = out + '<sync/>', False
        out += 'w' * draw(st.integers(0, 8))
    return out


def decoded(pair, tagged: str):
    "The same text from a script, by the PASTA runtime."
    model, tokenizer = pair
    tags, main, forks = TagVocab().bind(tokenizer), [], []
    for node in parse(tagged).nodes:
        if isinstance(node, Promise): main += encode_promise(node.topic, node.tokens, tags, tokenizer)
        elif isinstance(node, Async): forks.append(write(tokenizer, node.text) + [tags.async_end])
        else: main += [tags.sync] if isinstance(node, Sync) else write(tokenizer, node.text)
    script = dict(main=main + [tokenizer.eos_token_id]) | {f'fork {n}': ids for n, ids in enumerate(forks, 1)}
    result, = Engine(model, tokenizer, slots=2048, page_size=16).run(pasta('Q', raw=True, script=script, max_new_tokens=999))
    assert result.tagged_text == tagged
    return result


@settings(max_examples=60, deadline=None)
@given(tagged_texts())
def test_gain_is_the_engines(talker, tagged):
    "The tokens of the text and its end, over the longest chain that the runtime finds when it decodes the same tagged text."
    result, words = decoded(talker, tagged), len(TAGS.sub('', tagged)) + 1
    assert gain(tagged, talker[1]) == words / result.critical_path


def test_gain_by_hand(talker):
    _, tokenizer = talker
    assert gain('plain', tokenizer) == gain('', tokenizer) == 1 and gain('a<sync/>b', tokenizer) <= 1
    two = 'Hi:' + promise('a', 'x' * 40) + promise('b', 'y' * 37)
    assert gain(two, tokenizer) == 81 / max(3 + 3 + 1 + 40, 3 + 3 + 3 + 1 + 37)
    assert gain(two + '<sync/>end', tokenizer) == 84 / (47 + 3 + 1)


PROMPTS = [row['prompt'] for row in made_prompts(60, 5)]
FORMS = dict(good='Hi:' + promise('a', 'x' * 60) + promise('b', 'y' * 60) + promise('c', 'z' * 60), poor=f'Hello there, all of you:{PROMISE} And so on.', bare='No tags.')


def some_rows(**counts):
    forms = [form for form, count in counts.items() for _ in range(count)]
    return [dict(id=f'{form}{n}', prompt=PROMPTS[n], tagged_text=FORMS[form], chunks=FORMS[form].count('<async>')) for n, form in enumerate(forms)]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 12), st.integers(0, 3), st.integers(0, 20), st.integers(1, 15), st.sampled_from([.5, .8, .9, 1.]), st.integers(0, 3))
def test_training_rows(talker, good, poor, bare, marked, share, seed):
    rows = some_rows(good=good, poor=poor, bare=bare)
    found = training_rows(rows, talker[1], marked, share, seed=seed)
    assert found == training_rows(rows, talker[1], marked, share, seed=seed) and rows == some_rows(good=good, poor=poor, bare=bare)
    ids, by_id = [row['id'] for row in found], {row['id']: row for row in found}
    twice = [row for row in found if row['chunks']]
    assert len(set(ids)) == len(ids) and len(twice) == 2 * min(marked, good) and all(row['tagged_text'] == FORMS['good'] for row in twice)
    for row in rows[:good]:
        own = [one for one in (row['id'], row['id'] + '-open', row['id'] + '-again') if one in by_id]
        assert not own or own == [row['id'], row['id'] + ('-open' if open_prompt(row['prompt']) else '-again')]
        if own: assert by_id[own[0]] == row and by_id[own[1]] == row | dict(id=own[1], prompt=open_prompt(row['prompt']) or row['prompt'])
    assert len(found) - len(twice) <= bare and all(by_id[one] in rows for one in ids if one.startswith('bare'))
    if len(found) - len(twice) < bare: assert abs(len(twice) - share * len(found)) <= share / 2 + 1e-9
    if not twice: assert not found


def test_training_rows_are_mixed_and_worth_it(talker):
    found = training_rows(some_rows(good=20, bare=20), talker[1])
    assert len(found) == 50 and [row['chunks'] for row in found] != sorted(row['chunks'] for row in found) and training_rows([], talker[1]) == []
    assert {row['tagged_text'] for row in training_rows(some_rows(good=1, poor=5), talker[1], least=.1)} == {FORMS['good'], FORMS['poor']}
    assert training_rows(some_rows(good=3, bare=9), talker[1], least=99) == []


# --- tables and claims ------------------------------------------------------------------------------------------------
def is_number(text):
    try: return float(text) is not None
    except ValueError: return False


numbers = st.floats().filter(lambda value: not 1e300 < abs(value) < math.inf)
words = st.text(st.characters(exclude_categories=['Cs'], exclude_characters='\r\x00'), max_size=12).filter(lambda text: not is_number(text))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.fixed_dictionaries(dict(method=words, speedup=numbers, n=st.integers(-10**6, 10**6), note=words)), min_size=1, max_size=4))
def test_tables_come_back(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp('tables') / 'deep' / 'table.csv'
    assert save_table(rows, path, seed='0-1', dtype='bfloat16') == path
    back = read_table(path)
    assert len(back) == len(rows)
    for row, found in zip(rows, back):
        assert (found['method'], found['note'], found['n']) == (row['method'], row['note'], row['n'])
        assert found['speedup'] == pytest.approx(row['speedup'], rel=1e-4, nan_ok=True)
        assert found['seed'] == '0-1' and found['dtype'] == 'bfloat16' and {'cpu', 'commit', 'date', 'torch'} <= found.keys()


def test_tables_by_hand(tmp_path):
    rows = [dict(method='a', speedup=math.nan, low=-math.inf, high=math.inf, seed=7), dict(method='b,"c"', speedup=1.25, kind='all')]
    found = read_table(save_table(rows, tmp_path / 't.csv', seed=3))
    assert [row['seed'] for row in found] == [7, 3] and math.isnan(found[0]['speedup']) and (found[0]['low'], found[0]['high']) == (-math.inf, math.inf)
    assert (found[1]['method'], found[1]['speedup'], found[1]['low'], found[1]['kind'], found[0]['kind']) == ('b,"c"', 1.25, '', 'all', '')
    assert read_table(tmp_path / 'none.csv') == read_table(tmp_path) == [] and read_table(save_table([], tmp_path / 'empty.csv')) == []


def test_averages_by_hand():
    row = lambda method, speedup, accuracy, **more: dict(method=method, kind='all', seed=0, speedup=speedup, parallelism=speedup, accuracy=accuracy) | more
    rows = [row('a', 1., 50.), row('b', 3., 10.), row('a', 4., 60.), row('a', 5., 0., kind='chain')]
    assert averaged(rows) == {('a', 'all'): pytest.approx(dict(speedup=2, parallelism=2, accuracy=55)),
                              ('b', 'all'): pytest.approx(dict(speedup=3, parallelism=3, accuracy=10)),
                              ('a', 'chain'): pytest.approx(dict(speedup=5, parallelism=5, accuracy=0))}
    assert averaged(rows, ['kind']).keys() == {('all',), ('chain',)} and averaged([]) == {}


LAMS, FAST = ('1', '2', '4', '8', 'inf'), (2.1, 2., 1.9, 1.8, 1.7)
FOUND = dict(baseline=(90, 1), sot=(60, 2), apar=(80, 1.5), pasta=(90, 1.6)) | {'pasta (sampled)': (80, 1.5), 'bon-1-2 (sampled)': (85, 1.8)}
FOUND |= {f'bon-{lam}-1': (88, speed - .1) for lam, speed in zip(LAMS, FAST)} | {f'bon-{lam}-2': (89, speed) for lam, speed in zip(LAMS, FAST)}


def verdicts(*without, **changes):
    "Which of the six claims hold by such a table: two seeds around each number, and a kind of problem that must not count."
    found = {name: value for name, value in (FOUND | {name.replace('_', '-').replace('-hot', ' (sampled)'): c for name, c in changes.items()}).items()
             if name not in without}
    rows = [dict(method=name, kind='all', seed=seed, accuracy=float(accuracy + 2 * seed - 1), speedup=speed * 1.1 ** (2 * seed - 1))
            for name, (accuracy, speed) in found.items() for seed in (0, 1)]
    rows += [dict(method=name, kind='chain', seed=0, accuracy=float(100 - accuracy), speedup=9 - speed) for name, (accuracy, speed) in found.items()]
    return [row['verdict'] for row in tiny_claims(rows)], rows


@pytest.mark.parametrize('broken,changes', [
    ([], {}), ([0], dict(pasta=(88, 1.6))), ([], dict(pasta=(89.5, 1.6))), ([1], dict(apar=(95, 1.5))), ([], dict(sot=(60, 3))), ([1], dict(sot=(89.5, 2))),
    ([2], {f'bon_{lam}_{r}': (86, speed - (r == 1) / 10) for lam, speed in zip(LAMS, FAST) for r in (1, 2)}),
    ([3], dict(bon_inf_1=(88, 2.4), bon_inf_2=(89, 2.5))), ([3], dict(bon_4_1=(88, 1.95), bon_4_2=(89, 2.05))),
    ([], dict(bon_4_1=(88, 1.93), bon_4_2=(89, 2.03))),
    ([4], dict(pasta_hot=(86, 1.5))), ([4], dict(pasta_hot=(80, 1.9))), ([4], dict(bon_1_2_hot=(79, 1.8))),
    ([5], {f'bon_{lam}_1': (88, 3) for lam in '124'}), ([], {f'bon_{lam}_1': (88, 3) for lam in '12'}), ([5], {f'bon_{lam}_1': (89.5, 1.7) for lam in '124'})])
def test_claims_turn_with_the_numbers(broken, changes):
    said, rows = verdicts(**changes)
    assert said == ['does not hold' if n in broken else 'holds' for n in range(6)]
    random.Random(0).shuffle(rows)
    assert [row['verdict'] for row in tiny_claims(rows)] == said


def test_fronts_that_do_not_overlap_say_nothing():
    said, _ = verdicts(sot=(60, 3), apar=(80, 2.5))
    assert said[1] == 'not measured'


def test_claims_of_a_saved_table(tmp_path):
    said, rows = verdicts()
    found = tiny_claims(read_table(save_table(rows, tmp_path / 't.csv')))
    assert [row['verdict'] for row in found] == said and tiny_claims([]) == tiny_claims(read_table(tmp_path / 'none')) == []
    assert all(row['theirs'] and row['ours'] and 'nan' not in row['ours'] for row in found) and len({row['claim'] for row in found}) == 6


def test_one_round_says_nothing_of_a_second():
    said, _ = verdicts(*(f'bon-{lam}-2' for lam in LAMS))
    assert said == ['holds'] * 5 + ['not measured']


def test_a_second_round_of_some_speaks_for_these():
    assert verdicts('bon-1-2', 'bon-2-2')[0] == ['holds'] * 6
    assert verdicts('bon-1-2', 'bon-2-2', bon_4_2=(87.9, 1.9), bon_8_2=(89, 1.6))[0][-1] == 'does not hold'


def real_rows(**changes):
    row = dict(set='vicuna80', speedup=1.5, parallelism=1.4, promise=50., win_rate=48., win_rate_low=43., win_rate_high=54.)
    rows = [dict(row, method=name) | changes.get(name, {}) for name in ('baseline', 'pasta', 'bon')]
    return rows + [dict(row, method=name, set='other', speedup=1., win_rate_low=9.) for name in ('baseline', 'pasta', 'bon')]


@pytest.mark.parametrize('wanted,changes', [
    ('holds holds holds', dict(pasta=dict(speedup=1.4))), ('holds holds does not hold', {}), ('does not hold holds holds', dict(pasta=dict(speedup=1.), bon=dict(speedup=1.1))),
    ('does not hold holds does not hold', dict(bon=dict(parallelism=1.1))), ('holds does not hold does not hold', dict(bon=dict(win_rate_low=42.)))])
def test_claims_of_the_real_model(wanted, changes):
    rows, timing = real_rows(**changes), [dict(realised=1.9, theoretical=2.), dict(realised=.97, theoretical=1.)]
    assert ' '.join(row['verdict'] for row in real_claims(rows)) == wanted
    assert [row['verdict'] for row in real_claims(rows, timing)][3:] == ['holds'] and real_claims([]) == []
    assert real_claims(rows, [dict(row, theoretical=4.) for row in timing])[3]['verdict'] == 'does not hold'


def test_claims_of_a_folder(tmp_path):
    assert claims(tmp_path) == [] and 'no tables' in format_claims([])
    save_table(verdicts()[1], tmp_path / 'pasta_tiny.csv')
    save_table(real_rows(), tmp_path / 'pasta_smollm2.csv')
    found = claims(tmp_path)
    assert len(found) == 9 and format_claims(found).count('paper: ') == 9 and all(row['claim'] in format_claims(found) for row in found)


# --- prompts and answers of stage 0 -----------------------------------------------------------------------------------
FIELDS = ('activity', 'thing', 'problem', 'place', 'pair', 'person', 'habitat', 'proposal', 'story')
MADE = {' '.join(filter(None, [template.format(n=n, **{field: topic}), manner])): topic
        for template in TEMPLATES['parts'].splitlines() for field in FIELDS if f'{{{field}}}' in template
        for topic in TOPICS[field] for n in ('three', 'four', 'five', 'six') for manner in {*MANNERS['parts']}}


def test_open_prompts_name_the_same_topic():
    rows = made_prompts(600)
    assert {row['kind'] for row in rows} >= {'parts', 'steps', 'prose', 'code', 'maths'}
    for row in rows:
        opened = open_prompt(row['prompt'])
        if row['kind'] != 'parts': assert opened is None
        else:
            topic = MADE[row['prompt']]
            assert topic in opened and not re.search(r'\b(three|four|five|six)\b|[{}]', opened.replace(topic, '')) and opened != row['prompt']


def test_every_made_prompt_of_parts_can_be_opened():
    for prompt, topic in random.Random(0).sample(sorted(MADE.items()), 1500): assert topic in open_prompt(prompt)


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_texts_that_cannot_be_opened(text): assert open_prompt(text) is None


@pytest.mark.parametrize('prompt', ['List 5 benefits of walking. Then say which is best.', 'Give a few practical tips for John; he is ill.'])
def test_prompts_that_only_look_made_are_left_alone(prompt): assert open_prompt(prompt) is None


lines_of_words = st.lists(st.lists(st.sampled_from('the cat sat on a mat and Then it left us all'.split()), max_size=14).map(' '.join), max_size=8)
texts = st.one_of(st.text(), lines_of_words.map('\n'.join), st.tuples(lines_of_words, st.integers(1, 4)).map(lambda pair: '\n'.join([*pair[0], *map(str.upper, pair[0] * pair[1])])))
reasons = st.sampled_from(['eos', 'stop', 'end', 'length', 'pool_full'])


def first_loop(lines, n=6, most=.3):
    "Index of the first line that says too much again, by looking through everything before each of its n-grams."
    said = []
    for at, line in enumerate(lines):
        words, again = line.lower().split(), []
        for start in range(max(1, len(words) - n + 1) if len(words) > 1 else 0):
            again.append(words[start:start + n] in said)
            said.append(words[start:start + n])
        if again and sum(again) / len(again) > most: return at
    return len(lines)


@settings(max_examples=200, deadline=None)
@given(texts, reasons)
def test_answers_without_loops(text, reason):
    row = dict(id='x', text=text, finish_reason=reason)
    found, lines = without_loops(row), text.split('\n')
    end = first_loop(lines)
    if end == len(lines) and reason in ('eos', 'stop', 'end'): assert found == row
    else:
        kept = '\n'.join(lines[:min(end, len(lines) - 1)])
        assert found == dict(id='x', text=kept.rstrip(), finish_reason='eos', trimmed=True)
    assert without_loops(found) == found and row == dict(id='x', text=text, finish_reason=reason)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=12), reasons)
def test_nothing_said_twice_stays(lengths, reason):
    lines = [' '.join(f'w{n}x{k}' for k in range(length)) for n, length in enumerate(lengths)] or ['']
    found = without_loops(dict(text='\n'.join(lines), finish_reason=reason))
    if reason in ('eos', 'stop', 'end'): assert found == dict(text='\n'.join(lines), finish_reason=reason)
    else: assert found['text'] == '\n'.join(lines[:-1]).rstrip() and found['trimmed']


# --- paragraphs of any form -------------------------------------------------------------------------------------------
WORDS = ('copper lake walks green seven quiet music bread window early river paper harbour violin cheese winter orange doctor planet basket silver garden '
         'rocket thunder pencil castle monkey yellow feather market island button tunnel spring leather bridge').split()
CLOSING = ('In conclusion, ', 'Overall, ', 'To sum up, ', 'Ultimately, ', 'By following this, ', 'Remember, ', 'In short, ', '**Overall**, ', 'Finally, ')


def sentence(n, opening=''): return f'{opening}{" ".join(random.Random(n).sample(WORDS, 12))} in town number {n}.'


@st.composite
def paragraphs(draw):
    "(kind, text) of paragraphs: plain ones in one line, closing ones, and some of two lines."
    kinds = ['plain', *draw(st.lists(st.sampled_from(['plain', 'plain', 'plain', 'closer', 'two']), max_size=7))]
    make = dict(plain=sentence, closer=lambda n: sentence(n, CLOSING[n % len(CLOSING)]), two=lambda n: f'{sentence(n)}\n{sentence(n + 50)}')
    start = draw(st.integers(0, 10))
    return [(kind, make[kind](n + start)) for n, kind in enumerate(kinds)]


gaps, tails = st.sampled_from(['\n\n', '\n \n', '\n\n\n']), st.sampled_from(['', '\n', ' \n\n'])


def joinable(parts) -> list[list[str]]:
    "Runs of two or more plain paragraphs without a gap, after the first."
    runs = [[]]
    for kind, text in parts[1:]: runs[-1].append(text) if kind == 'plain' else runs.append([])
    return [run for run in runs if len(run) > 1]


@settings(max_examples=120, deadline=None)
@given(paragraphs(), gaps, tails)
def test_runs_of_unlike_paragraphs(parts, gap, tail):
    text = gap.join(text for _, text in parts) + tail
    runs = find_paragraphs(text, read_lines(text), unlike=True)
    assert [[text[item.start:item.end] for item in run] for run in runs] == joinable(parts)
    alike = find_parts(text)
    assert find_parts(text, paragraphs=True) == (alike or runs) and find_parts(text, paragraphs=False) == alike == find_paragraphs(text, read_lines(text))


@settings(max_examples=80, deadline=None)
@given(paragraphs(), gaps, tails)
def test_any_paragraphs_become_blocks(parts, gap, tail):
    text = gap.join(text for _, text in parts) + tail
    row, same = Structural(paragraphs=True)(dict(id='x', prompt='q', text=text)), Structural()(dict(id='x', prompt='q', text=text))
    expected = sum(joinable(parts), [])
    blocks = [node.text for node in parse(row['tagged_text']).nodes if isinstance(node, Async)]
    assert verify(row) is row and TAGS.sub('', row['tagged_text']) == row['response'] == text
    assert [block.strip() for block in blocks] == expected[:8] and row['tagged_text'].startswith(parts[0][1])
    after = row['tagged_text'].rpartition('</async>')[2]
    assert not expected or after.startswith('<sync/>') == bool(after)
    assert same == dict(id='x', prompt='q', response=text, tagged_text=text, annotator='structural', chunks=0, reason='no parts')


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 99).map(sentence), st.text(max_size=30), st.sampled_from(
    ['For one', '- item', '1. item', '## Head', '**Bold**', '<sync/> & `code`', '&lt;async&gt;', '<promise topic="x" tokens="10"/>', 'Overall, yes.', '  ', 'In: out'])),
    min_size=1, max_size=7), gaps)
def test_whatever_the_text_nothing_is_lost(parts, gap):
    row = dict(id='x', prompt='q', text=gap.join(parts))
    for paragraphs in (False, True):
        try: found = Structural(least=0, paragraphs=paragraphs)(row)
        except Drop as e:
            assert e.reason in ('repeats', 'no response')
            return
        assert verify(found) is found and plain(parse(found['tagged_text'])) == row['text'] and not lint(found['tagged_text'])
    if find_parts(row['text']): assert found == Structural(least=0)(row)


def test_paragraphs_that_open_alike_are_found_as_before():
    text = '\n\n'.join(sentence(n, f'For {word}, ') for n, word in enumerate(['speed', 'comfort', 'money']))
    row = dict(id='x', prompt='q', text=text)
    assert Structural(paragraphs=True)(row) == Structural()(row) and Structural()(row)['chunks'] == 3        # the first one too
    assert Structural().paragraphs is False


def test_fresh_problems_were_never_read():
    scale = TinyScale(plain_rows=3000, rows=2000, prompts=50)
    fresh = fresh_rows(60, 1, 3, scale)
    read = problem_rows(3000, 500_000, START_KINDS) + problem_rows(2000, 3) + problem_rows(50, 1003, BON_KINDS) + problem_rows(50, 2003, BON_KINDS)
    seen = {row['prompt'] for row in read}
    assert len(fresh) == 60 and not seen & {row['prompt'] for row in fresh}
    assert seen & {row['prompt'] for row in problem_rows(200, 9001)}                    # without a look they would have been
    assert fresh == fresh_rows(60, 1, 3, scale) == fresh_rows(80, 1, 3, scale)[:60]


# --- the whole path of the real model, on a stand-in ------------------------------------------------------------------
def test_the_real_path_runs_and_resumes(tmp_path, monkeypatch):
    "Every stage as `pasta experiment pasta --scale smollm2` runs it, with a tiny model in SmolLM2's place and answers given."
    base, out, table = tmp_path / 'base', tmp_path / 'run', tmp_path / 'table.csv'
    save(*tiny_model(layers=2, hidden=32, heads=2, kv_heads=2), base)
    source = models._source
    monkeypatch.setattr(models, '_source', lambda name, *a, **kw: str(base) if name == 'smollm2' else source(name, *a, **kw))
    monkeypatch.setattr(experiment_pasta, 'time_real', partial(time_real, n=1, rounds=1))
    scale, asked = RealScale(prompts=8, bon_prompts=6, n=3, batch=8, limit=2), tmp_path / 'asked.jsonl'
    write_jsonl(asked, [dict(id=f'q{n}', prompt=f'Give me {n} tips.') for n in range(3)])
    rows = [row | dict(tagged_text=FORMS['good' if n % 2 else 'bare']) for n, row in enumerate(made_prompts(8))]
    rows = [row | dict(text=(text := plain(parse(row['tagged_text']))), response=text, chunks=3 * (n % 2), sample=0, seed=row_seed(0, row['id'], 0),
                        finish_reason='eos') for n, row in enumerate(rows)]
    for name in ('answers', 'annotated'): write_jsonl(out / f'{name}.jsonl', rows)
    found, said = run_real(out, scale, '', (str(asked),), table, lambda line: None), []
    assert [row['method'] for row in found] == ['baseline', 'pasta', 'bon'] and {row['n'] for row in found} == {2} and found[0]['win_rate'] == 50
    assert [(row['method'], row['set']) for row in read_table(table)] == [(row['method'], 'asked') for row in found]
    stages = [row['stage'] for row in read_table(tmp_path / 'table_stages.csv')]
    assert stages == ['answers', 'annotate', 'mix', 'pasta', 'baseline', 'samples of pasta', 'samples of baseline', 'samples of untrained', 'pairs',
                      'bon', 'evaluate on asked', 'timing'] and len(read_table(tmp_path / 'table_timing.csv')) == 1
    assert load(str(out / 'bon'))[0].pasta.base == 'smollm2'
    before = {p: p.read_bytes() for p in out.rglob('*.safetensors')}
    again = run_real(out, scale, '', (str(asked),), None, said.append)
    assert again == found and len(said) == len(stages) and before == {p: p.read_bytes() for p in out.rglob('*.safetensors')}

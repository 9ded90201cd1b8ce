"Registers and liveness: the rule straight from its formula, keys deleted from a cache, brute-force last uses, colourings."
import ast
import copy
import random
import re
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from test_annotate import Server, answer, client

from pasta_lib.core import PastaError
from pasta_lib.jobs import Drop, read_jsonl
from pasta_lib.masks import dense_mask, layout_logits, leak_test
from pasta_lib.models import add_tokens, chat_ids, load
from pasta_lib.registers import (POLICIES, Allocation, GeminiSteps, LastUse, Program, RegisterError, Registers, Stay, Step,
                                 StepAnnotator, allocate, annotate_steps, bare_layout, cut_steps, draw_forgetting,
                                 draw_registers, encode_steps, forgetting_costs, forgetting_tree, joint_costs, last_felt,
                                 last_uses, live_steps, live_tokens, log_likelihoods, number_steps, numbers_in, open_step,
                                 program_step, program_steps, prolonged, read_needs, register_ids, register_table, register_text, register_tokens,
                                 registers_cost, stays, tip_layout, token_stays, verify_steps, with_registers,
                                 whole_statements, worked_solution)
from pasta_lib.segments import IGNORE, Layout, SegmentTable, pack
from pasta_lib.tags import GrammarError, parse, plain


@pytest.fixture(scope='module')
def reg():
    "The tiny model with 16 registers: (model, tokenizer, token id -> register)."
    model, tok = load('tiny', dtype=torch.float32)
    add_tokens(model, tok, register_tokens())
    return model, tok, register_ids(tok)


REGS = {100 + k: k for k in range(4)}                      # four registers of no particular tokenizer
words = st.integers(1, 9)


def by_definition(prompt, answer_ids, registers):
    "M[q, j] = j <= q and (j is prompt or preamble or q < d(s(j))), token by token."
    n = len(prompt) + len(answer_ids)
    opens = [len(prompt) + i for i, token in enumerate(answer_ids) if token in registers]
    number = {at: registers[answer_ids[at - len(prompt)]] for at in opens}
    mask = np.zeros((n, n), dtype=bool)
    for j in range(n):
        mine = [at for at in opens if at <= j]
        dies = n
        if mine: dies = next((at for at in opens if at > mine[-1] and number[at] == number[mine[-1]]), n)
        mask[j:dies, j] = True
    return mask


# ---- tokens and text

def test_register_tokens_are_found_whatever_else_was_added(reg):
    assert register_tokens(2) == ['<reg_0>', '<reg_1>'] and list(reg[2].values()) == list(range(16))
    with pytest.raises(RegisterError, match='use at least one'): register_tokens(0)
    model, tok = load('tiny')
    with pytest.raises(RegisterError, match='has no registers'): register_ids(tok)
    add_tokens(model, tok, ['<reg_07>', '<reg_x>', '<promise', '<reg_12>', '<reg_3>'])
    assert list(register_ids(tok).values()) == [12, 3]
    assert [register_ids(tok)[i] for i in encode_steps('<reg_3>a<reg_12>', tok)[::2]] == [3, 12]
    with pytest.raises(RegisterError, match='register 4 has no token'): encode_steps('<reg_4>', tok)


@pytest.mark.parametrize('bad', ['<reg_>', '<reg_x>', '<reg_01>', '<reg_-1>', '</reg_1>', '<reg_1'])
def test_malformed_tags_are_typed_errors(reg, bad):
    with pytest.raises(GrammarError): encode_steps('a ' + bad, reg[1])


def test_text_never_becomes_a_register(reg):
    model, tok, registers = reg
    for text in ('<reg_0>', 'x<reg_15>y', '<<reg_1>>', '<reg_<reg_1>>', '<|im_end|><reg_2>'):
        row = with_registers(dict(id=0, response=text), [text], allocate([0]), 'hand')
        ids = encode_steps(row['tagged_text'], tok)
        assert [i for i in ids if i in registers] == ids[:1]
        assert tok.decode(ids[1:]) == text and register_text(ids, tok) == row['tagged_text']
        assert not set(chat_ids(tok, text)) & set(registers)


def test_a_register_in_the_prompt_evicts_nothing():
    row = tip_layout([100, 5, 100, 101], [100, 6, 101, 7], REGS)
    assert len(row.table) == 3 and (dense_mask(row).numpy() == np.tri(8, dtype=bool)).all()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.text(st.characters(exclude_categories=['Cs']), max_size=12), st.integers(0, 15)), min_size=1, max_size=6))
def test_tags_come_off_again(steps):
    texts, numbers = zip(*steps)
    if not ''.join(texts).strip(): return
    row = with_registers(dict(id=0, text=''.join(texts)), texts, Allocation(list(numbers), list(range(len(numbers)))), 'x')
    document = parse(row['tagged_text'], 'tip')
    assert plain(document) == ''.join(texts) and not document.problems and row['registers'] == len(set(numbers))


def test_register_text_drops_special_tokens(reg):
    model, tok, registers = reg
    ids = encode_steps('pre<reg_1>été &lt;reg_1><reg_2>', tok)
    assert register_text([*ids, tok.eos_token_id], tok) == 'pre<reg_1>été &lt;reg_1><reg_2>'
    assert register_text([], tok) == ''


# ---- the rule

@settings(max_examples=400, deadline=None)
@given(st.lists(words, max_size=4), st.lists(st.one_of(words, st.sampled_from([*REGS])), max_size=40))
def test_layout_is_the_formula(prompt, ids):
    row = tip_layout(prompt, ids, REGS)
    mask = by_definition(prompt, ids, REGS)
    assert (dense_mask(row).numpy() == mask).all() if ids or prompt else len(row) == 0
    assert row.position.tolist() == list(range(len(row))) and row.ids.tolist() == prompt + ids
    assert live_tokens(row).tolist() == mask.sum(1).tolist()
    assert (tip_layout(prompt, ids, {}).segment == 0).all()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.one_of(words, st.sampled_from([*REGS])), min_size=1, max_size=12), min_size=1, max_size=4), st.integers(0, 5))
def test_packed_rows_are_block_diagonal(answers, padding):
    rows = [tip_layout([1, 2], ids, REGS) for ids in answers]
    packed = pack(rows, sum(map(len, rows)) + padding)
    want, at = np.zeros((len(packed),) * 2, dtype=bool), 0
    for row, ids in zip(rows, answers):
        want[at:at + len(row), at:at + len(row)] = by_definition([1, 2], ids, REGS)
        at += len(row)
    want[at:, at:] = np.tri(padding, dtype=bool)
    assert (dense_mask(packed).numpy() == want).all() and live_tokens(packed).tolist() == want.sum(1).tolist()


@pytest.mark.parametrize('prompt, ids, eos, want', [
    ([], [], 3, []), ([1], [], 3, [3]), ([1, 2], [], None, [IGNORE, IGNORE]), ([], [5, 6], 3, [6, 3]),
    ([1, 2, 4], [100, 7], 3, [IGNORE, IGNORE, 100, 7, 3]), ([1, 2], [5, 100], None, [IGNORE, 5, 100, IGNORE])])
def test_labels(prompt, ids, eos, want): assert tip_layout(prompt, ids, REGS, eos).label.tolist() == want


def test_registers_and_open_step():
    table, held = SegmentTable(), Registers()
    step = table.open(name='prompt')
    for register in (0, 1, 1, 0): step = open_step(table, held, step, register)
    assert table.reads.astype(int).tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 0, 1, 1]]
    assert held.held == {0: 4, 1: 3} and held.start(5, 9) is None and held.start(5, 10) == 9
    with pytest.raises(RegisterError, match='count from 0'): held.start(-1, 0)


def deleting(model, layout):
    "Logits of one token after the other, with a cache out of which dead keys are cut; positions stay."
    from transformers import DynamicCache
    cache, kept, out = DynamicCache(), [], []
    for n, token in enumerate(layout.ids):
        alive = [k for k, at in enumerate(kept) if layout.table.reads[layout.segment[n], layout.segment[at]]]
        kept = [kept[k] for k in alive] + [n]
        for layer in cache.layers: layer.keys, layer.values = layer.keys[:, :, alive], layer.values[:, :, alive]
        with torch.no_grad():
            got = model(torch.tensor([[token]]), position_ids=torch.tensor([[n]]), past_key_values=cache, use_cache=True)
        out.append(got.logits[0, -1])
    return torch.stack(out), kept


@pytest.mark.filterwarnings('ignore::FutureWarning')
@pytest.mark.parametrize('seed', range(4))
def test_masked_pass_equals_deleted_keys(reg, seed):
    model, tok, registers = reg
    rng = random.Random(seed)
    ids = [rng.choice([*list(registers)[:3], *range(60, 90)]) for _ in range(60)]
    layout = tip_layout(chat_ids(tok, 'hello <reg_0>'), ids, registers)
    logits, kept = deleting(model, layout)
    assert len(kept) < len(layout) and (logits - layout_logits(model, layout)).abs().max() < 1e-4


@pytest.mark.smollm2
@pytest.mark.filterwarnings('ignore::FutureWarning')
def test_masked_pass_equals_deleted_keys_in_smollm2(smollm2):
    model, tok = smollm2
    registers = {tok.encode(c)[0]: k for k, c in enumerate(('#', '@'))}          # two ordinary tokens act as registers
    ids = [i for part in ('#two and two are four', '@four and one are five', '#so five', '#done') for i in tok.encode(part)]
    layout = tip_layout(chat_ids(tok, 'Add.')[-8:], ids, registers)
    logits, kept = deleting(model, layout)
    assert len(layout.table) == 5 and len(kept) < len(layout) and (logits - layout_logits(model, layout)).abs().max() < 1e-4


def test_a_step_that_nobody_reads_leaks_nowhere(reg):
    model, tok, registers = reg
    layout = tip_layout(chat_ids(tok, 'Go'), encode_steps('pre<reg_0>secret<reg_0>next<reg_1>more', tok), registers)
    report = leak_test(model, layout, 1)
    assert report.leaks == [] and report.allowed == [1] and report.moved[1] > 0 == report.moved[2] == report.moved[3]
    everyone = leak_test(model, layout, 1, mask=torch.ones(len(layout), len(layout), dtype=bool).tril()[None, None])
    assert everyone.leaks == [2, 3]


# ---- liveness and allocation

names = st.lists(st.sampled_from('abcd'), max_size=2, unique=True).map(tuple)
traces = st.lists(st.builds(lambda d, e, u: Step('', d, tuple(n for n in e if n not in d), u), names, names, names), max_size=14)


def brute_last(steps):
    "For every pair, look back from the use to every step that has a share in the value."
    last = list(range(len(steps)))
    for i, step in enumerate(steps):
        for name in set(step.uses) | set(step.extends):
            for j in range(i - 1, -1, -1):
                if name in steps[j].defines or name in steps[j].extends: last[j] = max(last[j], i)
                if name in steps[j].defines: break
    return last


@settings(max_examples=250, deadline=None)
@given(traces)
def test_last_uses_by_brute_force(steps): assert last_uses(steps) == brute_last(steps)


lasts = st.lists(st.integers(0, 9), max_size=25).map(lambda extra: [min(i + e, len(extra) - 1) for i, e in enumerate(extra)])


@settings(max_examples=300, deadline=None)
@given(lasts, st.sampled_from(POLICIES), st.integers(0, 3))
def test_nothing_is_read_after_its_register_was_reused(last, policy, spare):
    live = live_steps(last)
    assert all(live[i, j] == (j <= i <= last[j]) for i in range(len(last)) for j in range(len(last)))
    needed = int(live.sum(1).max(initial=0))
    made = allocate(last, max(needed + spare, 1), policy)
    for i in range(len(last)):                                     # when step i has begun, it and all it needs are held
        held = {made.registers[j]: j for j in range(i + 1)}
        assert all(held[made.registers[j]] == j for j in range(i + 1) if last[j] >= i)
    assert made.lost == [] and max(made.registers, default=0) < max(needed + spare, 1)
    if policy != 'unused first': assert made.used == needed
    else: assert made.used == min(max(needed + spare, 1), len(last))
    assert [j for s in stays(made) for j in [s.step] if s.needed <= s.end] == list(range(len(last)))


@settings(max_examples=200, deadline=None)
@given(lasts, st.integers(1, 4))
def test_too_few_registers_are_reported(last, registers):
    needed = int(live_steps(last).sum(1).max(initial=0))
    if needed <= registers:
        assert allocate(last, registers).lost == []
        return
    with pytest.raises(RegisterError) as error: allocate(last, registers)
    assert f'use {needed} registers' in error.value.fix and f'among {registers}' in error.value.what
    made = allocate(last, registers, spill='ends last')
    taken = {(j, next(i for i in range(j + 1, len(last)) if made.registers[i] == made.registers[j])) for j, _ in made.lost}
    assert set(made.lost) == taken and made.lost and all(last[j] >= i for j, i in made.lost)
    early = {(s.step, s.end) for s in stays(made) if s.taken and made.last[s.step] >= s.end}
    assert early == set(made.lost)                                 # nobody else is forgotten too early


def test_the_register_dead_longest_is_reused():
    made = allocate([6, 3, 2, 5, 4, 5, 6])                         # step 2 dies after step 2, step 1 after 3, step 4 after 4
    assert made.registers == [0, 1, 2, 2, 1, 1, 2]
    made = allocate([6, 3, 3, 3, 5, 5, 6])                         # three die at once: the oldest first
    assert made.registers == [0, 1, 2, 3, 1, 2, 3]
    assert allocate([0, 1, 2, 3], 4).registers == [0, 0, 0, 0]
    assert allocate([0, 1, 2, 3], 3, 'unused first').registers == [0, 1, 2, 0]
    assert allocate([0, 3, 2, 3], 3, 'lowest').registers == [0, 0, 1, 1]
    assert allocate([]).registers == [] and allocate([]).used == 0


@pytest.mark.parametrize('call, message', [
    (lambda: allocate([0], policy='best'), "unknown policy 'best': use dead longest, lowest, unused first"),
    (lambda: allocate([0], spill='maybe'), "unknown spill 'maybe'"), (lambda: live_steps([1]), 'the last use of step 0 is step 1'),
    (lambda: live_steps([1, 0]), 'the last use of step 1 is step 0'), (lambda: allocate([0], 0), 'registers=0: use a whole number of at least 1'),
    (lambda: cut_steps('a', 'words'), "no steps by 'words': use lines, paragraphs, sentences")])
def test_what_cannot_be_is_a_typed_error(call, message):
    with pytest.raises(RegisterError, match=re.escape(message)) as error: call()
    assert isinstance(error.value, PastaError) and '\n' not in str(error.value)


# ---- annotators

@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from('ab 1.?!\n"#)=$'), max_size=40), st.sampled_from(['lines', 'sentences', 'paragraphs', 'results']))
def test_cut_steps_joins_to_the_text(text, by):
    steps = cut_steps(text, by)
    assert ''.join(steps) == text and all(steps)
    assert all(step.strip() for step in steps) or not text.strip()


@pytest.mark.parametrize('text, by, want', [
    ('a\nb\n\nc', 'lines', ['a\n', 'b\n\n', 'c']), ('a\nb\n\nc', 'paragraphs', ['a\nb\n\n', 'c']), ('\n\na', 'lines', ['\n\na']),
    ('x = 1\n#### 7', 'lines', ['x = 1\n#### 7']), ('x\n#### Part two\ny', 'lines', ['x\n', '#### Part two\n', 'y']),
    ('It is 3.5 m. Mr. Fox left (early). He did!', 'sentences', ['It is 3.5 m. ', 'Mr. Fox left (early). ', 'He did!']),
    ('1. One.\n2. Two. 12. Go.', 'sentences', ['1. One.\n', '2. Two. ', '12. ', 'Go.']), ('e.g. A cat. so there.', 'sentences', ['e.g. A cat. so there.']),
    ('He has 2 x 3 = $6.\nx = y, 6-.5=5.5\n#### 5.5', 'results', ['He has 2 x 3 = ', '$6.\n', 'x = y, 6-.5=', '5.5\n#### 5.5'])])
def test_cuts(text, by, want): assert cut_steps(text, by) == want


@pytest.mark.parametrize('line, defines, extends, uses', [
    ('x = f(a, b)', 'x', 'a b', 'f a b'), ('x,y = y, x', 'x y', '', 'y x'), ('(x, y) = p', 'x y', 'p', 'p'), ('x += a', 'x', 'a', 'a x'),
    ('x //= a', 'x', 'a', 'a x'), ('a[i + 1] = x', '', 'a x', 'a i x'), ('a.b = x', '', 'a x', 'a x'), ('a.append(x)', '', 'a x', 'a x'),
    ('print(a == b)', '', '', 'print a b'), ('x = "a b" # c', 'x', '', ''), ('x <<= 1', 'x', '', 'x'), ('a = 1; b = 2', 'a b', '', ''),
    ('x = a.b', 'x', '', 'a'), ('3.5', '', '', ''), ('', '', '', ''), ('x = y == z', 'x', '', 'y z'), ('größe = é', 'größe', '', 'é'),
    ('print(f"{a}")', '', '', 'print a'), ('a = b = 3', 'a b', '', ''), ('a[0].append(5)', '', 'a', 'a'), ('b = a.pop()', 'b', 'a', 'a'),
    ('heapq.heappush(h, 1)', '', 'h heapq', 'heapq h'), ('print((y := 2))', '', 'y', 'print'), ('x = """a\nb"""', 'x', '', ''),
    ('print(1, end="")', '', '', 'print'), ('print(x, file=f)', '', 'f x', 'print x f'), ('y = 2x + 1', 'y', 'x', 'x'), ('del a[i]', '', 'a', 'a i'),
    ('x: int = n', 'x', '', 'int n'), ('x: int', '', '', 'int'), ('from math import pi, sqrt as s', '', 'pi s', ''), ('[f(i) for i in a]', '', 'a i', 'f i a'),
    ('z = math.sqrt(2) + len(a)', 'z', '', 'math len a'), ('a, *b = c', 'a b', 'c', 'c'), ('print(*a)', '', 'a', 'print a'), ('1 in a', '', 'a', 'a'),
    ('s = sum(i * k for i in a)', 's', 'a i k', 'sum a i k'), ('a.sort(key=lambda p: p[0])', '', 'a p', 'a p'), ('import a.b', '', 'a', '')])
def test_program_step(line, defines, extends, uses):
    step = program_step(line)
    assert (step.defines, step.extends) == (tuple(defines.split()), tuple(sorted(extends.split()))) and step.text == line
    assert sorted(step.uses) == sorted(uses.split())


@pytest.mark.parametrize('line', ['if a <= b: c', 'for i in a: print(i)', 'def f(): pass', 'f = lambda: a', 'g = (i for i in a)', 'exec("a = 1")', 'x = eval("a")',
                                  'from os import *', 'so x is 3', 'x = 3, y = x', 'x = 1 if', 'f = max(lambda: a, 1)', 'await x', '(' * 300, 'a\0b'])
def test_what_is_no_straight_line_is_dropped(line):
    with pytest.raises(Drop) as drop: program_step(line)
    assert drop.value.reason == 'not straight-line'
    with pytest.raises(Drop): Program()(dict(id=1, response=line))


@pytest.mark.parametrize('program, changed', [
    ('a = [1]\nb = a\nb.append(2)', 'a b'), ('a = [[1]]\nb = a[0]\na = 3\nb.append(2)', 'b'), ('a = 3\nb = [a]\nb.append(a)', 'b'),
    ('a = [1]\nb = []\nb.append(a)\na.append(1)', 'a b'), ('a = [1]\np = a.append\np(2)', 'a p'), ('a = b = []\na += [1]', 'b'), ('a = 1\nb = a\na += 1', ''),
    ('a, *b = 1, 2\nb.append(3)', 'a b'), ('a = {}\nb = f(a)\nb[1] = 2', 'a b'), ('len = f\na = 3\nlen(a)', 'f len'), ('a = 1\nf(a := [])\nb = a\nb.append(1)', 'a b'),
    ('a = iter([1])\n(b, (c, d)) = 1, a', 'a'), ('a = "x"\na.upper()', ''), ('import random as r\nfrom random import seed\nseed(0)', 'r random seed')])
def test_what_shares_a_value_changes_with_it(program, changed):
    assert ' '.join(program_steps('', program.split('\n'))[-1].extends) == changed


LINES = ['{0} = [1]', '{0} = {1}', '{0} = [{1}, {2}]', '{0} = {1} + {1}', 'if isinstance({0}, list): pass', '{0}.append({1})', '{0}[0] = {1}', '{0} += [{1}]', '{0} = {1}[-1]',
         '{0} = {1}.pop()', '{0}[0].append(5)', '{0}, {1} = {1}, {0}', '{0} = {1} = {2}', '({0} := {1})', '{0} = iter({1})', '{0} = list({1})', '{0} = next({1})',
         '{0} = sum(1 for _ in {1})', '{0}.extend([{1}])', '{0} = 1; {1} = {0}', '{0}, *{1} = {2}', 'print(f"{{{0}}}")', '{0} = {1} in {2}', '{0} = {1}.append', '{0}({1})',
         'heapq.heappush({0}, {1})', '{0} += 2', '{0} = dict(a={1})', '{0}["a"] = {1}', 'del {0}[0]', '{0} = {1}["a"]', '{0} = 7', '{0} = f"{{{1}}}"', '{0} = max({1}, {2})']


def small(value, most=60):
    "Has it few parts? A list in itself has not."
    todo = [value]
    for _ in range(most):
        if not todo: return True
        value = todo.pop()
        if isinstance(value, str) and len(value) > 200: return False
        if isinstance(value, (list, tuple)): todo += value
        if isinstance(value, dict): todo += value.values()
        if hasattr(value, '__next__'): todo += value.__reduce__()[1]
        if isinstance(getattr(value, '__self__', None), (list, dict)): todo.append(value.__self__)
    return False


def seen(value, depth=0):
    "What a value shows, without using it up: iterators are copied."
    if depth > 4: return '…'
    if isinstance(value, (list, tuple)): return [seen(v, depth + 1) for v in value]
    if isinstance(value, dict): return [(k, seen(v, depth + 1)) for k, v in value.items()]
    if hasattr(value, '__self__') and not isinstance(value.__self__, type(ast)): return seen(value.__self__, depth + 1)
    if not hasattr(value, '__next__'): return repr(value)
    try: return repr(value.__reduce__())
    except RuntimeError: return 'an iterator of a dict that has grown'


def test_no_program_loses_what_it_reads():
    "Random programs are run: whatever last changed a value that a step reads must be live there."
    import contextlib, heapq, io
    checked = 0
    for seed in range(500):
        rng, lines, world, touched, needs = random.Random(seed), [], dict(heapq=heapq), {}, []
        for line in ['a = [1]', 'b = [[2], 3]', 'c = 4'] + [rng.choice(LINES).format(*(rng.choice('abc') for _ in range(3))) for _ in range(24)]:
            if line.startswith('if'): continue
            before = {k: seen(world[k]) for k in 'abc' if k in world}
            try:
                trial = copy.deepcopy({k: world[k] for k in 'abc' if k in world}) | dict(heapq=heapq)
                with contextlib.redirect_stdout(io.StringIO()): exec(line, {}, trial)
                if not all(small(trial[k]) for k in 'abc' if k in trial): continue
            except Exception: continue
            with contextlib.redirect_stdout(io.StringIO()): exec(line, {}, world)
            n = len(lines)
            lines.append(line)
            every = [m for m in ast.walk(ast.parse(line)) if isinstance(m, ast.Name)]
            read, stored = ({m.id for m in every if isinstance(m.ctx, ast.Store) is s} for s in (False, True))
            read |= {line[0]} if line[2:4] == '+=' else set()
            needs += [(touched[k], n, k) for k in read if k in touched]
            for k in 'abc':
                if k in world and (k in stored or before.get(k) != seen(world[k])): touched[k] = n
        last = last_uses(program_steps('', lines))
        for j, i, name in needs: assert last[j] >= i, (name, j, i, list(enumerate(lines)))
        checked += len(needs)
    assert checked > 4000


def test_a_statement_over_lines_is_one_step():
    text = 'a = """one\ntwo = 2\n"""\n\nb = [\n 1,\n 2]\n# note\nprint(a, b)'
    row = Program()(dict(id=1, response=text))
    assert re.split('<reg_.>', row['tagged_text'])[1:] == ['a = """one\ntwo = 2\n"""\n\n', 'b = [\n 1,\n 2]\n', '# note\n', 'print(a, b)']
    assert row['last'] == [3, 3, 2, 3] and whole_statements(['so\n', 'it is']) == ['so\n', 'it is'] and whole_statements([]) == []


def test_programs_keep_their_few_registers():
    "Safe must not mean everything: numbers and texts share nothing."
    row = Program()(dict(id=1, response='import math\na = 2\nb = math.sqrt(a)\nc = round(b * a, 2)\nd = f"{c}"\ne = len(d)\ne += 1\nprint(e)'))
    assert row['last'] == [2, 3, 3, 4, 5, 6, 7, 7]


def test_programs_run_the_same_with_what_is_held():
    "Random straight-line programs: each line is computed from the values in registers alone."
    for seed in range(60):
        rng, lines, known = random.Random(seed), [], []
        for n in range(12):
            name = rng.choice('abcdef')
            lines.append(f'{name} = {rng.choice([*known, str(n)])} + {rng.choice([*known, "1"])}')
            known = [*dict.fromkeys([*known, name])]
        row = Program(policy=rng.choice(POLICIES))(dict(id=seed, prompt='', response='\n'.join(lines)))
        held, truth = {}, {}
        for step in re.split(r'(?=<reg_)', row['tagged_text'])[1:]:
            register, line = re.match(r'<reg_(\d+)>(.*)', step).groups()
            held.pop(register, None)
            name, value = line.split(' = ')
            seen = {key: number for key, number in held.values()}          # later lines win: dicts keep the order
            assert eval(value, {}, seen) == eval(value, {}, truth)
            truth[name] = eval(value, {}, truth)
            held[register] = (name, truth[name])


def test_rows_may_bring_their_steps():
    steps = [dict(text='p;', defines=['p']), dict(text='q;', defines=['q'], uses=['p']), dict(text='r', uses=['q'])]
    row = Program()(dict(id=0, prompt='?', response='p;q;r', steps=steps, answer=4, kind='toy'))
    assert row['tagged_text'] == '<reg_0>p;<reg_1>q;<reg_0>r' and (row['steps'], row['answer'], row['kind']) == (3, 4, 'toy')
    with pytest.raises(Drop, match='not a list of steps'): Program()(dict(id=0, response='p', steps=[dict(words='p')]))
    with pytest.raises(Drop, match='text differs'): Program()(dict(id=0, response='p;q;', steps=steps))


BAD = [(dict(response='a', steps=[dict(text='a', uses=None)]), 'not a list of names'), (dict(response='a', steps=[dict(text=5)]), 'not a list of steps'),
       (dict(response='a', steps=[dict(text='a', defines='total')]), 'not a list of names'), (dict(response='a', steps=[dict(text='a', uses=[1])]), 'not a list of names'),
       (dict(response='a', steps=3), 'not a list of steps'), (dict(response='a', steps=['a']), 'not a list of steps'), (dict(response='a', steps=[]), 'text differs'),
       (dict(response='a', prompt=5), 'prompt is no text'), (dict(response='a \ud800'), 'half a character'), (dict(response=5), 'no response')]


def test_bad_rows_are_dropped_and_the_job_goes_on(tmp_path, reg):
    for n, (row, reason) in enumerate(BAD):
        with pytest.raises(Drop) as drop: Program()(dict(id=n) | row)
        assert drop.value.reason == reason
    rows = [dict(id=n) | row for n, (row, _) in enumerate(BAD)] + [dict(id='good', response='a = 1')]
    assert annotate_steps(rows, Program(), tmp_path / 'a.jsonl', progress=False).written == 1
    long = [dict(id=1, response='It is ' + '9' * 5000), dict(id=2, response='.' + '9' * 5000), dict(id=3, prompt='9' * 5000, response='1'), dict(id=4, response='1')]
    report = annotate_steps(long, Program(reads=number_steps), tmp_path / 'b.jsonl', progress=False)
    assert (report.written, report.dropped) == (1, {'number too long': 3})
    for row, reason in BAD[-3:]:
        with pytest.raises(Drop) as drop: LastUse(*reg[:2])(dict(id=1) | row)
        assert drop.value.reason == reason
    assert Program()(dict(id=1, response='x = ' + '9' * 5000))['registers'] == 1


@pytest.mark.parametrize('options', [dict(wait=1.5), dict(wait=-1), dict(registers='3'), dict(registers=0), dict(registers=True), dict(policy='x'), dict(spill='x'),
                                     dict(by='words'), dict(threshold=float('nan')), dict(threshold='2'), dict(bound=float('nan')), dict(bound=-1), dict(most=0), dict(repairs=.5)])
def test_options_that_make_no_sense(options):
    with pytest.raises(RegisterError): LastUse(None, None, **options)


def test_reading_takes_linear_time():
    start = time.process_time()
    assert len(numbers_in('1 ' * 40000)) == 1 and len(numbers_in('1' + ',111' * 20000 + '1')) == 3 and numbers_in('<' * 40000) == {}
    with pytest.raises(Drop): program_step('a' + ' ' * 40000 + 'b')
    with pytest.raises(Drop): program_step('a =' + ' ' * 40000 + '"')
    assert len(cut_steps('a\n' + ' \n' * 20000)) == 1 and len(cut_steps('a\n' * 20000)) == 20000
    assert len(read_needs('1:' + ' ' * 40000 + '\n2: 1', 2)) == 2
    assert time.process_time() - start < 5


def test_number_steps():
    assert numbers_in('1,200.50 and $.5 = *3* x2 4.') == {'2401/2': False, '1/2': False, '3': True, '4': False}
    assert numbers_in('1,200, then 1,2,300.5 or 12,345,67 = $ 5') == {str(n): n == 5 for n in (1200, 1, 2)} | {'601/2': False, '12': False, '345': False, '67': False, '5': True}
    texts = ['48/2 = <<48/2=24>>24 clips.\n', 'Also 10.\n', '48 + 24 = $72.\n', '10 x 72 = 720']
    assert last_uses(number_steps('48 friends', texts)) == [2, 3, 3, 3]
    assert last_uses(number_steps('5 and 6', ['5 + 5 = 10', '6 + 4 = 10', '10 it is'])) == [2, 2, 2]     # which 10? keep both
    assert last_uses(number_steps('Ten', ['3', '4', '5'])) == [0, 1, 2]


def test_wait_spill_and_too_few():
    row = dict(id=1, response='a = 1\nb = 2\nc = 3\nd = a + b + c')
    with pytest.raises(Drop, match='too few registers') as drop: Program(registers=3)(row)
    assert 'use 4 registers' in drop.value.detail
    lossy = Program(registers=2, spill='ends last')(row)
    assert lossy['lost'] == [[0, 2], [1, 3]]
    assert Program(wait=9)(row)['registers'] == 4 and 'lost' not in Program()(row)
    with pytest.raises(RegisterError, match='unknown policy'): Program(policy='x')(row)
    with pytest.raises(Drop, match='no response'): Program()(dict(id=1))


@pytest.mark.parametrize('change, reason', [
    (dict(tagged_text='<reg_0>b'), 'text differs'), (dict(tagged_text='<reg_x>a'), 'lint: register-malformed'), (dict(registers=2), 'wrong count')])
def test_verify_drops(change, reason):
    good = dict(id=1, response='a', tagged_text='<reg_0>a', registers=1)
    assert verify_steps(good) == good
    with pytest.raises(Drop) as drop: verify_steps(good | change)
    assert drop.value.reason == reason


def test_forgetting_tree_is_many_rows_in_one(reg):
    model, tok, _ = reg
    rng = random.Random(0)
    prompt, steps = [rng.randrange(200) for _ in range(5)], [[rng.randrange(200) for _ in range(n)] for n in (4, 1, 6, 3)]
    tree, branch, step = forgetting_tree(prompt, steps)
    logits = layout_logits(model, tree)
    for hidden in range(4):                                        # the same, a row for each: a register used twice
        numbers = [9, *range(4)] if not hidden else [9 if n == hidden - 1 else 9 if n == hidden else n for n in range(4)]
        table, held, segment, where = SegmentTable(), Registers(), 0, [0] * 5
        table.open(name='prompt')
        for n, ids in enumerate(steps):
            segment = open_step(table, held, segment, numbers[n] if hidden else n)
            where += [segment] * len(ids)
        alone = Layout(prompt + sum(steps, []), where, range(len(where)), [IGNORE] * len(where), table)
        at = branch == hidden
        got = layout_logits(model, alone)[tree.position[at]]
        assert torch.allclose(logits[torch.as_tensor(at)], got, atol=1e-4)
    assert (tree.label == IGNORE).sum() == 4 and step.max() == 4
    assert len(forgetting_tree([1], [[2]])[0]) == 2 and len(forgetting_tree([1], [])[0]) == 1


def test_costs_and_last_felt(reg):
    model, tok, _ = reg
    texts = ['One is 1.\n', 'Two is 2.\n', 'Three.']
    costs = forgetting_costs(model, tok, 'Count', texts)
    assert costs.shape == (3, 3) and (np.triu(costs) == 0).all() and (np.abs(costs[np.tril_indices(3, -1)]) > 0).all()
    prompt, ids = chat_ids(tok, 'Count'), [tok.encode(text) for text in texts]       # one pair by hand: step 3 without step 1
    hidden = bare_layout(prompt, f'<reg_0>{texts[0]}<reg_0>{texts[1]}<reg_1>{texts[2]}', tok)
    seen = bare_layout(prompt, f'<reg_0>{texts[0]}<reg_1>{texts[1]}<reg_2>{texts[2]}', tok)
    a, b = (log_likelihoods(model, some)[-len(ids[2]) - 1:-1].sum() for some in (seen, hidden))
    assert costs[2, 0] == pytest.approx(a - b, abs=1e-3)
    assert last_felt(np.array([[0, 0, 0], [3, 0, 0], [1, 5, 0]]), 2) == [1, 2, 2] and last_felt(np.zeros((0, 0)), 1) == []
    with pytest.raises(Drop, match='too long'): forgetting_costs(model, tok, 'Count', texts, most=20)
    row = LastUse(model, tok, threshold=1e9, bound=float('inf'))(dict(id=0, prompt='Count', response=''.join(texts)))
    assert row['annotator'] == 'last use' and row['last'] == [0, 1, 2] and row['registers'] == 1
    cost, share = registers_cost(model, tok, row)
    assert np.isfinite(cost) and 0 < share < 1
    assert registers_cost(model, tok, with_registers(row, texts, allocate([2, 2, 2]), 'x')) == (pytest.approx(0, abs=1e-5), 1.)
    assert LastUse(model, tok)(dict(id=0, response='alone'))['registers'] == 1


@pytest.mark.smollm2
def test_smollm2_misses_what_is_needed(smollm2):
    said = ['Ben picks 14 + 9 = 23 plums.\n', 'Together they pick 14 + 23 = 37 plums.\n', 'The pies take 5 * 4 = 20 plums.\n',
            'So 37 - 20 = 17 plums are left.\n']
    row = dict(id=0, prompt='Ann picks 14 plums, and Ben picks 9 more than Ann. Cleo bakes 5 pies with 4 plums each. How many '
               'plums are left?', response=''.join(said))
    made = LastUse(*smollm2)(row)
    assert made['last'] == [1, 3, 3, 3] == Program(reads=number_steps)(row)['last']
    cost, share = registers_cost(*smollm2, made)
    bad, _ = registers_cost(*smollm2, with_registers(row, said, allocate(range(4)), 'none'))
    assert cost < .1 < .5 < bad and share < .85


@pytest.mark.smollm2
def test_a_value_said_twice_is_not_lost(smollm2):
    said = ['Ben picks 14 + 9 = 23 plums.\n'] * 2 + ['The pies take 5 * 4 = 20 plums.\n', 'Together they pick 14 + 23 = 37 plums.\n', 'So 37 - 20 = 17 plums are left.\n']
    prompt = 'Ann picks 14 plums, and Ben picks 9 more than Ann. Cleo bakes 5 pies with 4 plums each. How many plums are left?'
    row = dict(id=0, prompt=prompt, response=''.join(said))
    assert joint_costs(*smollm2, prompt, said, allocate([1, 2, 4, 4, 4]))[3] > 10       # what hiding one at a time says
    made = LastUse(*smollm2)(row)
    assert made['last'] == [1, 3, 4, 4, 4]
    assert joint_costs(*smollm2, prompt, said, allocate(made['last'])).max() <= 4


def test_joint_costs_and_prolonged(reg):
    model, tok, _ = reg
    texts = ['One is 1.\n', 'Two is 2.\n', 'Three.']
    assert joint_costs(model, tok, 'Count', texts, allocate([2, 2, 2])) == pytest.approx(np.zeros(3), abs=1e-4)
    made, costs = allocate([2, 1, 2]), forgetting_costs(model, tok, 'Count', texts)        # only step 1 is hidden, from step 2
    row, forgetful = dict(id=1, prompt='Count', response=''.join(texts)), dict(threshold=1e9, bound=0)
    for options in (dict(repairs=0), dict(registers=1, spill='ends last')):
        with pytest.raises(Drop, match='forgets too much .step . loses .* nats'): LastUse(model, tok, **forgetful, **options)(row)
    assert made.registers == [0, 1, 1] and joint_costs(model, tok, 'Count', texts, made)[2] == pytest.approx(costs[2, 1], abs=.5)
    texts = ['a 5', 'b 5', 'c', 'd', 'e 5']
    assert prolonged([0, 1, 2, 3, 4], texts, allocate(range(5)), 4) == [0, 4, 2, 3, 4]
    assert prolonged([0, 1, 2, 3, 4], texts, allocate(range(5)), 3) == [0, 1, 3, 3, 4] and prolonged([4] * 5, texts, allocate([4] * 5), 4) is None


@pytest.mark.parametrize('said', ['1:\n2: 1\n3: 1 2', '1: none\n2: step 1\n3: Steps 1 and 2.', '1. \n2. 1\n3. 1, 2', '**1:**\n**2:** 1\n**3**: 1 & 2', '- 1: -\n- 2: (1)\n- 3: 1; 2',
                                  'Step 1: Nothing.\nStep 2: 1.\nStep 3: step 1, step 2', '1) \n2) 1\n\n3) 2 1\n'])
def test_needs_in_other_words(said): assert last_uses(read_needs(said, 3)) == [2, 2, 2] and [len(s.uses) for s in read_needs(said, 3)] == [0, 1, 2]


@pytest.mark.parametrize('said, reason', [
    ('1:\n2: 1-1', 'not one line per step'), ('1:\n2.1', 'not one line per step'), ('1:\n2: 1.5', 'not one line per step'), ('1:\n2: ' + '9' * 5000, 'not one line per step'),
    ('1:\n2: ²', 'not one line per step'), ('', 'not one line per step'), ('1:\n3: 1', 'not one line per step'), ('1:\n2: one', 'not one line per step'), ('1:', 'not one line per step'),
    ('1:\n2: 1\n3:', 'not one line per step'), ('1: 1\n2:', 'needs a step that is not before it'), ('1:\n2: 0', 'needs a step that is not before it')])
def test_needs_that_cannot_be(said, reason):
    with pytest.raises(Drop) as drop: read_needs(said, 2)
    assert drop.value.reason == reason


def test_gemini_over_the_wire(tmp_path):
    text = 'x is 1.\ny is 2.\nz is x + y.\nz is 3.'
    replies = iter(['```\n1:\n2:\n3: 1, 2\n4: 3\n```', 'I think that'])
    with Server(lambda *_: dict(body=answer(next(replies)))) as server:
        gemini, out = GeminiSteps(client=client(server), registers=3), tmp_path / 'out.jsonl'
        report = annotate_steps([dict(id=n, prompt='What is z?', response=text) for n in (1, 2)], gemini, out, progress=False)
        again = annotate_steps([dict(id=1, prompt='What is z?', response=text)], gemini, out, progress=False)
    (row,) = read_jsonl(out)
    assert (report.written, report.dropped, again.resumed) == (1, {'not one line per step': 1}, 1)
    assert row['annotator'] == 'gemini' and row['last'] == [2, 2, 3, 3] and row['registers'] == 3
    sent = server.requests[0][2]
    assert '1. x is 1.\n2. y is 2.' in sent['contents'][0]['parts'][0]['text'] and 'numbered steps' in sent['systemInstruction']['parts'][0]['text']


def test_job_counts_what_it_drops(tmp_path):
    rows = [dict(id=1, response='a = 1\nb = a'), dict(id=2, response='a = 1\nb = 2\nc = a + b'), dict(id=3), dict(id=4, prompt=7, response='x')]
    report = annotate_steps(rows, Program(registers=2), tmp_path / 'out.jsonl', progress=False, made_by=dict(registers=2))
    assert report.written == 1 and report.dropped == {'too few registers': 1, 'no response': 1, 'prompt is no text': 1}
    assert read_jsonl(tmp_path / 'out.jsonl')[0]['made_by'] == dict(registers=2)


def test_worked_solution():
    row = worked_solution(dict(id=1, reference='48/2 = <<48/2=24>>24.\n#### 24', answer=24))
    assert row['response'] == '48/2 = 24.\n#### 24' and Program(reads=number_steps)(row)['answer'] == 24


# ---- tables and pictures

def test_register_table():
    lines = register_table('pre<reg_0>a &lt;reg_1> b<reg_1>c<reg_0>d').split('\n')
    assert [line.split()[:3] for line in lines[1:]] == [['1', 'reg_0', 'step'], ['2', 'reg_1', '-'], ['3', 'reg_0', '-']]
    assert 'a <reg_1> b' in lines[1] and register_table('no steps').startswith('step')
    layout = tip_layout([1, 2], [3, 100, 4, 101, 5, 5, 100, 6], REGS)
    assert token_stays(layout) == [Stay(1, 0, 3, 5, 8), Stay(2, 1, 5, 8, 10, False), Stay(3, 0, 8, 10, 10, False)]
    assert [line.split() for line in register_table(layout).split('\n')[1:]] == [
        ['1', 'reg_0', '3-4', '8'], ['2', 'reg_1', '5-7', '-'], ['3', 'reg_0', '8-9', '-']]
    lines = register_table(bare_layout([1, 2], '<reg_0><reg_1>x', tok := load('tiny')[1])).split('\n')
    assert [line.split() for line in lines[1:]] == [['1', 'reg_0', '-', '-'], ['2', 'reg_1', '2-2', '-']]
    unfed = tip_layout([1, 2], [100, 3], REGS)                     # the step that a last register token, never fed, has opened
    unfed.table.open((1,), 'step 2: reg_0', without=(1,))
    assert token_stays(unfed) == [Stay(1, 0, 2, 4, 4), Stay(2, 0, 4, 4, 4, False)] and '2     reg_0     -       -' in register_table(unfed)
    assert token_stays(bare_layout([1, 2], '<reg_0>a<reg_0><reg_0>b', tok)) == [Stay(1, 0, 2, 3, 3), Stay(2, 0, 3, 3, 3), Stay(3, 0, 3, 4, 4, False)]


def test_pictures():
    import matplotlib.pyplot as plt
    found = stays(allocate([1, 2, 2, 3]))
    ax = draw_registers(found, labels='abcd')
    assert [t.get_text() for t in ax.get_yticklabels()] == list('abcd') and len(ax.patches) == 8 and ax.get_xlabel() == 'time (steps)'
    assert draw_registers(found, rows='register', unit='token').get_ylabel() == 'register'
    assert draw_registers([]) is not None
    costs = np.array([[0, 0, 0], [3., 0, 0], [1, 5, 0]])
    assert len(draw_forgetting(costs, 2).patches) == 2 and draw_forgetting(costs, 2, 'abc').get_yticklabels()[0].get_text() == 'a  0'
    axes = plt.figure().gca()
    assert draw_registers(found, ax=axes) is axes and draw_forgetting(costs, 2, ax=axes) is axes
    plt.close('all')


def test_an_annotator_of_your_own():
    class Everything(StepAnnotator):
        name = 'everything'
        def last_uses(self, row, texts): return [len(texts) - 1] * len(texts)
    row = Everything(by='sentences')(dict(id=1, response='One. Two. Three.'))
    assert row['annotator'] == 'everything' and row['registers'] == row['steps'] == 3


@pytest.mark.parametrize('last, options, words', [
    ('ab', {}, 'last uses'), ([None], {}, 'last uses'), ([.5], {}, 'last uses'), ([0], dict(registers=0), 'registers=0'),
    ([0], dict(registers=1.5), 'registers=1.5'), ([0], dict(registers=True), 'registers=True')])
def test_allocation_is_of_whole_numbers(last, options, words):
    with pytest.raises(RegisterError, match=words): allocate(last, **options)


@pytest.mark.parametrize('policy', POLICIES)
def test_a_billion_registers_cost_nothing(policy):
    last = [2, 1, 2]
    assert allocate(last, 10 ** 9, policy) == allocate(last, 16, policy)

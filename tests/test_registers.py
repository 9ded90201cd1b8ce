"Registers and liveness: the rule straight from its formula, keys deleted from a cache, brute-force last uses, colourings."
import random
import re

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
                                 draw_registers, encode_steps, forgetting_costs, forgetting_tree, last_felt, last_uses,
                                 live_steps, live_tokens, log_likelihoods, number_steps, numbers_in, open_step,
                                 program_step, read_needs, register_ids, register_table, register_text, register_tokens,
                                 registers_cost, stays, tip_layout, token_stays, verify_steps, with_registers,
                                 worked_solution)
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
    (lambda: live_steps([1, 0]), 'the last use of step 1 is step 0'), (lambda: allocate([0], 0), 'step 0 finds no free register among 0'),
    (lambda: cut_steps('a', 'words'), "no steps by 'words': use lines, paragraphs, sentences")])
def test_what_cannot_be_is_a_typed_error(call, message):
    with pytest.raises(RegisterError, match=re.escape(message)) as error: call()
    assert isinstance(error.value, PastaError) and '\n' not in str(error.value)


# ---- annotators

@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from('ab 1.?!\n"#)'), max_size=40), st.sampled_from(['lines', 'sentences', 'paragraphs']))
def test_cut_steps_joins_to_the_text(text, by):
    steps = cut_steps(text, by)
    assert ''.join(steps) == text and all(steps)
    assert all(step.strip() for step in steps) or not text.strip()


@pytest.mark.parametrize('text, by, want', [
    ('a\nb\n\nc', 'lines', ['a\n', 'b\n\n', 'c']), ('a\nb\n\nc', 'paragraphs', ['a\nb\n\n', 'c']), ('\n\na', 'lines', ['\n\na']),
    ('x = 1\n#### 7', 'lines', ['x = 1\n#### 7']), ('x\n#### Part two\ny', 'lines', ['x\n', '#### Part two\n', 'y']),
    ('It is 3.5 m. Mr. Fox left (early). He did!', 'sentences', ['It is 3.5 m. ', 'Mr. Fox left (early). ', 'He did!']),
    ('1. One.\n2. Two. 12. Go.', 'sentences', ['1. One.\n', '2. Two. ', '12. ', 'Go.']), ('e.g. A cat. so there.', 'sentences', ['e.g. A cat. so there.'])])
def test_cuts(text, by, want): assert cut_steps(text, by) == want


@pytest.mark.parametrize('line, defines, extends, uses', [
    ('x = f(a, b)', 'x', '', 'f a b'), ('x,y = y, x', 'x y', '', 'y x'), ('(x, y) = p', 'x y', '', 'p'), ('x += a', 'x', '', 'a x'),
    ('x //= a', 'x', '', 'a x'), ('a[i + 1] = x', '', 'a', 'i x'), ('a.b = x', '', 'a', 'x'), ('a.append(x)', '', 'a', 'a x'),
    ('print(a == b)', '', '', 'print a b'), ('if a <= b: c', '', '', 'if a b c'), ('x = "a b" # c', 'x', '', ''),
    ('x = a.b', 'x', '', 'a'), ('3.5', '', '', ''), ('', '', '', ''), ('x = y == z', 'x', '', 'y z'), ('größe = é', 'größe', '', 'é')])
def test_program_step(line, defines, extends, uses):
    step = program_step(line)
    assert (step.defines, step.extends) == (tuple(defines.split()), tuple(extends.split())) and step.text == line
    assert sorted(step.uses) == sorted(uses.split())


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


def test_number_steps():
    assert numbers_in('1,200.50 and $.5 = *3* x2 4.') == {'2401/2': False, '1/2': False, '3': True, '4': False}
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
    row = LastUse(model, tok, threshold=1e9)(dict(id=0, prompt='Count', response=''.join(texts)))
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


@pytest.mark.parametrize('said, reason', [
    ('', 'not one line per step'), ('1:\n3: 1', 'not one line per step'), ('1:\n2: one', 'not one line per step'), ('1:', 'not one line per step'),
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
        again = annotate_steps([dict(id=1, response=text)], gemini, out, progress=False)
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

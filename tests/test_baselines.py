"""Skeleton-of-Thought and APAR against what they are made of: each of their threads is plain decoding of a plain prompt.

So the oracle for every thread is `ar` on the token ids that the method says this thread has before it."""
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from test_engine import empty
from pasta_lib.baselines import *
from pasta_lib.core import PastaError
from pasta_lib.engine import *
from pasta_lib.masks import dense_mask, layout_logits
from pasta_lib.metrics import critical_path, noncontrol_tokens, theoretical_speedup, written_steps
from pasta_lib.models import add_tokens, byte_tokenizer, chat_ids, literal_ids, tiny_model
from pasta_lib.segments import IGNORE, Layout, pack
from pasta_lib.trace import ascii_interleaving, describe, from_json, html, timeline, to_json

LIST = ('Three habits help.\n1. Light: dim it after nine.\n2. **Food:** eat early and little.\n'
        '3. Sport: move in the morning.\n\nStart today.')


@pytest.fixture(scope='module')
def pair():
    model, tokenizer = tiny_model(seed=4, layers=2, hidden=32)
    add_tokens(model, tokenizer, APAR_TOKENS)
    with torch.no_grad(): model.lm_head.weight[list(apar_ids(tokenizer))] += .02 * torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    return model, tokenizer


def engine_of(pair, **options): return Engine(*pair, **{**dict(slots=4096, page_size=16), **options})

def write(tokenizer, text, eos=True): return tokenizer.encode(text, add_special_tokens=False) + [tokenizer.eos_token_id] * eos

def own(record, thread, kind='sampled'): return [t for t, n, k in zip(record.token, record.thread, record.kind) if n == thread and k == kind]

def forking(tokenizer, every=5):
    "A processor that makes each line fork after every few of its tokens, and never end or say [Child]."
    fork, child = apar_ids(tokenizer)
    def process(ids, row):
        row = row.clone()
        row[[child, tokenizer.eos_token_id]] = -torch.inf
        row[fork] = torch.inf if len(ids) % every == every - 1 else -torch.inf
        return row.clamp(max=1e9)
    return process


# ---- the outline reader

GRID = {
    '1. One\n2. Two\n3. Three': ['One', 'Two', 'Three'],
    '1. Use Python 3.10 features.\n2. Run it.': ['Use Python 3.10 features', 'Run it'],
    '1. Use Python 3.10 features. 2. Avoid 2.7 code.': ['Use Python 3.10 features', 'Avoid 2.7 code'],
    '1. A. 2. B.': ['A', 'B'],
    '1. A 2. B 3. C': ['A', 'B', 'C'],
    'Sure! Here it is: 1. A 2. B': ['A', 'B'],
    '1) A\n2) B': ['A', 'B'],
    '1) A 2) B': ['A', 'B'],
    '(1) A\n(2) B': ['A', 'B'],
    '1: A\n2: B': ['A', 'B'],
    'Point 1: A\nPoint 2: B': ['A', 'B'],
    'Step 1. A\nstep 2. B': ['A', 'B'],
    '**1. A**\n**2. B**': ['A', 'B'],
    '1. **A**\n2. **B**:': ['A', 'B'],
    '1. **A**: with words\n2. __B__': ['A', 'B'],
    '- 1. A\n- 2. B': ['A', 'B'],
    '# 1. A\n## 2. B': ['A', 'B'],
    '> 1. A\n> 2. B': ['A', 'B'],
    '1.A\n2.B': ['A', 'B'],
    '- A\n- B': ['A', 'B'],
    '* A\n* B': ['A', 'B'],
    '• A\n• B': ['A', 'B'],
    '- A\n  - inner\n- B': ['A', 'B'],
    '1. A\n   - inner\n   1. inner\n2. B': ['A', 'B'],
    '1. A\n\n2. B\n\nThat is all.': ['A', 'B'],
    '2. B\n1. A': ['B', 'A'],
    '1. A\n1. B\n1. C': ['A', 'B', 'C'],
    '1. A\n2. a\n3. B': ['A', 'B'],
    '1.\n2. B\n3.   \n4. D': ['B', 'D'],
    '1. **\n2. B': ['B'],
    '1. A\r\n2. B\r\n': ['A', 'B'],
    '1. Use version 2. It is fast\n2. B': ['Use version 2. It is fast', 'B'],
    'At 10:30 we meet\n1. A\n2. B': ['A', 'B'],
    '1. Größe\n2. 温度\n3. 🙂 smile': ['Größe', '温度', '🙂 smile'],
    '١. A\n٢. B': ['A', 'B'],
    '1. A\n10. B\n11. C': ['A', 'B', 'C'],
    '': [], '   \n': [], 'No points at all.': [], '3.10 is a version': [], '1.': [], '1999. A year': [],
}

@pytest.mark.parametrize('text', GRID)
def test_skeleton(text): assert [p.text for p in read_skeleton(text)] == GRID[text]

def test_more_than_ten_points():
    text = '\n'.join(f'{n}. point {n}' for n in range(1, 15))
    assert [p.number for p in read_skeleton(text)] == list(range(1, 15))

@given(st.text() | st.lists(st.sampled_from(['1. ', '2. ', '2.5', ' ', '\n', '- ', 'a', 'b.', '**', '3)', '\r', '10.', '.', '\u2028'])).map(''.join))
def test_skeleton_never_crashes(text):
    points = read_skeleton(text)
    assert [p.number for p in points] == list(range(1, len(points) + 1))
    assert all(p.text and text[p.start:p.start + len(p.text)] == p.text and '\n' not in p.text for p in points)
    assert len({p.text.casefold() for p in points}) == len(points)

@pytest.mark.parametrize('piece', ['1. a ', '1. a\n', '- ', '*_(', ' 1', '`', '$a ', 'a:', 'a. ', '\n\n', '| ', '1-1-', '    ', '1)\n'])
def test_linear_time(piece):
    def seconds(n):
        text, start = piece * n, time.perf_counter()
        read_skeleton(text)
        try: apar_tree(text)
        except NoTree: pass
        return time.perf_counter() - start
    assert min(seconds(10000) for _ in range(2)) < 1.5


# ---- the router

@pytest.mark.parametrize('question,suits', [
    ('Give me five tips for better sleep.', True), ('What are the causes of the war?', True), ('How can I learn faster?', True),
    ('Compare cats and dogs.', True), ('What is 12 * 9?', False), ('Write a poem about ways of the sea.', False),
    ('Implement a function that lists primes.', False), ('Translate: the benefits of tea', False), ('Who wrote Hamlet?', False), ('', False)])
def test_rule(question, suits): assert route(question) == suits

def test_probability_of_yes():
    tokenizer, logits = byte_tokenizer(), torch.full((300,), -20.)
    assert probability_of_yes(torch.full((300,), -torch.inf).index_fill(0, torch.tensor([65]), 0), tokenizer) == 0.5
    logits[ord('Y')] = logits[ord('y')] = 1
    assert probability_of_yes(logits, tokenizer) > .99
    logits[ord('N')] = 1
    assert probability_of_yes(logits, tokenizer) == pytest.approx(2 / 3, abs=1e-6)

def test_model_routes(pair):
    r, = engine_of(pair).run(sot('Name three.', router='model', max_new_tokens=20), keep_logits=True)
    assert 0 <= r.counts['probability'] <= 1 and r.counts['routed'] == ('sot' if r.counts['probability'] > .5 else 'ar')
    assert r.forwards + 1 >= r.critical_path and replay_deviation(pair[0], r) < 1e-4

@pytest.mark.parametrize('yes', [True, False])
def test_models_verdict_decides(pair, monkeypatch, yes):
    monkeypatch.setattr('pasta_lib.baselines.probability_of_yes', lambda logits, tokenizer: float(yes))
    tokenizer, prompt = pair[1], 'Name three.'
    r, = engine_of(pair).run(sot(prompt, router='model', max_new_tokens=12), keep_logits=True)
    a, = engine_of(pair).run(ar(prompt, max_new_tokens=12))
    assert r.counts['routed'] == ('sot' if yes else 'ar') and replay_deviation(pair[0], r) < 1e-4
    if not yes: assert r.token_ids == a.token_ids and r.text == a.text and r.critical_path == a.critical_path and r.prefill_forwards == 2


# ---- Skeleton-of-Thought

def test_hand_computed(pair, tmp_path):
    """Outline: 'ok 1. ab' and '\\n2. cde' are 8 + 7 tokens and an end: 15 are fed in 15 steps. Point 1: 4 tokens, point 2: 9,
    with their ends. The chain is 15 + 9 = 24; a 48-token baseline is twice as slow. Content: 2 + 3 words' tokens, 3 + 8."""
    tokenizer = pair[1]
    script = {'main': write(tokenizer, 'ok 1. ab\n2. cde'), 'point 1': write(tokenizer, ' xy'), 'point 2': write(tokenizer, ' longer.')}
    r, = engine_of(pair).run(sot('Q', script=script), keep_logits=True)
    path = critical_path(r.record)
    assert path.length == r.critical_path == 24 and theoretical_speedup(48, path) == 2
    assert r.text == '1. ab: xy\n2. cde: longer.' and r.parallelism == (2 + 3 + 3 + 8) / 24
    assert path.clock == written_steps(r.record) and r.forwards == 15 + 8 and r.prefill_forwards == 2
    assert r.generated_tokens == 16 + 4 + 9 == len(r.token_ids) and r.forks == 2 and r.prompt_tokens == len(chat_ids(tokenizer, 'Q'))
    assert r.threads == {'main': 'eos', 'point 1': 'eos', 'point 2': 'eos'} and r.counts['points'] == ['ab', 'cde']
    assert [leg.thread for leg in path.legs] == [0, 2] and path.links[0].fork == 2
    assert replay_deviation(pair[0], r) < 1e-4
    assert from_json(to_json(r.record)).step == r.record.step
    timeline(r.record, tokenizer)
    html(r.record, tokenizer, tmp_path / 'trace.html')
    assert 'longer.' in describe(r.record) + ascii_interleaving(r.record, tokenizer) + r.text

def point_rows(engine, prompt, raw, points, prompts=Prompts()):
    "Each point's prompt from the definition."
    tokenizer, skeleton = engine.tokenizer, '\n'.join(f'{n}. {p}' for n, p in enumerate(points, 1))
    def ids(words, **fields):
        if isinstance(prompt, str):
            text = words.format(question=prompt, **fields)
            return literal_ids(tokenizer, text) if raw else chat_ids(tokenizer, text)
        if isinstance(prompt[-1], dict): return chat_ids(tokenizer, prompt[:-1] + [dict(role='user', content=words.format(question=prompt[-1]['content'], **fields))])
        return prompt + literal_ids(tokenizer, words.format(question='', **fields))
    rows = [ids(prompts.expand, skeleton=skeleton, number=n, point=p) + literal_ids(tokenizer, prompts.heading.format(number=n, point=p)) for n, p in enumerate(points, 1)]
    return ids(prompts.outline), rows

@pytest.mark.parametrize('prompt,raw', [('What helps? {x}', False), ('What helps?', True), ([81, 58, 32], False),
                                        ([dict(role='user', content='Hi'), dict(role='assistant', content='Yes?'), dict(role='user', content='What <|end|> helps?')], False)])
def test_threads_are_plain_requests(pair, prompt, raw):
    "The outline and every point say what `ar` says after the same prompt, and so does the answer without points."
    engine = engine_of(pair)
    outline, rows = point_rows(engine, prompt, raw, ['ab', 'cde'])
    script = {'main': write(engine.tokenizer, '1. ab\n2. cde')}
    r, free = engine.run([sot(prompt, raw=raw, script=script, max_thread_tokens=12), sot(prompt, raw=raw, outline_tokens=12, max_new_tokens=24)], keep_logits=True)
    expected = engine.run([ar(ids, max_new_tokens=12) for ids in (*rows, outline)] + [ar(prompt, raw=raw, max_new_tokens=12)])
    assert [own(r.record, n) for n in (1, 2)] == [e.token_ids for e in expected[:2]]
    assert own(free.record, 0) == expected[2].token_ids and free.counts['fallback'] == 'ar' and free.forks == 0
    assert free.text == expected[3].text and free.critical_path == 11 + 12 and own(free.record, 1) == expected[3].token_ids
    assert free.finish_reason == expected[3].finish_reason and critical_path(free.record).clock == written_steps(free.record)
    assert all(replay_deviation(pair[0], x) < 1e-4 for x in (r, free))
    empty(engine)

def test_prompts_share_their_beginning(pair):
    engine = engine_of(pair)
    outline, rows = point_rows(engine, 'What helps?', False, ['ab', 'cde'])
    r, = engine.run(sot('What helps?', script={'main': write(engine.tokenizer, '1. ab\n2. cde')}, max_thread_tokens=2))
    plain = chat_ids(engine.tokenizer, 'What helps?')
    head, shared, fed = common_prefix([plain, outline]), common_prefix(rows), r.record.kind.count('prompt')
    assert fed == len(outline) + (shared - head) + sum(len(row) - shared for row in rows) and head == len(plain) - 2
    assert len([s for s, k in zip(r.record.slot, r.record.kind) if k == 'prompt' and s >= 0]) == fed

def test_prompts_that_share_nothing(pair):
    apart = Prompts(outline='A {question}', expand='B{number} {question}', route='C {question}', heading='{point}')
    engine = engine_of(pair)
    _, rows = point_rows(engine, 'Q', True, ['ab', 'cde'], apart)
    r, = engine.run(sot('Q', raw=True, prompts=apart, script={'main': write(engine.tokenizer, '1. ab\n2. cde')}, max_thread_tokens=9), keep_logits=True)
    assert [own(r.record, n) for n in (1, 2)] == [e.token_ids for e in engine.run([ar(ids, max_new_tokens=9) for ids in rows])]
    assert replay_deviation(pair[0], r) < 1e-4

def test_batch_is_single(pair):
    def requests():
        said = lambda text: {'main': write(pair[1], text)}
        return [sot('One?', script=said('1. a\n2. b'), max_thread_tokens=9, temperature=1.0, seed=3), sot('Two?', script=said('none'), max_new_tokens=24),
                apar('Three?', max_new_tokens=60, processors=(forking(pair[1]),), temperature=1.0), ar('Four?', max_new_tokens=9),
                sot('Two?', script=said('1. a\n2. b\n3. c'), max_thread_tokens=5, router='model')]
    together = engine_of(pair, chunk=32).run(requests())
    for r, request in zip(together, requests()):
        alone, = engine_of(pair).run(request)
        assert (alone.token_ids, alone.text, alone.threads, alone.record.step) == (r.token_ids, r.text, r.threads, r.record.step)

def test_sot_limits(pair):
    engine, said = engine_of(pair), {'main': write(pair[1], '\n'.join(f'{n}. p{n}' for n in range(1, 13)))}
    ten, three = engine.run([sot('Q', script=said, max_thread_tokens=3, max_new_tokens=999), sot('Q', script=said, max_points=3, point_tokens=2, max_new_tokens=999)])
    assert ten.forks == 10 and ten.counts['left_out'] == 2 and three.forks == 3 and set(list(three.threads.values())[1:]) == {'length'}
    cut, none, at = engine.run([sot('Q', script=said, max_new_tokens=100), sot('Q', script=said, max_new_tokens=5), sot('Q', script=said, max_new_tokens=len(said['main']))])
    assert cut.generated_tokens == 100 and cut.text.startswith('1. p1:') and 'length' in cut.threads.values()
    assert none.text == '1. p1' and none.finish_reason == 'length' and none.forks == 0
    assert at.text == '\n'.join(f'{n}. p{n}' for n in range(1, 13)) and at.forks == 0
    some, = engine.run(sot('Q', script=said, outline_tokens=12))
    assert some.counts['points'] == ['p1', 'p2'] and some.threads['main'] == 'length' and len(own(some.record, 0)) == 12
    empty(engine)

def test_a_point_ends_where_it_begins_the_next(pair):
    script = {'main': write(pair[1], '1. a\n2. b'), 'point 1': write(pair[1], ' x\n2. b: y'), 'point 2': write(pair[1], ' z')}
    r, = engine_of(pair).run(sot('Q', script=script))
    assert r.text == '1. a: x\n2. b: z' and r.threads['point 1'] == 'stop'

def test_silent_points_leave_the_outline(pair):
    eos = pair[1].eos_token_id
    r, = engine_of(pair).run(sot('Q', script={'main': write(pair[1], '1. a\n2. b'), 'point 1': [eos], 'point 2': [eos]}))
    assert r.text == '1. a\n2. b'

def test_fallback_outline(pair):
    r, = engine_of(pair).run(sot('Q', script={'main': write(pair[1], 'No list.')}, fallback='outline'))
    assert r.text == 'No list.' and r.counts['fallback'] == 'outline' and r.critical_path == 9 and noncontrol_tokens(r.record) == 8

@pytest.mark.parametrize('slots', [128, 256, 384, 432])
def test_full_pool_keeps_text(pair, slots):
    engine = engine_of(pair, slots=slots)
    said = {'main': write(pair[1], '1. a\n2. b'), 'point 1': write(pair[1], ' ' + 'x' * 99), 'point 2': write(pair[1], ' y')}
    r, = engine.run(sot('Q', script=said, reserve=1), keep_logits=True)
    assert r.finish_reason == 'pool_full' and critical_path(r.record).length >= 0
    if slots == 256: assert r.text == '1. a\n2. b' and r.threads['main'] == 'eos'
    if slots > 350: assert r.text.startswith('1. a: xx') and r.text.endswith('2. b: y') and r.threads['point 2'] == 'eos' and r.threads['point 1'] == 'pool_full'
    empty(engine)

def test_cancel_and_listen(pair):
    heard, request = [], sot('Q', script={'main': write(pair[1], '1. a\n2. b')}, max_new_tokens=40)
    def listen(chunk):
        heard.append(chunk.thread)
        if len(heard) == 15: request.cancel()
    r, = engine_of(pair).run(request, listen=listen)
    assert r.finish_reason == 'cancelled' and r.text.startswith('1. a:') and {'main', 'point 1', 'point 2'} == set(heard)

@pytest.mark.parametrize('options', [
    dict(router='maybe'), dict(fallback='x'), dict(max_points=0), dict(point_tokens=0), dict(outline_tokens=0), dict(max_points=1.5),
    dict(max_points=None), dict(outline_tokens='a'), dict(point_tokens=float('nan')), dict(prompts=None), dict(prompts='{question}')])
def test_sot_options(pair, options):
    r, = engine_of(pair).run(sot('Q', **options))
    assert isinstance(r.error, OptionError) and r.finish_reason == 'error' and list(options)[0] in str(r.error)

def test_sot_unknown_option_and_no_tokenizer(pair):
    with pytest.raises(OptionError): sot('Q', points=3)
    r, = Engine(pair[0], None, slots=256).run(sot([1, 2]))
    assert 'tokenizer' in str(r.error)
    assert 'tokenizer' in str(Engine(pair[0], None, slots=256).run(apar([1, 2]))[0].error)


# ---- APAR: decoding

@pytest.mark.parametrize('depth', [0, 1, 2])
def test_apar_lines_are_plain_requests(pair, depth):
    "Main is plain decoding; a child is plain decoding after its parent's text so far and [Child]."
    tokenizer, limit, engine = pair[1], 12, engine_of(pair)
    options = dict(processors=(forking(tokenizer),))
    r, = engine.run(apar('What helps?', max_new_tokens=130, max_thread_tokens=limit, depth=depth, max_forks=99, ignore_eos=True, **options), keep_logits=True)
    record, fork, child = r.record, *apar_ids(tokenizer)
    prompt = chat_ids(tokenizer, 'What helps?')
    main, = engine.run(ar('What helps?', max_new_tokens=len(own(record, 0)), ignore_eos=True, **options))
    assert main.token_ids == own(record, 0)
    before = {0: prompt}
    for n, t in enumerate(record.threads[1:], 1):
        said, where = before[t.parent], [i for i, m in enumerate(record.thread) if m == t.parent and record.kind[i] != 'prompt']
        before[n] = said + [record.token[i] for i in where if i <= t.at and record.kind[i] == 'sampled'] + [child]
        assert record.token[t.at] == fork
        level = 1
        while record.threads[t.parent].parent is not None: level, t = level + 1, record.threads[t.parent]
        t = record.threads[n]
        if level > depth:
            assert t.finish_reason == 'max_forks' and not own(record, n)
            continue
        def process(ids, row): return forking(tokenizer)([child, *ids], row)
        plain, = engine.run(ar(before[n], max_new_tokens=limit, ignore_eos=True, processors=(process,)))
        said_here = own(record, n)
        assert said_here == plain.token_ids[:len(said_here)] and own(record, n, 'forced') == [child] and t.joined is None
    assert replay_deviation(pair[0], r) < 1e-4 and critical_path(record).clock == written_steps(record)
    parents = {t.parent for t in record.threads[1:] if t.finish_reason != 'max_forks'}
    assert parents == set() if depth == 0 else parents == {0} if depth == 1 else len(parents) > 2
    empty(engine)

def scripts(rows): return {f'child {n}' if n else 'main': [int(i) for i in row.label if i != IGNORE] for n, row in enumerate(rows)}

def fed(record, prompt):
    "The record as a row in document order, without what was never fed."
    at = [*range(prompt), *(i for i in record.order if record.slot[i] >= 0)]
    column = lambda name: [getattr(record, name)[i] for i in at]
    return Layout(column('token'), column('segment'), column('position'), [IGNORE] * len(at), record.table)

NESTED = [Stretch('a', [Stretch('x', [Stretch('deep')]), Stretch(' y')]), Stretch(' plain '), Stretch('long second', []), Stretch(' and a rest', [Stretch('z')]), Stretch('.')]

@pytest.mark.parametrize('tree', [apar_tree(LIST), [Stretch('plain')], [Stretch('ends in a fork', [Stretch('child')])], NESTED], ids=['list', 'plain', 'last', 'nested'])
def test_training_is_the_runtime(pair, tree):
    model, tokenizer = pair
    prompt = chat_ids(tokenizer, 'Q')
    rows, (whole,) = apar_layouts(prompt, tree, tokenizer), apar_layouts(prompt, tree, tokenizer, together=True)
    r, = engine_of(pair).run(apar('Q', script=scripts(rows), depth=2), keep_logits=True)
    ran = fed(r.record, len(prompt))
    assert r.text == spoken(tree) and set(r.threads.values()) == {'eos'}
    assert ran.ids.tolist() == whole.ids.tolist() and ran.position.tolist() == whole.position.tolist()
    assert (dense_mask(ran) == dense_mask(whole)).all() and replay_deviation(model, r) < 1e-4
    assert len(np.unique(ran.segment)) == len(np.unique(whole.segment))
    together = layout_logits(model, whole)
    for row in rows:
        at = [i for i in range(len(row)) if row.label[i] != IGNORE]
        alone, place = layout_logits(model, row), {(int(s), int(p)): i for i, (s, p) in enumerate(zip(whole.segment, whole.position))}
        assert row.position.tolist() == list(range(len(row))) and (dense_mask(row) == torch.ones(len(row), len(row)).tril().bool()).all()
        for i in at:
            j = place[int(row.segment[i]), int(row.position[i])]
            assert row.label[i] == whole.label[j] and float((alone[i] - together[j]).abs().max()) < 1e-4
    assert sum((row.label != IGNORE).sum() for row in rows) == (whole.label != IGNORE).sum()
    assert len(pack(rows)) == sum(map(len, rows))

def test_row_by_hand(pair):
    tokenizer = pair[1]
    (fork, child), eos = apar_ids(tokenizer), tokenizer.eos_token_id
    main, kid = apar_layouts([1, 2], [Stretch('a', [Stretch('bc')]), Stretch('d')], tokenizer)
    a, b, c, d = map(ord, 'abcd')
    assert main.ids.tolist() == [1, 2, a, fork, d] and main.label.tolist() == [IGNORE, a, fork, d, eos]
    assert kid.ids.tolist() == [1, 2, a, fork, child, b, c] and kid.label.tolist() == [IGNORE] * 4 + [b, c, eos]
    whole, = apar_layouts([1, 2], [Stretch('a', [Stretch('bc')]), Stretch('d')], tokenizer, eos_id=7, together=True)
    assert whole.ids.tolist() == [1, 2, a, fork, child, b, c, d] and whole.position.tolist() == [0, 1, 2, 3, 4, 5, 6, 4]
    assert whole.segment.tolist() == [0] * 4 + [1] * 3 + [2] and whole.label.tolist() == [IGNORE, a, fork, d, b, c, 7, 7]

def test_apar_hand_computed(pair):
    """Main: 'ab', [Fork], 'c', [Fork], 'de' and an end: 8 tokens. Child 1 starts with step 3 and says 10, child 2 with step 5
    and says 3. The longest chain is 3 + 10; all content is 2 + 1 + 2 + 9 + 2 tokens."""
    tokenizer = pair[1]
    script = {'main': write(tokenizer, 'ab[Fork]c[Fork]de'), 'child 1': write(tokenizer, 'x' * 9), 'child 2': write(tokenizer, 'yy')}
    r, = engine_of(pair).run(apar('Q', script=script))
    assert r.critical_path == 13 and r.parallelism == 16 / 13 and r.text == 'abxxxxxxxxxcyyde' and r.forwards == 12
    assert r.tagged_text == 'ab[Fork][Child]xxxxxxxxxc[Fork][Child]yyde'
    assert [t.at - r.prompt_tokens for t in r.record.threads[1:]] == [2, 6] and [t.topic for t in r.record.threads] == ['', 'ab', 'c']

def test_apar_limits(pair):
    tokenizer = pair[1]
    script = {'main': write(tokenizer, 'a[Fork]b[Fork]c[Fork]d'), 'child 1': write(tokenizer, 'one[Fork]!'), 'child 2': write(tokenizer, 'two'),
              'child 3': write(tokenizer, 'three'), 'child 4': write(tokenizer, 'four')}
    engine = engine_of(pair)
    none, two, flat = engine.run([apar('Q', script=script, max_forks=0), apar('Q', script=script, max_forks=2), apar('Q', script=script)])
    assert none.text == 'abcd' and list(none.threads.values())[1:] == ['max_forks'] * 3
    assert two.text == 'aone!btwocd' and [two.threads[f'child {n}'] for n in (1, 2, 3)] == ['eos', 'eos', 'max_forks']
    assert flat.threads['child 4'] == 'max_forks' and flat.text == 'aone!btwocthreed'
    deep, = engine.run(apar('Q', script=script, depth=2))
    assert deep.text == 'aonefour!btwocthreed' and deep.record.threads[4].parent == 1
    short, thread = engine.run([apar('Q', script=script, max_new_tokens=6), apar('Q', script=script, max_thread_tokens=2)])
    assert short.record.kind.count('sampled') == 6 and short.finish_reason == 'length' and short.text == 'aonb'
    assert thread.text == 'aonbtwcthd' and thread.threads == {'main': 'eos', 'child 1': 'length', 'child 2': 'length', 'child 3': 'length'}
    last, = engine.run(apar('Q', script=dict(main=write(tokenizer, 'a[Fork]', eos=False)), max_new_tokens=2))
    assert last.forks == 0 and last.text == 'a'
    stop, = engine.run(apar('Q', script=script, stop='ne'))
    assert stop.threads['child 1'] == 'stop' and stop.text == 'aobtwocthreed'
    empty(engine)

@pytest.mark.parametrize('slots', [32, 48, 64])
def test_apar_full_pool(pair, slots):
    tokenizer, engine = pair[1], engine_of(pair, slots=slots)
    script = {'main': write(tokenizer, 'ab[Fork]cd'), 'child 1': write(tokenizer, 'x' * 200)}
    r, = engine.run(apar([81] * 8, script=script, reserve=1), keep_logits=True)
    assert r.finish_reason == 'pool_full' and r.threads == {'main': 'eos', 'child 1': 'pool_full'}
    assert r.text.startswith('abxxxx') and r.text.endswith('xcd') and critical_path(r.record).length > 5
    assert replay_deviation(pair[0], r) < 1e-4
    empty(engine)

def test_apar_option_errors(pair):
    for options in (dict(depth=-1), dict(depth=None), dict(max_forks='a'), dict(max_forks=-1), dict(max_forks=float('nan'))):
        r, = engine_of(pair).run(apar('Q', **options))
        assert isinstance(r.error, OptionError) and list(options)[0] in str(r.error)
    r, = Engine(*tiny_model(layers=1), slots=128).run(apar('Q'))
    assert '[Fork]' in str(r.error)

def test_users_words_are_never_control(pair):
    ids = set(apar_ids(pair[1]))
    r, = engine_of(pair).run(apar('Say [Fork] and [Child].', script={'main': write(pair[1], 'No.')}))
    assert not ids & set(r.record.token) and r.forks == 0
    rows = apar_layouts([1], [Stretch('Say [Fork].')], pair[1])
    assert not ids & set(rows[0].ids.tolist())


# ---- APAR: data

def cut(response): return [(s.text, s.child and s.child[0].text) for s in apar_tree(response)]

def test_list_is_cut():
    assert cut(LIST) == [('Three habits help.\n1. Light:', ' dim it after nine.'), ('\n2. **Food:**', ' eat early and little.'),
                         ('\n3. Sport:', ' move in the morning.'), ('\n\nStart today.', None)]
    assert cut('1) **A**: detail one is long\n\n2) **B**: detail two is long\n3) C: at 10:30, detail\n   goes on\n') == [
        ('1) **A**:', ' detail one is long'), ('\n\n2) **B**:', ' detail two is long'), ('\n3) C:', ' at 10:30, detail\n   goes on'), ('\n', None)]

def test_paragraphs_are_cut():
    text = 'The first thing is light. It tells the body when.\n\nToo short.\n\nThe second, e.g. food, is this. It feeds the body well.\n\nThe third thing is sport! It moves the body about.'
    assert cut(text) == [('The first thing is light.', ' It tells the body when.'),
                         ('\n\nToo short.\n\nThe second, e.g. food, is this.', ' It feeds the body well.'),
                         ('\n\nThe third thing is sport!', ' It moves the body about.')]

ITEMS = ['1. A: long enough detail', '2. B: long enough detail', '3. C: long enough detail']

@pytest.mark.parametrize('text,reason', [
    ('', 'empty'), ('  \n', 'empty'), ('\n'.join(ITEMS[:2]), 'no structure'), ('\n'.join(ITEMS), None),
    ('\n'.join(ITEMS[:2] + ['3. C: short']), 'no structure'), ('\n'.join(ITEMS[:2] + ['3. no head and no colon']), 'no structure'),
    ('\n'.join(ITEMS[:2] + ['3. C: steps 1. one 2. two']), 'no structure'), ('\n'.join(ITEMS[:2] + ['3. C: version 3.10 is fine']), None),
    ('\n'.join(ITEMS[:2] + ['4. C: long enough detail']), 'no structure'), ('\n'.join(ITEMS[::-1]), 'no structure'),
    ('\n'.join(ITEMS[:2] + ['3. : long enough detail']), 'no structure'), ('\n'.join(ITEMS[:2] + ['3. A\nB: long enough detail']), 'no structure'),
    ('\n\n'.join(ITEMS), None), ('\n'.join(ITEMS) + '\nSee https://example.org', 'address'), ('\n'.join(ITEMS) + '\n```\nx\n```', 'code'),
    ('\n'.join(ITEMS) + '\nuse `x`', 'code'), ('\n'.join(ITEMS) + '\n| a | b |\n|---|---|', 'table'), ('\n'.join(ITEMS) + '\n$x^2$', 'maths'),
    ('\n'.join(ITEMS) + '\n\\(x\\)', 'maths'), ('\n'.join(ITEMS) + '\n2 + 2 = 4', 'maths'), ('\n'.join(ITEMS) + '\nIt costs $5 and $10.', None),
    ('\n'.join(ITEMS) + '\nbetween 2010-2020', None), ('def f(x):\n  return x', 'code'), ('One sentence only.', 'no structure'),
    ('\n\n'.join(['# A heading that is long enough. And more words here.'] * 3), 'no structure'),
    ('\n\n'.join(['A sentence of some length. And enough more words here.'] * 2), 'no structure'),
    ('\n\n'.join(['A sentence of some length. And enough more words here.'] * 3), None)])
def test_extraction(text, reason):
    if reason:
        with pytest.raises(NoTree) as e: apar_tree(text)
        assert e.value.reason == reason
    else:
        tree = apar_tree(text)
        assert spoken(tree) == text and sum(s.child is not None for s in tree) >= 3

@settings(deadline=None)
@given(st.text() | st.lists(st.sampled_from([*ITEMS, '\n', '\n\n', ' ', 'First sentence is long. Then the rest is long too.', '4. D: ', 'x', '\r\n'])).map(''.join))
def test_trees_give_the_answer_back(text):
    try: tree = apar_tree(text)
    except NoTree as e: assert e.reason in ('empty', 'code', 'table', 'address', 'maths', 'no structure')
    else:
        assert spoken(tree) == text and all(len(s.child[0].text.strip()) >= 10 for s in tree if s.child)
        assert sum(bool(s.child) for s in tree) >= 3

def test_rows(pair):
    answers = [LIST, '', 'plain one', '`code`', LIST, 'plain two', 'plain three', None]
    rows, dropped = [dict(id=str(n), prompt='P', response=a, extra=n) for n, a in enumerate(answers)], {}
    mixed = apar_rows(rows, dropped=dropped)
    trees, bare = [r for r in mixed if not r['why']], [r for r in mixed if r['why']]
    assert [r['id'] for r in trees] == ['0', '4'] and len(bare) == 2 and [r['extra'] for r in mixed] == sorted(r['extra'] for r in mixed)
    assert sum(dropped.values()) + len(mixed) == len(rows) and dropped['no response'] == 2
    assert all(spoken(read_tree(r['tree'])) == r['response'] for r in mixed) and apar_rows(rows) == mixed
    assert len({tuple(r['id'] for r in apar_rows(rows, seed=s)) for s in range(20)}) > 1
    assert len(apar_rows(rows, plain=0)) == 2 and len(apar_rows(rows, plain=9)) == 6 and apar_rows([]) == []
    layouts = [l for r in mixed for l in row_layouts(r, pair[1])]
    assert len(layouts) == 4 + 4 + 1 + 1 and len(row_layouts(mixed[0], pair[1], together=True)) == 1
    prompt = chat_ids(pair[1], 'P')
    assert all(l.ids[:len(prompt)].tolist() == prompt for l in layouts)


# ---- a real model

@pytest.mark.smollm2
def test_smollm2(smollm2):
    model, tokenizer = smollm2
    said = {'main': write(tokenizer, '1. Dim the light\n2. Eat early')}
    r, plain = Engine(model, tokenizer, slots=2048).run(
        [sot('How do I sleep better?', script=said, point_tokens=4), sot('What is 17 + 25?', router='model', max_new_tokens=4)], keep_logits=True)
    assert r.text.startswith('1. Dim the light: ') and '\n2. Eat early: ' in r.text and r.forks == 2
    assert all(replay_deviation(model, x) < 1e-4 for x in (r, plain)) and 0 < plain.counts['probability'] < 1

@pytest.mark.smollm2
def test_smollm2_apar(smollm2):
    import copy
    model, tokenizer = (copy.deepcopy(x) for x in smollm2)
    add_tokens(model, tokenizer, APAR_TOKENS)
    text = '\n'.join(ITEMS) + '\n\nStart.'
    rows, (whole,) = (apar_layouts(chat_ids(tokenizer, 'How?'), apar_tree(text), tokenizer, together=t) for t in (False, True))
    r, free = Engine(model, tokenizer, slots=1024).run(
        [apar('How?', script=scripts(rows)), apar('How?', max_new_tokens=16, processors=(forking(tokenizer),))], keep_logits=True)
    assert r.text == text and fed(r.record, r.prompt_tokens).ids.tolist() == whole.ids.tolist()
    assert r.forks == 3 and free.forks and all(replay_deviation(model, x) < 1e-4 for x in (r, free))

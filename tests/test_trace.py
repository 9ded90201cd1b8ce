"Traces: the golden case by table, JSON round trips, terminal text, and the page in a real browser against the mask."
import json
import math
import random
import re
import subprocess
import sys
from html import escape, unescape
from types import SimpleNamespace

import matplotlib
matplotlib.use('Agg')
import matplotlib.pyplot as plt
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from golden_case import (AFTER, OFFSET, PAPER_SYNC_SLOT, PREDICTED, SCRIPT, SYNC_SLOT, TABLE, golden_record, of_record, tuples)
from pasta_lib.metrics import MetricError, Words, critical_path, toy_record, written_steps
from pasta_lib.trace import (TraceError, _lanes, _lifetimes, ascii_interleaving, deaths, describe, from_json, html, pieces,
                             print_interleaved, slot_map, slot_owners, timeline, to_json)

BIRDS = [5, ('lark', 12), ('robin', 4), 3, '<sync/>', 6, ('wren', 7), 2, '<sync/>', 3]
NASTY = ['</script><script>document.title="broken"</script>', '<!--', '"\'`${a}\\', '🐦‍⬛', '\u2028\u2029', '\x00\x1b[31m\x9b',
         'a\n\n\tb', '\u202eright to left', '&lt;&amp;', ' ', '', '\ufffd', 'ひばり', 'e\u0301', '$DATA $TITLE', '<img src=x onerror=alert(1)>']


class Table:
    "A tokenizer whose token i is the i-th text."
    def __init__(self, texts): self.texts = texts
    def decode(self, ids): return ''.join(self.texts[i % len(self.texts)] for i in ids)


def random_record(seed, items=10, heading=2):
    rng = random.Random(seed)
    kinds = [lambda i: rng.randint(1, 6), lambda i: (f'topic {i}', rng.randint(0, 9)), lambda i: '<sync/>']
    return toy_record([rng.choice(kinds)(i) for i in range(items)], prompt=rng.randint(1, 6), heading=rng.randint(0, heading))


def mask(record):
    "Who could read whom, straight from the definition, and nobody reads what never entered the pool."
    n, reads = len(record.token), record.table.reads
    out = np.zeros((n, n), bool)
    for q in range(n):
        for k in range(n):
            s, t = record.segment[q], record.segment[k]
            may = reads[s, t] and (s != t or not record.table.causal[s] or record.position[k] <= record.position[q])
            out[q, k] = q == k or (may and record.slot[k] >= 0)
    return out


def chain_record(segments, prompt=3):
    "One thread; each segment is (name, tokens, the segments that it forgets), decoded by no model."
    from pasta_lib.engine import Record, Thread
    from pasta_lib.segments import SegmentTable
    table = SegmentTable()
    segment = table.open(name='main')
    record = Record(table, [Thread('main', segment)])
    for i in range(prompt): record.add(i, i, segment, i, 0, 0, math.nan, 'prompt', False)
    for name, tokens, dead in segments:
        segment = table.open((segment,), name, without=dead)
        for k in range(tokens):
            i = len(record.token)
            record.add(i, i, segment, i, i - prompt + 1, 0, .5, 'sampled', k == 0)
    return record


def tip_record(plan, prompt=3):
    "The record of steps (register, tokens)."
    last = lambda n: [k + 1 for k in range(n) if plan[k][0] == plan[n][0]][-1:]
    return chain_record([(f'step {n + 1}: reg_{r}', tokens, last(n)) for n, (r, tokens) in enumerate(plan)], prompt)


def page_record(seed, pages=12):
    "The record of a policy that drops pages by chance."
    rng = random.Random(seed)
    dropped = lambda n: [s for s in range(n) if rng.random() < .15]
    return chain_record([(f'page {n}', rng.randint(1, 4), dropped(n)) for n in range(1, pages)], rng.randint(1, 9))


def unseen(record):
    "Segment -> since when no token sees any of it, straight from the mask: for records of one thread."
    seen = mask(record)
    own = {s: [i for i, t in enumerate(record.segment) if t == s] for s in set(record.segment)}
    last = {s: max(record.step[q] for q in range(len(seen)) if seen[q, k].any()) for s, k in own.items()}
    return {s: step + 1 for s, step in last.items() if step < max(record.step)}


PLANS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=12)
PLAN = [(0, 4), (1, 3), (0, 5), (2, 1), (2, 2), (1, 4), (0, 3)]


# ---- the golden case
def test_golden_table_is_the_figure():
    slots = lambda T: [r.slot for r in TABLE if r.step and r.T == T]
    assert [r.slot for r in TABLE] == list(range(79)) and sum(r.kind == 'prompt' for r in TABLE) == 19
    assert slots(-1) + slots(0) == [19, 20] and slots(1) == [21, 22] and slots(2) == [23, 24, 25] and slots(3) == [26, 27]
    ends = {r.thread: r.T for r in TABLE if r.what == '</async>'}
    assert ends == {1: 34, 2: 22}
    sync = TABLE[-1]
    assert (sync.slot, sync.T, sync.what) == (SYNC_SLOT, 34, '<sync/>') and PAPER_SYNC_SLOT - SYNC_SLOT == 2
    named = [19, 2, 2, 2, sum(r.thread == 1 and r.kind == 'sampled' for r in TABLE), sum(r.thread == 2 and r.kind == 'sampled' for r in TABLE)]
    assert named == [19, 2, 2, 2, 33, 20] and sum(named) == SYNC_SLOT == 78
    for n, name in enumerate(('main', 'fork 1', 'fork 2')):
        assert [r.what for r in TABLE + AFTER if r.thread == n and r.kind == 'sampled'] == SCRIPT[name]


def test_toy_runtime_reproduces_the_golden_table():
    toy, built = toy_record([2, ('a', 32), ('b', 19), '<sync/>', 2], prompt=19), golden_record()
    assert of_record(toy) == of_record(built) == tuples(TABLE + AFTER)
    assert toy.position == built.position and list(toy.order) == list(built.order)
    assert [t.predicted for t in toy.threads] == list(PREDICTED)
    assert (mask(toy) == mask(built)).all()
    path = critical_path(built)
    assert path.length == 36 + OFFSET and path.links[0].waited == 34 - 3


# ---- pieces
@given(st.text(min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_pieces_of_bytes_join_to_the_text(text, rng):
    data = list(text.encode('utf-8', 'replace'))
    record = toy_record([len(data)], prompt=1)
    record.token = [32, *data]
    got = pieces(record, type('Bytes', (), {'decode': staticmethod(lambda ids: bytes(ids).decode('utf-8', 'replace'))}))
    assert ''.join(got)[1:] == bytes(data).decode('utf-8', 'replace')


def test_pieces_keep_a_leading_space():
    class Piece:                               # as sentencepiece does: the first token of a text loses its space
        def decode(self, ids, skip_special_tokens=True, clean_up_tokenization_spaces=True):
            assert not skip_special_tokens and not clean_up_tokenization_spaces
            return ''.join([' one', ' two', ' three'][i] for i in ids)[1:]
    record = toy_record([2], prompt=1)
    record.token = [0, 1, 2]
    assert pieces(record, Piece()) == ['one', ' two', ' three']
    assert pieces(record) == [' 0', ' 1', ' 2']


# ---- deaths
@settings(max_examples=60, deadline=None)
@given(PLANS)
def test_a_step_dies_when_its_register_is_used_again(plan):
    starts = [1 + sum(n for _, n in plan[:k]) for k in range(len(plan))]
    again = {k: [j for j in range(k + 1, len(plan)) if plan[j][0] == plan[k][0]] for k in range(len(plan))}
    record = tip_record(plan)
    assert deaths(record) == {k + 1: (starts[later[0]], later[0] + 1) for k, later in again.items() if later}
    assert {s: step for s, (step, _) in deaths(record).items()} == unseen(record)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_a_page_dies_when_nobody_sees_it(seed):
    record = page_record(seed)
    assert {s: step for s, (step, _) in deaths(record).items()} == unseen(record)
    assert all(record.step[record.segment.index(killer)] == step for step, killer in deaths(record).values())


def test_threads_that_never_read_each_other_kill_nobody():
    for seed in range(20): assert deaths(random_record(seed)) == {} == deaths(toy_record([0], prompt=0))
    assert 'died' not in describe(random_record(1)) and 'lifetimes' not in json.loads(to_json(random_record(1)))


@pytest.mark.parametrize('after, dead', [(9, {1: (8, 4)}), (7, {})])
def test_what_a_fork_still_reads_is_not_dead(after, dead):
    "Main forgets segment 1 at step 3; a fork that left before reads it up to step 7."
    record = chain_record([('one', 2, ())], prompt=1)
    table = record.table
    fork, empty = table.open((1,), 'fork'), table.open((1,), 'nobody', without=(1,))       # what has no tokens kills nobody
    rest = table.open((empty,), 'rest')
    for segment, steps in ((fork, range(3, 8)), (rest, range(3, after + 1))):
        for step in steps: record.add(9, step, segment, len(record.token), step, 0, .5, 'sampled', False)
    assert deaths(record) == dead


def test_deaths_of_real_runs(tiny):
    from pasta_lib.engine import Engine
    from pasta_lib.eviction import lifetimes, paged_h2o, streaming_llm, tip
    ids = tiny[1].encode('A one B two A three C four B five A six', add_special_tokens=False)
    registers = {tiny[1].encode(c, add_special_tokens=False)[0]: n for n, c in enumerate('ABC')}
    said = dict(script={'main': ids}, max_new_tokens=len(ids), ignore_eos=True)
    asks = [tip('Think.', registers=registers, **said), streaming_llm('Think, and think again.', window=8, **said),
            paged_h2o('Think, and think again.', budget=16, **said)]
    for result in Engine(*tiny, slots=512, page_size=4).run(asks):
        lives = lifetimes(result.record)
        assert {life.segment: life.died for life in lives if life.died is not None} == {s: step for s, (step, _) in deaths(result.record).items()}
        assert [(life.segment, life.tokens, life.born, life.written, life.died) for life in lives] == [
            tuple(life[k] for k in ('segment', 'tokens', 'born', 'written', 'died')) for life in _lifetimes(result.record)]
        assert sum(life.died is not None for life in lives) >= 3 and deaths(from_json(to_json(result.record))) == deaths(result.record)


@settings(max_examples=60, deadline=None)
@given(PLANS, st.integers(0, 10**6))
def test_lanes(plan, seed):
    "A register has one lane, no two bars of a lane overlap, and pages need no more lanes than live at once."
    for lives in (_lifetimes(tip_record(plan)), _lifetimes(page_record(seed))):
        lanes, until = _lanes(lives), lambda life: math.inf if life['died'] is None else life['died']
        for n, a in enumerate(lives):
            for b, lane in zip(lives[n + 1:], lanes[n + 1:]):
                if lane == lanes[n]: assert a['register'] == b['register'] and until(a) <= b['born']
                else: assert a['register'] is None or a['register'] != b['register']
        free = [life for life in lives if life['register'] is None]
        alive = max((sum(a['born'] <= b['born'] < until(a) for a in free) for b in free), default=0)
        assert len({lane for lane, life in zip(lanes, lives) if life['register'] is None}) == alive
        held = [(lane, life['register']) for lane, life in zip(lanes, lives) if life['register'] is not None]
        assert sorted(held) == sorted(held, key=lambda pair: pair[1]) or not held


def test_lifetimes_in_words_and_in_the_file():
    record = tip_record(PLAN)
    lines = describe(record).splitlines()
    at = lines.index('segments, 4 of 8 died:')
    assert lines[at + 1:at + 4] == ['  main: 3 tokens, steps 0-0, alive to the end',
                                    '  step 1: reg_0: 4 tokens, steps 1-4, dead from step 8 on, killed by step 3: reg_0',
                                    '  step 2: reg_1: 3 tokens, steps 5-7, dead from step 16 on, killed by step 6: reg_1']
    assert lines[at + 9] == 'why not faster:'
    kept = json.loads(to_json(record))['lifetimes']
    assert kept[1] == dict(segment=1, register=0, tokens=4, born=1, written=4, died=8, by=3)
    assert [life['register'] for life in kept] == [None, *(r for r, _ in PLAN)] and kept[7]['died'] is kept[7]['by'] is None
    record.table.names[1] = '\x1b[31m: reg_0'
    assert '\x1b' not in describe(record)


@settings(max_examples=30, deadline=None)
@given(PLANS, st.integers(0, 10**6))
def test_json_round_trip_of_what_forgets(plan, seed):
    for record in (tip_record(plan), page_record(seed)):
        again = from_json(to_json(record))
        assert to_json(again) == to_json(record) and deaths(again) == deaths(record) and _lifetimes(again) == _lifetimes(record)
        assert (mask(again) == mask(record)).all() and again.table.names == record.table.names


def test_timeline_ends_a_bar_at_death():
    record = tip_record(PLAN)
    bars = [path.vertices[:, 0].max() for c in timeline(record).collections if c.get_alpha() == .25 for path in c.get_paths()]
    dead, end = deaths(record), max(record.step)
    assert bars == [dead[s][0] - 1 if s in dead else end for s in record.segment[3:]]
    plt.close('all')


# ---- pictures
def test_timeline_draws_every_written_token():
    words = Words()
    record = toy_record(BIRDS, words=words)
    for tokenizer in (None, words):
        ax = timeline(record, tokenizer)
        cells = sum(len(c.get_paths()) for c in ax.collections if c.get_alpha() == 1)
        assert cells == sum(k != 'prompt' for k in record.kind)
        assert bool(ax.texts) == (tokenizer is not None)
        assert [t.get_text() for t in ax.get_legend().get_texts()][1] == 'fork 1 (lark)'
    assert timeline(toy_record([3], words=words), words, ax=ax) is ax
    assert timeline(toy_record([0], prompt=0)) is not None
    eos = toy_record([3, ('a', 2)])
    eos.slot[-1] = -1
    timeline(eos)
    plt.close('all')


def test_slot_map_and_owners():
    record = toy_record(BIRDS)
    owners = slot_owners(record)
    assert owners.tolist() == [record.thread[record.slot.index(s)] for s in range(len(record.token))]
    ax = slot_map(record, width=16)
    assert len(ax.get_yticks()) == -(-len(owners) // 16)
    record.slot[3] = -1
    assert slot_owners(record)[3] == -1
    assert slot_owners(toy_record([0], prompt=0)).shape == (0,)
    slot_map(toy_record([0], prompt=0))
    plt.close('all')


# ---- words
def test_describe_counts_and_blames():
    text = describe(toy_record([1, ('lark', 9), 2, '<sync/>', 1]))
    assert text.splitlines()[0] == '17 tokens (13 of them sampled content) in 13 steps, parallelism 1.00'
    assert 'fork 1 (lark): 11 tokens, steps 2-12, end, joined at step 12' in text
    assert 'fork 1 (lark) took 10 steps from step 2: main waited 7 at a sync' in text


def test_describe_what_is_unusual():
    record = toy_record([2, ('a', 3)])
    record.threads[1].finish_reason, record.step[-1] = None, 11
    assert 'limits cost 4 more' in describe(record) and 'unfinished' in describe(record)
    assert describe(toy_record([0])).startswith('0 tokens (0 of them sampled content) in 0 steps\n  main: 0 tokens, wrote nothing')


def test_interleaving_has_one_line_per_step():
    words = Words()
    record = toy_record(BIRDS, words=words, heading=1)
    lines = ascii_interleaving(record, words, width=80).splitlines()
    assert [int(l.split()[0]) for l in lines[1:]] == list(range(1, max(record.step) + 1))
    assert lines[0].split() == ['step', 'main', 'lark', 'robin', 'wren'] and max(map(len, lines)) <= 80
    assert any('·' in l for l in lines) and '<async> w' in '\n'.join(lines)


def test_terminal_is_safe_from_tokens():
    record = random_record(3)
    record.threads[0].topic = '\x1b]0;title\x07'
    text = ascii_interleaving(record, Table(NASTY), width=60)
    assert not re.search(r'[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e]', text) and len(text.splitlines()) == max(written_steps(record)) + 1


def test_print_interleaved(capsys, monkeypatch):
    from rich.console import Console
    words = Words()
    record = toy_record(BIRDS, words=words)
    console = Console(force_terminal=True, width=200, color_system='standard')
    with console.capture() as c: print_interleaved(record, words, console, width=80)
    plain = re.sub(r'\x1b\[[\d;]*m', '', c.get())
    strip = lambda t: [l.rstrip() for l in t.splitlines()]
    assert strip(plain)[1:] == strip(ascii_interleaving(record, words, width=80))[1:] and '\x1b[' in c.get()
    monkeypatch.setitem(sys.modules, 'rich.console', None)
    print_interleaved(record, words, width=80)
    assert capsys.readouterr().out.rstrip('\n') == ascii_interleaving(record, words, width=80)


# ---- JSON
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_json_round_trip(seed):
    record = random_record(seed)
    rng = random.Random(seed)
    record.prob = [math.nan if k != 'sampled' else rng.random() for k in record.kind]
    record.seconds, record.prefill_seconds = [rng.random() for _ in record.seconds], rng.random()
    text = to_json(record)
    again = from_json(text)
    assert to_json(again) == text == to_json(record)
    for name in 'token position segment slot step thread kind control seconds prefill_seconds'.split():
        assert getattr(again, name) == getattr(record, name)
    assert again.threads == record.threads and list(again.order) == list(record.order)
    assert all(a == b or (a != a and b != b) for a, b in zip(again.prob, record.prob))
    assert (again.table.reads == record.table.reads).all() and again.table.parents == record.table.parents
    assert (again.table.names, again.table.causal) == (record.table.names, record.table.causal)


def test_json_takes_numpy_and_keeps_texts():
    record = random_record(5)
    plain = to_json(record, Table(NASTY))
    record.token, record.slot = list(np.array(record.token)), list(np.array(record.slot))
    record.control, record.step = list(np.array(record.control)), list(np.array(record.step))
    assert to_json(record, Table(NASTY)) == plain and json.loads(plain)['text'] == pieces(record, Table(NASTY))


@pytest.mark.parametrize('change,message', [
    (lambda t: '[]', 'not a trace'), (lambda t: '{', 'not JSON .line 1, column 2.'),
    (lambda t: t.replace('pasta-trace', 'other'), 'not a trace'), (lambda t: t.replace('"version":1', '"version":2'), 'version 2'),
    (lambda t: t.replace('"threads"', '"theads"'), 'part missing .threads'), (lambda t: t.replace('"prob"', '"probability"'), 'part missing .prob'),
    (lambda t: t.replace('"kind":["prompt",', '"kind":['), 'unequal length')])
def test_json_that_is_not_a_trace(change, message):
    with pytest.raises(TraceError, match=message): from_json(change(to_json(toy_record([2], prompt=2))))


def damaged(path, value):
    "A trace in which one thing is another."
    trace = json.loads(to_json(toy_record([2, ('a', 3), 2, '<sync/>', 1], prompt=3)))
    part, *last = trace, *path
    for key in path[:-1]: part = part[key]
    if value is ...: del part[path[-1]]
    elif callable(value): part[path[-1]] = value(part[path[-1]])
    else: part[path[-1]] = value
    return json.dumps(trace)


@pytest.mark.parametrize('path, value, field', [
    (['tokens'], [], 'tokens'), (['threads'], {}, 'threads'), (['segments'], None, 'segments'), (['segments', 'reads'], ..., 'reads in segments'),
    (['tokens', 'token'], 5, 'tokens.token'), (['tokens', 'slot'], lambda c: c[:-1], 'tokens.slot'), (['segments', 'causal'], lambda c: c[1:], 'segments.causal'),
    (['tokens', 'thread', 4], 2, 'tokens.thread.4.'), (['tokens', 'thread', 4], -1, 'tokens.thread.4.'), (['tokens', 'step', 3], -1, 'tokens.step.3.'),
    (['tokens', 'step', 3], 10**9, 'tokens.step.3.'), (['tokens', 'step', 3], '1', 'tokens.step.3.'), (['tokens', 'step', 3], 1.5, 'tokens.step.3.'),
    (['tokens', 'position', 0], None, 'tokens.position.0.'), (['tokens', 'segment', 0], 99, 'tokens.segment.0.'), (['tokens', 'token', 1], True, 'tokens.token.1.'),
    (['tokens', 'slot', 1], -2, 'tokens.slot.1.'), (['tokens', 'prob', 1], 'high', 'tokens.prob.1.'), (['tokens', 'kind', 1], 'guess', 'tokens.kind.1.'),
    (['tokens', 'kind', 1], [], 'tokens.kind.1.'), (['tokens', 'control', 1], 1, 'tokens.control.1.'), (['threads', 0], 'main', 'threads.0.'),
    (['threads', 1, 'name'], ..., 'name in threads.1.'), (['threads', 1, 'name'], 5, 'threads.1..name'), (['threads', 1, 'segment'], 44, 'threads.1..segment'),
    (['threads', 1, 'parent'], 1, 'threads.1..parent'), (['threads', 1, 'parent'], 'main', 'threads.1..parent'), (['threads', 1, 'at'], 10**6, 'threads.1..at'),
    (['threads', 1, 'joined'], -3, 'threads.1..joined'), (['threads', 1, 'predicted'], 'long', 'threads.1..predicted'), (['threads', 1, 'colour'], 5, 'threads.1..colour'),
    (['threads', 1, 'trim'], True, 'threads.1..trim'), (['segments', 'names', 0], 5, 'segments.names.0.'), (['segments', 'parents', 1], [7], 'segments.parents.1.'),
    (['segments', 'parents', 1], 0, 'segments.parents.1.'), (['segments', 'causal', 0], 'yes', 'segments.causal.0.'), (['segments', 'reads', 0], [0, 1], 'segments.reads.0.'),
    (['seconds'], 5, 'seconds'), (['seconds', 0], 'x', 'seconds'), (['prefill_seconds'], 'x', 'prefill_seconds')])
def test_damage_is_named(path, value, field):
    with pytest.raises(TraceError, match=field) as e: from_json(damaged(path, value))
    assert '\n' not in str(e.value)


def test_a_fork_of_itself_is_damage():
    record = toy_record([2, ('a', 3), 2, '<sync/>', 1], prompt=3)
    with pytest.raises(TraceError, match='threads.1..at'): from_json(damaged(['threads', 1, 'at'], record.thread.index(1)))


@pytest.mark.parametrize('text', [5, None, b'\xff', '[' * 100_000])
def test_what_is_not_json(text):
    with pytest.raises(TraceError, match='not JSON'): from_json(text)


def leaves(value, path=()):
    if isinstance(value, dict): pairs = value.items()
    elif isinstance(value, list): pairs = enumerate(value)
    else: pairs = ()
    for key, inner in pairs:
        yield (*path, key)
        yield from leaves(inner, (*path, key))


WHOLE = json.loads(to_json(toy_record([2, ('a', 3), 2, '<sync/>', 1], prompt=3)))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(list(leaves(WHOLE))), st.sampled_from([..., None, -1, 0, 3, 10**12, 1.5, 'x', True, [], {}, [0], [[0]], float('inf')]))
def test_a_mutated_trace_is_read_or_refused(path, value):
    "Whatever one change makes of a trace: an error of ours, or a record that every view can show."
    try: record = from_json(damaged(path, value))
    except TraceError: return
    assert to_json(record) and ascii_interleaving(record)
    try: assert describe(record)
    except MetricError as e: assert 'wait for each other' in str(e)         # a join before its fork's end


# ---- the page
def page_data(text): return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)[1])


def nasty_records():
    records = [random_record(seed, 12) for seed in range(3)]
    for r in records:
        r.prob = [math.nan if k != 'sampled' else (i % 10) / 10 for i, k in enumerate(r.kind)]
        r.token = [i % len(NASTY) for i in range(len(r.token))]
        r.threads[-1].topic = NASTY[0]
    eos = toy_record([3, ('late', 4), 2, '<sync/>', 1])
    eos.token = list(range(len(eos.token)))
    eos.slot[-1] = -1
    bidirectional = random_record(8)
    bidirectional.table.causal[bidirectional.threads[-1].segment] = False
    bidirectional.token = list(range(len(bidirectional.token)))
    return [*records, eos, bidirectional, toy_record([0], prompt=2)]


def test_page_is_complete_in_itself(tmp_path):
    records = nasty_records()
    path = html(records, Table(NASTY), tmp_path / 'page.html', NASTY[0] + ' $DATA $SCRIPT', names=NASTY[:len(records)])
    text = path.read_text(encoding='utf-8')
    assert text.count('<script') == 2 and text.count('</script') == 2 and text.count('<!--') == 0
    assert not re.search(r'(src|href)\s*=\s*["\'](?!#)|@import|url\(|fetch\(|XMLHttp', text)
    assert set(re.findall(r'https?://[^\s"\']+', text)) <= {'http://www.w3.org/2000/svg'}
    assert [a['name'] for a in page_data(text)] == NASTY[:len(records)]
    assert [a['text'] for a in page_data(text)] == [pieces(r, Table(NASTY)) for r in records]
    assert '&lt;/script&gt;' in text and '$DATA $SCRIPT' in text


def test_page_takes_one_record_and_checks_names(tmp_path):
    data = page_data(html(toy_record(BIRDS), None, tmp_path / 'one.html').read_text())
    assert len(data) == 1 and data[0]['name'] == 'Answer 1'
    results = [SimpleNamespace(record=toy_record([2]), request=SimpleNamespace(prompt=p)) for p in ('Why?', [1, 2])]
    assert [a['name'] for a in page_data(html(results, None, tmp_path / 'run.html').read_text())] == ['Why?', 'Answer 2']
    with pytest.raises(TraceError, match='1 names for 2 records'):
        html([toy_record([1])] * 2, None, tmp_path / 'two.html', names=['a'])


def test_page_of_eight_answers_is_small(tmp_path):
    records = [toy_record([10, *[(f'topic {i}', 40) for i in range(4)], 5, '<sync/>', 12], prompt=60) for _ in range(8)]
    assert min(len(r.token) for r in records) > 200
    for r in records: r.prob = [.123456789] * len(r.prob)
    assert html(records, Table([' something']), tmp_path / 'p.html').stat().st_size <= 300_000


def test_page_knows_lifetimes(tmp_path):
    records = [tip_record(PLAN), random_record(2), page_record(3)]
    records[0].table.names[2] = NASTY[0]
    text = html(records, None, tmp_path / 'page.html').read_text(encoding='utf-8')
    thought, pasta, pages = page_data(text)
    assert 'lifetimes' not in pasta and text.count('</script') == 2
    assert thought['lifetimes'] == [life | dict(lane=n, name=records[0].table.names[life['segment']])
                                    for life, n in zip(_lifetimes(records[0]), [0, 2, 1, 2, 4, 4, 3, 2])]
    assert len(pages['lifetimes']) == 12 and {life['register'] for life in pages['lifetimes']} == {None}


FLAGS = ('--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking '
         '--disable-component-update --disable-sync --disable-dev-shm-usage --virtual-time-budget=4000 --dump-dom').split()


def open_page(browser, path, profile, hash):
    run = subprocess.run([browser, *FLAGS, f'--user-data-dir={profile}', f'{path.as_uri()}#{hash}'], capture_output=True, timeout=90)
    dom = run.stdout.decode('utf-8', 'replace')
    assert 'id="result"' in dom, run.stderr.decode('utf-8', 'replace')[-2000:]
    return dom


@pytest.mark.browser
def test_page_in_a_browser(tmp_path, chromium):
    "The page runs; what its script says a token could read is the mask; keys, replay and highlights work; nothing breaks out."
    records = nasty_records()
    path = html(records, Table(NASTY), tmp_path / 'page.html', NASTY[0], names=NASTY[:len(records)])
    dom = open_page(chromium, path, tmp_path / 'profile', 'selftest')
    result = json.loads(unescape(re.search(r'<pre id="result"[^>]*>(.*?)</pre>', dom, re.S)[1]))
    assert result['error'] is None and len(result['answers']) == len(records)
    assert '<title>' + escape(NASTY[0], quote=False) + '</title>' in dom
    for record, got in zip(records, result['answers']):
        n, wanted = len(record.token), mask(record)
        bits = np.array([[int(h, 16) >> b & 1 for h in row for b in range(4)][:n] for row in got['rows']], bool).reshape(n, n)
        assert (bits == wanted).all()
        order, steps, text = list(record.order), written_steps(record), pieces(record, Table(NASTY))
        assert got['spans'] == n and got['text'] == ''.join(text[i] for i in order)
        assert got['later'] == sum(s > got['half'] for s in steps)
        if order:
            middle = order[len(order) // 2]
            assert got['middle'] == middle and got['read'] == wanted[middle].sum() and got['tipped']
            following = order[len(order) // 2 + 1] if len(order) // 2 + 1 < len(order) else middle
            assert got['moved'] == following


@pytest.mark.browser
def test_page_of_what_forgets_in_a_browser(tmp_path, chromium):
    "Dead tokens are pale at the chosen moment and under the pointer; each bar of the register timeline leads to its segment."
    records = [tip_record(PLAN), page_record(3), tip_record([(n % 3, n % 4 + 1) for n in range(40)], prompt=0), random_record(2)]
    for record in records: record.token = [i % len(NASTY) for i in range(len(record.token))]
    records[0].table.names[1:3] = [NASTY[0], f'{NASTY[1]}: reg_1']
    path = html(records, Table(NASTY), tmp_path / 'page.html')
    dom = open_page(chromium, path, tmp_path / 'profile', 'selftest')
    result = json.loads(unescape(re.search(r'<pre id="result"[^>]*>(.*?)</pre>', dom, re.S)[1]))
    assert result['error'] is None and re.search(r'id="lives"[^>]*>', dom)[0].count('hidden') == 0
    for record, got in zip(records, result['answers']):
        n, seen, dead = len(record.token), mask(record), deaths(record)
        bits = np.array([[int(h, 16) >> b & 1 for h in row for b in range(4)][:n] for row in got['rows']], bool).reshape(n, n)
        assert (bits == seen).all()
        died = [dead.get(s, (math.inf,))[0] for s in record.segment]
        gone = lambda step: sum(d <= step for d in died)
        assert (got['dead'], got['gone']) == (gone(record.step[got['middle']]), gone(got['half']))
        assert [record.segment[i] for i in got['pointed']] == [life['segment'] for life in _lifetimes(record)]
        if dead: assert got['read'] + got['dead'] == sum(s <= record.step[got['middle']] for s in record.step)


@pytest.mark.browser
def test_page_says_who_killed_whom(tmp_path, chromium):
    record = tip_record(PLAN)
    path = html([record, random_record(2)], Table([' word']), tmp_path / 'page.html')
    dom = open_page(chromium, path, tmp_path / 'profile', 'answer=1&token=4')
    lives, answer, thumbnails = _lifetimes(record), sum(k != 'prompt' for k in record.kind), 1 + len(random_record(2).threads)
    assert dom.count('class="kept life t') == len(lives) and dom.count('class="cell t') == 2 * answer + len(lives) + thumbnails
    assert '>step 1: reg_0: 4 tokens, dead from step 8 on, killed by step 3: reg_0<' in dom
    assert [f'>register {n}<' in dom for n in range(4)] == [True, True, True, False] and '4 of 8' in dom
    other = open_page(chromium, path, tmp_path / 'profile', 'answer=2&token=4')
    assert 'class="kept life' not in other and 'segments died</dt>' not in other and re.search(r'<p [^>]*id="lives"[^>]*hidden', other)


@pytest.mark.browser
def test_page_draws_the_golden_case(tmp_path, chromium):
    record = golden_record()
    path = html(record, Table([' word']), tmp_path / 'golden.html', 'Figure 3.4', names=['golden'])
    dom = open_page(chromium, path, tmp_path / 'profile', 'answer=1&step=5&token=27')
    answer = sum(k != 'prompt' for k in record.kind)
    assert dom.count('class="cell t') == 2 * answer + len(record.threads) and dom.count('class="kept t') == answer
    assert 'step 5, slot 27, position 64' in dom and 'step 5 of 38' in dom       # fork 2's first own token at T=3
    assert re.search(r'could read</span><span>25<', dom)          # 19 of the prefix, 2 of main, two promises, its <async>, itself

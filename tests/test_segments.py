"Segments and documents against the token-by-token oracle."
import random

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import oracle_masks as oracle
from pasta_lib import segments
from pasta_lib.core import PastaError
from pasta_lib.segments import (IGNORE, Layout, LayoutBuilder, SegmentError, SegmentTable, pack, pasta_layout,
                                predicted_length, resume_position, show_layout, summary, sync_position, thread_labels)
from pasta_lib.tags import Piece


def text(*ids): return Piece('text', list(ids))
def promise(*ids, tokens=10, topic=''): return Piece('promise', list(ids), tokens, topic)
def block(*ids): return Piece('async', list(ids))
def sync(*ids): return Piece('sync', list(ids))


def random_pieces(rng):
    pieces, fresh = [], iter(range(100, 10_000))
    take = lambda low, high: [next(fresh) for _ in range(rng.randint(low, high))]
    for _ in range(rng.randint(0, 8)):
        kind = rng.choice(['text', 'promise', 'promise', 'sync'])
        if kind == 'promise':
            pieces.append(Piece('promise', take(1, 3), rng.randint(0, 12)))
            if rng.random() < .85: pieces.append(Piece('async', take(1, 6)))
        else: pieces.append(Piece(kind, take(0, 3) if kind == 'text' else take(1, 2)))
    return pieces


def agrees(layout, tokens):
    assert layout.ids.tolist() == [t.id for t in tokens]
    assert layout.position.tolist() == [t.position for t in tokens]
    assert layout.label.tolist() == [t.label for t in tokens]
    # the table alone, with the rule spelled out here
    s, p = layout.segment, layout.position
    if not len(layout): return
    may = layout.table.reads[s[:, None], s] & ((s[:, None] != s) | (p[None] <= p[:, None]))
    assert may.tolist() == oracle.readable(tokens)


# --- the table --------------------------------------------------------------------------------------------------------

def test_reading_is_reachability():
    table = SegmentTable()
    a = table.open(); b = table.open([a]); c = table.open([a]); d = table.open([b, c]); e = table.open()
    assert [''.join(map(str, row)) for row in table.reads.astype(int)] == ['10000', '11000', '10100', '11110', '00001']
    assert table.row(d).tolist() == [True] * 4 + [False] and table.readers(b).tolist() == [b, d] and len(table) == 5
    assert table.names[e] == 'segment 4' and table.parents[d] == (b, c) and table.causal == [True] * 5


def test_without_and_reads():
    table = SegmentTable()
    a = table.open(); b = table.open(a)                                  # a bare number is one parent
    c = table.open([b], without=[a]); d = table.open([c]); e = table.open([d], reads=[a], causal=False)
    assert not table.reads[c, a] and table.reads[c, b] and not table.reads[d, a]      # forgotten for good
    assert table.row(e).tolist() == [True, False, False, False, True] and table.parents[e] == (d,)
    f = table.open([e], reads=[a, b], without=[b])
    assert table.row(f).tolist() == [True, False, False, False, False, True]
    g = table.open([g0 := table.open([a])], without=[g0])              # a step may reuse the register of the one before
    assert table.row(g).nonzero()[0].tolist() == [a, g]


some_ids = st.lists(st.integers(0, 60), max_size=3)


@given(st.lists(st.tuples(some_ids, some_ids), max_size=60))
@settings(max_examples=60, deadline=None)
def test_table_equals_sets(opens):
    table, rows = SegmentTable(), []
    for n, (parents, without) in enumerate(opens):
        parents, without = [p for p in parents if p < n], [w for w in without if w < n]
        assert table.open(parents, without=without) == n
        rows.append((set().union(*(rows[p] for p in parents)) - set(without)) | {n})
    assert [set(np.flatnonzero(r).tolist()) for r in table.reads] == rows
    assert all(table.readers(k).tolist() == [q for q in range(len(rows)) if k in rows[q]] for k in range(len(rows)))


def test_growth_keeps_rows_and_memory_is_segments_squared():
    table = SegmentTable()
    for i in range(1000): table.open([i - 1] if i else [])
    assert (table.reads == np.tri(1000, dtype=bool)).all()
    assert table.reads.base.nbytes <= (2 * 1000) ** 2
    other = SegmentTable()
    for _ in range(3): other.open([])
    assert other.extend(table, 'x ') == 3 and len(other) == 1003 and other.names[3] == 'x segment 0'
    assert (other.reads[3:, 3:] == table.reads).all() and not other.reads[3:, :3].any() and other.parents[4] == (3,)
    assert other.open([1002]) == 1003 and other.row(1003).sum() == 1001


@pytest.mark.parametrize('call', [
    lambda t: t.open([1]), lambda t: t.open([-1]), lambda t: t.open([0], without=[7]), lambda t: t.open(reads=[2]),
    lambda t: t.row(1), lambda t: t.row(-1), lambda t: t.readers(5), lambda t: t.open(3)])
def test_unknown_segments(call):
    table = SegmentTable(); table.open()
    with pytest.raises(SegmentError, match='is not a segment .table of 1 segments.: open it first'): call(table)
    assert len(table) == 1 and issubclass(SegmentError, PastaError)


# --- layouts ----------------------------------------------------------------------------------------------------------

def test_layout_converts_and_checks():
    table = SegmentTable(); table.open()
    layout = Layout([1, 2], [0, 0], range(2), [2, IGNORE], table)
    assert len(layout) == 2
    assert all(getattr(layout, n).dtype == np.int64 for n in ('ids', 'segment', 'position', 'label'))
    tensors = layout.tensors()
    assert tensors['position'].tolist() == [0, 1] and set(tensors) == {'ids', 'segment', 'position', 'label'}
    assert len(Layout([], [], [], [], SegmentTable())) == 0
    with pytest.raises(SegmentError, match='differ in length'): Layout([1], [0], [0], [], table)
    with pytest.raises(SegmentError, match='table lacks'): Layout([1], [1], [0], [0], table)
    with pytest.raises(SegmentError, match='table lacks'): Layout([1], [-1], [0], [0], table)


def test_builder():
    row = LayoutBuilder()
    assert row.write([1, 2], row.table.open(), 5) == 7 and row.write([3], 0, 7, [9]) == 8 and row.write([], 0, 3) == 3
    layout = row.layout()
    assert layout.position.tolist() == [5, 6, 7] and layout.label.tolist() == [IGNORE, IGNORE, 9]
    assert LayoutBuilder(layout.table).table is layout.table


# --- documents against the oracle -------------------------------------------------------------------------------------

@pytest.mark.parametrize('positions', ['predicted', 'constant', 'oracle'])
@pytest.mark.parametrize('after_sync', ['main', 'max'])
def test_random_documents(positions, after_sync):
    rng = random.Random(f'{positions} {after_sync}')
    for _ in range(120):
        prompt, pieces, eos = list(range(rng.randint(0, 4))), random_pieces(rng), rng.choice([None, 1])
        options = dict(positions=positions, constant=rng.randint(0, 50), after_sync=after_sync, eos_id=eos)
        agrees(pasta_layout(prompt, pieces, **options), oracle.document(prompt, pieces, **options))


EDGES = {
    'nothing': [],
    'empty text': [text()],
    'promise first': [promise(1), block(2, 3)],
    'empty text before the promise': [text(), promise(1), block(2, 3), text(4)],
    'sync first': [sync(5), text(6)],
    'sync alone': [sync(5)],
    'sync after text': [text(1), sync(5), text(6)],
    'adjacent promises': [promise(1), block(2, 3), promise(4), block(5, 6), text(7)],
    'sync right after a promise without block': [promise(1), sync(2), text(3)],
    'sync right after a block': [promise(1), block(2, 3), sync(4)],
    'two syncs': [promise(1), block(2, 3), sync(4), sync(5), text(6)],
    'second round': [promise(1), block(2, 3), sync(4), promise(5), block(6, 7), sync(8), text(9)],
    'no later sync': [text(1), promise(2), block(3, 4)],
    'blocks missing': [promise(1), promise(2), promise(3), block(4), sync(5)],
    'block of one token': [promise(1), block(2), text(3)],
    'zero-length text everywhere': [text(), promise(1), block(2), text(), sync(3), text()],
    'long promise and sync': [promise(1, 2, 3, 4), block(5, 6), sync(7, 8), text(9)],
    'promise of zero tokens': [promise(1, tokens=0), block(2, 3, 4), text(5), sync(6)],
    'fork longer than promised': [promise(1, tokens=1), block(*range(2, 30)), sync(30), text(31)],
}


@pytest.mark.parametrize('name', EDGES)
@pytest.mark.parametrize('prompt', [[], [90], [90, 91, 92]])
@pytest.mark.parametrize('options', [{}, dict(after_sync='max', eos_id=99), dict(positions='oracle', eos_id=99),
                                     dict(positions='constant', constant=3)])
def test_edges(name, prompt, options):
    agrees(pasta_layout(prompt, EDGES[name], **options), oracle.document(prompt, EDGES[name], **options))


def test_worked_example():
    "P1 A1 P2 A2 sync: the labels of the thesis's third change."
    pieces = [promise(1), block(10, 11, 12), promise(2), block(20, 21), sync(3), text(4)]
    layout = pasta_layout([8, 9], pieces, eos_id=7)
    assert layout.ids.tolist() == [8, 9, 1, 10, 11, 12, 2, 20, 21, 3, 4]
    assert layout.label.tolist() == [IGNORE, 1, 2, 11, 12, IGNORE, 3, 21, IGNORE, 4, 7]
    assert layout.position.tolist() == [0, 1, 2, 3, 4, 5, 13, 14, 15, 24, 25]
    assert layout.table.names == ['main 1', 'fork 1', 'main 2', 'fork 2', 'main 3']
    assert layout.table.parents == [(), (0,), (0,), (2,), (2, 1, 3)]


def test_main_after_a_sync_reads_old_forks_but_new_forks_do_not_read_each_other():
    layout = pasta_layout([1], [promise(2), block(3), sync(4), promise(5), block(6), promise(7), block(8), text(9)])
    reads, names = layout.table.reads, layout.table.names
    at = {name: i for i, name in enumerate(names)}
    assert layout.table.parents == [(), (0,), (0, 1), (2,), (2,), (4,), (4,)]     # each edge once; 2 is the sync
    assert reads[at['fork 2'], at['fork 1']] and reads[at['fork 3'], at['fork 1']]
    assert not reads[at['fork 3'], at['fork 2']]


def test_topics_become_names():
    layout = pasta_layout([1], [promise(2, topic='main idea'), block(3), promise(4, topic='fork'), block(5), sync(6)])
    assert layout.table.names == ['main 1', 'fork 1: main idea', 'main 2', 'fork 2: fork', 'main 3']


@pytest.mark.parametrize('pieces, message', [
    ([block(1)], 'an async block without its promise .piece 0.'),
    ([text(1), block(2)], 'without its promise .piece 1.'),
    ([promise(1), block(2), block(3)], 'without its promise .piece 2.'),
    ([promise(1), sync(2), block(3)], 'without its promise .piece 2.: put it right after its promise'),
    ([promise()], 'promise without tokens .piece 0.'),
    ([promise(1), block()], 'async without tokens .piece 1.'),
    ([sync()], 'sync without tokens'),
    ([Piece('plan', [1])], "unknown kind of piece 'plan'"),
    ([promise(1, tokens=None)], 'a promise without a length'),
    ([promise(1, tokens=-10)], 'a promise of -10 tokens'),
])
def test_malformed_pieces(pieces, message):
    with pytest.raises(SegmentError, match=message): pasta_layout([0], pieces)


def test_a_missing_length_matters_only_when_it_is_used():
    pieces = [promise(1, tokens=None), block(2, 3), text(4)]
    assert pasta_layout([], pieces, 'constant', 5).position.tolist() == [0, 1, 2, 6]
    assert pasta_layout([], pieces, 'oracle').position.tolist() == [0, 1, 2, 3]


def test_position_helpers():
    assert resume_position(18, 20) == 39 and sync_position(5, []) == sync_position(5, [], 'max') == 5
    assert sync_position(5, [9, 3], 'max') == 10 and predicted_length('constant') == 40
    with pytest.raises(SegmentError, match='unknown position mode'): predicted_length('best', 1)
    with pytest.raises(SegmentError, match='unknown mode'): sync_position(1, [], 'last')
    with pytest.raises(SegmentError, match='unknown mode'): pasta_layout([1], [sync(2)], after_sync='')


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 4)), max_size=40))
@settings(max_examples=60, deadline=None)
def test_thread_labels_are_the_next_of_the_same_thread(tokens):
    ids, thread = [i for i, _ in tokens], [t for _, t in tokens]
    n = len(ids)
    expected = [next((ids[j] for j in range(i + 1, n) if thread[j] == thread[i]), IGNORE) for i in range(n)]
    assert thread_labels(ids, thread).tolist() == expected


# --- packing ----------------------------------------------------------------------------------------------------------

def test_packing_keeps_documents_apart():
    rng = random.Random(3)
    for _ in range(40):
        parts = [(list(range(rng.randint(1, 3))), random_pieces(rng)) for _ in range(rng.randint(1, 4))]
        layouts = [pasta_layout(*part) for part in parts]
        total = sum(map(len, layouts)); length = total + rng.choice([0, 1, 7])
        row, start = pack(layouts, length, pad_id=77), 0
        assert len(row) == length and len({*row.segment}) <= len(row.table)
        for layout in layouts:
            here = slice(start, start + len(layout)); start += len(layout)
            for name in ('ids', 'position', 'label'): assert (getattr(row, name)[here] == getattr(layout, name)).all()
            s = row.segment[here]
            assert (row.table.reads[s[:, None], s] == layout.table.reads[layout.segment[:, None], layout.segment]).all()
            inside = np.zeros(length, bool); inside[here] = True
            assert not row.table.reads[s[:, None], row.segment[~inside]].any()
        assert (row.ids[total:] == 77).all() and (row.label[total:] == IGNORE).all()
        padding = row.segment[-1]
        if length > total: assert row.table.readers(padding).tolist() == [padding] and row.table.row(padding).sum() == 1


def test_packing_edges():
    one = pasta_layout([1, 2], [])
    assert pack([one]).table.names == ['main 1'] and pack([one, one]).table.names == ['0. main 1', '1. main 1']
    assert len(pack([])) == 0 and pack([], 3, 5).ids.tolist() == [5, 5, 5]
    assert len(pack([pack([one, one], 6), one], 10)) == 10                                   # packs of packs
    with pytest.raises(SegmentError, match='4 tokens do not fit in a row of 3'): pack([one, one], 3)


# --- what people look at ----------------------------------------------------------------------------------------------

def test_summary_and_picture():
    import matplotlib.pyplot as plt
    layout = pasta_layout([1, 2], [promise(3, topic='pears'), block(4, 5), sync(6)])
    lines = summary(layout).splitlines()
    assert lines[0].split() == ['segment', 'parents', 'tokens', 'positions', 'reads']
    assert lines[2].split() == ['1', 'fork', '1:', 'pears', '0', '2', '3-4', '0', '1']
    assert lines[3].split() == ['2', 'main', '2', '0', '1', '1', '13-13', '0', '1', '2']
    ax = show_layout(layout, [str(i) for i in layout.ids])
    assert len(ax.patches) == 6 and {t.get_text() for t in ax.texts} >= {'main 1', 'fork 1: pears', '6'}
    layout.table.open([2], 'empty'); layout.table.open([3], 'after nothing')
    row = Layout([1], [4], [0], [IGNORE], layout.table)
    assert ' - ' in summary(row) and show_layout(row) is not None and show_layout(pasta_layout([], [])) is not None
    plt.close('all')


def test_import_is_light():
    import subprocess, sys
    code = 'import sys, pasta_lib.segments; print([m for m in ["torch", "matplotlib", "nbdev"] if m in sys.modules])'
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout.strip() == '[]'
    assert set(segments.__all__) >= {'IGNORE', 'SegmentTable', 'Layout', 'pasta_layout', 'pack'}

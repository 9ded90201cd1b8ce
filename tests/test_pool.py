"Pool: random operations against an independent book of who owns what, and the edges: exhaustion, reuse, prefixes, claims."
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from pasta_lib.core import PastaError
from pasta_lib.pool import *

EXAMPLES = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


class Book:
    "What a pool must say, kept with sets and lists only: no arrays, no clever index."
    def __init__(self, pool):
        self.pool, self.size, self.count = pool, pool.page_size, len(pool.pages)
        self.tables = {}                                     # table -> its entry

    def open(self, room):
        t = self.pool.table(room)
        self.tables[t] = dict(pages=[], slots=[], owner={}, ids=None)

    def refs(self): return Counter(p for e in self.tables.values() for p in e['pages'] if p is not None)

    def free(self): return self.count - len(self.refs())

    def look(self, t):
        "The table says what the book says."
        e = self.tables[t]
        assert t.used == len(e['slots'])
        assert [None if p < 0 else p for p in t.pages] == e['pages']
        for s in range(t.used):
            assert t.owner[s] == e['owner'].get(s, -1)
            p = e['pages'][s // self.size]
            if p is not None: assert t.index[s] == p * self.size + s % self.size
        live = [s for s in range(t.used) if e['pages'][s // self.size] is not None]
        assert np.arange(t.capacity)[t.live()].tolist()[:len(live)] == live and len(np.arange(t.used)[t.live()]) == len(live)
        assert t.held == sum(p is not None for p in e['pages'])

    def check(self):
        check_pool(self.pool)
        refs = self.refs()
        assert self.pool.pages.free == self.free()
        assert all(self.pool.pages.refs[p] == refs[p] for p in range(self.count))
        for t in self.tables: self.look(t)


def take(book, t, n, segment):
    e, before, free = book.tables[t], list(t.pages), book.free()
    need = max(0, -(-(t.used + n) // book.size) - len(t.pages))
    if need > free:
        with pytest.raises(PoolFull): t.take(n, segment)
        assert t.pages == before and book.pool.pages.free == free      # exhaustion leaves everything as it was
        return
    taken = {p for x in book.tables.values() for p in x['pages']}
    slots = t.take(n, segment)
    assert slots.tolist() == list(range(len(e['slots']), len(e['slots']) + n))
    new = t.pages[len(before):]
    assert t.pages[:len(before)] == before and len(new) == need and not taken & set(new)
    e['pages'] += new
    e['slots'] += slots.tolist()
    e['owner'] |= {int(s): int(o) for s, o in zip(slots, np.broadcast_to(segment, n))}


def give_back(book, t, n):
    e = book.tables[t]
    t.give_back(n)
    for s in e['slots'][len(e['slots']) - n:]: e['owner'].pop(s, None)
    del e['slots'][len(e['slots']) - n:]


def drop(book, t, slots):
    e, gone = book.tables[t], 0
    for s in slots: e['owner'].pop(s, None)
    for p in {s // book.size for s in slots}:
        inside = range(p * book.size, (p + 1) * book.size)
        if inside[-1] < len(e['slots']) and e['pages'][p] is not None and not any(s in e['owner'] for s in inside):
            e['pages'][p], gone = None, gone + 1
    assert t.drop(np.array(sorted(slots), int)) == gone


def align(book, t):
    e, before = book.tables[t], t.used
    assert t.align() == -before % book.size
    e['slots'] += range(before, t.used)
    page = before // book.size
    if t.used > before and not any(s // book.size == page for s in e['owner']): e['pages'][page] = None


def there_and_back(book, t, rng):
    "Set a mark, do something, rewind: nothing happened; unless a page has gone that was there."
    e, mark = book.tables[t], t.mark()
    before = {k: v.copy() if v is not None else None for k, v in e.items()}
    for _ in range(rng.integers(1, 4)):
        if rng.random() < .7: take(book, t, int(rng.integers(1, 2 * book.size + 1)), 3)
        elif rng.random() < .5: align(book, t)
        elif t.used: drop(book, t, {int(s) for s in rng.integers(0, t.used, 3)})
        book.check()
    if any(p is not None and e['pages'][n] is None for n, p in enumerate(before['pages'])):
        with pytest.raises(PastaError, match='no way back'): t.rewind(mark)
    else:
        t.rewind(mark)
        book.tables[t] = before


def release(book, t):
    t.release()
    del book.tables[t]
    assert t not in book.pool.tables.values()


def share(book, ids):
    "A new table begins with what others have written of `ids`: exactly the whole pages of an equal beginning."
    pages, size = book.pool.prefix(ids), book.size
    for n, p in enumerate(pages):
        writers = [e for e in book.tables.values() if e['ids'] and n < len(e['pages']) and e['pages'][n] == p]
        assert any(e['ids'][:(n + 1) * size] == ids[:(n + 1) * size] for e in writers)
    assert len(pages) * size < len(ids)
    t = book.pool.table()
    t.adopt(pages, 7)
    n = len(pages) * size
    book.tables[t] = dict(pages=list(pages), slots=list(range(n)), owner={s: 7 for s in range(n)}, ids=list(ids[:n]) or None)
    assert t.position[:n].tolist() == list(range(n))
    return t


@pytest.mark.parametrize('size', [1, 3, 16, 64])
@EXAMPLES
@given(seed=st.integers(0, 10**6))
def test_random_operations(size, seed):
    "60 x 50 operations for each page size: 12,000 and more."
    rng = np.random.default_rng(seed)
    pool = Pool(1, 1, 1, slots=int(rng.integers(4, 30)) * size, page_size=size)
    book, prompts = Book(pool), [[0] * 200, [0] * size + [1] * 200, rng.integers(0, 2, 200).tolist()]
    for _ in range(50):
        tables, action = list(book.tables), rng.integers(0, 12)
        t = tables[rng.integers(len(tables))] if tables else None
        if t is None or action == 0 and len(tables) < 6: book.open(int(rng.integers(1, 5)))
        elif action <= 3:
            n = int(rng.integers(1, 3 * size + 2))
            take(book, t, n, int(rng.integers(5)) if rng.random() < .5 else rng.integers(0, 5, n))
        elif action == 4: give_back(book, t, int(rng.integers(0, 1 + min(t.used, 2 * size))) if t.held == len(t.pages) else 0)
        elif action == 5 and t.used:
            a, b = sorted(rng.integers(0, t.used + 1, 2))
            drop(book, t, set(range(a, b)))
        elif action == 6: release(book, t)
        elif action == 8: align(book, t)
        elif action == 9: there_and_back(book, t, rng)
        elif action == 10 and t.used and t.held: drop(book, t, {s for s in range(t.used) if rng.random() < .8})
        elif action == 7 and len(tables) < 6: share(book, prompts[rng.integers(3)][:int(rng.integers(1, 6 * size + 2))])
        else:
            ids = prompts[rng.integers(3)][:int(rng.integers(1, 6 * size + 2))]
            fresh = pool.table()
            book.tables[fresh] = dict(pages=[], slots=[], owner={}, ids=None)
            take(book, fresh, len(ids), 0)
            if fresh.used:
                pool.register(ids, fresh)
                book.tables[fresh]['ids'] = ids
                again = pool.prefix(ids + [5])
                assert len(again) == len(ids) // size              # all of its whole pages are found
        book.check()
    for t in list(book.tables): release(book, t)
    book.check()
    assert pool.pages.free == len(pool.pages) and not pool.prefixes and not pool.names and (pool.pages.aside == -1).all()


# ---- exhaustion, reuse, claims

@pytest.mark.parametrize('size', [1, 3, 16, 64])
def test_every_slot_can_be_used_and_used_again(size):
    pool = Pool(2, 2, 4, slots=5 * size, page_size=size)
    for _ in range(3):
        t = pool.table()
        slots = t.take(5 * size, np.arange(5 * size))
        assert sorted(t.index[slots]) == list(range(5 * size))
        with pytest.raises(PoolFull, match='no free page'): t.take(1)
        with pytest.raises(PoolFull): pool.table().take(1)
        t.release()
        check_pool(pool)
        assert pool.pages.free == 5


def test_exhaustion_half_way_gives_the_pages_back():
    pool = Pool(1, 1, 1, slots=12, page_size=4)
    a, b = pool.table(), pool.table()
    a.take(5)
    with pytest.raises(PoolFull): b.take(5)
    assert b.used == 0 and b.pages == [] and pool.pages.free == 1
    b.take(4)
    check_pool(pool)


def test_claims_never_lose_pages():
    "Pages set aside for one request are lent to others before anyone is turned away."
    pool = Pool(1, 1, 1, slots=40, page_size=4)
    greedy, other = pool.table(room=9), pool.table(room=4)
    greedy.take(1)
    assert (pool.pages.aside == greedy.key).sum() == 8
    other.take(4 * 9)
    check_pool(pool)
    assert pool.pages.free == 0
    with pytest.raises(PoolFull): greedy.take(4)
    other.release()
    greedy.take(39)
    check_pool(pool)
    greedy.release()
    assert pool.pages.free == 10 and (pool.pages.aside == -1).all()


def test_requests_that_said_how_much_they_need_stay_contiguous():
    pool = Pool(1, 1, 1, slots=64, page_size=4)
    tables = [pool.table(room=4) for _ in range(4)]
    for _ in range(16):
        for t in tables: t.take(1)
    assert all(t.contiguous for t in tables)
    check_pool(pool)


def test_a_page_after_a_dropped_one():
    "Contiguity is about the pages that are left, also when the last one is gone and page 0 comes next."
    pool = Pool(1, 1, 1, slots=12, page_size=2)
    first, t = pool.table(room=2), pool.table()
    first.take(4)
    t.take(4)                                                # pages 2, 3
    t.drop(np.array([2, 3]))
    first.release()
    blockers = pool.table()
    blockers.take(2), check_pool(pool)
    t.take(2)
    check_pool(pool)
    physical = t.index[np.arange(t.capacity)[t.live()]]
    assert t.contiguous == (np.diff(physical) == 1).all()
    t.drop(np.arange(6))
    check_pool(pool)
    assert t.held == 0
    t.take(1)
    check_pool(pool)
    assert t.contiguous


def test_release_twice_is_an_error():
    pool = Pool(1, 1, 1, slots=8, page_size=4)
    t = pool.table()
    t.take(1)
    page = t.pages[0]
    t.release()
    with pytest.raises(PastaError, match='released twice'): pool.release(page)
    t.release()                                              # an empty table has nothing to give back
    check_pool(pool)


def test_holes_are_filled_first_and_lent_out_when_nothing_else_is_left():
    pool = Pool(1, 1, 1, slots=40, page_size=4)
    t, other = pool.table(room=6), pool.table()
    t.take(24)
    t.drop(np.arange(4, 12))                                 # pages 1 and 2 are holes
    assert pool.pages.free == 6 and (t.first, t.last) == (0, 5)
    other.take(12)
    assert min(other.pages) > 5                              # nobody needs the holes yet
    t.take(4)
    assert t.pages[-1] == 1                                  # but their owner takes them first
    other.take(8)
    assert 2 in other.pages and pool.pages.free == 0         # lent out, when nothing else is left
    check_pool(pool)
    with pytest.raises(PoolFull, match='1 wanted, 0 of 10 free'): t.take(1)
    t.drop(np.arange(12, 16))
    other.release()
    t.take(4)
    assert t.pages[-1] == 2 and t.last == 5
    check_pool(pool)


def test_the_stretch_shrinks_as_its_ends_die():
    pool = Pool(1, 1, 1, slots=40, page_size=4)
    t = pool.table(room=6)
    t.take(24)
    t.drop(np.arange(0, 4)), t.drop(np.arange(20, 24))
    assert (t.first, t.last, t.contiguous) == (1, 4, True)
    t.drop(np.arange(8, 12))
    assert not t.contiguous
    t.drop(np.arange(24))
    assert t.held == 0 and (t.first, t.last) == (10, -1)
    check_pool(pool)


def test_align():
    "A page on which everything is dead goes as soon as nothing more will be written on it."
    pool = Pool(1, 1, 1, slots=40, page_size=4)
    t = pool.table()
    assert t.align() == 0 and t.used == 0
    t.take(5)
    assert t.align() == 3 and t.used == 8 and t.align() == 0
    assert t.take(1).tolist() == [8]
    assert t.drop(np.array([8])) == 0 and t.held == 3        # still being written
    assert t.align() == 3 and t.held == 2
    check_pool(pool)
    assert t.drop(np.array([4])) == 1 and t.held == 1        # the rest of that page was never used
    check_pool(pool)


def test_no_way_back_over_a_dropped_page():
    pool = Pool(1, 1, 1, slots=40, page_size=4)
    t = pool.table()
    t.take(6)
    mark = t.mark()
    t.take(6)
    t.drop(np.arange(8, 12))
    t.rewind(mark)                                           # that page was not there at the mark
    check_pool(pool)
    t.drop(np.arange(4))
    with pytest.raises(PastaError, match='no way back .1 pages'): t.rewind(mark)
    check_pool(pool)


@pytest.mark.parametrize('slots, page_size', [(0, 4), (4, 0), (-1, 1)])
def test_a_pool_needs_slots(slots, page_size):
    with pytest.raises(PastaError, match='needs slots'): Pool(1, 1, 1, slots, page_size)


def test_stores():
    "One slot more than the pages have: the scratch slot that nobody reads."
    pool = Pool(3, 2, 8, slots=10, page_size=4, dtype=torch.bfloat16)
    assert pool.slots == 12 and pool.scratch == 12 and len(pool.keys) == len(pool.values) == 3
    assert pool.keys[0].shape == (1, 2, 13, 8) and pool.keys[0].dtype == torch.bfloat16
    assert '12 slots in 3 pages of 4' in repr(pool)


# ---- prefixes

def test_prefixes_are_exact():
    pool = Pool(1, 1, 1, slots=64, page_size=4)
    t, ids = pool.table(), list(range(10))
    t.take(10)
    pool.register(ids, t)
    assert pool.prefix(ids) == t.pages[:2]
    assert pool.prefix(ids[:9]) == t.pages[:2]
    assert pool.prefix(ids[:8]) == t.pages[:1]               # one token must be left to ask about
    assert pool.prefix(ids[:4]) == [] and pool.prefix(ids[:5]) == t.pages[:1]
    assert pool.prefix([9] + ids[1:]) == []
    assert pool.prefix(ids[:3] + [9] + ids[4:]) == []
    assert pool.prefix(ids[:4] + [9] * 8) == t.pages[:1]
    assert pool.prefix(ids[4:]) == []                        # the same tokens elsewhere are another page
    t.release()
    assert pool.prefix(ids) == [] and not pool.names


def test_a_shared_page_outlives_its_writer():
    pool = Pool(1, 1, 1, slots=16, page_size=4)
    a, ids = pool.table(), list(range(9))
    a.take(9)
    pool.register(ids, a)
    b = pool.table()
    b.adopt(pool.prefix(ids), 0)
    shared = list(b.pages)
    a.release()
    check_pool(pool)
    assert pool.prefix(ids) == shared and pool.pages.free == 2
    b.drop(np.arange(4))                                     # the first page is free, and its prefix gone
    check_pool(pool)
    assert pool.prefix(ids) == []
    b.release()
    check_pool(pool)
    assert pool.pages.free == 4


def test_the_second_to_write_a_prefix_does_not_replace_the_first():
    pool, ids = Pool(1, 1, 1, slots=32, page_size=4), list(range(8))
    a, b = pool.table(), pool.table()
    for t in (a, b):
        t.take(8)
        pool.register(ids, t)
    check_pool(pool)
    assert pool.prefix(ids + [1])[0] == a.pages[0]


def test_a_dropped_page_is_not_registered():
    pool, ids = Pool(1, 1, 1, slots=32, page_size=4), list(range(12))
    t = pool.table()
    t.take(12)
    t.drop(np.arange(4, 8))
    pool.register(ids, t)
    check_pool(pool)
    assert len(pool.prefix(ids)) == 1


# ---- small parts

@given(st.lists(st.booleans(), max_size=40), st.integers(0, 8))
def test_first_run(flags, length):
    need = max(length, 1)
    expected = next((i for i in range(len(flags)) if all(flags[i:i + need]) and i + need <= len(flags)
                     and (i == 0 or not flags[i - 1])), None)
    assert first_run(np.array(flags, bool), length) == expected


def break_(pool, how):
    t = next(iter(pool.tables.values()))
    if how == 'twice': t.pages[1] = t.pages[0]
    if how == 'used': t.used = 99
    if how == 'contiguous': t.contiguous = not t.contiguous
    if how == 'dropped': t.pages[0], t.freed = -1, [0]
    if how == 'index': t.index[0] = 30
    if how == 'refs': pool.pages.refs[7] = 1
    if how == 'prefix': pool.prefixes[(-1, (1,))] = 7
    if how == 'names': pool.names[0] = (-1, (1,))
    if how == 'stretch': t.last = 7
    if how == 'leak': t.owner[:4] = -1
    if how == 'aside': pool.pages.aside[7] = 99
    if how == 'stale': t.drop(np.arange(4)), t.index.__setitem__(0, 3)


@pytest.mark.parametrize('how', ['twice', 'used', 'contiguous', 'dropped', 'index', 'refs', 'prefix', 'names', 'stretch', 'leak', 'aside', 'stale'])
def test_the_check_finds_what_is_wrong(how):
    pool = Pool(1, 1, 1, slots=32, page_size=4)
    pool.table().take(8)
    check_pool(pool)
    break_(pool, how)
    with pytest.raises(PastaError, match='pool invariant'): check_pool(pool)


def test_picture():
    pool = Pool(1, 1, 1, slots=32, page_size=4)
    a, b = pool.table(), pool.table()
    a.take(9)
    pool.register(list(range(9)), a)
    b.adopt(pool.prefix(list(range(9))), 0)
    b.take(3)
    ax = show_pool(pool)
    assert ax.get_title() == '4 of 8 pages free'
    assert sum(p.get_hatch() is not None for p in ax.patches) == 2
    assert show_pool(Pool(1, 1, 1, 8, 4), title='empty').get_title() == 'empty'


def test_promised_pages_are_not_for_others():
    "Beyond its own promise a table gets what nobody was promised; within it, it is never refused."
    pool = Pool(1, 1, 4, slots=40, page_size=4)
    a, b = pool.table(room=4), pool.table(room=3)
    a.most, b.most = 6, 3
    assert (a.promised, b.promised, pool.promised) == (4, 3, 7)
    a.take(7 * 4)                                        # four of its own, three that nobody was promised
    with pytest.raises(PoolFull, match='1 wanted, 3 of 10 free, 3 of them promised to others'): a.take(1)
    assert a.used == 28 and a.promised == 0
    b.take(3 * 4)
    with pytest.raises(PoolFull, match='0 of 10 free'): b.take(1)
    a.drop(np.arange(8))
    assert a.promised == 0 and pool.pages.free == 2
    b.take(8)
    check_pool(pool)
    b.release()
    b = pool.table(room=11)
    b.most = 11
    with pytest.raises(PastaError, match='more pages are promised than free'): check_pool(pool)

"Speedups and parallelism: the critical path against an event simulation, records by hand, means by definition."
import math
import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st

from pasta_lib.metrics import (CriticalPath, Leg, MetricError, Words, arithmetic_mean, critical_path, draw_critical_path,
                               geometric_mean, noncontrol_tokens, parallelism, realised_speedup, summary_table,
                               theoretical_speedup, thread_colours, toy_record, waiting_profile, written_steps)


def hand_record(threads, tokens):
    "A record with nothing but what time depends on. Threads: (parent, at, joined); tokens: (thread, kind, control, step)."
    names = ['main'] + [f'fork {n}' for n in range(1, len(threads))]
    thread, kind, control, step = map(list, zip(*tokens)) if tokens else ([], [], [], [])
    return SimpleNamespace(
        threads=[SimpleNamespace(name=n, parent=p, at=a, joined=j, topic='') for n, (p, a, j) in zip(names, threads)],
        token=[0] * len(tokens), thread=thread, kind=kind, control=control, step=step)


# ---- an independent oracle: a simulation that knows no rule, only that a live thread writes one token a step
def simulate(document):
    """Document: list of ('text', n) | ('fork', promise tokens, forced, sampled incl. the closing tag) | ('sync',).
    Returns (last step, hand record)."""
    main = []                                                  # one entry per token of main
    for item in document:
        if item[0] == 'text': main += [('word',)] * item[1]
        elif item[0] == 'fork': main += [('tag',)] * (item[1] - 1) + [('promise', item[2], item[3])]
        else: main += [('sync',)]
    tokens, threads, left, now = [(0, 'prompt', False, 0)] * 3, [[None, None, None]], {}, 0
    pending, blocked, cursor = [], False, 0
    while cursor < len(main) or any(left.values()):
        now += 1
        running = [f for f, n in left.items() if n]            # forks that decode in this step
        if cursor < len(main) and not blocked:
            event = main[cursor]
            if event[0] == 'sync': blocked = True
            else:
                tokens.append((0, 'sampled', event[0] != 'word', now))
                cursor += 1
                if event[0] == 'promise':
                    threads.append([0, len(tokens) - 1, None])
                    fork = len(threads) - 1
                    tokens += [(fork, 'forced', True, now)] * event[1]
                    left[fork] = event[2]
                    pending.append(fork)
        for fork in running:
            tokens.append((fork, 'sampled', False, now))
            left[fork] -= 1
        if blocked and not any(left[f] for f in pending):
            tokens.append((0, 'sampled', True, now))
            for f in pending: threads[f][2] = len(tokens) - 1
            pending, blocked, cursor = [], False, cursor + 1
    return now, hand_record(threads, tokens)


items = st.one_of(st.tuples(st.just('text'), st.integers(1, 8)), st.just(('sync',)),
                  st.tuples(st.just('fork'), st.integers(1, 5), st.integers(1, 4), st.integers(0, 15)))


@settings(max_examples=300, deadline=None)
@given(st.lists(items, max_size=14))
def test_clock_equals_event_simulation(document):
    last, record = simulate(document)
    path = critical_path(record)
    assert path.length == last
    assert path.clock == record.step
    assert sum(leg.stop - leg.start for leg in path.legs) == path.length
    assert all(a.stop == b.start for a, b in zip(path.legs, path.legs[1:]))


@settings(max_examples=100, deadline=None)
@given(st.lists(items, max_size=14), st.randoms(use_true_random=False))
def test_path_does_not_read_the_steps(document, rng):
    "Recorded steps after the prefill may be anything, as under a limit on live threads."
    last, record = simulate(document)
    record.step = [s and rng.randint(1, 99) for s in record.step]
    assert critical_path(record).length == last


@settings(max_examples=100, deadline=None)
@given(st.lists(items, max_size=14))
def test_links_say_who_waited(document):
    "The formula of the thesis: at(sync) = max(main, max over forks of spawn + length)."
    _, record = simulate(document)
    path, step = critical_path(record), record.step
    for link in path.links:
        forks = [n for n, t in enumerate(record.threads) if t.joined == link.sync and n]
        own = {f: sum(t == f and k == 'sampled' for t, k in zip(record.thread, record.kind)) for f in forks}
        reach = {f: step[record.threads[f].at] + own[f] for f in forks}
        if link.sync is not None: assert link.at == max(link.main, *reach.values()) == step[link.sync]
        assert reach[link.fork] == max(reach.values()) and link.spawn == step[record.threads[link.fork].at]
        assert link.waited >= 0
        if link.waited: assert link.length == own[link.fork]


def test_toy_runtime_agrees_with_the_simulation():
    rng = random.Random(1)
    for _ in range(60):
        doc, toy = [], []
        for i in range(rng.randint(0, 10)):
            kind, n = rng.choice(['text', 'fork', 'sync']), rng.randint(1, 9)
            doc.append(('text', n) if kind == 'text' else ('fork', 1, 1, n + 1) if kind == 'fork' else ('sync',))
            toy.append(n if kind == 'text' else (f't{i}', n) if kind == 'fork' else '<sync/>')
        last, _ = simulate(doc)
        record = toy_record(toy)
        assert max(record.step) == last == critical_path(record).length == len(record.seconds)
        assert written_steps(record) == record.step and sorted(record.slot) == list(range(len(record.token)))


def test_toy_record_follows_the_contract():
    record = toy_record([2, ('a', 3), ('b', 12), 1, '<sync/>', 2], prompt=5)
    reads, seg = record.table.reads, record.segment
    a, b = record.threads[1], record.threads[2]
    assert (a.predicted, b.predicted) == (10, 20) and a.joined == b.joined
    assert record.position[a.at + 1] == record.position[a.at] + 1                          # the fork goes on from its promise
    assert record.position[b.at] == record.position[a.at] + 1 + 10                         # main leaves room for it
    assert reads[a.segment, seg[a.at]] and not reads[b.segment, a.segment] and not reads[seg[b.at], a.segment]
    assert reads[seg[a.joined], a.segment] and reads[seg[a.joined], b.segment]
    assert sorted(record.order) == [i for i, k in enumerate(record.kind) if k != 'prompt']
    assert record.order.index(a.at) + 1 == record.order.index(a.at + 1)                    # each fork right after its promise


def test_sync_recorded_when_sampled_or_when_written():
    "The step of a sync may be that of its sampling: it enters the pool after the forks all the same."
    record = toy_record([1, ('a', 9), '<sync/>', 1])
    sync = record.threads[1].joined
    entered = record.step[sync]
    record.step[sync] = 3
    assert written_steps(record)[sync] == entered == critical_path(record).clock[sync]


def test_guided_without_tags():
    "Forks on the prompt itself, headings forced together: one forward for all of them; main goes on untagged."
    prompt = [(0, 'prompt', False, 0)] * 2
    tokens = (prompt + [(1, 'forced', False, 1)] * 3 + [(2, 'forced', False, 1)] * 2
              + [(1, 'sampled', False, s) for s in range(2, 9)] + [(2, 'sampled', False, s) for s in range(2, 5)])
    threads = [(None, None, None), (0, 1, len(tokens)), (0, 1, len(tokens))]
    forced = critical_path(hand_record(threads, tokens + [(0, 'forced', False, 8), (0, 'sampled', False, 9)]))
    assert forced.length == 9 and forced.legs == [Leg(1, 0, 8), Leg(0, 8, 9)]
    sampled = critical_path(hand_record(threads, tokens + [(0, 'sampled', False, 9), (0, 'sampled', False, 10)]))
    assert sampled.length == 10 and (sampled.links[0].main, sampled.links[0].at) == (0, 8)


def test_forced_text_fed_in_the_prefill_is_free():
    tokens = [(0, 'prompt', False, 0), (0, 'forced', True, 0), (0, 'sampled', False, 1)]
    assert critical_path(hand_record([(None, None, None)], tokens)).length == 1
    tokens[1] = (0, 'forced', True, 1)
    assert critical_path(hand_record([(None, None, None)], tokens)).length == 2


def test_nested_and_empty_forks():
    tokens = [(0, 'prompt', False, 0), (0, 'sampled', True, 1), (1, 'forced', True, 1), (1, 'sampled', True, 2),
              (2, 'forced', True, 2), *[(2, 'sampled', False, s) for s in range(3, 8)], (1, 'sampled', True, 7),
              (0, 'sampled', True, 7), (0, 'sampled', False, 8)]
    path = critical_path(hand_record([(None, None, None), (0, 1, 11), (1, 3, 10)], tokens))
    assert path.length == 8 and path.legs == [Leg(0, 0, 1), Leg(1, 1, 2), Leg(2, 2, 7), Leg(0, 7, 8)]
    nothing = critical_path(hand_record([(None, None, None), (0, 1, 2)], tokens[:2] + [(0, 'sampled', True, 2)]))
    assert nothing.length == 2 and nothing.links[0].waited == 0                            # a fork without room wrote nothing


def test_empty_record_has_no_path():
    for tokens in [], [(0, 'prompt', False, 0)]:
        path = critical_path(hand_record([(None, None, None)], tokens))
        assert (path.length, path.links, path.legs) == (0, [], [])
        assert waiting_profile(hand_record([(None, None, None)], tokens)).live == []


def test_circular_joins_are_located():
    record = toy_record([1, ('knot', 2), '<sync/>'])
    record.threads[1].joined = record.thread.index(1)
    with pytest.raises(MetricError, match='token 6 of the record'): critical_path(record)


def test_why_in_words():
    assert critical_path(toy_record([3])).why() == '3 steps; no thread waited for a fork'
    text = critical_path(toy_record([1, ('larks', 9), '<sync/>', ('owls', 9)])).why()
    assert 'fork 1 (larks) took 10 steps from step 2: main waited 9 at a sync' in text
    assert 'fork 2 (owls) took 10 steps from step 13: main waited 10 at the end' in text


@settings(max_examples=100, deadline=None)
@given(st.lists(items, max_size=14))
def test_profile_accounts_for_every_token_and_step(document):
    last, record = simulate(document)
    profile = waiting_profile(record)
    assert len(profile.live) == len(profile.waiting) == last
    seen = {(s, t) for s, t in zip(record.step, record.thread) if s}
    assert sum(profile.live) == len(seen)
    for s in range(1, last + 1): assert profile.live[s - 1] == len({t for step, t in seen if step == s})


def test_words_round_trip():
    words = Words()
    for text in ['', 'Larks  sing.\n<sync/> 3 < 4', ' a<b> ', '🐦 <promise topic="x" tokens="10"/>']:
        assert words.decode(words.encode(text)) == text
    assert words.encode(' a') == words.encode(' a')


# ---- ratios and means
def test_ratios():
    path = CriticalPath(10, [], [], [])
    assert theoretical_speedup(15, path) == theoretical_speedup(15, 10) == parallelism(15, path) == realised_speedup(3, 2) == 1.5


@pytest.mark.parametrize('ratio', [theoretical_speedup, parallelism, realised_speedup])
@pytest.mark.parametrize('top,bottom', [(0, 1), (1, 0), (-1, 1), (1, -1), (math.nan, 1), (1, math.inf)])
def test_ratios_without_a_value(ratio, top, bottom):
    with pytest.raises(MetricError, match='a ratio needs finite numbers above zero'): ratio(top, bottom)


def test_tokens_that_count():
    record = toy_record([2, ('a', 5), '<sync/>', 1], heading=2)
    assert noncontrol_tokens(record) == 2 + 3 + 1 and noncontrol_tokens(record, forced=True) == 2 + 5 + 1


positive = st.floats(1e-3, 1e3)


@given(st.lists(positive, min_size=1, max_size=30))
def test_means_by_definition(values):
    product = math.prod(values) ** (1 / len(values)) if len(values) <= 30 else None
    assert math.isclose(geometric_mean(values), product, rel_tol=1e-9)
    assert math.isclose(arithmetic_mean(values), sum(values) / len(values), rel_tol=1e-9)
    assert geometric_mean(values) <= arithmetic_mean(values) * (1 + 1e-12)
    assert math.isclose(geometric_mean(1 / v for v in values), 1 / geometric_mean(values), rel_tol=1e-9)


@pytest.mark.parametrize('mean', [geometric_mean, arithmetic_mean])
@pytest.mark.parametrize('values', [[], [0.], [1., -1.], [math.nan], [2., math.inf]])
def test_means_without_a_value(mean, values):
    with pytest.raises(MetricError): mean(values)


@pytest.mark.parametrize('mean', [geometric_mean, arithmetic_mean])
def test_means_stay_finite(mean):
    assert math.isclose(mean([1e308] * 9), 1e308, rel_tol=1e-9) and math.isclose(mean([5e-324, 5e-324]), 5e-324, abs_tol=1e-323)


def test_table_prints_both_means():
    text = summary_table([dict(answer='a', tokens=10, speedup=4.), dict(answer='b', tokens=20, speedup=1., note='slow'),
                          dict(answer='c', tokens=3, speedup=math.nan), dict(answer='d', tokens=3, speedup=None)])
    lines = text.splitlines()
    assert lines[0].split() == ['answer', 'tokens', 'speedup', 'note']
    assert lines[-2].split() == ['geometric', 'mean', '2.00'] and lines[-1].split() == ['arithmetic', 'mean', '2.50']
    assert lines[4].split() == ['c', '3', '-', '-'] and lines[5].split() == ['d', '3', '-', '-']
    with pytest.raises(MetricError): summary_table([])
    with pytest.raises(MetricError): summary_table([dict(answer='a', speedup=0.)])


def test_pictures():
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    record = toy_record([2, ('larks', 9), ('rooks', 4), '<sync/>', 3])
    ax = draw_critical_path(record)
    assert [t.get_text() for t in ax.get_yticklabels()] == ['main', 'fork 1 (larks)', 'fork 2 (rooks)']
    assert list(ax.lines[0].get_xdata()) == [0, 3, 3, 13, 13, 16]
    assert draw_critical_path(toy_record([0]), ax=ax) is ax
    plt.close('all')
    assert len(thread_colours(25)) == 25 and thread_colours(1) == thread_colours(9)[:1] and len(set(map(str, thread_colours(8)))) == 8

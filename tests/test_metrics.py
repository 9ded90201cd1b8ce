"Speedups, parallelism, win rates: an event simulation, records by hand, means by definition, an independent fit."
import csv
import math
import os
import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pasta_lib.metrics import (aup_trapezoid, aup_weighted, CriticalPath, Estimate, Leg, MetricError, Words, arithmetic_mean, critical_path,
                               draw_critical_path, draw_length_control, fit_logistic, geometric_mean, interval,
                               length_controlled_win_rate, looping_share, loops, noncontrol_tokens, parallelism,
                               realised_speedup, summary_table, theoretical_speedup, thread_colours, toy_record,
                               waiting_profile, weighted_wins, win_rate, win_rate_difference, written_steps)


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


# ---- win rates
def by_newton(x, y, ridge=1e-6):
    "An independent fit: scaled gradient steps in float64, slow and plain."
    w = np.zeros(x.shape[1])
    size = 4 / np.linalg.eigvalsh(x.T @ x / len(y)).max()
    for _ in range(60_000):
        slope = x.T @ (1 / (1 + np.exp(-x @ w)) - y) / len(y) + ridge * w
        if abs(slope).max() < 1e-10: break
        w = w - size * slope
    return w


def some_preferences(n=150, seed=0):
    rng = np.random.default_rng(seed)
    theirs = rng.integers(50, 900, n)
    ours = np.maximum(0, theirs + rng.integers(-300, 500, n))
    p = np.clip(1 / (1 + np.exp(-(ours - theirs) / 250 + .4)) + rng.normal(0, .2, n), 0, 1)
    return p, ours, theirs, rng.normal(size=n)


@pytest.mark.parametrize('seed', range(4))
@pytest.mark.parametrize('binary', [False, True])
@pytest.mark.parametrize('with_difficulty', [False, True])
def test_length_control_by_an_independent_fit(seed, binary, with_difficulty):
    p, ours, theirs, hard = some_preferences(seed=seed)
    if binary: p = (p > .5).astype(float)
    delta = ours - theirs
    columns = [np.ones(len(p)), *([hard] if with_difficulty else []), np.tanh(delta / delta.std())]
    w = by_newton(np.stack(columns, 1), p)
    expected = np.mean([1 / (1 + math.exp(-sum(a * b for a, b in zip(w[:-1], row)))) for row in zip(*columns[:-1])])
    found = length_controlled_win_rate(p, ours, theirs, hard if with_difficulty else None)
    assert math.isclose(found, 100 * expected, abs_tol=1e-4)


def test_the_fit_is_a_minimum():
    p, ours, theirs, hard = some_preferences()
    x = np.stack([np.ones(len(p)), hard], 1)
    w = fit_logistic(x, p)
    def loss(w): return np.mean(np.log1p(np.exp(x @ w)) - p * (x @ w)) + .5e-6 * w @ w
    for dw in np.random.default_rng(0).normal(scale=1e-2, size=(200, 2)): assert loss(w + dw) > loss(w)


prefs = st.lists(st.sampled_from([0., .3, .5, 1.]), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(prefs, st.data())
def test_win_rates_are_always_finite(p, data):
    "Ties, all wins, empty answers, one row, constant lengths, lengths that give the winner away."
    lengths = st.lists(st.integers(0, 5), min_size=len(p), max_size=len(p))
    ours, theirs, hard = data.draw(lengths), data.draw(lengths), data.draw(lengths)
    assert 0 <= win_rate(p) <= 100
    for difficulty in None, hard, [1.] * len(p):
        assert 0 <= length_controlled_win_rate(p, ours, theirs, difficulty) <= 100


def test_without_a_length_effect_nothing_is_corrected():
    for p in ([1, 0, .5, 1], [.2], [1, 1], [0, 0, 0], [.5] * 5):
        for ours, theirs in ((7, 5), (5, 5), (0, 0)):
            lc = length_controlled_win_rate(p, [ours] * len(p), [theirs] * len(p))
            assert math.isclose(lc, win_rate(p), abs_tol=2e-2)
    assert math.isclose(length_controlled_win_rate([.1] * 3, [.3 + 1e-17] * 3, [.1] * 3), 10, abs_tol=1e-2)     # σ is rounding


def test_swapping_sides_mirrors_the_win_rate():
    p, ours, theirs, hard = some_preferences()
    for a, b, d in ((1, -1, None), (1, -1, hard)):
        one, other = length_controlled_win_rate(p, ours, theirs, d), length_controlled_win_rate(1 - p, theirs, ours, d)
        assert math.isclose(one + other, 100, abs_tol=1e-6)


@pytest.mark.parametrize('p,match', [([], 'no preferences'), ([.5, 1.5], r'preference 1.5 \(row 1\)'), ([-.1], 'row 0'),
                                     ([0, math.nan], r'preference nan \(row 1\)')])
def test_preferences_out_of_range(p, match):
    with pytest.raises(MetricError, match=match): win_rate(p)
    with pytest.raises(MetricError, match=match): length_controlled_win_rate(p, [1] * len(p), [1] * len(p))


def test_lengths_must_match():
    with pytest.raises(MetricError, match='2 lengths for 3 preferences'): length_controlled_win_rate([1, 0, 1], [1, 2], [2, 3])


@pytest.mark.parametrize('bad', [[1, 2, math.nan], [1, math.inf, 2], ['1', '2', '3'], [None, 1, 2], None, 5, 'abc', [[1], [2], [3]],
                                 [[1], [2, 3], 4], [1, 2], [1, 2, 3, 4], []], ids=repr)
def test_columns_that_cannot_be(bad):
    "Lengths and difficulties: finite numbers, one for each preference."
    p, fine = [1, 0, 1], [3, 1, 2]
    for asked in ((bad, fine), (fine, bad), (fine, fine, bad) if bad is not None else (bad, bad)):
        with pytest.raises(MetricError): length_controlled_win_rate(p, *asked)
    with pytest.raises(MetricError): draw_length_control(p, fine, bad)
    with pytest.raises(MetricError): interval(win_rate_difference, [1, 0, 1], bad)
    if bad not in ([1, 2], [1, 2, 3, 4]):
        with pytest.raises(MetricError): win_rate(bad)
        with pytest.raises(MetricError): interval(geometric_mean, bad)


def test_what_numbers_may_be():
    "Arrays, generators, truths, tensors."
    import torch
    assert win_rate(iter([True, False])) == win_rate(np.array([1, 0])) == win_rate(torch.tensor([1., 0.])) == 50
    assert interval(win_rate, (p for p in [1, 1])).value == 100


@pytest.mark.parametrize('wrong', [dict(draws=0), dict(draws=-1), dict(draws=2.5), dict(draws=None), dict(draws='9'), dict(level=1.5),
                                   dict(level=-.1), dict(level=math.nan), dict(level='x'), dict(level=None)], ids=repr)
def test_intervals_that_cannot_be(wrong):
    with pytest.raises(MetricError, match=f'{next(iter(wrong))}='): interval(win_rate, [1, 0], **wrong)
    with pytest.raises(MetricError, match='needs rows'): interval(win_rate)
    assert interval(win_rate, [1, 0, 1], draws=np.int64(3), level=1).value == pytest.approx(200 / 3)


def test_intervals():
    p = np.random.default_rng(3).uniform(size=400)
    a, b = interval(win_rate, p), interval(win_rate, p)
    assert a == b and a.low < a.value < a.high and a.value == win_rate(p) and a != interval(win_rate, p, seed=1)
    half = 1.96 * 100 * p.std() / 20                                           # the textbook's interval of a mean
    assert math.isclose(a.high - a.low, 2 * half, rel_tol=.12)
    assert interval(win_rate, p, level=.5).high < a.high
    assert interval(win_rate, [1.]) == Estimate(100., 100., 100.) and str(Estimate(1, .5, 2)) == '1.00 [0.50, 2.00]'
    assert interval(geometric_mean, [1., 2., 4.]).value == pytest.approx(2)
    for bad in ([],), ([1., 0.], [1.]):
        with pytest.raises(MetricError, match='an interval needs rows'): interval(win_rate, *bad)


def test_paired_intervals_are_narrower():
    rng = np.random.default_rng(0)
    a = rng.uniform(size=300)
    b = np.clip(a - .05 + rng.normal(0, .02, 300), 0, 1)
    paired = interval(win_rate_difference, a, b)
    assert paired.low > 0 and paired.value == pytest.approx(win_rate(a) - win_rate(b))
    assert paired.high - paired.low < .3 * (interval(win_rate, a).high - interval(win_rate, a).low)


def test_intervals_cover_the_truth():
    "Of a hundred 90% intervals, about ninety hold the true mean."
    rng, hits = np.random.default_rng(5), 0
    for i in range(100):
        found = interval(win_rate, (rng.uniform(size=80) < .3).astype(float), draws=200, seed=i, level=.9)
        hits += found.low <= 30 <= found.high
    assert 80 <= hits <= 98


@pytest.mark.parametrize('name,published', [('vicuna-7b-v1.5', 4.797), ('gemma-7b-it', 6.937)])
def test_published_win_rates(name, published):
    "From AlpacaEval's published preferences (1 = reference, 2 = model): give their folder in PASTA_ALPACA_EVAL."
    folder = os.environ.get('PASTA_ALPACA_EVAL')
    if not folder: pytest.skip('set PASTA_ALPACA_EVAL to a folder with annotations_*.csv')
    with open(os.path.join(folder, f'annotations_{name}.csv')) as f: rows = list(csv.DictReader(f))
    p = [float(r['preference']) - 1 for r in rows]
    assert len(rows) == 805 and round(win_rate(p), 3) == published
    ours, theirs = ([float(r[k]) for r in rows] for k in ('len_model', 'len_baseline'))
    assert win_rate(p) < length_controlled_win_rate(p, ours, theirs) < 3 * win_rate(p)


class Said:
    def __init__(self, value): self.value = value
    def __float__(self): return self.value


def test_weighted_wins():
    assert weighted_wins([1, -1]) == 1 and weighted_wins([.5]) == 2 and weighted_wins([-.5]) == .5
    assert weighted_wins([]) == weighted_wins([0, 0.]) == 1 and weighted_wins([Said(1.), Said(-.25), 0]) == 2
    for bad in math.nan, math.inf:
        with pytest.raises(MetricError): weighted_wins([bad])


@given(st.lists(st.floats(-1, 1), max_size=8))
def test_weighted_wins_mirror(signed):
    assert math.isclose(weighted_wins(signed) * weighted_wins(-s for s in signed), 1, rel_tol=1e-9)
    assert weighted_wins(signed + [1]) > weighted_wins(signed) > weighted_wins(signed + [-1]) > 0


plain = 'Larks sing at dawn. Rooks gather in tall trees, and owls hunt at night. None of them sings twice the same song.'


@pytest.mark.parametrize('text', ['', ' ', '...', plain, 'no no no', 'ha ha ha ha ha', '| a | b |\n| --- | --- |\n| 1 | 2 |',
                                  '\n'.join(f'{i}. Feed {bird} daily.' for i, bird in enumerate(['larks', 'rooks', 'owls', 'wrens', 'jays'])),
                                  plain + ' ' + plain + ' ' + plain])
def test_texts_that_do_not_loop(text): assert not loops(text)


@pytest.mark.parametrize('text', ['go ' * 12, plain * 4, plain + ' and then some' * 5, 'Feed the birds daily. Then rest. ' * 4,
                                  '\n'.join(f'{i}. Feed the birds every day\n   - about {i} grams of corn each' for i in range(5)),
                                  plain + '\n' + 'the larks and the rooks and the owls and ' * 8])
def test_texts_that_loop(text): assert loops(text)


def test_looping_share():
    assert looping_share([]) == 0 and looping_share(['', 'go ' * 40]) == .5 and looping_share(iter(['go ' * 40])) == 1


def test_loops_takes_linear_time():
    assert not loops(' '.join(map(str, range(20_000)))) and loops('x ' * 20_000)


def test_length_control_picture():
    import matplotlib.pyplot as plt
    p, ours, theirs, _ = some_preferences()
    ax = draw_length_control(p, ours, theirs)
    at = [l for l in ax.lines if l.get_label() == 'length-controlled'][0]
    assert at.get_ydata()[0] == pytest.approx(length_controlled_win_rate(p, ours, theirs), abs=1e-6)
    assert draw_length_control([1.], [3], [3], ax=ax) is ax
    plt.close('all')


# ---- area under accuracy and parallelism

def test_aup_by_definition():
    "Both forms, summed point by point from their formulas."
    rng = random.Random(0)
    for _ in range(50):
        n = rng.randint(1, 6)
        points = sorted((rng.uniform(1, 9), rng.uniform(60, 90)) for _ in range(n))
        shuffled = rng.sample(points, n)
        plain_ = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in zip(points, points[1:]))
        assert aup_trapezoid(*zip(*shuffled)) == pytest.approx(plain_)
        kept = [(x, y) for x, y in points if y >= points[0][1] - 5]
        for best in (None, 95., 70.):
            top = max(y for _, y in kept) if best is None else best
            w = [min(math.exp(-3 * (1 - y / top)), 1) for _, y in kept]
            area = kept[0][0] * kept[0][1] + sum((kept[i][0] - kept[i - 1][0]) * (kept[i][1] * w[i] + kept[i - 1][1] * w[i - 1]) / 2
                                                 for i in range(1, len(kept)))
            assert aup_weighted(*zip(*shuffled), best=best) == pytest.approx(area)


@pytest.mark.parametrize('tpf, accuracy', [([], []), ([1, 2], [50]), ([-1], [50]), ([math.nan], [50]), ([1], [math.inf])])
def test_curves_that_are_none(tpf, accuracy):
    for aup in (aup_trapezoid, aup_weighted):
        with pytest.raises(MetricError): aup(tpf, accuracy)


def test_aup_needs_an_accuracy():
    with pytest.raises(MetricError): aup_weighted([1], [0])


def test_denoised_tokens_count_by_their_step():
    "A bidirectional segment is no chain: its tokens are as late as the step that revealed them."
    from pasta_lib.engine import Record, Thread
    from pasta_lib.segments import SegmentTable
    record = Record(SegmentTable(), [Thread('main', 0)])
    record.table.open(name='prompt')
    block = record.table.open([0], causal=False)
    record.add(1, 0, 0, 0, 0, 0, math.nan, 'prompt', False)
    for position, step in enumerate((2, 1, 3, 1), 1): record.add(7, position, block, position, step, 0, .9, 'sampled', False)
    assert critical_path(record).length == 3

"""Blocks: layouts and their coverage counted run by run, schedulers against their expectations, the dual stream against a rule
written token by token, and the states that it makes against the states that they should equal."""
import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pasta_lib.blocks import *
from pasta_lib.blocks import BlockError
from pasta_lib.core import PastaError
from pasta_lib.masks import dense_mask, layout_logits, leak_test
from pasta_lib.models import tiny_model
from pasta_lib.segments import IGNORE

MASK = 999
DRAWS = 100_000


def compositions(n):
    "All ways to write n as a sum of positive numbers, in order."
    if n == 0: return [()]
    return [(first, *rest) for first in range(1, n + 1) for rest in compositions(n - first)]


def edges(groups): return [sum(groups[:k]) for k in range(len(groups) + 1)]


# ---- layouts

@pytest.mark.parametrize('blocks', range(1, 13))
@pytest.mark.parametrize('size', range(2, 7))
def test_a_shifted_layout_has_its_boundaries_where_the_paper_says(blocks, size):
    for shift in range(size):
        numbered_from_one = {1, blocks + 1} | {1 + shift + q * size for q in range(99) if 1 < 1 + shift + q * size < blocks + 1}
        assert [e + 1 for e in edges(shifted(blocks, size, shift))] == sorted(numbered_from_one)


@pytest.mark.parametrize('blocks', range(1, 13))
@pytest.mark.parametrize('size', range(2, 7))
def test_every_run_is_a_group_of_exactly_one_shift(blocks, size):
    groups = [set(zip(edges(g), edges(g)[1:])) for g in (shifted(blocks, size, shift) for shift in range(size))]
    for first in range(blocks - size + 1):
        assert [(first, first + size) in g for g in groups].count(True) == 1
        assert (first, first + size) in groups[first % size]


@pytest.mark.parametrize('size', range(2, 6))
def test_every_block_takes_every_place_of_a_group(size):
    places = {block: [] for block in range(3 * size)}
    for shift in range(size):
        for block, first in enumerate(first_blocks(shifted(3 * size, size, shift))): places[block].append(block - first)
    inner = range(size - 1, 2 * size + 1)                    # the others lie in groups that an end has cut
    assert all(sorted(places[block]) == list(range(size)) for block in inner)


@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 5), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_layouts_cover_the_text(blocks, largest, n_random, seed):
    n_random = 0 if largest == 1 else n_random
    found = layouts(blocks, largest, n_random, np.random.default_rng(seed))
    assert len(found) == ((largest + 2) * (largest - 1) // 2 + n_random if largest > 1 else 1)
    for groups in found:
        assert sum(groups) == blocks and min(groups) >= 1 and max(groups) <= max(1, largest)
        assert first_blocks(groups).tolist() == [a for a, b in zip(edges(groups), edges(groups)[1:]) for _ in range(a, b)]


def test_random_layouts_use_all_sizes_and_repeat_with_their_seed():
    drawn = [random_layout(30, 4, np.random.default_rng(seed)) for seed in range(20)]
    assert {size for groups in drawn for size in groups[:-1]} == {2, 3, 4}
    assert drawn == [random_layout(30, 4, np.random.default_rng(seed)) for seed in range(20)]


@pytest.mark.parametrize('call', [
    lambda: shifted(0, 2, 0), lambda: shifted(4, 2, 2), lambda: shifted(4, 0, 0), lambda: shifted(4, 2, -1), lambda: shifted(4., 2, 0),
    lambda: systematic(4, 0), lambda: systematic(4, True), lambda: random_layout(4, 1, np.random.default_rng(0)),
    lambda: layouts(4, 2, 1), lambda: layouts(4, 2, -1), lambda: block_count(4, 0), lambda: block_count(4, 2.5)])
def test_layouts_that_cannot_be(call):
    with pytest.raises(BlockError) as e: call()
    assert isinstance(e.value, PastaError) and '\n' not in str(e.value)


# ---- schedulers

def within_four_sigma(drawn, expected):
    sigma = drawn.std(0) / np.sqrt(len(drawn))
    assert (np.abs(drawn.mean(0) - expected) < 4 * sigma).all(), (drawn.mean(0), expected, sigma)


@pytest.mark.parametrize('low, high, margin', [(.001, 1., 0.), (.2, .9, 0.), (.1, 1., .3), (0., .5, .5)])
def test_chain_uniform_has_its_expectation(low, high, margin):
    drawn = chain_uniform(5, np.random.default_rng(11), low, high, margin, (DRAWS,))
    top = high - margin * (high - low)
    within_four_sigma(top - drawn, (top - low) * 2. ** -(np.arange(1, 6) + 1))
    assert (np.diff(drawn) >= 0).all() and drawn.min() >= low and drawn.max() <= top


def test_chain_uniform_is_a_chain_of_uniform_draws():
    "Each draw, as a share of what its floor leaves, is uniform and independent of the floor."
    drawn = chain_uniform(3, np.random.default_rng(5), draws=(DRAWS,))
    for floor, t in zip(drawn.T, drawn.T[1:]):
        share = np.sort((t - floor) / (1 - floor))
        assert np.abs(share - np.linspace(0, 1, DRAWS)).max() < 2 / np.sqrt(DRAWS)        # Kolmogorov-Smirnov
        assert abs(np.corrcoef(floor, (t - floor) / (1 - floor))[0, 1]) < 4 / np.sqrt(DRAWS)


def test_sorted_uniform_has_the_means_of_order_statistics():
    drawn = sorted_uniform(4, np.random.default_rng(2), .1, .9, (DRAWS,))
    within_four_sigma(drawn, .1 + .8 * np.arange(1, 5) / 5)
    assert (np.diff(drawn) >= 0).all() and drawn.min() >= .1 and drawn.max() <= .9


@pytest.mark.parametrize('increments', ['equal', 'random'])
def test_d2f_climbs_to_the_top(increments):
    drawn = d2f(5, np.random.default_rng(2), .1, .9, increments, (DRAWS,))
    within_four_sigma(drawn[:, :-1], .5 + .1 * np.arange(4))             # all increments have the same mean
    assert (np.diff(drawn) >= 0).all() and np.allclose(drawn[:, -1], .9)
    if increments == 'equal': assert np.allclose(np.diff(drawn, 2), 0)
    assert .1 <= float(d2f(1, np.random.default_rng(0), .1, .9, increments)[0]) <= .9


@pytest.mark.parametrize('bias', [.5, 1., 3.])
def test_random_ratios_have_their_power_law(bias):
    drawn = random_ratios(3, np.random.default_rng(3), .2, 1., bias, (DRAWS,))
    within_four_sigma(drawn, [.2 + .8 / (bias + 1)] * 3)
    assert np.abs(np.corrcoef(drawn.T) - np.eye(3)).max() < 4 / np.sqrt(DRAWS)


@pytest.mark.parametrize('name', SCHEDULERS)
def test_schedulers_speak_one_language(name):
    schedule = SCHEDULERS[name]
    assert schedule(3, np.random.default_rng(0)).shape == (3,)
    assert schedule(3, np.random.default_rng(0), draws=(4, 2)).shape == (4, 2, 3)
    assert (schedule(6, np.random.default_rng(1)) == schedule(6, np.random.default_rng(1))).all()
    assert schedule(1, np.random.default_rng(1), .3, .4)[0] <= .4
    for bad in (dict(low=.5, high=.5), dict(low=-.1), dict(high=1.1)):
        with pytest.raises(BlockError): schedule(2, np.random.default_rng(0), **bad)
    with pytest.raises(BlockError): schedule(0, np.random.default_rng(0))


@pytest.mark.parametrize('call', [lambda g: chain_uniform(2, g, margin=1.), lambda g: d2f(2, g, increments='odd'),
                                  lambda g: random_ratios(2, g, bias=0), lambda g: random_ratios(2, g, bias=np.inf)])
def test_schedulers_that_cannot_be(call):
    with pytest.raises(BlockError): call(np.random.default_rng(0))


# ---- counts and states

def test_floor_never_masks_a_whole_block_and_ceil_never_nothing():
    ratios = np.random.default_rng(0).uniform(.001, 1, 2000)
    count = lambda rounding: [masked_count(t, 8, rounding) for t in ratios]
    assert set(count('floor')) == set(range(8)) and set(count('ceil')) == set(range(1, 9)) and set(count('whole')) == set(range(9))
    assert count('floor') == [int(8 * t // 1) for t in ratios] and all(c - f == 1 for f, c in zip(count('floor'), count('ceil')))
    assert masked_count(1., 8, 'whole') == masked_count(1., 8, 'floor') == 8 and masked_count(0., 8) == masked_count(.7, 0) == 0
    with pytest.raises(BlockError): masked_count(.5, 8, 'round')


@given(st.integers(1, 30), st.integers(1, 6), st.data())
@settings(max_examples=80, deadline=None)
def test_a_state_masks_what_its_ratios_say(tokens, block, data):
    prompt = data.draw(st.integers(0, tokens - 1))
    rounding, seed = data.draw(st.sampled_from(['floor', 'ceil', 'whole'])), data.draw(st.integers(0, 99))
    groups = data.draw(st.sampled_from(compositions(min(5, -(-tokens // block) - prompt // block))))
    groups = (*groups, *[1] * (-(-tokens // block) - prompt // block - sum(groups)))
    state = training_state(range(tokens), block, groups, MASK, sorted_uniform, np.random.default_rng(seed), prompt, rounding)
    assert state.start == prompt // block and len(state.ratios) == sum(groups) and not state.masked[:prompt].any()
    assert (state.ids == np.where(state.masked, MASK, range(tokens))).all()
    for k, ratio in enumerate(state.ratios, state.start):
        free = [i for i in range(tokens) if i // block == k and i >= prompt]
        assert state.masked[free].sum() == masked_count(ratio, len(free), rounding)


def test_masked_positions_are_uniform():
    rng = np.random.default_rng(4)
    hits = sum(training_state(range(8), 8, (1,), MASK, lambda n, g: np.array([.25]), rng).masked for _ in range(4000))
    assert hits.sum() == 2 * 4000 and (np.abs(hits - 1000) < 4 * np.sqrt(4000 * .25 * .75)).all()


@pytest.mark.parametrize('groups, prompt', [((1, 1), 0), ((3, 1), 0), ((2, 0, 1), 0), ((3,), 12), ((3,), -1), ((3,), 4)])
def test_states_that_cannot_be(groups, prompt):
    with pytest.raises(BlockError): training_state(range(12), 4, groups, MASK, d2f, np.random.default_rng(0), prompt)


# ---- the dual stream

def oracle(tokens, block, groups, start):
    "The table of the chapter, token by token: (half, token) pairs of the row, and who reads whom."
    group = [n for n, size in enumerate(groups) for _ in range(size)]
    first = [edges(groups)[n] + start for n in group]
    places = [('t', i) for i in range(start * block, tokens)] + [('0', i) for i in range(tokens)]
    def reads(a, b):
        (h, i), (g, j) = a, b
        bi, bj = i // block, j // block
        if h == 't' and g == 't': return group[bi - start] == group[bj - start] and bj <= bi
        if h == 't': return bj < first[bi - start]
        return g == '0' and bj <= bi
    return places, np.array([[reads(a, b) for b in places] for a in places])


@pytest.mark.parametrize('blocks', range(1, 6))
@pytest.mark.parametrize('block', [1, 2, 3])
def test_dual_stream_equals_the_rule(blocks, block):
    for groups, start, short in product(compositions(blocks), (0, 2), {0, block - 1}):
        tokens = (blocks + start) * block - short
        ids, prompt = np.arange(100, 100 + tokens), start * block
        state = training_state(ids, block, groups, MASK, chain_uniform, np.random.default_rng(blocks), prompt)
        row, (places, expected) = dual_stream(ids, block, state), oracle(tokens, block, groups, start)
        assert (dense_mask(row).numpy() == expected).all(), (groups, start)
        assert row.position.tolist() == [i for _, i in places]
        assert row.ids.tolist() == [state.ids[i] if half == 't' else ids[i] for half, i in places]
        assert row.label.tolist() == [ids[i] if half == 't' and state.masked[i] else IGNORE for half, i in places]


@pytest.mark.parametrize('blocks', [7, 9])
def test_layouts_of_the_paper_equal_the_rule(blocks):
    rng = np.random.default_rng(blocks)
    for groups in layouts(blocks, 4, 3, rng):
        ids = np.arange(2 * blocks)
        row = dual_stream(ids, 2, training_state(ids, 2, groups, MASK, random_ratios, rng))
        assert (dense_mask(row).numpy() == oracle(2 * blocks, 2, groups, 0)[1]).all()


def test_the_extremes():
    ids = np.arange(12)
    row = lambda groups: dense_mask(dual_stream(ids, 3, training_state(ids, 3, groups, MASK, d2f, np.random.default_rng(0)))).numpy()
    same = np.kron(np.eye(4), np.ones((3, 3))) > 0
    before = np.kron(np.tri(4, k=-1), np.ones((3, 3))) > 0
    teacher, forced = row((1,) * 4), row((4,))
    assert (teacher[:12, :12] == same).all() and (teacher[:12, 12:] == before).all()
    assert (forced[:12, :12] == same | before).all() and not forced[:12, 12:].any()
    assert (teacher[12:, 12:] == same | before).all() and not teacher[12:, :12].any()


def test_states_share_one_clean_copy():
    model, _ = tiny_model(seed=1, hidden=32, vocab=MASK + 1)
    ids, rng = np.arange(10, 31), np.random.default_rng(0)
    states = [training_state(ids, 4, groups, MASK, chain_uniform, rng, 5) for groups in layouts(5, 3, 1, rng)]
    row, n = dual_stream(ids, 4, states), len(ids) - 4
    together = layout_logits(model, row)
    for k, state in enumerate(states):
        alone = layout_logits(model, dual_stream(ids, 4, state))
        assert (together[k * n:(k + 1) * n] - alone[:n]).abs().max() < 1e-4
        assert (together[-len(ids):] - alone[n:]).abs().max() < 1e-4
    with pytest.raises(BlockError): dual_stream(ids[:-1], 4, states)


def test_a_group_with_a_clean_head_is_the_shorter_group():
    model, _ = tiny_model(seed=1, hidden=32, vocab=MASK + 1)
    ids, masked = np.arange(10, 30), np.arange(20) // 4 >= 3
    make = lambda groups: TrainingState(np.where(masked, MASK, ids), masked, np.zeros(5), groups, 0)
    longer, shorter = (layout_logits(model, dual_stream(ids, 4, make(groups))) for groups in ((2, 3), (3, 2)))
    assert (longer - shorter)[12:20].abs().max() < 1e-4


def test_nothing_leaks():
    model, _ = tiny_model(seed=2, hidden=32, vocab=MASK + 1)
    ids = np.arange(10, 26)
    row = dual_stream(ids, 4, training_state(ids, 4, (2, 2), MASK, chain_uniform, np.random.default_rng(0)))
    for segment in row.table.names:
        report = leak_test(model, row, segment)
        assert not report.leaks
        if segment == 'noisy 0': assert report.moved[row.table.names.index('noisy 1')] > 0


def test_pictures():
    import matplotlib.pyplot as plt
    ax = show_groups(systematic(6, 3))
    assert len(ax.patches) == sum(map(len, systematic(6, 3)))
    ratios = np.random.default_rng(0).uniform(size=(50, 3))
    ratios[:40, 2] = np.nan
    axes = show_slot_ratios(dict(one=ratios, two=ratios))
    assert len(axes) == 2 and axes[0].get_title() == 'one'
    assert show_slot_ratios(dict(one=ratios), [plt.subplots()[1]])[0].get_xlabel() == 'slot'
    plt.close('all')


# ---- input that does not fit together

@pytest.mark.parametrize('ratio, free, rounding, count', [(.28, 25, 'ceil', 7), (.07, 100, 'ceil', 7), (.29, 100, 'floor', 29), (.3, 9, 'whole', 3), (.7, 9, 'whole', 7)])
def test_a_ratio_that_is_a_whole_number_of_masks(ratio, free, rounding, count): assert masked_count(ratio, free, rounding) == count


def test_every_whole_ratio_comes_back():
    for free in range(1, 200):
        assert all(masked_count(k / free, free, rounding) == k for k in range(free + 1) for rounding in ('ceil', 'floor'))


@pytest.mark.parametrize('ratio', [math.nan, -.1, 1.5, 'x', None])
def test_a_ratio_is_a_share(ratio):
    with pytest.raises(BlockError): masked_count(ratio, 8)


@pytest.mark.parametrize('schedule', SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize('bad', [dict(low=math.nan), dict(high=math.nan), dict(low='a'), dict(high=None)])
def test_bounds_of_noise_are_numbers(schedule, bad):
    with pytest.raises(BlockError): schedule(3, np.random.default_rng(0), **bad)


def test_margin_and_bias_are_numbers():
    for value in (math.nan, 'x', None):
        with pytest.raises(BlockError): chain_uniform(3, np.random.default_rng(0), margin=value)
        with pytest.raises(BlockError): random_ratios(3, np.random.default_rng(0), bias=value)


def a_state(**changes):
    return training_state(**dict(ids=np.arange(16), block=4, groups=(2, 2), mask=99, schedule=chain_uniform, generator=np.random.default_rng(0)) | changes)


@pytest.mark.parametrize('bad', [dict(ids=[]), dict(ids=np.arange(16).reshape(4, 4)), dict(ids=np.arange(16) + .5), dict(mask='x'), dict(mask=None), dict(mask=-1),
                                 dict(schedule=lambda n, g: np.array([.5])), dict(schedule=lambda n, g: np.full(n, np.nan)), dict(schedule=lambda n, g: np.full(n, 2.))])
def test_a_state_is_of_tokens_a_mask_and_a_schedule(bad):
    with pytest.raises(BlockError): a_state(**bad)


def test_a_stream_wants_noise_of_its_own_text_and_blocks():
    state = a_state()
    for ids, block in ((np.arange(16) + 1, 4), (np.arange(15), 4), (np.arange(16), 8), (np.arange(16), 2), (np.arange(16.), 4)):
        with pytest.raises(BlockError): dual_stream(ids, block, state)
    with pytest.raises(BlockError): dual_stream(np.arange(16), 4, [state, a_state(ids=np.arange(16)[::-1])])
    assert len(dual_stream(np.arange(16), 4, [state, a_state(prompt=5, groups=(3,))])) == 16 + 12 + 16

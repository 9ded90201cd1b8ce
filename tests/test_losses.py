"Losses against their formulas in float64 (numpy), against torch, transformers and trl, and against counting."
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from pasta_lib.core import PastaError
from pasta_lib.losses import (LossError, best_and_worst_of_n, best_of_n, best_of_n_beta, best_of_n_margin, bonbon_loss,
                              draw_gap_losses, draw_policies, ipo_loss, of_gap, owners, preference_gap, sequence_logps,
                              sft_loss, token_logps)
from pasta_lib.segments import IGNORE


def reference_logps(logits, labels):
    "By the definition, float64, one place at a time."
    logits, labels = np.asarray(logits, dtype=np.float64), np.asarray(labels)
    out = np.zeros(labels.shape)
    for at in np.ndindex(labels.shape):
        if labels[at] == IGNORE: continue
        top = logits[at].max()
        out[at] = logits[at][labels[at]] - top - np.log(np.exp(logits[at] - top).sum())
    return out


def batch(shape=(2, 7), vocab=13, seed=0, dtype=torch.float32, scale=3.):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, vocab, shape, generator=g)
    labels[torch.rand(shape, generator=g) < .3] = IGNORE
    return (scale * torch.randn(*shape, vocab, generator=g)).to(dtype), labels


# ---- log-probabilities
@pytest.mark.parametrize('shape', [(1,), (9,), (2, 7), (2, 3, 4), (600,), (0,), (2, 0)])
def test_token_logps_by_definition(shape):
    logits, labels = batch(shape)
    found = token_logps(logits, labels)
    assert found.dtype == torch.float32 and found.shape == labels.shape
    np.testing.assert_allclose(found.numpy(), reference_logps(logits, labels), atol=2e-6)


@pytest.mark.parametrize('dtype,wide', [(torch.bfloat16, torch.float32), (torch.float16, torch.float32),
                                        (torch.float32, torch.float32), (torch.float64, torch.float64)])
def test_token_logps_are_wide(dtype, wide):
    logits, labels = batch((40,), dtype=dtype)
    x = logits.clone().requires_grad_()
    found = token_logps(x, labels)
    assert found.dtype == wide
    np.testing.assert_allclose(found.detach().numpy(), reference_logps(logits.double(), labels), atol=2e-6)
    found.sum().backward()
    assert x.grad.dtype == dtype
    y = logits.double().requires_grad_()
    F.cross_entropy(y, labels, ignore_index=IGNORE, reduction='sum').backward()
    torch.testing.assert_close(x.grad.double(), -y.grad, atol=1e-2 if dtype in (torch.bfloat16, torch.float16) else 1e-6, rtol=0)


def test_token_logps_gradcheck():
    logits, labels = batch((3, 4), vocab=5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: token_logps(x, labels), logits.requires_grad_())


def test_chunks_change_nothing(monkeypatch):
    from pasta_lib import losses
    logits, labels = batch((50,))
    results = []
    for rows in (1, 7, 50, 1000):
        monkeypatch.setattr(losses._TokenLogps, 'rows', rows)
        x = logits.clone().requires_grad_()
        y = token_logps(x, labels)
        (y * torch.arange(50)).sum().backward()
        results.append((y.detach(), x.grad))
    for y, grad in results[1:]:
        torch.testing.assert_close(y, results[0][0]); torch.testing.assert_close(grad, results[0][1])


def test_no_array_of_the_size_of_the_logits():
    "Forwards, only chunks are held in float32: nothing of size (N, V) is allocated."
    logits, labels = torch.randn(2048, 4096).bfloat16(), torch.randint(0, 4096, (2048,))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        token_logps(logits, labels)
    biggest = max(e.cpu_memory_usage for e in seen.events() if not e.cpu_children)
    assert biggest <= 256 * 4096 * 4 + 4096


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[1e4, 0., -1e4], [-math.inf, 0., 1.]], requires_grad=True)
    found = token_logps(logits, torch.tensor([2, 1]))
    assert found[0] == -2e4 and torch.isfinite(found).all()
    found.sum().backward()
    assert torch.isfinite(logits.grad).all() and logits.grad[1, 0] == 0


@pytest.mark.parametrize('shape,labels,match', [
    ((2, 5, 7), torch.zeros(2, 4, dtype=torch.long), r'labels of shape \(2, 4\)'), ((3, 7), torch.tensor([0, 7, 1]), 'between 0 and 7'),
    ((2, 7), torch.tensor([-1, 3]), 'between -1 and 3'), ((7,), torch.zeros(7, dtype=torch.long), 'labels of shape')])
def test_labels_must_fit(shape, labels, match):
    with pytest.raises(LossError, match=match): token_logps(torch.zeros(shape), labels)
    assert issubclass(LossError, PastaError)


def test_no_label_at_all():
    logits, labels = torch.randn(2, 3, 5, requires_grad=True), torch.full((2, 3), IGNORE)
    assert not token_logps(logits, labels).any() and not sequence_logps(logits, labels).any()
    loss = sft_loss(logits, labels)
    loss.backward()
    assert loss == 0 and not logits.grad.any()


# ---- answers
@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(0, 5), st.integers(0, 10 ** 6))
def test_packed_answers_equal_single_ones(lengths, pad, seed):
    total = sum(lengths) + pad
    logits, labels = batch((1, total), seed=seed)
    owner = owners(lengths, total)
    assert owner.tolist() == [n for n, k in enumerate(lengths) for _ in range(k)] + [-1] * pad
    found = sequence_logps(logits, labels, owner[None], count=len(lengths))
    cuts = list(itertools.accumulate([0] + lengths))
    single = [reference_logps(logits, labels)[0, a:b].sum() for a, b in zip(cuts, cuts[1:])]
    np.testing.assert_allclose(found.numpy(), single, atol=1e-5)


def test_owner_over_rows_and_gradient():
    logits, labels = batch((2, 6), dtype=torch.float64)
    labels[labels == IGNORE] = 1
    owner = torch.tensor([[0, 0, 1, 1, -1, -1], [1, 1, 2, 2, 2, -1]])
    logits.requires_grad_()
    found = sequence_logps(logits, labels, owner)
    ref = reference_logps(logits.detach(), labels)
    np.testing.assert_allclose(found.detach().numpy(), [ref[owner == k].sum() for k in range(3)], atol=1e-9)
    found.sum().backward()
    assert not logits.grad[owner == -1].any() and logits.grad[owner >= 0].any(-1).all()
    assert sequence_logps(logits, labels, owner, count=5).shape == (5,)
    assert torch.equal(owners([1, 2], first=4), torch.tensor([4, 5, 5])) and owners([]).shape == (0,)


def test_owner_errors():
    logits, labels = batch((2, 6))
    with pytest.raises(LossError, match='up to 4'): sequence_logps(logits, labels, torch.full((2, 6), 4), count=4)
    with pytest.raises(LossError, match='owners of shape'): sequence_logps(logits, labels, torch.zeros(6, dtype=torch.long))
    with pytest.raises(LossError, match='do not fit'): owners([3, 4], total=6)
    none = torch.full((2, 6), -1)
    assert not sequence_logps(logits, labels, none, count=2).any()
    for least in (-2, -100):
        with pytest.raises(LossError, match=f'from {least} up to 1.*-1 is nobody'):
            sequence_logps(logits, labels, torch.tensor([[0, 1, least, 0, 0, 0]] * 2), count=2)
    for kind in (torch.float32, torch.bool, torch.int32):
        with pytest.raises(LossError, match='owners of type'): sequence_logps(logits, labels, none.to(kind))
    for lengths in ([-1], [3, -2], [1.5], [True]):
        with pytest.raises(LossError, match='a length is a whole number'): owners(lengths)


@pytest.mark.parametrize('kind', [torch.float32, torch.bool, torch.int32, torch.float16])
def test_labels_are_whole_numbers(kind):
    logits, labels = batch((2, 6))
    for loss in (token_logps, sft_loss, sequence_logps):
        with pytest.raises(LossError, match='labels of type'): loss(logits, labels.clamp(min=0).to(kind))


@pytest.mark.parametrize('count', [0, -3, math.nan, torch.tensor(0)])
def test_a_mean_over_nothing(count):
    with pytest.raises(LossError, match='a mean over'): sft_loss(*batch((2, 6)), num_items=count)


@pytest.mark.parametrize('place', range(4))
def test_pairs_have_one_shape(place):
    "No value stands for several pairs."
    pairs = [torch.zeros(2) for _ in range(4)]
    for shape in ((1,), (), (2, 1), (3,)):
        pairs[place] = torch.zeros(shape)
        for loss in (preference_gap, lambda *four: ipo_loss(*four, margin=1.), bonbon_loss):
            with pytest.raises(LossError, match='pairs of shapes'): loss(*pairs)


def test_sequences_are_sums_over_labels():
    logits, labels = batch((3, 9))
    np.testing.assert_allclose(sequence_logps(logits, labels).numpy(), reference_logps(logits, labels).sum(-1), atol=1e-5)


def test_packed_layouts_of_a_model(tiny):
    "Answers packed in one row with their masks: the same sums as alone."
    from pasta_lib.masks import layout_logits
    from pasta_lib.segments import LayoutBuilder, pack
    def answer(ids):
        row = LayoutBuilder()
        row.write(ids, row.table.open(), 0, label=[*ids[1:], IGNORE])
        return row.layout()
    layouts = [answer(list(range(5, 5 + k))) for k in (6, 3, 9)]
    alone = [sequence_logps(layout_logits(tiny[0], l)[None], l.tensors()['label'][None])[0] for l in layouts]
    row = pack(layouts, 24)
    owner = owners([len(l) for l in layouts], 24)[None]
    packed = sequence_logps(layout_logits(tiny[0], row)[None], row.tensors()['label'][None], owner)
    torch.testing.assert_close(packed, torch.stack(alone), atol=1e-4, rtol=0)


# ---- supervised
def test_sft_against_torch_and_transformers():
    from transformers.loss.loss_utils import ForCausalLMLoss
    logits, labels = batch((2, 9))
    expected = F.cross_entropy(logits.view(-1, 13), labels.view(-1), ignore_index=IGNORE)
    torch.testing.assert_close(sft_loss(logits, labels), expected)
    unshifted = F.pad(labels, (1, 0), value=IGNORE)[:, :-1]                    # theirs says what a place is, ours what comes next
    theirs = ForCausalLMLoss(logits[:, :-1].contiguous(), None, 13, shift_labels=labels[:, :-1].contiguous())
    torch.testing.assert_close(sft_loss(logits[:, :-1], labels[:, :-1]), theirs)
    last = labels.clone(); last[:, -1] = IGNORE
    torch.testing.assert_close(sft_loss(logits, last), ForCausalLMLoss(logits, unshifted, 13))
    torch.testing.assert_close(sft_loss(logits, last, num_items=40), ForCausalLMLoss(logits, unshifted, 13, num_items_in_batch=40))


def test_sft_of_a_real_model(tiny):
    model, _ = tiny
    ids = torch.arange(5, 25)[None]
    labels = F.pad(ids, (0, 1), value=IGNORE)[:, 1:]
    with torch.no_grad():
        out = model(input_ids=ids, labels=ids)
        torch.testing.assert_close(sft_loss(out.logits, labels), out.loss)


def test_sft_parts_add_up():
    logits, labels = batch((6, 9))
    count = (labels != IGNORE).sum()
    x, y = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    sft_loss(x, labels).backward()
    parts = [sft_loss(y[i:j], labels[i:j], num_items=count) for i, j in ((0, 1), (1, 4), (4, 6))]
    sum(parts).backward()
    torch.testing.assert_close(sum(parts), sft_loss(logits, labels)); torch.testing.assert_close(x.grad, y.grad)


# ---- preference
def formula(chosen, rejected, ref_chosen, ref_rejected, alpha=.005, n=10):
    "BoNBoN as the paper writes it, numpy float64."
    harmonic = sum(1 / k for k in range(1, n))
    beta = 1 / (2 * (n - 1) * harmonic)
    left = alpha * -chosen
    right = ((chosen - rejected) - (ref_chosen - ref_rejected) - 1 / (2 * beta)) ** 2
    return left + (1 - alpha) * right


def four(seed=0, size=20, dtype=torch.float64):
    rng = np.random.default_rng(seed)
    return [torch.tensor(-rng.uniform(50, 400, size), dtype=dtype) for _ in range(4)]


@pytest.mark.parametrize('n', [2, 3, 8, 10, 64])
@pytest.mark.parametrize('alpha', [0., .005, .5, 1.])
def test_bonbon_by_formula(n, alpha):
    for seed in range(5):
        pairs = four(seed)
        found = bonbon_loss(*pairs, alpha=alpha, n=n)
        np.testing.assert_allclose(found.numpy(), formula(*(x.numpy() for x in pairs), alpha, n), rtol=1e-12)
        single = bonbon_loss(*(x.float() for x in pairs), alpha=alpha, n=n)
        np.testing.assert_allclose(single.numpy(), found.numpy(), rtol=1e-4, atol=1e-2)


def test_constants_of_the_paper():
    assert math.isclose(best_of_n_beta(8), 0.0275482, abs_tol=5e-8)
    assert math.isclose(best_of_n_beta(10), 0.0196382, abs_tol=1.5e-7)    # 0.01963810
    assert math.isclose(best_of_n_margin(10), 25.4607, abs_tol=5e-5)
    assert best_of_n_margin(2) == 1
    for n in (1, 0, -3, math.nan, 2.5, 'a', None, True):
        with pytest.raises(LossError, match='n is at least 2'): best_of_n_margin(n)
    pairs = four()
    assert torch.equal(bonbon_loss(*pairs), bonbon_loss(*pairs, alpha=.005, n=10))
    assert torch.equal(bonbon_loss(*pairs, margin=3.), bonbon_loss(*pairs, n=99, margin=3.))


def test_bonbon_gradient():
    chosen, rejected, rc, rr = four(size=4)
    inputs = chosen.requires_grad_(), rejected.requires_grad_()
    assert torch.autograd.gradcheck(lambda c, r: bonbon_loss(c, r, rc, rr), inputs)
    bonbon_loss(*inputs, rc, rr).sum().backward()
    pull = 2 * .995 * (preference_gap(chosen, rejected, rc, rr) - best_of_n_margin(10)).detach()
    torch.testing.assert_close(chosen.grad, pull - .005); torch.testing.assert_close(rejected.grad, -pull)


def test_references_carry_no_gradient():
    pairs = [x.requires_grad_() for x in four(size=3)]
    bonbon_loss(*pairs).sum().backward()
    assert pairs[0].grad.any() and pairs[1].grad.any() and pairs[2].grad is None and pairs[3].grad is None


def dpo(chosen, rejected, rc, rr, beta): return -F.logsigmoid(beta * ((chosen - rc) - (rejected - rr)))


def test_bonbon_is_not_dpo():
    "DPO pulls everywhere and is convex but never zero; BoNBoN's preference part has its minimum at the margin."
    margin, zero = best_of_n_margin(10), torch.zeros(3, dtype=torch.float64)
    gap = torch.tensor([margin - 10, margin, margin + 10], dtype=torch.float64, requires_grad=True)
    ours = torch.autograd.grad(bonbon_loss(gap, zero, zero, zero, alpha=0.).sum(), gap)[0]
    theirs = torch.autograd.grad(dpo(gap, zero, zero, zero, best_of_n_beta(10)).sum(), gap)[0]
    assert ours[0] < 0 and ours[1] == 0 and ours[2] > 0 and ours[0] == -ours[2]
    assert (theirs < 0).all()
    pairs = four()
    assert not torch.allclose(bonbon_loss(*pairs, alpha=0.), dpo(*pairs, best_of_n_beta(10)))


def test_of_gap():
    gap = torch.linspace(-3, 3, 7)
    torch.testing.assert_close(of_gap(ipo_loss, margin=2.)(gap), (gap - 2) ** 2)
    torch.testing.assert_close(of_gap(bonbon_loss, alpha=.5, margin=2.)(gap), -.5 * gap + .5 * (gap - 2) ** 2)


@pytest.fixture(scope='module')
def trl_trainer(tiny, tmp_path_factory):
    "trl's DPOTrainer with loss_type='ipo' on a tiny model and a reference that differs from it."
    pytest.importorskip('trl')
    from datasets import Dataset
    from pasta_lib.models import load
    from trl import DPOConfig, DPOTrainer
    rows = [dict(prompt='Name a bird.', chosen=' A lark sings at dawn.', rejected=' No.'),
            dict(prompt='Two?', chosen=' Rook.', rejected=' A rook and an owl, and then some more owls.'),
            dict(prompt='A long question with words', chosen=' yes', rejected=' nay')]
    (model, tok), (reference, _) = load('tiny', seed=1), load('tiny', seed=2)
    args = DPOConfig(output_dir=str(tmp_path_factory.mktemp('trl')), loss_type='ipo', beta=.1, report_to=[], use_cpu=True, bf16=False,
                     per_device_train_batch_size=3, disable_dropout=True)
    return DPOTrainer(model=model, ref_model=reference, args=args, train_dataset=Dataset.from_list(rows), processing_class=tok)


def test_ipo_against_trl(trl_trainer):
    "trl takes means over completion tokens: ours on means equals theirs, ours on sums does not."
    trainer = trl_trainer
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    mask, ids = inputs['completion_mask'], inputs['input_ids']
    labels = F.pad(ids.masked_fill(mask == 0, IGNORE), (0, 1), value=IGNORE)[:, 1:]
    plain = {k: inputs[k] for k in ('input_ids', 'attention_mask')}
    with torch.no_grad():
        sums = [sequence_logps(m(**plain).logits, labels) for m in (trainer.model, trainer.ref_model)]
        theirs = trainer.compute_loss(trainer.model, inputs)
    lengths = mask.sum(1)
    assert len(set(lengths.tolist())) > 2
    def pairs(values): return [*values[0].chunk(2), *values[1].chunk(2)]
    ours = ipo_loss(*pairs([s / lengths for s in sums]), margin=1 / (2 * .1)).mean()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(ipo_loss(*pairs(sums), margin=1 / (2 * .1)).mean(), theirs, rtol=1e-2)


# ---- best of n, exactly
@pytest.mark.parametrize('p,n', [([.2, .5, .3], 2), ([.25, .25, .25, .25], 3), ([1.], 4), ([.5, 0., .5], 3), ([.1, .9], 1)])
def test_best_and_worst_by_enumeration(p, n):
    "Every sequence of n draws, one by one."
    expected = np.zeros((len(p), len(p)))
    for draws in itertools.product(range(len(p)), repeat=n): expected[max(draws), min(draws)] += math.prod(p[d] for d in draws)
    found = best_and_worst_of_n(torch.tensor(p, dtype=torch.float64), n)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(best_of_n(torch.tensor(p, dtype=torch.float64), n).numpy(), expected.sum(1), atol=1e-12)


def fit(base, n, alpha):
    i, j = torch.tril_indices(len(base), len(base), -1)
    weight = best_and_worst_of_n(base, n)[i, j]
    weight, logits = weight / weight.sum(), base.log().clone().requires_grad_()
    opt = torch.optim.LBFGS([logits], max_iter=500, tolerance_grad=1e-12, tolerance_change=0, line_search_fn='strong_wolfe')
    def closure():
        opt.zero_grad()
        pi, pi0 = logits.log_softmax(0), base.log()
        loss = (weight * bonbon_loss(pi[i], pi[j], pi0[i], pi0[j], alpha=alpha, n=n)).sum()
        loss.backward()
        return loss
    for _ in range(20): opt.step(closure)
    return logits.detach().log_softmax(0)


def test_preference_part_has_the_closed_form_of_least_squares():
    "With α = 0 the optimum solves a linear system in the log-ratios; gradient descent must find the same policy."
    base, n = torch.tensor([.2, .3, .1, .25, .15], dtype=torch.float64), 10
    i, j = np.tril_indices(5, -1)
    w = np.sqrt(best_and_worst_of_n(base, n).numpy()[i, j])
    rows = np.zeros((len(i), 5)); rows[range(len(i)), i] = 1; rows[range(len(i)), j] = -1
    h = np.linalg.lstsq(rows * w[:, None], w * best_of_n_margin(n), rcond=None)[0]
    expected = np.log(base.numpy()) + h
    expected -= np.log(np.exp(expected).sum())
    np.testing.assert_allclose(fit(base, n, 0.).numpy(), expected, atol=1e-4)


def test_first_term_alone_reaches_best_of_n():
    "Pairs are of different answers, so the target is best-of-n given that best and worst differ."
    base, n = torch.tensor([.2, .3, .1, .25, .15], dtype=torch.float64), 6
    table = best_and_worst_of_n(base, n)
    table.fill_diagonal_(0)
    goal = table.sum(1) / table.sum()
    found = fit(base, n, 1.).exp()
    torch.testing.assert_close(found, goal, atol=1e-4, rtol=0)


def test_mean_gap_of_best_of_n_is_the_margin():
    "Many answers approach the continuous case: the table's mean of (n−1)·(log F⁺ − log F⁻) is the margin."
    k, n = 1500, 5
    table = best_and_worst_of_n(torch.full((k,), 1 / k, dtype=torch.float64), n).numpy()
    log_rank = np.log((np.arange(k) + .5) / k)
    mean = (n - 1) * (table * (log_rank[:, None] - log_rank[None])).sum()
    assert math.isclose(mean, best_of_n_margin(n), rel_tol=2e-3)


def test_pictures():
    import matplotlib.pyplot as plt
    axes = draw_gap_losses({'ipo': of_gap(ipo_loss, margin=4.)}, 4., (-2., 10.))
    line = axes[1].lines[0]
    np.testing.assert_allclose(line.get_ydata(), -2 * (line.get_xdata() - 4), atol=1e-9)
    assert draw_gap_losses({'a': lambda g: g ** 2}, axes=axes) is axes
    ax = draw_policies({'a': torch.tensor([.5, .5]), 'b': torch.tensor([.1, .9])})
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ['b', 'a'] and draw_policies({'a': [1.]}, ax) is ax
    plt.close('all')

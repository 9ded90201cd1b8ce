"Losses of masked diffusion, against float64 references written term by term."
import itertools, math
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from pasta_lib.diffusion_losses import (draw_weights, masked_loss, multitf_loss, oput_loss, planned_loss, sdar_loss, self_denoised,
                                        token_weights)
from pasta_lib.losses import LossError, sft_loss
from pasta_lib.orders import Counted
from pasta_lib.segments import IGNORE

KINDS = [torch.float64, torch.float32, torch.bfloat16]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-5}      # the reference reads the rounded logits


def made(rows, n, vocab, seed, kind=torch.float64, share=.5, ignored=.2):
    "Logits, labels, masked and a level per row."
    g = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(rows, n, vocab, generator=g, dtype=torch.float64)).to(kind)
    labels = torch.randint(0, vocab, (rows, n), generator=g)
    labels[torch.rand(rows, n, generator=g) < ignored] = IGNORE
    return logits, labels, torch.rand(rows, n, generator=g) < share, .05 + .95 * torch.rand(rows, 1, generator=g)


def surprise(logits, labels):
    "−log p of each label, in numpy; 0 where there is none."
    x = logits.detach().double().numpy()
    out = np.zeros(labels.shape)
    for i in np.ndindex(*labels.shape):
        if labels[i] != IGNORE:
            row = x[i] - x[i].max()
            out[i] = math.log(np.exp(row).sum()) - row[labels[i]]
    return out


sizes = dict(rows=st.integers(1, 3), n=st.integers(1, 9), vocab=st.integers(2, 7), seed=st.integers(0, 10 ** 6))


@settings(max_examples=40, deadline=None)
@given(**sizes, kind=st.sampled_from(KINDS))
def test_masked_loss(rows, n, vocab, seed, kind):
    logits, labels, masked, t = made(rows, n, vocab, seed, kind)
    s, known = surprise(logits, labels), (masked & (labels != IGNORE)).numpy()
    everything = max(1, int((labels != IGNORE).sum()))
    bound = sum(s[i] / t[i[0], 0].item() for i in np.ndindex(*s.shape) if known[i]) / everything
    plain = s[known].sum() / max(1, known.sum())
    near = dict(rel=TOLERANCE[kind] * 10, abs=TOLERANCE[kind])
    assert masked_loss(logits, labels, masked, t).item() == pytest.approx(bound, **near)
    assert masked_loss(logits, labels, masked).item() == pytest.approx(plain, **near)
    assert multitf_loss(logits, labels, masked).item() == pytest.approx(plain, **near)
    assert masked_loss(logits, labels, masked, t.expand(rows, n), 7).item() == pytest.approx(bound * everything / 7, **near)


@settings(max_examples=40, deadline=None)
@given(**sizes, kind=st.sampled_from(KINDS), divide=st.booleans())
def test_planned_loss(rows, n, vocab, seed, kind, divide):
    logits, labels, masked, t = made(rows, n, vocab, seed, kind)
    s = surprise(logits, labels)
    weight = [1 / t[i[0], 0].item() if masked[i] or divide else 1 for i in np.ndindex(*s.shape)]
    want = (s.reshape(-1) * weight).sum() / max(1, int((labels != IGNORE).sum()))
    assert planned_loss(logits, labels, masked, t, divide).item() == pytest.approx(want, rel=TOLERANCE[kind] * 10, abs=TOLERANCE[kind])
    assert planned_loss(logits, labels, masked & False, .1).item() == pytest.approx(sft_loss(logits, labels).item(), abs=1e-6)


def test_the_level_of_a_place_that_is_not_masked_does_not_matter():
    logits, labels, masked, _ = made(2, 6, 5, 1)
    t = torch.where(masked & (labels != IGNORE), .5, math.nan)
    assert torch.equal(planned_loss(logits, labels, masked, t), planned_loss(logits, labels, masked, .5))
    assert torch.equal(masked_loss(logits, labels, masked, t), masked_loss(logits, labels, masked, torch.tensor(.5)))
    with pytest.raises(LossError, match='noise level'): planned_loss(logits, labels, masked, t, divide_ar=True)


def reference_sdar(logits, labels, masked, block, t, epsilon, normalise):
    "B.13, and its self-normalised form, block by block."
    s, total, weights, blocks = surprise(logits, labels), 0., 0., 0
    for row in range(len(labels)):
        for k in range(int(block.max()) + 1):
            inside = (block[row] == k).numpy()
            if not inside.any(): continue
            hidden = inside & (masked[row] & (labels[row] != IGNORE)).numpy()
            ratio = hidden.sum() / inside.sum() if t is None else t[row, k].item()
            w = 1 / max(ratio, epsilon)
            total, weights, blocks = total + w * s[row][hidden].sum(), weights + w * hidden.sum(), blocks + 1
    return total / (max(1, blocks) if normalise == 'blocks' else weights or 1)


@settings(max_examples=60, deadline=None)
@given(**sizes, kind=st.sampled_from(KINDS), size=st.integers(1, 4), ratios=st.booleans(), epsilon=st.sampled_from([1e-6, 1e-3, .3]),
       normalise=st.sampled_from(['blocks', 'weights']), front=st.integers(0, 3))
def test_sdar_loss(rows, n, vocab, seed, kind, size, ratios, epsilon, normalise, front):
    logits, labels, masked, _ = made(rows, n, vocab, seed, kind)
    block = (torch.arange(n).expand(rows, n) - front).div(size, rounding_mode='floor').clamp(min=-1)       # a prompt in no block
    masked = masked & (block >= 0)
    t = torch.rand(rows, int(block.max()) + 1 if block.max() >= 0 else 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) if ratios else None
    want = reference_sdar(logits, labels, masked, block, t, epsilon, normalise)
    found = sdar_loss(logits, labels, masked, block, t, epsilon, normalise).item()
    assert found == pytest.approx(want, rel=max(1e-6, TOLERANCE[kind] * 10), abs=TOLERANCE[kind])


def test_sdar_on_one_row_and_shared_ratios():
    logits, labels, masked, _ = made(2, 6, 5, 3)
    block, t = torch.arange(6) // 2, torch.tensor([.2, .5, 1.])
    both = sdar_loss(logits, labels, masked, block.expand(2, 6), t)
    single = [sdar_loss(logits[n], labels[n], masked[n], block, t) for n in range(2)]
    assert torch.allclose(both, sum(single) / 2) and both.dtype == torch.float64


def test_equal_ratios_make_the_self_normalised_form_the_global_mean():
    logits, labels, masked, _ = made(3, 8, 5, 4)
    block = torch.arange(8).expand(3, 8) // 2
    same = sdar_loss(logits, labels, masked, block, torch.full((4,), .3), normalise='weights')
    assert torch.allclose(same, multitf_loss(logits, labels, masked))


@pytest.mark.parametrize('loss', [
    lambda x, y, m: masked_loss(x, y, m), lambda x, y, m: masked_loss(x, y, m, 0.), lambda x, y, m: planned_loss(x, torch.full_like(y, IGNORE), m, .5),
    lambda x, y, m: multitf_loss(x, y, m), lambda x, y, m: sdar_loss(x, y, m, torch.zeros_like(y)),
    lambda x, y, m: sdar_loss(x, y, m, torch.full_like(y, -1), normalise='weights'), lambda x, y, m: sdar_loss(x, y, m, torch.zeros_like(y), normalise='weights')])
@pytest.mark.parametrize('shape', [(2, 5), (1, 1), (2, 0), (0, 4), (0,), (4,)])
def test_nothing_masked_is_zero_with_a_finite_gradient(loss, shape):
    x = torch.randn(*shape, 4, requires_grad=True)
    value = loss(x, torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.bool))
    value.backward()
    assert value.item() == 0 and torch.isfinite(x.grad).all() and not x.grad.any()


def test_places_that_are_not_masked_may_hold_anything():
    logits, labels, masked, t = made(2, 6, 5, 5, torch.float32)
    logits[~masked] = math.nan
    logits.requires_grad_()
    block = torch.arange(6).expand(2, 6) // 3
    for loss in (masked_loss(logits, labels, masked, t), multitf_loss(logits, labels, masked), sdar_loss(logits, labels, masked, block)):
        grad, = torch.autograd.grad(loss, logits)
        assert torch.isfinite(loss) and torch.isfinite(grad).all()


@pytest.mark.parametrize('loss', [
    lambda x, y, m, t, b: masked_loss(x, y, m, t), lambda x, y, m, t, b: multitf_loss(x, y, m), lambda x, y, m, t, b: planned_loss(x, y, m, t),
    lambda x, y, m, t, b: planned_loss(x, y, m, t, True), lambda x, y, m, t, b: sdar_loss(x, y, m, b), lambda x, y, m, t, b: sdar_loss(x, y, m, b, normalise='weights')])
def test_gradients(loss):
    logits, labels, masked, t = made(2, 6, 4, 6)
    block = torch.arange(6).expand(2, 6) // 2
    assert torch.autograd.gradcheck(lambda x: loss(x, labels, masked, t, block), logits.requires_grad_())


@pytest.mark.parametrize('loss', [lambda x, y, m, k: masked_loss(x, y, m, .4, k), lambda x, y, m, k: multitf_loss(x, y, m, k),
                                  lambda x, y, m, k: planned_loss(x, y, m, .4, num_items=k)])
def test_parts_of_a_step_add_up(loss):
    logits, labels, masked, _ = made(4, 6, 5, 7)
    whole = loss(logits, labels, masked, 13)
    assert torch.allclose(whole, sum(loss(logits[n:n + 2], labels[n:n + 2], masked[n:n + 2], 13) for n in (0, 2)))
    with pytest.raises(LossError, match='mean over 0'): loss(logits, labels, masked, 0)


@pytest.mark.parametrize('call, words', [
    (lambda x, y, m: masked_loss(x, y, m[0]), 'masked of shape'), (lambda x, y, m: masked_loss(x, y, m.long()), 'masked of shape'),
    (lambda x, y, m: masked_loss(x, y, m | True, 1.5), 'noise level'), (lambda x, y, m: masked_loss(x, y, m | True, -.5), 'noise level'),
    (lambda x, y, m: masked_loss(x, y, m | True, 0), 'noise level'), (lambda x, y, m: masked_loss(x, y, m | True, math.nan), 'noise level'),
    (lambda x, y, m: masked_loss(x, y, m, torch.ones(5)), 't of shape'), (lambda x, y, m: masked_loss(x, y + 99, m | True), 'vocabulary'),
    (lambda x, y, m: masked_loss(x[:, :3], y, m), 'labels of shape'), (lambda x, y, m: planned_loss(x, y, m[:1], .5), 'masked of shape'),
    (lambda x, y, m: sdar_loss(x, y, m, y[0]), 'blocks of shape'), (lambda x, y, m: sdar_loss(x, y, m, y.float()), 'blocks of shape'),
    (lambda x, y, m: sdar_loss(x, y, m | True, y * 0 - 1), 'in no block'), (lambda x, y, m: sdar_loss(x, y, m, y * 0 + 3, torch.ones(2)), 'block 3'),
    (lambda x, y, m: sdar_loss(x, y, m, y * 0, torch.tensor([2.])), 'ratio outside'), (lambda x, y, m: sdar_loss(x, y, m, y * 0, epsilon=0), 'ε'),
    (lambda x, y, m: sdar_loss(x, y, m, y * 0, normalise='mean'), 'normalise')])
def test_losses_without_a_value(call, words):
    logits, labels, masked, _ = made(2, 6, 5, 8, ignored=0)
    with pytest.raises(LossError, match=words): call(logits, labels, masked)


# ---- the bound is exact for an exact model

@pytest.mark.parametrize('texts', [['ab', 'ba'], ['aab', 'aba', 'bba', 'bbb', 'cab'], ['abcd', 'abdc', 'bacd', 'dcba', 'aaaa', 'bbbb']])
def test_the_bound_is_the_likelihood(texts):
    "Over all masks, t integrated in closed form: ∫ t^k (1−t)^(n−k) / t dt = (k−1)! (n−k)! / n!."
    model, n, total = Counted(texts), len(texts[0]), 0.
    for ids in model.ids:
        for bits in itertools.product([False, True], repeat=n):
            masked, k = np.array(bits), sum(bits)
            if not k: continue
            loss = masked_loss(model(np.where(masked, model.mask, ids)), torch.tensor(ids), torch.tensor(masked), 1.)
            total += n * loss.item() * math.factorial(k - 1) * math.factorial(n - k) / math.factorial(n)
    assert total / len(texts) == pytest.approx(math.log(len(texts)), rel=1e-9)


# ---- OPUT

class Little(torch.nn.Module):
    "A token's own and its left neighbour's embedding -> logits; counts its calls and keeps what it read."
    def __init__(self, vocab, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.table, self.head = torch.nn.Embedding(vocab, 4).double(), torch.nn.Linear(8, vocab).double()
        self.read = []
    def forward(self, ids):
        self.read.append(ids)
        x = self.table(ids)
        return self.head(torch.cat([x.roll(1, -2), x], -1))


def oput_case(seed, vocab=6, mask=5):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, vocab - 1, (2, 7), generator=g)
    masked = torch.rand(2, 7, generator=g) < .6
    masked[0, 0], masked[1, 1] = True, False
    return Little(vocab, seed), labels.masked_fill(masked, mask), labels, masked


@pytest.mark.parametrize('seed', range(4))
@pytest.mark.parametrize('weight', [0., 1., .3])
def test_oput_equals_a_reference(seed, weight):
    model, ids, labels, masked = oput_case(seed)
    first = model(ids).detach().numpy().copy()
    first[..., 5] = -np.inf
    guessed = torch.where(masked, torch.tensor(first.argmax(-1)), ids)
    mean = lambda x: surprise(model(x), labels)[masked.numpy()].mean()
    want = mean(ids) + weight * mean(guessed)
    assert oput_loss(model, ids, labels, masked, weight=weight).item() == pytest.approx(want, rel=1e-10)


@pytest.mark.parametrize('seed', range(4))
def test_no_gradient_flows_through_the_guesses(seed):
    model, ids, labels, masked = oput_case(seed)
    weights = list(model.parameters())
    whole = torch.autograd.grad(oput_loss(model, ids, labels, masked, weight=2.), weights)
    noisy, guessed = model.read
    assert len(model.read) == 2 and not guessed.requires_grad and torch.equal(noisy, ids) and (guessed[~masked] == ids[~masked]).all()
    parts = [torch.autograd.grad(multitf_loss(model(x), labels, masked), weights) for x in (ids, guessed.clone())]
    for g, a, b in zip(whole, *parts): assert torch.allclose(g, a + 2 * b, atol=1e-12)
    with torch.enable_grad(): assert not self_denoised(model(ids), ids, masked).requires_grad


def test_guesses_are_never_the_mask_nor_a_forbidden_token():
    logits = torch.zeros(1, 3, 6)
    logits[..., 5], logits[..., 4], logits[..., 2] = 9, 8, 7
    ids, masked = torch.tensor([[5, 1, 5]]), torch.tensor([[True, False, True]])
    assert self_denoised(logits, ids, masked).tolist() == [[4, 1, 4]]
    assert self_denoised(logits, ids, masked, [4]).tolist() == [[2, 1, 2]]
    assert self_denoised(logits[..., :5], ids, masked).tolist() == [[4, 1, 4]]        # a head without the mask
    assert self_denoised(logits, ids, masked & False).tolist() == ids.tolist()


# ---- weights

def test_weights_are_read_off_the_gradient():
    _, labels, masked, t = made(1, 8, 5, 9, ignored=0)
    w = token_weights(lambda x: masked_loss(x, labels[0], masked[0], t[0]), labels[0], 5)
    assert torch.allclose(w, masked[0] / t[0].double() / 8)
    block = torch.arange(8) // 4
    w = token_weights(lambda x: sdar_loss(x, labels[0], masked[0], block), labels[0], 5)
    hidden = torch.stack([masked[0, :4].sum(), masked[0, 4:].sum()])
    assert torch.allclose(w, masked[0] * (4 / hidden.clamp(min=1))[block].double() / 2)
    import matplotlib
    matplotlib.use('Agg')
    axes = draw_weights({'a': w, 'b': w}, ['x'] * 8)
    assert len(axes) == 2 and len(axes[0].patches) == 8 and 'a (sum' in axes[0].get_title(loc='left')


@pytest.mark.parametrize('t', [torch.rand(5, 3), torch.rand(3, 2, 3), torch.tensor(.5), torch.rand(2, 1)])
def test_ratios_of_another_shape(t):
    logits, labels, block = torch.randn(2, 6, 5), torch.arange(12).reshape(2, 6) % 5, torch.arange(6).expand(2, 6) // 2
    with pytest.raises(LossError): sdar_loss(logits, labels, torch.ones(2, 6).bool(), block, t)


def test_ratios_may_be_a_list_or_one_row_for_all():
    logits, labels, block = torch.randn(2, 6, 5), torch.arange(12).reshape(2, 6) % 5, torch.arange(6).expand(2, 6) // 2
    losses = [sdar_loss(logits, labels, torch.ones(2, 6).bool(), block, t) for t in ([.1, .5, 1.], torch.tensor([[.1, .5, 1.]]), torch.tensor([[.1, .5, 1.]] * 2))]
    assert losses[0] == losses[1] == losses[2]


def test_somebody_must_be_left_to_guess():
    logits, ids, masked = torch.randn(1, 4, 5), torch.tensor([[4, 1, 4, 2]]), torch.tensor([[True, False, True, False]])
    with pytest.raises(LossError, match='forbid fewer'): self_denoised(logits, ids, masked, range(4))
    assert self_denoised(logits, ids, masked, [0, 1, 2, -1, 99]).tolist() == [[3, 1, 3, 2]]
    assert self_denoised(logits, ids, masked & False, range(5)).tolist() == ids.tolist()


@pytest.mark.parametrize('weight', [math.nan, math.inf, -1, '1', None])
def test_the_weight_of_own_guesses(weight):
    with pytest.raises(LossError, match='weight'):
        oput_loss(lambda ids: torch.randn(*ids.shape, 6), torch.full((1, 3), 5), torch.zeros(1, 3).long(), torch.ones(1, 3).bool(), weight=weight)

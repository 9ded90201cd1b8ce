"GRPO: advantages, reward and loss against formulas in float64 and against trl's own trainer."
import math
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from pasta_lib.losses import LOSS_TYPES, LossError, clipped_surrogate, draw_surrogate, group_advantages, grpo_loss, k3, tip_reward


# ---- advantages and reward
@settings(max_examples=80, deadline=None)
@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 10 ** 6), st.booleans())
def test_advantages_by_formula(groups, samples, seed, scale):
    r = np.random.default_rng(seed).uniform(-2, 2, (groups, samples))
    apart = r - r.mean(1, keepdims=True)
    std = r.std(1, ddof=1, keepdims=True) if samples > 1 else np.zeros((groups, 1))
    found = group_advantages(torch.tensor(r), scale)
    np.testing.assert_allclose(found.numpy(), apart / (std + 1e-4) if scale else apart, rtol=1e-9, atol=1e-9)
    assert torch.allclose(found.sum(1), torch.zeros(groups, dtype=torch.float64), atol=1e-6)


@pytest.mark.parametrize('value', [0., 1., .1, 1 / 3, 1e-7, -5.3])
@pytest.mark.parametrize('samples', [1, 2, 3, 7, 16])
def test_a_group_of_equals_teaches_nothing(value, samples):
    "Exactly nothing: rounding must not become an advantage when it is divided by 10⁻⁴."
    rewards = torch.full((3, samples), value)
    assert torch.equal(group_advantages(rewards), torch.zeros(3, samples)) and not group_advantages(rewards, False).any()


def test_advantages_take_any_leading_shape():
    one = group_advantages(torch.tensor([1., 0., 0.]))
    assert one.shape == (3,) and torch.equal(group_advantages(torch.tensor([[[1., 0., 0.]]]))[0, 0], one)


@pytest.mark.parametrize('bad', [torch.ones(2, 0), torch.tensor(1.), torch.tensor([[1., math.nan]]), torch.tensor([math.inf, 0.])])
def test_no_advantages(bad):
    with pytest.raises(LossError): group_advantages(bad)


def test_reward_by_definition():
    assert tip_reward(1., 50, 100, .4) == .8 and tip_reward(0., 50, 100, .4) == 0 and tip_reward(0., 50, 100, .4, gate=False) == -.2
    assert tip_reward(1., 50, 100, 0.) == 1 and tip_reward(.5, 100, 100, 1.) == 0
    correct, live = torch.tensor([1., 0., 1.]), torch.tensor([10., 10., 40.])
    torch.testing.assert_close(tip_reward(correct, live, torch.full((3,), 40.), .2), torch.tensor([.95, 0., .8]))
    for bad in (dict(live=0), dict(dense=0), dict(live=-1), dict(weight=-.1), dict(weight=math.nan), dict(dense=torch.tensor([4., 0.]))):
        with pytest.raises(LossError): tip_reward(**dict(correct=1., live=3, dense=4, weight=.1) | bad)


# ---- the loss
def tables(seed=0, answers=5, tokens=7, dtype=torch.float64, far=.4):
    rng = np.random.default_rng(seed)
    old = -rng.uniform(.01, 4, (answers, tokens))
    new, ref = old + rng.normal(0, far, old.shape), old + rng.normal(0, far, old.shape)
    mask = np.arange(tokens)[None] < rng.integers(1, tokens + 1, answers)[:, None]
    t = lambda x: torch.tensor(x, dtype=dtype)
    return t(new), t(old), t(rng.normal(0, 1, answers)), torch.tensor(mask), t(ref)


def formula(new, old, adv, mask, epsilon, beta, ref, kind):
    "The definition, token by token."
    new, old, adv, ref, rows = new.numpy(), old.numpy(), adv.numpy(), ref.numpy(), []
    for i in range(len(new)):
        row = []
        for t in range(new.shape[1]):
            if not mask[i, t]: continue
            rho = math.exp(new[i, t] - old[i, t])
            kept = min(max(rho, 1 - epsilon), 1 + epsilon)
            kl = math.exp(ref[i, t] - new[i, t]) - (ref[i, t] - new[i, t]) - 1
            row.append(-min(rho * adv[i], kept * adv[i]) + beta * kl)
        rows.append(row)
    if kind == 'grpo': return np.mean([np.mean(row) if row else 0. for row in rows])
    total = sum(map(sum, rows))
    return total / (new.size if kind == 'dr_grpo' else sum(map(len, rows)))


@pytest.mark.parametrize('kind', LOSS_TYPES)
@pytest.mark.parametrize('beta', [0., .04, 1.])
@pytest.mark.parametrize('epsilon', [.1, .2])
def test_loss_by_formula(kind, beta, epsilon):
    for seed in range(6):
        new, old, adv, mask, ref = tables(seed)
        found = grpo_loss(new, old, adv, mask, epsilon, beta, ref, kind)
        assert math.isclose(found.item(), formula(new, old, adv, mask, epsilon, beta, ref, kind), rel_tol=1e-12)
        single = grpo_loss(*(x.float() for x in (new, old, adv)), mask, epsilon, beta, ref.float(), kind)
        assert math.isclose(single.item(), found.item(), rel_tol=1e-4, abs_tol=1e-5)


def trls(new, old, adv, mask, epsilon, beta, ref, kind, training=True):
    "trl's own `_compute_loss` on our numbers: a stand-in for the trainer, whose model says `new`."
    from trl import GRPOTrainer
    accelerator = SimpleNamespace(num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kw: (new, torch.zeros_like(new), None), aux_loss_enabled=False,
        top_entropy_quantile=1., off_policy_mask_threshold=None, importance_sampling_level='token', beta=beta, loss_type=kind,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1), epsilon_low=epsilon, epsilon_high=epsilon,
        use_vllm=False, _entropy_bonus_enabled=False, model=SimpleNamespace(training=training), current_gradient_accumulation_steps=1,
        max_completion_length=new.shape[1], accelerator=accelerator, _metrics=dict(train=defaultdict(list), eval=defaultdict(list)))
    empty, ids = torch.zeros(len(new), 0, dtype=torch.long), torch.zeros(new.shape, dtype=torch.long)
    inputs = dict(prompt_ids=empty, prompt_mask=empty, completion_ids=ids, completion_mask=mask.long(), advantages=adv,
                  old_per_token_logps=old, ref_per_token_logps=ref, num_items_in_batch=mask.sum())
    return GRPOTrainer._compute_loss(trainer, None, inputs), trainer._metrics['train']


@pytest.mark.parametrize('kind', LOSS_TYPES)
@pytest.mark.parametrize('beta', [0., .04, .5])
def test_loss_and_gradient_are_trls(kind, beta):
    for seed in range(4):
        new, old, adv, mask, ref = tables(seed, answers=6, tokens=11)
        ours, theirs = new.clone().requires_grad_(), new.clone().requires_grad_()
        a = grpo_loss(ours, old, adv, mask, .2, beta, ref, kind)
        b, said = trls(theirs, old, adv, mask, .2, beta, ref, kind)
        a.backward(), b.backward()
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
        if beta: assert math.isclose(said['kl'][0], k3(new, ref)[mask].mean().item(), rel_tol=1e-9)


def test_the_constants_of_two_types():
    new, old, adv, mask, ref = tables()
    whole = grpo_loss(new, old, adv, mask, loss_type='dr_grpo', max_tokens=new.shape[1])
    assert torch.equal(whole, grpo_loss(new, old, adv, mask, loss_type='dr_grpo'))
    torch.testing.assert_close(grpo_loss(new, old, adv, mask, loss_type='dr_grpo', max_tokens=70), whole / 10)
    parts = [grpo_loss(new[i:j], old[i:j], adv[i:j], mask[i:j], loss_type='dapo', num_items=mask.sum()) for i, j in ((0, 2), (2, 5))]
    torch.testing.assert_close(sum(parts), grpo_loss(new, old, adv, mask, loss_type='dapo'))


@pytest.mark.parametrize('kind', LOSS_TYPES)
@pytest.mark.parametrize('junk', [math.nan, math.inf, -math.inf, 1e30, -700.])
def test_masked_tokens_do_not_matter(kind, junk):
    new, old, adv, mask, ref = tables(3)
    clean = new.clone().requires_grad_()
    expected = grpo_loss(clean, old, adv, mask, .2, .1, ref, kind)
    expected.backward()
    dirty = [x.masked_fill(~mask, junk) for x in (new, old, ref)]
    dirty[0].requires_grad_()
    found = grpo_loss(dirty[0], dirty[1], adv, mask.long(), .2, .1, dirty[2], kind)
    found.backward()
    assert torch.equal(found, expected) and torch.equal(dirty[0].grad, clean.grad) and not clean.grad[~mask].any()


def test_gradient():
    new, old, adv, mask, ref = tables(1, 3, 4)
    inputs = new.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: grpo_loss(x, old, adv, mask, .2, .3, ref), inputs)
    held = [old.clone().requires_grad_(), ref.clone().requires_grad_()]
    grpo_loss(inputs, held[0], adv, mask, .2, .3, held[1]).backward()
    assert all(x.grad is None for x in held) and torch.isfinite(inputs.grad).all()


def test_first_update_is_the_policy_gradient():
    "With ρ = 1 nothing is clipped: the gradient is −A over the number of tokens."
    new, _, adv, mask, _ = tables(2)
    new.requires_grad_()
    grpo_loss(new, new.detach(), adv, mask, loss_type='bnpo').backward()
    torch.testing.assert_close(new.grad, -(adv[:, None] * mask) / mask.sum())
    equal = group_advantages(torch.full((1, 5), .7, dtype=torch.float64))[0]
    assert grpo_loss(new, new.detach(), equal, mask).item() == 0


@pytest.mark.parametrize('advantage,ratio,slope', [(1., 1.1, 1.), (1., 1.3, 0.), (1., .5, 1.), (-1., .9, -1.), (-1., .7, 0.), (-1., 1.5, -1.)])
def test_where_it_clips(advantage, ratio, slope):
    x = torch.tensor([ratio], requires_grad=True)
    clipped_surrogate(x, torch.tensor([advantage])).backward()
    assert x.grad.item() == slope


def test_k3_is_a_divergence():
    "Its mean over π's samples is KL(π‖π₀), and it is never negative."
    p, q = (torch.tensor(x, dtype=torch.float64) for x in ([.2, .5, .3], [.4, .4, .2]))
    each = k3(p.log(), q.log())
    assert (each >= 0).all() and k3(p.log(), p.log()).abs().max() == 0
    torch.testing.assert_close((p * each).sum(), (p * (p / q).log()).sum())


def test_one_answer_and_one_token():
    one = torch.zeros(1, 1, dtype=torch.float64)
    assert grpo_loss(one, one, torch.tensor([2.]), one == 0).item() == -2
    holes = grpo_loss(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2), torch.tensor([[1, 0, 0], [0, 0, 0]]))
    assert holes.item() == -.5                                          # an answer without tokens counts as 0, as in trl


@pytest.mark.parametrize('change,says', [
    (dict(mask=torch.zeros(5, 7)), 'no token to learn from'), (dict(loss_type='ppo'), 'no loss is called'), (dict(beta=.1), 'without a reference'),
    (dict(advantages=torch.zeros(4)), 'one advantage per answer'), (dict(advantages=torch.zeros(5, 1)), 'one advantage per answer'),
    (dict(old_logps=torch.zeros(5, 6)), 'tables of shapes'), (dict(mask=torch.ones(5)), 'tables of shapes'),
    (dict(beta=.1, reference_logps=torch.zeros(7, 5)), 'tables of shapes')])
def test_loss_errors(change, says):
    new, old, adv, mask, _ = tables()
    with pytest.raises(LossError, match=says) as e: grpo_loss(**dict(logps=new, old_logps=old, advantages=adv, mask=mask) | change)
    assert '\n' not in str(e.value)


def test_picture():
    import matplotlib.pyplot as plt
    axes = draw_surrogate(.3)
    good, bad = (ax.lines[1].get_ydata() for ax in axes)
    assert good.max() == pytest.approx(1.3) and bad.max() == pytest.approx(-.7) and draw_surrogate(axes=axes) is axes
    plt.close('all')

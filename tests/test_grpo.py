"GRPO: advantages, reward and loss against formulas in float64 and against trl's own trainer; runs against runs that nobody disturbed."
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from pasta_lib import train as T
from pasta_lib.jobs import write_jsonl
from pasta_lib.losses import LOSS_TYPES, LossError, clipped_surrogate, draw_surrogate, group_advantages, grpo_loss, k3, tip_reward
from pasta_lib.masks import layout_logits
from pasta_lib.models import load, read_settings
from pasta_lib.registers import register_ids, tip_layout

ROOT = Path(__file__).resolve().parent.parent
ENV = os.environ | dict(OMP_NUM_THREADS='1', PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES='', HF_HUB_OFFLINE='1')


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


def trls(new, old, adv, mask, epsilon, beta, ref, kind, correct):
    "trl's own `_compute_loss` on our numbers: a stand-in for the trainer, whose model says `new`."
    from trl import GRPOTrainer
    accelerator = SimpleNamespace(num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kw: (new, torch.zeros_like(new), None), aux_loss_enabled=False,
        top_entropy_quantile=1., off_policy_mask_threshold=None, importance_sampling_level='token', beta=beta, loss_type=kind,
        args=SimpleNamespace(use_bias_correction_kl=correct, delta=None, steps_per_generation=1), epsilon_low=epsilon, epsilon_high=epsilon,
        use_vllm=False, _entropy_bonus_enabled=False, model=SimpleNamespace(training=True), current_gradient_accumulation_steps=1,
        max_completion_length=new.shape[1], accelerator=accelerator, _metrics=dict(train=defaultdict(list), eval=defaultdict(list)))
    empty, ids = torch.zeros(len(new), 0, dtype=torch.long), torch.zeros(new.shape, dtype=torch.long)
    inputs = dict(prompt_ids=empty, prompt_mask=empty, completion_ids=ids, completion_mask=mask.long(), advantages=adv,
                  old_per_token_logps=old, ref_per_token_logps=ref, num_items_in_batch=mask.sum())
    return GRPOTrainer._compute_loss(trainer, None, inputs), trainer._metrics['train']


@pytest.mark.parametrize('kind', LOSS_TYPES)
@pytest.mark.parametrize('beta', [0., .04, .5])
@pytest.mark.parametrize('correct', [False, True])
def test_loss_and_gradient_are_trls(kind, beta, correct):
    for seed in range(4):
        new, old, adv, mask, ref = tables(seed, answers=6, tokens=11)
        ours, theirs = new.clone().requires_grad_(), new.clone().requires_grad_()
        a = grpo_loss(ours, old, adv, mask, .2, beta, ref, kind, correct_kl=correct)
        b, said = trls(theirs, old, adv, mask, .2, beta, ref, kind, correct)
        a.backward(), b.backward()
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
        if beta and not correct: assert math.isclose(said['kl'][0], k3(new, ref)[mask].mean().item(), rel_tol=1e-9)


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


def test_which_divergence_pulls():
    "Over all answers of a policy, weighed by their probability: the gradient of KL(π₀‖π), and with `correct_kl` of KL(π‖π₀)."
    logits, p0 = torch.tensor([.3, -1., .7], dtype=torch.float64, requires_grad=True), torch.tensor([.2, .5, .3], dtype=torch.float64)
    for correct, divergence in ((False, lambda p: (p0 * (p0 / p).log()).sum()), (True, lambda p: (p * (p / p0).log()).sum())):
        p = logits.softmax(0)
        each = [grpo_loss(p.log()[[i], None], p.log()[[i], None].detach(), torch.zeros(1), torch.ones(1, 1), beta=1., reference_logps=p0.log()[[i], None],
                          correct_kl=correct) for i in range(3)]
        ours, = torch.autograd.grad((p.detach() * torch.stack(each)).sum(), logits, retain_graph=True)
        torch.testing.assert_close(ours, torch.autograd.grad(divergence(p), logits)[0])


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


# ---- graders and prompts
@pytest.mark.parametrize('row,text,grade', [
    (dict(answer=11), 'so 11', 1.), (dict(answer=11), 'so 711', 0.), (dict(answer='25'), 'it is 025.', 1.), (dict(reference='#### 1,234'), '1234', 1.),
    (dict(reference='x #### 5', answer=6), '6', 1.), (dict(answer=.5), '1/2', 1.), (dict(answer=3), 'none', 0.), (dict(answer=3), '', 0.),
    (dict(reference='a red owl'), 'It is a red  owl', 1.), (dict(reference='owl'), 'an owlet', 0.), (dict(answer=-4), '-4', 1.)])
def test_exact(row, text, grade): assert T.exact(row, text) == grade


@pytest.mark.parametrize('answer,text,grade', [
    ('5', r'the answer: 5\boxed{', 0), ('7', r'\boxed{7', 0), (7, r'\boxed{7', 0), (7, r'\boxed{8} or \boxed{7', 0), (7, r'so 7 \boxed{8}', 0), (7, r'\boxed{7} of 8', 1),
    ('[1, 2]', 'so 2', 0), ('[1, 2]', 'so [1, 2].', 1), ('2x+1', '1', 0), ('2x+1', 'so 2x+1', 1), ('x+1', r'\boxed{1+x}', 1), ('1', 'so 2x+1', 0), ('A) 4', 'B) 4', 0),
    ('B) 4', 'A) 4', 0), ('A) 4', r'\boxed{B) 4}', 0), ('A) 4', r'\boxed{A) 4}', 1), ('12:30', '30', 0), ('30', 'at 12:30', 0), ('12:30', 'at 12:30.', 1),
    ('Paris 2024', 'in 2024', 0), ('Paris 2024', 'It was Paris 2024', 1), ('Yes', 'Yes.', 1), ('Yes.', 'so yes', 1), ('Yes', 'Yes, no', 0), ('0.5', '50%', 1),
    ('50%', 'so 0.5', 1), ('0.5', 'so 50', 0), ('3/4', r'is \frac{3}{4}', 1), (r'\frac{3}{4}', 'is .75', 1), ('1,200 cm', 'so 1200', 1), ('-3', 'so \u22123', 1), ('9', '#### 9', 1),
    ('9', 'so 9 #### 8', 0), ('9', '####', 0), ('5', '', 0), ('x', '', 0), ('5', '9' * 400, 0)])
def test_what_a_text_gives(answer, text, grade): assert T.exact(dict(answer=answer), text) == grade


@settings(max_examples=40, deadline=None)
@given(st.integers(-10 ** 6, 10 ** 6), st.sampled_from(['so {}', 'The answer is {}.', r'\boxed{{{}}}', '#### {}', 'it costs ${} each']))
def test_a_number_is_right_alone(n, frame):
    "The same for training as for evaluation: right in every frame, and neighbours are wrong."
    from pasta_lib.metrics import same_answer
    assert T.exact(dict(answer=n), frame.format(n)) == 1 and T.exact(dict(answer=n + 1), frame.format(n)) == 0
    assert same_answer(frame.format(n) if '{{' in frame or '#' in frame else str(n), n)


def test_graders(tmp_path, monkeypatch):
    (tmp_path / 'my_graders.py').write_text('def half(row, text): return .5\nnumber = 3')
    monkeypatch.syspath_prepend(str(tmp_path))
    assert T.grader('exact') is T.exact and T.grader('my_graders:half')({}, '') == .5
    for wrong in ('exactly', 'my_graders:number', 'my_graders:none', 'no_module:x', ':', 'my_graders:', ''):
        with pytest.raises(T.TrainError, match='use exact, or module:function'): T.grader(wrong)
    with pytest.raises(T.TrainError, match='a row without answer'): T.exact(dict(id=3), 'x')
    for nothing in ('', ' ', r'\boxed{5'):
        with pytest.raises(T.TrainError, match='says nothing'): T.exact(dict(reference=nothing), 'x')


@pytest.mark.parametrize('row,grader,says', [
    (dict(prompt='b'), 'exact', 'a row without answer or reference .*rows.jsonl, line 2'), (dict(prompt='b', answer={'a': 1}), 'exact', 'of type dict .*line 2'),
    (dict(prompt='b', answer=[1]), 'exact', 'of type list .*line 2'), (dict(prompt='b', answer=' '), 'exact', 'says nothing .*line 2'),
    (dict(prompt='b', answer=1), 'os:getcwd', 'the grader fails: .*rows.jsonl, line 1'), (dict(prompt='b', answer=1), 'operator:or_', 'the grader fails.*line 1'),
    (dict(prompt='b', answer=1), 'bad', 'a grade of 7')])
def test_rows_are_checked_before_the_first_step(tmp_path, monkeypatch, row, grader, says):
    monkeypatch.setitem(T.GRADERS, 'bad', bad_grade)
    write_jsonl(tmp_path / 'rows.jsonl', [dict(prompt='a', answer=1), row])
    config = dict(model='tiny', data=str(tmp_path / 'rows.jsonl'), tags='registers', registers=3, prompt='raw', device='cpu', batch=1, samples=2, max_steps=1,
                  grader=grader)
    with pytest.raises(T.TrainError, match=says): T.train('tip-grpo', config, tmp_path / 'run')
    assert not (tmp_path / 'run' / 'log.jsonl').exists() or not T.read_log(tmp_path / 'run')


def test_a_row_without_registers_is_counted(thinker):
    rows = [dict(prompt='a', tagged_text='<reg_0>a'), dict(prompt='a', tagged_text='a'), dict(prompt='a', tagged_text='&lt;reg_0>')]
    layouts, dropped = T.layouts_of(rows, thinker[1], 'tip', prompt='raw')
    assert len(layouts) == 1 and dropped == {'no register': 2}


def test_questions(tiny):
    rows = [dict(prompt='hi'), dict(prompt=''), dict(prompt='x' * 50), dict(prompt=3), dict(prompt='\ud800')]
    questions, dropped = T.questions_of(rows, tiny[1], 40, 'raw')
    assert [q.ids for q in questions] == [list(b'hi')] and questions[0].row == rows[0]
    assert dropped.pop('too long') == 1 and dropped.pop('empty') == 1 and sum(dropped.values()) == 2
    with pytest.raises(T.TrainError, match='no prompt can be trained on'): T.questions_of(rows[1:], tiny[1], 40, 'raw')


# ---- log-probabilities under eviction
@pytest.fixture(scope='module')
def thinker(): return T.prepare('tiny', 'registers', registers=4)


def answers(tok, seed=0, count=5):
    "Prompts and answers with random registers."
    rng, registers = np.random.default_rng(seed), list(register_ids(tok))
    make = lambda n: [int(rng.choice(registers)) if rng.random() < .3 else int(rng.integers(97, 122)) for _ in range(n)]
    return [(make(int(rng.integers(1, 9))), make(int(rng.integers(1, 30)))) for _ in range(count)]


def dead_at(answer, registers):
    "For each place of an answer: the place where its step dies (by definition, from the ids)."
    owner, ends, held, step = [], {}, {}, None
    for n, token in enumerate(answer):
        if token in registers:
            if registers[token] in held: ends[held[registers[token]]] = n
            step = held[registers[token]] = n
        owner.append(step)
    return [math.inf if step is None else ends.get(step, math.inf) for step in owner]


@pytest.mark.parametrize('temperature', [1., .6])
@pytest.mark.parametrize('room', [0, 64])
def test_answer_tables_by_definition(thinker, temperature, room):
    "One dense forward per answer, its mask written straight from the rule M[q,j] = j ≤ q and q < d(step of j)."
    model, tok = thinker
    registers, pairs = register_ids(tok), answers(tok)
    layouts = [tip_layout(*pair, registers) for pair in pairs]
    with torch.no_grad(): logps, entropy, plainly = T.answer_tables(model, T.Collator(model.config, 0, room)(layouts), temperature)
    for n, (prompt, answer) in enumerate(pairs):
        ids, start = torch.tensor([prompt + answer]), len(prompt)
        dies = [math.inf] * start + [d + start for d in dead_at(answer, registers)]
        sees = torch.tensor([[j <= q and q < dies[j] for j in range(len(dies))] for q in range(len(dies))])
        with torch.no_grad(): logits = model(ids, attention_mask=sees[None, None], position_ids=torch.arange(len(dies))[None]).logits[0, start - 1:-1]
        at = torch.tensor(answer)[:, None]
        for found, want in ((logps, (logits / temperature).log_softmax(-1).gather(1, at)[:, 0]), (plainly, logits.log_softmax(-1).gather(1, at)[:, 0]),
                            (entropy, torch.distributions.Categorical(logits=logits / temperature).entropy())):
            torch.testing.assert_close(found[n, :len(answer)], want, atol=1e-4, rtol=0)
            assert not found[n, len(answer):].any()


def test_gradients_of_answers_are_under_eviction_too(thinker):
    model, tok = thinker
    layout = tip_layout(*answers(tok, 3)[0], register_ids(tok))
    def gradient(loss):
        model.zero_grad(), loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters()}
    one = gradient(T.answer_tables(model, T.Collator(model.config)([layout]))[0].sum())
    logits = model(torch.as_tensor(layout.ids)[None], attention_mask=T.hf_mask(model, layout), position_ids=torch.as_tensor(layout.position)[None]).logits[0]
    label = torch.as_tensor(layout.label)
    other = gradient(-torch.nn.functional.cross_entropy(logits, label, ignore_index=-100, reduction='sum'))
    for name in one: torch.testing.assert_close(one[name], other[name], atol=1e-4, rtol=1e-3)


# ---- runs
@pytest.fixture(scope='module')
def start(tmp_path_factory):
    "A model that says a letter three times in registers picked by chance, and the settings to go on from."
    folder, rng = tmp_path_factory.mktemp('grpo'), np.random.default_rng(0)
    say = lambda letter: ' '.join(f'<reg_{k}>{letter}' for k in rng.integers(3, size=3))
    write_jsonl(folder / 'rows.jsonl', [dict(id=str(n), prompt=c, reference=c, tagged_text=say(c)) for n, c in enumerate('abcdef' * 16)])
    base = dict(model='tiny', data=str(folder / 'rows.jsonl'), tags='registers', registers=3, prompt='raw', device='cpu')
    T.train('tip-sft', base | dict(batch=16, micro_batch=16, epochs=8, learning_rate=8e-3, warmup=.1), folder / 'sft')
    return base | dict(model=str(folder / 'sft'), batch=2, samples=4, micro_batch=4, learning_rate=5e-4, kv_weight=.5, max_new_tokens=14,
                       max_steps=4, save_every=1)


@pytest.fixture(scope='module')
def straight(start, tmp_path_factory):
    "Two sets of answers, three updates each, that nobody disturbed."
    config = start | dict(passes=3, max_steps=6)
    return config, T.train('tip-grpo', config, tmp_path_factory.mktemp('straight') / 'run')


def weights(folder): return {n: p.detach().clone() for n, p in load(str(folder))[0].named_parameters()}


def timeless(folder): return [{k: v for k, v in row.items() if k != 'seconds'} for row in T.read_log(folder)]


def same(one, other):
    a, b = weights(one), weights(other)
    return all(torch.equal(a[n], b[n]) for n in a) and timeless(one) == timeless(other)


def test_a_run(straight):
    config, result = straight
    log = T.read_log(result['out'])
    assert result['steps'] == len(log) == 6 and result['recipe'] == 'tip-grpo' and result['rows'] == 96
    measured = {'reward', 'accuracy', 'live', 'held', 'dense', 'length', 'parity', 'equal'}
    assert [measured <= row.keys() for row in log] == [True, False, False] * 2
    assert all({'clipped', 'entropy', 'loss', 'grad_norm'} <= row.keys() for row in log)
    assert all(0 <= row['accuracy'] <= 1 and 0 < row['live'] <= 1 and row['parity'] < 1e-4 for row in log if 'live' in row)
    assert log[0]['clipped'] == 0 and abs(log[0]['loss']) < 1e-5                     # unscaled advantages of a group sum to 0
    assert [p.name for p in sorted(Path(result['out']).glob('checkpoint-*'))] == ['checkpoint-3', 'checkpoint-6']
    assert log[-1]['tokens'] == result['tokens'] > 0 and read_settings(result['out']).registers == 3


def test_same_seed_same_run(straight, tmp_path):
    config, result = straight
    assert same(T.train('tip-grpo', config, tmp_path / 'again')['out'], result['out'])
    assert not same(T.train('tip-grpo', config | dict(seed=1), tmp_path / 'other')['out'], result['out'])


def test_killed_and_resumed(straight, tmp_path):
    "kill -9 between two updates from one set of answers; resumed, the run draws the same answers again and ends in the same bits."
    config, result = straight
    command = [sys.executable, '-c', 'import sys, time, json\nfrom pasta_lib import train as T\n'
               'class Slow(T.Journal):\n    def on_log(self, args, state, control, **kw):\n'
               '        super().on_log(args, state, control, **kw)\n        if state.global_step == 5: time.sleep(300)\n'
               'T.Journal = Slow\nT.train("tip-grpo", json.loads(sys.argv[1]), sys.argv[2])', json.dumps(config), str(tmp_path / 'run')]
    process = subprocess.Popen(command, env=ENV, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.time() + 300
    while len(T.read_log(tmp_path / 'run')) < 5 and time.time() < deadline and process.poll() is None: time.sleep(.1)
    process.kill(), process.wait()
    assert len(T.read_log(tmp_path / 'run')) == 5 and T.last_checkpoint(tmp_path / 'run').name == 'checkpoint-3'
    assert same(T.train('tip-grpo', config, tmp_path / 'run', resume=True)['out'], result['out'])


def test_an_interrupted_run_stops_between_two_sets(straight, tmp_path):
    config, result = straight
    class Press(T.Journal):
        def on_log(self, args, state, control, **kw):
            super().on_log(args, state, control, **kw)
            if state.global_step == 2: os.kill(os.getpid(), signal.SIGINT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(T, 'Journal', Press)
        stopped = T.train('tip-grpo', config, tmp_path / 'run')
    assert stopped['interrupted'] and stopped['steps'] == 3
    assert same(T.train('tip-grpo', config, tmp_path / 'run', resume=True)['out'], result['out'])


def test_two_processes(straight, tmp_path):
    "Each answers its share of the prompts, with the draws that one process would have made."
    config, result = straight
    command = [sys.executable, '-m', 'torch.distributed.run', '--nproc_per_node', '2', '--standalone', '-m', 'pasta_lib.train', 'tip-grpo',
               '--out', str(tmp_path / 'two'), *[f'{key}={value}' for key, value in config.items()]]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.strip().splitlines()[-1])['processes'] == 2
    for one, two in zip(T.read_log(result['out']), T.read_log(tmp_path / 'two'), strict=True):
        for name in one.keys() - {'seconds', 'clipped', 'entropy', 'parity'}: assert two[name] == pytest.approx(one[name], abs=1e-4, rel=1e-3), name


@pytest.mark.parametrize('change', [dict(loss_type='grpo', scale=True), dict(loss_type='bnpo', beta=.1, correct_kl=False), dict(loss_type='dr_grpo', temperature=.7),
                                    dict(loss_type='dapo', beta=.05, temperature=1.3, kv_weight=0., room=96)], ids=lambda c: c['loss_type'])
def test_the_trainers_loss_is_that_of_chapter_40(start, tmp_path, change):
    "Every forward's loss, from an own recomputation of all its ingredients."
    config, seen = T.read_config(start | change | dict(passes=2, max_steps=4, micro_batch=8)), []
    class Watched(T.grpo_trainer()):
        def _calculate_rewards(self, inputs, *rest):
            self.asked = [x['prompt'] for x in inputs]
            self.rewards = super()._calculate_rewards(inputs, *rest)
            return self.rewards
        def compute_loss(self, model, inputs, *rest, **kw):
            loss = super().compute_loss(model, inputs, *rest, **kw)
            keep, registers = inputs['completion_mask'].bool(), register_ids(self.tok)
            rows = [tip_layout(p[m.bool()].tolist(), c[k].tolist(), registers) for p, m, c, k in
                    zip(inputs['prompt_ids'], inputs['prompt_mask'], inputs['completion_ids'], keep)]
            def own(model):
                table = torch.zeros(keep.shape)
                for n, row in enumerate(rows):
                    logits, label = layout_logits(model, row, T.hf_mask(model, row)), torch.as_tensor(row.label)
                    at = label != -100
                    table[n, :int(at.sum())] = (logits[at] / config.temperature).log_softmax(-1).gather(1, label[at, None])[:, 0]
                return table
            expected = grpo_loss(own(model), inputs['old_per_token_logps'], inputs['advantages'], keep, config.epsilon, config.beta,
                                 own(self.ref_model) if config.beta else None, config.loss_type, max_tokens=config.max_new_tokens,
                                 correct_kl=config.correct_kl)
            seen.append((loss.item(), expected.item(), inputs['advantages'].sort().values, group_advantages(self.rewards.view(2, 4), config.scale).view(-1)))
            return loss
    model, tok = T.prepare(config.model, 'registers', registers=3)
    questions, _ = T.questions_of(T.read_rows(config), tok, prompt='raw')
    trainer = Watched(model, questions, config, tmp_path / 'run', tok)
    trainer.train()
    assert len(seen) == 4 and any(abs(a) > 1e-6 for a, _, _, _ in seen)
    for loss, expected, given, advantages in seen:
        assert loss == pytest.approx(expected, abs=2e-5)
        torch.testing.assert_close(given, advantages.sort().values, atol=1e-4, rtol=1e-3)
    assert all(trainer.asked[n] == trainer.asked[n - n % 4] for n in range(8))


@pytest.mark.parametrize('tie', [False, True])
def test_adapters_and_the_rows_of_registers(start, tmp_path, tie):
    "LoRA with trained rows of embedding and head, which trl's own trainer refuses; β against a copy of the start."
    config = start | dict(model='tiny', model_options=dict(tie=tie), lora=4, beta=.1, max_steps=2)
    result = T.train('tip-grpo', config, tmp_path / 'run')
    log = T.read_log(result['out'])
    assert len(log) == 2 and log[0]['kl'] == pytest.approx(0, abs=1e-6) and all(row['parity'] < 1e-4 for row in log)
    assert read_settings(result['out']).registers == 3 and read_settings(result['out']).base == 'tiny'
    again = T.train('tip-grpo', config | dict(model=result['out'], model_options={}, max_steps=1) | (dict(model_options=dict(tie=tie))), tmp_path / 'more')
    assert again['steps'] == 1
    with pytest.raises(T.PastaError, match='registers'): T.train('tip-grpo', config | dict(model=result['out'], registers=5), tmp_path / 'five')


def test_the_reference_may_be_another_run(start, tmp_path):
    "π₀ by folder: with the start's own folder the same divergence as with a copy of it."
    runs = [T.train('tip-grpo', start | dict(beta=.1, max_steps=2, reference=reference), tmp_path / f'run{n}')['out'] for n, reference in enumerate(('', start['model']))]
    assert same(*runs) and T.read_log(runs[0])[1]['kl'] > 0


def test_an_answer_that_is_cut_is_wrong(start, tmp_path):
    log = T.read_log(T.train('tip-grpo', start | dict(max_new_tokens=2, max_steps=1), tmp_path / 'run')['out'])
    assert log[0]['accuracy'] == log[0]['reward'] == 0 and log[0]['equal'] == 1 and log[0]['length'] == 2


def bad_grade(row, text): return 7


@pytest.mark.parametrize('change,says', [
    (dict(slots=64, max_new_tokens=200), r'an answer failed .*line \d.*set slots higher'), (dict(grader='nobody'), 'no grader'),
    (dict(tags='compact'), 'write tags=registers'), (dict(micro_batch=3), r'a batch of 2 × 4 answers cannot be shared out .*make batch × samples a multiple'), (dict(registers=9), 'registers=')])
def test_runs_that_cannot_be(start, tmp_path, change, says):
    write_jsonl(tmp_path / 'long.jsonl', [dict(prompt=letter * 60, reference='none') for letter in 'xyz'])
    with pytest.raises(T.PastaError, match=says): T.train('tip-grpo', start | dict(data=str(tmp_path / 'long.jsonl')) | change | dict(max_steps=1), tmp_path / 'run')


def test_grades_are_shares(start, tmp_path, monkeypatch):
    monkeypatch.setitem(T.GRADERS, 'bad', bad_grade)
    with pytest.raises(T.TrainError, match='a grade of 7.*line'): T.train('tip-grpo', start | dict(grader='bad', max_steps=1), tmp_path / 'run')


def test_halves_that_disagree_stop_the_run(start, tmp_path, monkeypatch):
    "A trainer that forgets to evict is found out at the first set of answers."
    monkeypatch.setattr(T, 'tip_layout', lambda prompt, answer, registers: tip_layout(prompt, answer, {}))
    with pytest.raises(T.TrainError, match='the runtime and the trainer differ'): T.train('tip-grpo', start | dict(max_steps=1), tmp_path / 'run')


def test_picture_of_a_run(straight):
    import matplotlib.pyplot as plt
    axes = T.plot_answers(straight[1]['out'])
    log = [row for row in T.read_log(straight[1]['out']) if 'held' in row]
    assert [line.get_ydata().tolist() for ax in axes for line in ax.lines] == [[row[key] for row in log] for key in ('accuracy', 'reward', 'held', 'dense')]
    assert T.plot_answers(straight[1]['out'], axes) is axes
    plt.close('all')


@pytest.mark.parametrize('base', ['group', 'own'])
def test_what_the_penalty_is_a_share_of(start, tmp_path, base):
    "Rewards from the engine's counters, by definition."
    config, seen = T.read_config(start | dict(kv_base=base, max_steps=1, gate=False, kv_weight=.7)), {}
    class Watched(T.grpo_trainer()):
        def rollout(self, prompts, trainer=None):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(T, 'tip_reward', lambda right, live, dense, *rest: seen.update(live=live, dense=dense, right=right) or tip_reward(right, live, dense, *rest))
                return seen.setdefault('given', super().rollout(prompts, trainer))
    model, tok = T.prepare(config.model, 'registers', registers=3)
    Watched(model, T.questions_of(T.read_rows(config), tok, prompt='raw')[0], config, tmp_path / 'run', tok).train()
    given, registers = seen['given'], register_ids(tok)
    live, dense = [], []
    for prompt, answer in zip(given['prompt_ids'], given['completion_ids']):
        dies, at = [math.inf] * len(prompt) + [d + len(prompt) for d in dead_at(answer, registers)], range(len(prompt), len(prompt) + len(answer) - 1)
        live.append(np.mean([sum(q < dies[j] for j in range(q + 1)) for q in at])); dense.append(np.mean([q + 1 for q in at]))
    np.testing.assert_allclose(seen['live'], live, rtol=1e-5)
    whole = np.repeat(np.mean(np.reshape(dense, (2, 4)), 1), 4) if base == 'group' else dense
    np.testing.assert_allclose(given['reward'], seen['right'].numpy() - .7 * np.array(live) / whole, rtol=1e-5)


def test_a_ratio_beyond_float32():
    logps = torch.tensor([[100., -.1]], requires_grad=True)
    loss = grpo_loss(logps, torch.zeros(1, 2), torch.zeros(1), torch.ones(1, 2))
    loss.backward()
    assert loss.item() == 0 and torch.isfinite(logps.grad).all()


def test_whole_rewards():
    assert group_advantages(torch.tensor([[1, 0]]), scale=False).tolist() == [[.5, -.5]]

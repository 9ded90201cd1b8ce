"Training on noise: losses from their definitions, one forward per text; runs that are interrupted, packed and split."
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml

from pasta_lib import train as T
from pasta_lib import train_diffusion as D
from pasta_lib.blocks import BlockError
from pasta_lib.buffer import multi_block, single_block
from pasta_lib.diffusion_losses import multitf_loss, oput_loss, sdar_loss
from pasta_lib.engine import Engine
from pasta_lib.jobs import write_jsonl
from pasta_lib.masks import layout_logits
from pasta_lib.models import load, read_settings
from pasta_lib.planned import planned
from pasta_lib.segments import IGNORE

ROOT = Path(__file__).resolve().parent.parent
ENV = os.environ | dict(OMP_NUM_THREADS='1', PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES='', HF_HUB_OFFLINE='1')
BLOCKY = ['block-sft', 'multitf', 'd2f']


def plain_rows(n=8): return [dict(id=str(i), prompt=f'{i}+{i % 3}=', response=f'{i + i % 3}; ' + 'so ' * (i % 4)) for i in range(n)]


def planned_rows(n=8):
    return [dict(id=str(i), prompt=f'p{i}', tagged_text='<topic> a 1 </topic><topic> b 1 </topic><async>xx</async><async>' + 'y' * (i % 3 + 1)
                 + '</async>' + ('<sync/> end' if i % 2 else '')) for i in range(n)]


def settings(folder, recipe, **changes):
    "Settings of a small run, and its rows."
    rows = planned_rows() if recipe == 'planned-sft' else plain_rows()
    write_jsonl(folder / f'{recipe}.jsonl', rows)
    return dict(model='tiny', data=str(folder / f'{recipe}.jsonl'), tags=T.RECIPES[recipe].needs, prompt='raw', block=4, groups=3, batch=4,
                micro_batch=2, learning_rate=5e-3, epochs=2, save_every=2, device='cpu') | changes


def built(recipe, config, folder):
    "A trainer before its first step, and its tokenizer."
    config = T.read_config(config)
    model, tok = T.prepare(config.model, config.tags)
    documents, dropped = T.RECIPES[recipe].documents(T.read_rows(config), tok, config)
    return T.RECIPES[recipe].build(model, documents, config, folder, tok, []), tok, dropped


def losses(folder): return [row['loss'] for row in T.read_log(folder)]


# ---- texts

def test_texts_of_whole_blocks():
    _, tok = T.prepare('tiny', 'mask')
    config = T.read_config(dict(tags='mask', block=4, prompt='raw'))
    texts, dropped = D.block_texts([*plain_rows(), dict(prompt='x', response='')], tok, config)
    assert len(texts) == 8 and dropped == {'empty': 1}
    for row, text in zip(plain_rows(), texts):
        prompt, answer = tok.encode(row['prompt']), tok.encode(row['response'])
        assert text.ids[:len(prompt)].tolist() == prompt and text.prompt == len(prompt)
        rest = text.ids[len(prompt):].tolist()
        assert rest[:len(answer)] == answer and set(rest[len(answer):]) == {tok.eos_token_id}
        assert len(text) % 4 == 0 and 0 < len(rest) - len(answer) <= 4
        assert text.noisy_blocks == len(text) // 4 - len(prompt) // 4


def test_plans_are_read_or_dropped():
    _, tok = T.prepare('tiny', 'plan')
    pasta = '<promise topic="a" tokens="10"/><async>xx</async><promise topic="b" tokens="10"/><async>yy</async><sync/> end'
    rows = [*planned_rows(2), dict(prompt='p', tagged_text=pasta), dict(prompt='p', tagged_text='no plan'), dict(prompt='p', tagged_text='<topic> a 1 </topic>'),
            dict(prompt='p', tagged_text='<sync/>x<async>'), dict(prompt=dict(a=1), tagged_text='x'), dict(prompt='p', tagged_text='x' * 99)]
    texts, dropped = D.plan_texts(rows, tok, T.read_config(dict(tags='plan', prompt='raw', max_length=64)))
    assert len(texts) + sum(dropped.values()) == len(rows) and len(texts) == 4 and dropped['too long'] == 1
    assert all(len(t) == len(t.layout(T.read_config(dict(tags='plan')), 0)) for t in texts)
    with pytest.raises(T.TrainError, match='no row'): D.plan_texts(rows[-1:], tok, T.read_config(dict(tags='plan', max_length=9)))
    with pytest.raises(T.TrainError, match='without'): D.plan_texts([dict(prompt='p')], tok, T.read_config(dict(tags='plan')))


# ---- noise

@pytest.mark.parametrize('recipe', [*BLOCKY, 'planned-sft'])
def test_noise_depends_on_the_seed_and_the_place_alone(tmp_path, recipe):
    course = lambda seed: built(recipe, settings(tmp_path, recipe, seed=seed), tmp_path / 'x')[0].train_dataset
    one, same, other = course(3), course(3), course(4)
    assert len(one) == 16
    for n in (5, 0, 15, 5):
        a, b = one[n], same[n]
        assert np.array_equal(a.layout.ids, b.layout.ids) and np.array_equal(a.masked, b.masked) and np.array_equal(a.t, b.t) and a.items == b.items
    assert any(not np.array_equal(one[n].layout.ids, other[n].layout.ids) for n in range(8))
    assert any(not np.array_equal(one[n].masked, one[m].masked) for n in range(16) for m in range(n) if one.order[n] == one.order[m])


@pytest.mark.parametrize('recipe', BLOCKY)
@pytest.mark.parametrize('weighting', ['mean', 'blocks', 'weights'])
@pytest.mark.parametrize('copies', [1, 3])
def test_labels_levels_and_divisors(tmp_path, recipe, weighting, copies):
    trainer, tok, _ = built(recipe, settings(tmp_path, recipe, weighting=weighting, copies=copies), tmp_path / 'x')
    for n in range(6):
        read, text = trainer.train_dataset[n], trainer.train_dataset.documents[int(trainer.train_dataset.order[n])]
        start, size = text.prompt // 4 * 4, len(text)
        noisy = copies * (size - start)
        assert len(read) == noisy + size and read.layout.ids[noisy:].tolist() == text.ids.tolist() and not read.masked[noisy:].any()
        shares, weights = [], 0.
        for k in range(copies):
            part = slice(k * (size - start), (k + 1) * (size - start))
            ids, label, masked = read.layout.ids[part], read.layout.label[part], read.masked[part]
            assert np.array_equal(np.where(masked, label, ids), text.ids[start:]) and (ids[masked] == text.mask).all() and (label[~masked] == IGNORE).all()
            assert not masked[:text.prompt - start].any()
            share = masked.reshape(-1, 4).mean(1)
            shares += share.tolist()
            want = np.ones(size - start) if weighting == 'mean' else np.repeat(share, 4)
            assert np.allclose(read.t[part][masked], want[masked])
            weights += (1 / want[masked]).sum()
        assert read.items == pytest.approx(dict(mean=read.masked.sum(), blocks=len(shares), weights=weights)[weighting])


def test_groups_of_the_recipes(tmp_path):
    rng = np.random.default_rng(0)
    trainer = lambda recipe, **more: built(recipe, settings(tmp_path, recipe, **more), tmp_path / 'x')[0]
    assert trainer('block-sft').groups(5, rng) == [(1,) * 5] and trainer('d2f').groups(5, rng) == [(5,)]
    both = trainer('multitf', random_layouts=2).groups(6, rng)
    assert both[:5] == [(2, 2, 2), (1, 2, 2, 1), (3, 3), (1, 3, 2), (2, 3, 1)] and len(both) == 7 and all(sum(g) == 6 for g in both)
    assert len(trainer('multitf', random_layouts=0).groups(6, rng)) == 5
    only = trainer('multitf', systematic=False, random_layouts=4).groups(6, rng)
    assert len(only) == 4 and all(sum(g) == 6 and max(g) <= 3 for g in only)


def test_easy_noise_comes_first(tmp_path):
    trainer = built('multitf', settings(tmp_path, 'multitf', epochs=8, easy=.5, rounding='floor'), tmp_path / 'x')[0]
    course = trainer.train_dataset
    shares = [[course[n].masked[:len(course[n]) // 2].mean() for n in part] for part in (range(0, 32), range(32, 64))]
    assert max(shares[0]) <= .4 < max(shares[1])
    with pytest.raises(BlockError): D.scheduler(T.read_config(dict(noise_low=.6, noise_high=.5)), 'd2f')(2, np.random.default_rng(0))
    assert D.scheduler(T.read_config(dict(noise_low=.6, easy=1.)), 'd2f', 0.)(2, np.random.default_rng(0))[-1] == 1
    for name in ('chain_uniform', 'sorted_uniform', 'd2f', 'random'):
        assert D.scheduler(T.read_config(dict(scheduler=name, noise_margin=.1, noise_bias=2)), 'd2f')(3, np.random.default_rng(0)).shape == (3,)


# ---- losses

@pytest.mark.parametrize('recipe, change', [('block-sft', {}), ('multitf', {}), ('multitf', dict(weighting='blocks', copies=2)),
                                            ('d2f', dict(weighting='weights')), ('multitf', dict(oput=.7))])
def test_block_losses_by_hand(tmp_path, recipe, change):
    "The first step's loss is the loss of chapter 38 over all places of all its texts."
    config = settings(tmp_path, recipe, max_steps=1, **change)
    result = T.train(recipe, config, tmp_path / 'run')
    trainer, tok, _ = built(recipe, config, tmp_path / 'x')
    model = trainer.model.eval()
    read = [trainer.train_dataset[n] for n in range(4)]
    logits = torch.cat([layout_logits(model, r.layout) for r in read])
    label, masked = (torch.as_tensor(np.concatenate(x)) for x in ([r.layout.label for r in read], [r.masked for r in read]))
    number, block = 0, []
    for r in read:                                                              # a block is four places of the noisy copies
        noisy = len(r) - sum('clean' in r.layout.table.names[s] for s in r.layout.segment)
        block += [number + i // 4 for i in range(noisy)] + [-1] * (len(r) - noisy)
        number += noisy // 4
    block = torch.tensor(block)
    if 'weighting' in change: want = sdar_loss(logits, label, masked, block, normalise=change['weighting'])
    else: want = multitf_loss(logits, label, masked)
    if 'oput' in change:
        guesses = logits.clone()
        guesses[:, trainer.train_dataset.documents[0].mask] = -torch.inf
        again, at = [], 0
        for r in read:
            ids = np.where(r.masked, guesses[at:at + len(r)].argmax(-1).numpy(), r.layout.ids)
            again.append(layout_logits(model, type(r.layout)(ids, r.layout.segment, r.layout.position, r.layout.label, r.layout.table)))
            at += len(r)
        want = want + .7 * multitf_loss(torch.cat(again), label, masked)
    assert losses(result['out'])[0] == pytest.approx(want.item(), abs=2e-4)


@pytest.mark.parametrize('change', [{}, dict(divide_ar=True), dict(alignment='shifted'), dict(alignment='shifted_input', padding='2'), dict(padding='fill')])
def test_planned_losses_by_hand(tmp_path, change):
    config = settings(tmp_path, 'planned-sft', max_steps=1, **change)
    result = T.train('planned-sft', config, tmp_path / 'run')
    trainer, tok, _ = built('planned-sft', config, tmp_path / 'x')
    model, total, count = trainer.model.eval(), 0., 0
    for n in range(4):
        r, text = trainer.train_dataset[n], trainer.train_dataset.documents[int(trainer.train_dataset.order[n])]
        surprise = F.cross_entropy(layout_logits(model, r.layout), torch.as_tensor(r.layout.label), ignore_index=IGNORE, reduction='none')
        weight = np.where(r.masked | bool(change.get('divide_ar')), 1 / r.t, 1)
        total += float((surprise * torch.as_tensor(weight)).sum())
        count += r.items
        assert 0 < r.t[0] <= 1 and (r.t == r.t[0]).all() and r.items >= (r.layout.label != IGNORE).sum()
    assert losses(result['out'])[0] == pytest.approx(total / count, rel=1e-3)


def test_what_follows_the_spans_reads_clean_ones(tmp_path):
    trainer, tok, _ = built('planned-sft', settings(tmp_path, 'planned-sft'), tmp_path / 'x')
    mask = trainer.train_dataset.documents[0].ids.mask
    for n in range(8):
        r = trainer.train_dataset[n]
        after = [s for s, name in enumerate(r.layout.table.names) if name == 'after sync']
        for s in after: assert mask not in r.layout.ids[np.isin(r.layout.segment, np.flatnonzero(r.layout.table.row(s)))]


# ---- runs

@pytest.fixture(scope='module')
def straight(tmp_path_factory):
    "Two runs that nobody disturbs."
    folder = tmp_path_factory.mktemp('straight')
    return {recipe: (config := settings(folder, recipe, **more), T.train(recipe, config, folder / recipe))
            for recipe, more in (('multitf', dict(weighting='weights')), ('planned-sft', {}))}


@pytest.mark.parametrize('recipe', ['multitf', 'planned-sft'])
def test_runs_learn_and_are_saved(straight, recipe):
    config, result = straight[recipe]
    assert result['steps'] == 4 and losses(result['out'])[-1] < losses(result['out'])[0] and all(isinstance(row['tokens'], int) for row in T.read_log(result['out']))
    model, tok = load(result['out'])
    assert '<mask>' in tok.get_vocab() and read_settings(result['out']).block_size == (4 if recipe == 'multitf' else None)


@pytest.mark.parametrize('recipe', ['multitf', 'planned-sft'])
def test_resuming_gives_the_same_bits(straight, tmp_path, recipe):
    config, result = straight[recipe]
    shutil.copytree(result['out'], tmp_path / 'run')
    shutil.rmtree(tmp_path / 'run' / 'checkpoint-4')
    (tmp_path / 'run' / 'result.json').unlink()
    again = T.train(recipe, config, tmp_path / 'run', resume=True)
    assert losses(again['out']) == losses(result['out'])
    one, other = (dict(load(str(r['out']))[0].named_parameters()) for r in (result, again))
    assert all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize('recipe, change', [('multitf', dict(micro_batch=4, room=256)), ('planned-sft', dict(micro_batch=1))])
def test_packing_and_accumulation_change_nothing(straight, tmp_path, recipe, change):
    config, result = straight[recipe]
    assert losses(T.train(recipe, config | change, tmp_path / 'run')['out']) == pytest.approx(losses(result['out']), rel=1e-3, abs=2e-4)


def test_two_processes(straight, tmp_path):
    config, result = straight['multitf']
    (tmp_path / 'c.yaml').write_text(yaml.safe_dump(config | dict(micro_batch=1)))
    command = [sys.executable, '-m', 'torch.distributed.run', '--nproc_per_node', '2', '--standalone',
               '-m', 'pasta_lib.train', 'multitf', '--config', str(tmp_path / 'c.yaml'), '--out', str(tmp_path / 'two')]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    both = json.loads(done.stdout.strip().splitlines()[-1])
    assert both['processes'] == 2 and losses(tmp_path / 'two') == pytest.approx(losses(result['out']), rel=1e-3, abs=2e-4)
    assert both['tokens'] == result['tokens']


@pytest.mark.parametrize('recipe', ['block-sft', 'multitf', 'planned-sft'])
def test_what_is_learnt_by_heart_is_decoded(tmp_path, recipe):
    "Four answers, learnt by heart and decoded: one block, several blocks, or a plan and its spans."
    words = ['red apples fall', 'blue birds sing now', 'green', 'old men row home']
    plan = lambda n, w: f'<topic> {w[:3]} 1 </topic><topic> b 1 </topic><async>{w[:9]}</async><async>{w[-8:]}</async>' + '<sync/> end' * (n % 2)
    rows = [dict(id=str(n), prompt=f'q{n}: ', response=w, tagged_text=plan(n, w)) for n, w in enumerate(words)]
    config = settings(tmp_path, recipe, batch=4, micro_batch=4, epochs=200 if recipe == 'planned-sft' else 100, learning_rate=1e-2, copies=2,
                      padding='fill', save_every=1000)
    write_jsonl(Path(config['data']), rows)
    model, tok = load(str(T.train(recipe, config, tmp_path / 'run')['out']))
    how = dict(raw=True, max_new_tokens=80)
    ask = {'block-sft': lambda p: single_block(p, block=4, **how), 'multitf': lambda p: multi_block(p, block=4, buffer=3, **how),
           'planned-sft': lambda p: planned(p, **how)}[recipe]
    results = Engine(model, tok, slots=1024).run([ask(row['prompt']) for row in rows])
    for row, r in zip(rows, results): assert (r.tagged_text if recipe == 'planned-sft' else r.text) == row['tagged_text' if recipe == 'planned-sft' else 'response']


def test_oput_never_guesses_what_is_no_token(tmp_path, monkeypatch):
    "A head with more rows than the tokenizer has tokens, and all for them: its guesses are tokens all the same."
    config = T.read_config(settings(tmp_path, 'multitf', oput=1.))
    (model, tok), seen = T.prepare(config.model, config.tags), []
    model.resize_token_embeddings(300)
    trainer = T.RECIPES['multitf'].build(model, T.RECIPES['multitf'].documents(T.read_rows(config), tok, config)[0], config, tmp_path / 'x', tok, [])
    real, strange = D.labelled_logits, [len(tok), 299, tok.convert_tokens_to_ids('<mask>')]
    def loving(model, batch):
        logits, *rest = real(model, batch)
        seen.append(batch['input_ids'])
        return logits.index_fill(-1, torch.tensor(strange), 99.), *rest
    monkeypatch.setattr(D, 'labelled_logits', loving)
    trainer.loss(model, trainer.data_collator([trainer.train_dataset[n] for n in range(2)]), 1.)
    assert len(seen) == 2 and {*strange} & set(seen[0].flatten().tolist()) and not {*strange} & set(seen[1].flatten().tolist())


def test_oput_takes_its_guesses_without_gradient(tmp_path):
    "Two forwards of the model for a text, and the gradient of two ordinary losses."
    trainer, tok, _ = built('multitf', settings(tmp_path, 'multitf', oput=1.), tmp_path / 'x')
    model, batch = trainer.model, trainer.data_collator([trainer.train_dataset[n] for n in range(2)])
    loss = trainer.loss(model, batch, batch['items'].sum())
    whole = torch.autograd.grad(loss, list(model.parameters()))
    at = batch['labels'] != IGNORE
    run = lambda ids: model(**{k: batch[k] for k in T.INPUTS if k != 'input_ids'}, input_ids=ids, use_cache=False).logits
    ids = batch['input_ids']
    want = torch.autograd.grad(oput_loss(run, ids, batch['labels'], at), list(model.parameters()))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(whole, want))


def test_adapters_and_another_base(straight, tmp_path):
    base = straight['multitf'][1]['out']
    config = settings(tmp_path, 'd2f', model=base, max_steps=1)
    assert T.train('d2f', config, tmp_path / 'on')['steps'] == 1
    with pytest.raises(T.PastaError, match='block_size=4'): T.train('d2f', config | dict(block=8), tmp_path / 'other')
    adapted = T.train('block-sft', settings(tmp_path, 'block-sft', lora=4, max_steps=2), tmp_path / 'lora')
    model, tok = load(str(adapted['out']))
    assert read_settings(adapted['out']).block_size == 4 and '<mask>' in tok.get_vocab()


@pytest.mark.parametrize('recipe, change, words', [
    ('multitf', dict(tags='none'), 'write tags=mask'), ('planned-sft', dict(tags='mask'), 'write tags=plan'),
    ('multitf', dict(systematic=False, random_layouts=0), 'without layouts'), ('d2f', dict(noise_low=.9, noise_high=.5), 'low < high'),
    ('multitf', dict(max_length=3), 'no row')])
def test_runs_that_cannot_start(tmp_path, recipe, change, words):
    with pytest.raises(T.PastaError, match=words): T.train(recipe, settings(tmp_path, recipe, **change), tmp_path / 'run')


@pytest.mark.parametrize('text', ['block=0', 'groups=1', 'scheduler=best', 'rounding=up', 'weighting=sum', 'padding=-1', 'padding=some',
                                  'alignment=left', 'easy=2', 'noise_high=0', 'noise_margin=1', 'copies=0', 'oput=-1', 'random_layouts=-1'])
def test_settings_out_of_range(text):
    with pytest.raises(T.TrainError, match=text.partition('=')[0]): T.read_config({}, [text])


def test_slots_of_a_course(tmp_path):
    trainer = built('multitf', settings(tmp_path, 'multitf', epochs=8), tmp_path / 'x')[0]
    seen = D.slot_ratios_read(trainer, 60, slots=3)
    assert seen.shape[1] == 3 and len(seen) > 60 and np.isnan(seen[:, 2]).any() and ((seen > 0) & (seen <= 1) | np.isnan(seen)).all()
    assert (np.diff(seen, axis=1)[~np.isnan(seen[:, 1:])] >= 0).all()

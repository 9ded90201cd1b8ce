"Training, against definitions: losses written out, one forward per document, a run that is never interrupted."
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from hypothesis import given, settings, strategies as st

from pasta_lib import train as T
from pasta_lib.jobs import JobError, write_jsonl
from pasta_lib.masks import layout_logits
from pasta_lib.models import add_tokens, load, read_settings
from pasta_lib.segments import IGNORE, pack
from pasta_lib.tags import TagVocab

ROOT = Path(__file__).resolve().parent.parent
ENV = os.environ | dict(OMP_NUM_THREADS='1', PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES='', HF_HUB_OFFLINE='1')
TWO = ('Two:<promise topic="a" tokens="10"/><async>one</async><promise topic="b" tokens="20"/><async>more</async>'
       '<sync/> end')


def tagged(n: int) -> str:
    return (f'{n}:<promise topic="a" tokens="10"/><async>{"x" * (n % 5 + 1)}</async><promise topic="b" tokens="10"/>'
            f'<async>{"yz" * (n % 3 + 1)}</async>' + '<sync/> end' * (n % 2)) if n % 4 else f'plain answer {n}'


def some_rows(n=12): return [dict(id=str(i), prompt=f'q{i}', tagged_text=tagged(i)) for i in range(n)]


def some_pairs(n=6): return [dict(id=str(i), prompt=f'q{i}', chosen=tagged(i), rejected=f'no {i}') for i in range(n)]


@pytest.fixture(scope='module')
def tagged_tiny():
    model, tok = load('tiny')
    add_tokens(model, tok, TagVocab())
    return model, tok


@pytest.fixture()
def data(tmp_path):
    write_jsonl(tmp_path / 'rows.jsonl', some_rows())
    write_jsonl(tmp_path / 'pairs.jsonl', some_pairs())
    return tmp_path


def tiny(path, **changes):
    base = dict(model='tiny', data=str(path), batch=4, micro_batch=2, learning_rate=5e-3, epochs=2, save_every=2, device='cpu')
    return base | changes


def trained(folder): return {n: p.detach().clone() for n, p in load(str(folder))[0].named_parameters()}


def losses(folder): return [row['loss'] for row in T.read_log(folder)]


# --- rows -------------------------------------------------------------------------------------------------------------
def test_labels_by_definition(tagged_tiny):
    "Every token of the answer is predicted once, forced ones never, and the end of main predicts the end of the text."
    _, tok = tagged_tiny
    tags = TagVocab().bind(tok)
    layout = T.answer_layout(T.prompt_ids('p', tok), TWO, tok, tags)
    prompt = len(T.prompt_ids('p', tok))
    want = sorted([i for i in layout.ids[prompt:].tolist() if i != tags.async_start] + [tok.eos_token_id])
    assert sorted(layout.label[layout.label != IGNORE].tolist()) == want
    ids, label = layout.ids.tolist(), layout.label.tolist()
    first, second = (i for i, t in enumerate(ids) if t in (tags.end(10), tags.end(20)))
    assert label[first] == tags.promise and label[second] == tags.sync
    assert all(label[i] == IGNORE for i, t in enumerate(ids) if t == tags.async_end)
    assert label[prompt - 1] == ids[prompt] and set(label[:prompt - 1]) == {IGNORE}


def test_prompt_styles(tagged_tiny):
    _, tok = tagged_tiny
    assert T.prompt_ids('hi', tok, 'raw') == list(b'hi')
    assert T.prompt_ids([1, 2, 3], tok, 'raw') == T.prompt_ids([1, 2, 3], tok) == [1, 2, 3]
    assert len(T.prompt_ids('hi', tok)) > 2
    with pytest.raises(T.TrainError, match='style'): T.prompt_ids('hi', tok, 'shout')


def test_dropped_rows_are_counted(tagged_tiny):
    _, tok = tagged_tiny
    rows = [dict(id=1, prompt='p', tagged_text=t) for t in ('fine', '', 'x' * 300, 'bad <sync/>', 'bad</async>', 'end<|end|>more')]
    layouts, dropped = T.layouts_of(rows, tok, max_length=200)
    assert len(layouts) == 1 and dropped.pop('too long') == 1 and dropped.pop('empty') == 1 and dropped.pop('control tokens') == 1
    assert sum(dropped.values()) == 2 and all(reason.startswith('grammar: ') for reason in dropped)


def test_exactly_as_long_as_allowed(tagged_tiny):
    _, tok = tagged_tiny
    row = dict(prompt='p', tagged_text='abc')
    length = len(T.layouts_of([row], tok)[0][0])
    assert T.layouts_of([row], tok, max_length=length)[1] == {}
    with pytest.raises(T.TrainError, match='no row can be trained on .*too long'): T.layouts_of([row], tok, max_length=length - 1)


@pytest.mark.parametrize('row', [dict(prompt='p'), dict(tagged_text='a'), dict(prompt='p', tagged_text=3)])
def test_rows_that_lack_something(tagged_tiny, row):
    with pytest.raises(T.TrainError, match='row without'): T.layouts_of([row], tagged_tiny[1])


def test_plain_rows_have_the_original_response(tagged_tiny):
    _, tok = tagged_tiny
    row = dict(prompt='p', response='Original', tagged_text='Other')
    layout = T.layouts_of([row], tok, 'plain')[0][0]
    assert tok.decode(layout.label[layout.label != IGNORE][:-1]) == 'Original'
    layout = T.layouts_of([dict(prompt='p', tagged_text=TWO)], tok, 'plain')[0][0]
    assert tok.decode(layout.label[layout.label != IGNORE][:-1]) == 'Two:onemore end'
    with pytest.raises(T.TrainError, match='kind'): T.layouts_of([row], tok, 'plane')


def test_plain_rows_need_no_tags(tiny):
    assert len(T.layouts_of([dict(prompt='p', response='<sync/> is a tag')], tiny[1], 'plain')[0]) == 1


@pytest.mark.parametrize('positions,gap', [('predicted', 20), ('constant', 7), ('oracle', len('more') + 2)])
def test_position_modes(tagged_tiny, positions, gap):
    _, tok = tagged_tiny
    tags = TagVocab().bind(tok)
    layout = T.layouts_of([dict(prompt='p', tagged_text=TWO)], tok, positions=positions, constant=7)[0][0]
    at = {int(t): int(p) for t, p in zip(layout.ids, layout.position)}
    assert at[tags.sync] == at[tags.end(20)] + 1 + gap


# --- order and batches ------------------------------------------------------------------------------------------------
@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 9), st.floats(.1, 4), st.integers(0, 5))
def test_schedule(lengths, batch, epochs, seed):
    order, n = T.schedule(lengths, batch, epochs, seed), len(lengths)
    assert len(order) == batch * max(1, math.ceil(round(n * epochs) / batch))
    counts = np.bincount(order, minlength=n)
    assert counts.max() - counts.min() <= 2 and (order == T.schedule(lengths, batch, epochs, seed)).all()
    for step in order.reshape(-1, batch): assert (np.diff(np.asarray(lengths)[step]) >= 0).all()


def test_schedule_reads_everything_once_an_epoch():
    order = T.schedule(range(1, 13), 4, 2, 0)
    assert sorted(order[:12]) == sorted(order[12:]) == list(range(12)) and (order[:12] != order[12:]).any()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=25), st.integers(40, 100))
def test_bins(lengths, room):
    rows = T.bins(lengths, room)
    assert sorted(n for row in rows for n in row) == list(range(len(lengths)))
    for row in rows: assert len(row) == 1 or sum(lengths[n] for n in row) <= room
    full = [sum(lengths[n] for n in row) for row in rows]
    assert all(a + b > room for i, a in enumerate(full) for b in full[i + 1:])           # no two rows could be one


@pytest.mark.parametrize('room', [0, 64, 100, 1000])
@pytest.mark.parametrize('bucket', [1, 16, 50])
def test_batches_hold_the_documents(tagged_tiny, room, bucket):
    model, tok = tagged_tiny
    layouts, _ = T.layouts_of(some_rows(7), tok)
    batch = T.Collator(model.config, 260, room, bucket)(layouts)
    assert batch['input_ids'].shape[1] % bucket == 0
    for n, layout in enumerate(layouts):
        at = batch['owner'] == n
        for name, key in (('input_ids', 'ids'), ('labels', 'label'), ('position_ids', 'position')):
            assert batch[name][at].tolist() == getattr(layout, key).tolist()
    pad = batch['owner'] == -1
    assert (batch['labels'][pad] == IGNORE).all() and (batch['input_ids'][pad] == 260).all()


@pytest.mark.parametrize('room', [0, 120, 1000])
def test_packing_changes_no_loss(tagged_tiny, room):
    "The loss of a batch is that of its documents, each alone in the model."
    model, tok = tagged_tiny
    layouts, _ = T.layouts_of(some_rows(6), tok)
    total = count = 0
    for layout in layouts:
        logits, label = layout_logits(model, layout), torch.as_tensor(layout.label)
        total += F.cross_entropy(logits, label, ignore_index=IGNORE, reduction='sum').item()
        count += int((label != IGNORE).sum())
    with torch.no_grad(): logits, labels, owner = T.labelled_logits(model, T.Collator(model.config, 260, room)(layouts))
    assert len(labels) == count and abs(T.sft_loss(logits, labels).item() - total / count) < 1e-5
    assert owner.unique().tolist() == list(range(6))


@pytest.mark.parametrize('window', [8, None])
def test_sliding_window_models(window):
    model, tok = load('tiny', **(dict(sliding_window=window) if window else {}))
    layouts, _ = T.layouts_of(some_rows(4), tok, 'plain')
    assert T.Collator(model.config, 0)(layouts)['attention_mask'].dtype == torch.bool


# --- settings ---------------------------------------------------------------------------------------------------------
def test_settings_from_yaml(tmp_path):
    path = tmp_path / 'a.yaml'
    path.write_text('model: smollm2\nlearning_rate: 5e-4\nlora: 16\nmodel_options: {layers: 1}\nmargin:\n')
    config = T.read_config(path, ['batch=2', 'data=a,b', 'autocast=true', 'margin=3', 'epochs=1', 'reference='])
    assert (config.learning_rate, config.lora, config.batch, config.data, config.autocast, config.margin) == (5e-4, 16, 2, 'a,b', True, 3.0)
    assert config.epochs == 1.0 and isinstance(config.epochs, float) and config.model_options == dict(layers=1) and config.reference == ''
    assert T.read_config(config) == config and T.read_config() == T.TrainConfig()


@pytest.mark.parametrize('text,says', [
    ('learning_rates=1', 'did you mean learning_rate'), ('lerning_rate=1', 'did you mean learning_rate'), ('batch=x', 'type int'),
    ('batch=1.5', 'type int'), ('batch=true', 'type int'), ('learning_rate=true', 'type float'), ('autocast=1', 'type bool'),
    ('model=[1]', 'type str'), ('epochs=many', 'type float'), ('batch', 'key=value'), ('epochs=1' + 400 * '0', 'type float'),
    ('seed=[', r'not YAML \(seed=\['), ('model=2001-99-99', 'not YAML'), ('data="', 'not YAML'), ('model=a: b: c', 'not YAML')])
def test_wrong_settings(text, says):
    with pytest.raises(T.TrainError, match=says): T.read_config({}, [text])


OUTSIDE = '''batch=0 batch=-4 micro_batch=0 bucket=0 save_every=0 room=-1 limit=-1 max_steps=-1 lora=-1 lora=5000 lora_alpha=-1
learning_rate=0 learning_rate=-1e-3 learning_rate=nan learning_rate=.nan learning_rate=.inf learning_rate=1e30 new_row_rate=nan
new_row_rate=-1 new_row_rate=inf epochs=0 epochs=-1 epochs=inf epochs=nan warmup=1.5 warmup=-.1 warmup=nan weight_decay=-1
weight_decay=nan clip=-1 clip=nan clip=inf alpha=2 alpha=-.1 alpha=nan best_of=1 margin=0 margin=nan margin=inf constant=0
max_length=0 max_tokens=0 max_tokens=15 seed=-1 seed=4294967296 device=tpu device=cuda:99 after_sync=side positions=absolute
prompt=shout tags=fancy registers=0 samples=1 passes=0 temperature=0 max_new_tokens=0 grader= kv_weight=-1 kv_weight=nan epsilon=0
epsilon=2 beta=-1 loss_type=ppo slots=0 dtype=float16 dtype=int8 model= model_options={lora:3} model_options={1:2}'''


@pytest.mark.parametrize('text', OUTSIDE.split())
def test_settings_out_of_range(text):
    text = text.replace('{lora:', '{lora: ').replace('{1:', '{1: ')
    with pytest.raises(T.TrainError, match=f'^{text.partition("=")[0]}: .*: give ') as e: T.read_config({}, [text])
    assert '\n' not in str(e.value)


def test_settings_at_the_edge():
    T.read_config({}, ['seed=4294967295', 'warmup=1', 'clip=0', 'alpha=1', 'best_of=2', 'margin=null', 'room=0', 'learning_rate=1000',
                       'new_row_rate=0', 'epochs=.01', 'max_tokens=10', 'device=cpu', 'model_options={sliding_window: 8}'])
    free = {'data', 'reference', 'autocast', 'quick', 'evict', 'gate', 'scale', 'correct_kl', 'systematic', 'divide_ar'}
    assert set(T.ALLOWED) == set(vars(T.TrainConfig())) - free                       # every other setting has its range


@pytest.mark.parametrize('options,says', [(dict(layer=3), 'did you mean layers'), (dict(nonsense=1), 'no option of the model'),
                                          (dict(hidden='x'), "can't build"), (dict(heads=3), "can't build"), (dict(layers=-1.5), "can't build"),
                                          (dict(name_or_path='x'), "can't build"), (dict(device='nowhere'), 'no device')])
def test_wrong_options_of_a_model(options, says):
    with pytest.raises(T.PastaError, match=says): T.prepare('tiny', **options)


def test_help_lists_the_settings(capsys):
    lines = T.settings_help().splitlines()
    assert [line.split('=')[0].strip() for line in lines] == list(vars(T.TrainConfig()))
    assert all(len(line.split('  ', 2)[-1]) > 5 for line in lines) and any('learning_rate=1e-05 ' in line and 'falls' in line for line in lines)
    with pytest.raises(SystemExit): T.main(['--help'])
    assert T.settings_help() in capsys.readouterr().out


def test_wrong_files_of_settings(tmp_path):
    with pytest.raises(T.TrainError, match='no such file'): T.read_config(tmp_path / 'x.yaml')
    for text in (b'[1, 2]', b'a: [', b'just words', b'\xff\xff'):
        (tmp_path / 'x.yaml').write_bytes(text)
        with pytest.raises(T.TrainError, match='not'): T.read_config(tmp_path / 'x.yaml')


@pytest.mark.parametrize('path', sorted((ROOT / 'data' / 'configs').glob('*.yaml')), ids=lambda p: p.stem)
def test_committed_settings(path):
    config = T.read_config(path)
    assert config.batch * (config.samples if 'grpo' in path.stem else 1) % config.micro_batch == 0
    assert (config.tags == 'registers') == path.stem.startswith('tip_')


def test_baselines_differ_from_pasta_only_where_they_must():
    read = lambda name: yaml.safe_load((ROOT / 'data' / 'configs' / f'{name}.yaml').read_text())
    for scale in ('tiny', 'smollm2'):
        one, other = read(f'pasta_sft_{scale}'), read(f'baseline_sft_{scale}')
        assert {key for key in one if one[key] != other.get(key)} == {'tags'}


# --- registers --------------------------------------------------------------------------------------------------------
THOUGHTS = ['<reg_0>one <reg_1>two <reg_0>three', 'before <reg_2>x<reg_2>y<reg_2>z', 'only <reg_1>the end', '<reg_3>a', '<reg_0><reg_0><reg_1>']


def thoughts(): return [dict(id=str(n), prompt=f'q{n}', response=f'plain {n}', tagged_text=text) for n, text in enumerate(THOUGHTS)]


@pytest.fixture(scope='module')
def thinker(): return T.prepare('tiny', 'registers', registers=4)


def test_rows_with_registers_by_definition(thinker):
    "Labels are the whole answer and its end; a token reads what comes before it, unless its step's register was used again."
    _, tok = thinker
    names = {tok.convert_tokens_to_ids(f'<reg_{k}>'): k for k in range(4)}
    layouts, dropped = T.layouts_of(thoughts(), tok, 'tip')
    assert not dropped and len(layouts) == len(THOUGHTS)
    for n, (layout, text) in enumerate(zip(layouts, THOUGHTS)):
        prompt = T.prompt_ids(f'q{n}', tok)
        answer = layout.ids[len(prompt):].tolist()
        assert tok.decode(answer) == text and layout.ids[:len(prompt)].tolist() == prompt and layout.position.tolist() == [*range(len(layout))]
        assert layout.label[:len(prompt) - 1].tolist() == [IGNORE] * (len(prompt) - 1)
        assert layout.label[len(prompt) - 1:].tolist() == [*answer, tok.eos_token_id]
        dead, held, step = [math.inf] * len(layout), {}, None
        mine = [None] * len(layout)
        for at in range(len(prompt), len(layout)):
            if (register := names.get(int(layout.ids[at]))) is not None:
                for j in range(at):
                    if mine[j] is not None and mine[j] == held.get(register): dead[j] = at
                held[register] = step = at
            mine[at] = step
        want = [[j <= q < dead[j] for j in range(len(layout))] for q in range(len(layout))]
        assert T.hf_mask(thinker[0], layout)[0, 0].tolist() == want


def test_the_two_dense_baselines(thinker):
    _, tok = thinker
    kept, (evicting, _) = T.layouts_of(thoughts(), tok, 'tip', evict=False)[0], T.layouts_of(thoughts(), tok, 'tip')
    for one, other in zip(kept, evicting):
        assert len(one.table) == 1 and all((getattr(one, name) == getattr(other, name)).all() for name in ('ids', 'position', 'label'))
    dense, _ = T.layouts_of(thoughts(), tok, 'dense')
    assert [tok.decode(row.label[row.label != IGNORE][:-1]) for row in dense] == [f'plain {n}' for n in range(len(THOUGHTS))]
    bare, dropped = T.layouts_of([dict(prompt='q', tagged_text=text) for text in THOUGHTS], tok, 'dense')
    assert tok.decode(bare[0].label[bare[0].label != IGNORE][:-1]) == 'one two three'


def test_rows_with_registers_that_are_dropped(thinker):
    _, tok = thinker
    rows = [dict(prompt='p', tagged_text=text) for text in ('<reg_0>fine', '', '<reg_7>too many', '<reg_0', '<reg_0>' + 'x' * 300, '<reg_0>a<|end|>b')]
    layouts, dropped = T.layouts_of(rows, tok, 'tip', max_length=200)
    assert len(layouts) >= 1 and dropped.pop('too long') == 1 and dropped.pop('empty') == 1
    assert dropped.pop('a register without a token') == 1 and sum(count for reason, count in dropped.items() if reason.startswith('grammar: ')) == 1
    with pytest.raises(T.PastaError, match='no registers'): T.layouts_of(thoughts(), load('tiny')[1], 'tip')
    with pytest.raises(T.TrainError, match='row without tagged_text'): T.layouts_of([dict(prompt='p')], tok, 'tip')


@pytest.mark.parametrize('room', [0, 48, 1000])
def test_packing_changes_no_loss_under_eviction(thinker, room):
    model, tok = thinker
    layouts, _ = T.layouts_of(thoughts(), tok, 'tip', prompt='raw')
    total = count = 0
    for layout in layouts:
        label = torch.as_tensor(layout.label)
        total += F.cross_entropy(layout_logits(model, layout), label, ignore_index=IGNORE, reduction='sum').item()
        count += int((label != IGNORE).sum())
    with torch.no_grad(): logits, labels, _ = T.labelled_logits(model, T.Collator(model.config, 0, room)(layouts))
    assert len(labels) == count and abs(T.sft_loss(logits, labels, 1).item() - total) < 1e-3
    blind = T.layouts_of(thoughts(), tok, 'tip', prompt='raw', evict=False)[0]
    with torch.no_grad(): other, labels, _ = T.labelled_logits(model, T.Collator(model.config, 0, room)(blind))
    assert abs(T.sft_loss(other, labels, 1).item() - total) > 1e-2                     # forgetting is not nothing


@pytest.mark.parametrize('change', [dict(), dict(lora=4), dict(evict=False), dict(room=64, micro_batch=4)], ids=str)
def test_a_run_with_registers(tmp_path, change):
    write_jsonl(tmp_path / 'rows.jsonl', 4 * thoughts())
    config = tiny(tmp_path / 'rows.jsonl', tags='registers', registers=4, prompt='raw') | change
    result = T.train('tip-sft', config, tmp_path / 'run')
    model, tok = load(result['out'])
    assert read_settings(result['out']).registers == 4 and read_settings(result['out']).tags is None
    assert tok.convert_tokens_to_ids('<reg_3>') < len(tok) and losses(result['out'])[-1] < losses(result['out'])[0]
    dense = T.train('dense-sft', config | dict(tags='none', lora=0), tmp_path / 'dense')
    assert dense['rows'] == result['rows'] and '<reg_0>' not in load(dense['out'])[1].get_vocab()
    for wrong, says in ((dict(registers=5), 'registers=4'), (dict(tags='compact'), 'write tags=registers')):
        with pytest.raises(T.PastaError, match=says): T.train('tip-sft', config | dict(model=result['out'], lora=0) | wrong, tmp_path / 'again')


def test_packing_and_accumulation_change_no_curve_under_eviction(tmp_path):
    write_jsonl(tmp_path / 'rows.jsonl', 4 * thoughts())
    config = tiny(tmp_path / 'rows.jsonl', tags='registers', registers=4, prompt='raw', max_steps=4)
    curves = [losses(T.train('tip-sft', config | change, tmp_path / str(n))['out']) for n, change in
              enumerate((dict(), dict(micro_batch=1), dict(micro_batch=4, room=96)))]
    for other in curves[1:]: assert other == pytest.approx(curves[0], abs=1e-4)


# --- models -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('tie', [False, True])
def test_adapters_start_as_the_model(tie):
    model, tok = load('tiny', tie=tie)
    ids = add_tokens(model, tok, TagVocab())
    adapted, _ = T.prepare('tiny', lora=4, tie=tie)
    row = torch.tensor([[5, 6, *ids[:3], 7]])
    assert torch.allclose(model(row).logits, adapted(row).logits, atol=1e-5)
    rows = [p for n, p in adapted.named_parameters() if 'trainable_tokens' in n]
    assert len(rows) == (1 if tie else 2) and all(p.shape == (len(ids), 64) for p in rows)
    assert all(p.dtype == torch.float32 for p in adapted.parameters() if p.requires_grad)


def test_same_seed_same_adapters():
    weights = lambda seed: {n: p for n, p in T.prepare('tiny', lora=4, seed=seed)[0].named_parameters() if p.requires_grad}
    a, b, c = weights(0), weights(0), weights(1)
    assert all(torch.equal(a[n], b[n]) for n in a) and any(not torch.equal(a[n], c[n]) for n in a)


# --- runs -------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope='module')
def straight(tmp_path_factory):
    "A run that nobody disturbs."
    folder = tmp_path_factory.mktemp('straight')
    write_jsonl(folder / 'rows.jsonl', some_rows())
    config = tiny(folder / 'rows.jsonl')
    return config, T.train('pasta-sft', config, folder / 'run')


def test_a_run(straight):
    config, result = straight
    log = T.read_log(result['out'])
    assert result['steps'] == len(log) == 6 and [row['step'] for row in log] == list(range(1, 7))
    assert log[-1]['loss'] < log[0]['loss'] and result['loss'] == pytest.approx(np.mean([row['loss'] for row in log]))
    assert result['tokens'] == log[-1]['tokens'] > 0 and result['rows'] == 12 and not result['interrupted']
    rates = [row['learning_rate'] for row in log]
    assert rates == pytest.approx([5e-3 * (1 - n / 6) for n in range(6)])
    assert read_settings(result['out']).tags == 'compact' and read_settings(result['out']).positions == 'predicted'
    assert len(list(Path(result['out']).glob('checkpoint-*'))) == 2


def test_losses_of_a_run_by_hand(straight):
    "A training loop in ten lines gives the same losses."
    config, result = straight
    config = T.read_config(config)
    model, tok = T.prepare('tiny')
    layouts, _ = T.layouts_of(some_rows(), tok)
    order = T.schedule([len(l) for l in layouts], 4, 2, 0).reshape(-1, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0)
    for n, step in enumerate(order):
        for group in optimizer.param_groups: group['lr'] = 5e-3 * (1 - n / len(order))
        total = count = 0
        for i in step:
            logits = model(torch.as_tensor(layouts[i].ids)[None], position_ids=torch.as_tensor(layouts[i].position)[None],
                           attention_mask=T.hf_mask(model, layouts[i])).logits[0]
            label = torch.as_tensor(layouts[i].label)
            total, count = total + F.cross_entropy(logits, label, ignore_index=IGNORE, reduction='sum'), count + int((label != IGNORE).sum())
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(), optimizer.zero_grad()
        assert abs(total.item() / count - losses(result['out'])[n]) < 1e-4


@pytest.mark.parametrize('change', [dict(micro_batch=1), dict(micro_batch=4), dict(micro_batch=4, room=128), dict(bucket=64)])
def test_accumulation_and_packing_change_nothing(straight, tmp_path, change):
    config, result = straight
    assert losses(T.train('pasta-sft', config | change, tmp_path / 'run')['out']) == pytest.approx(losses(result['out']), abs=1e-4)


def test_an_interrupted_run_goes_on(straight, tmp_path):
    "Ctrl-C stops after the step with a checkpoint; resuming gives the same bits as never stopping."
    config, result = straight
    class Press(T.Journal):
        def on_log(self, args, state, control, **kw):
            super().on_log(args, state, control, **kw)
            if state.global_step == 3: os.kill(os.getpid(), signal.SIGINT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(T, 'Journal', Press)
        stopped = T.train('pasta-sft', config, tmp_path / 'run')
    assert stopped['interrupted'] and 3 <= stopped['steps'] < 6 and not (tmp_path / 'run' / 'result.json').exists()
    again = T.train('pasta-sft', config, tmp_path / 'run', resume=True)
    assert again['steps'] == 6 and not again['interrupted'] and losses(again['out']) == losses(result['out'])
    one, other = trained(result['out']), trained(again['out'])
    assert all(torch.equal(one[n], other[n]) for n in one)
    assert T.train('pasta-sft', config, tmp_path / 'run', resume=True) == again                  # it is finished


def test_ctrl_c_twice_stops_at_once():
    interrupt = T.Interrupt()
    interrupt.hear(2, None)
    with pytest.raises(KeyboardInterrupt): interrupt.hear(2, None)
    with interrupt.listening(alone=False): assert signal.getsignal(signal.SIGINT) != interrupt.hear


def test_killed_and_resumed(straight, tmp_path):
    "kill -9 in the middle of a run in another process, then resume: the same bits."
    config, result = straight
    (tmp_path / 'c.yaml').write_text(yaml.safe_dump(config))
    command = [sys.executable, '-c', 'import os, sys, time\nfrom pasta_lib import train as T\n'
               'class Slow(T.Journal):\n    def on_log(self, args, state, control, **kw):\n'
               '        super().on_log(args, state, control, **kw)\n        if state.global_step == 5: time.sleep(300)\n'
               'T.Journal = Slow\nsys.exit(T.main(sys.argv[1:]))', 'pasta-sft', '--config', str(tmp_path / 'c.yaml'), '--out', str(tmp_path / 'run')]
    process = subprocess.Popen(command, env=ENV, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.time() + 300
    while len(T.read_log(tmp_path / 'run')) < 5 and time.time() < deadline and process.poll() is None: time.sleep(.1)
    process.kill(), process.wait()
    assert [row['step'] for row in T.read_log(tmp_path / 'run')] == [1, 2, 3, 4, 5]
    assert T.last_checkpoint(tmp_path / 'run').name == 'checkpoint-4'
    again = T.train('pasta-sft', config, tmp_path / 'run', resume=True)
    one, other = trained(result['out']), trained(again['out'])
    assert all(torch.equal(one[n], other[n]) for n in one) and losses(again['out']) == losses(result['out'])


CUT = ('trained.safetensors', 'optimizer.pt', 'scheduler.pt', 'rng_state.pth')


def make_checkpoint(out, step, state=None):
    "Files as a checkpoint has them."
    from safetensors.torch import save_file
    folder = out / f'checkpoint-{step}'
    folder.mkdir()
    save_file(dict(w=torch.arange(40.)), str(folder / CUT[0]))
    for name in CUT[1:]: torch.save(dict(a=torch.arange(40.)), folder / name)
    if state: (folder / 'trainer_state.json').write_text(state)


@pytest.mark.parametrize('name', CUT)
def test_a_cut_checkpoint_does_not_count(tmp_path, name):
    for step in (2, 4): make_checkpoint(tmp_path, step, json.dumps(dict(global_step=step)))
    assert T.last_checkpoint(tmp_path).name == 'checkpoint-4'
    path = tmp_path / 'checkpoint-4' / name
    whole = path.read_bytes()
    for data in (b'', whole[:9], whole[:len(whole) // 2], whole[:-1], b'junk' * 99):
        path.write_bytes(data)
        assert T.last_checkpoint(tmp_path).name == 'checkpoint-2', len(data)
    if name != 'rng_state.pth':
        path.unlink()
        assert T.last_checkpoint(tmp_path).name == 'checkpoint-2'


@pytest.mark.parametrize('name', CUT[:3])
def test_resuming_from_the_checkpoint_before(straight, tmp_path, name):
    "The newest checkpoint is damaged: the run goes on from the one before it, to the same bits."
    config, result = straight
    run = shutil.copytree(result['out'], tmp_path / 'run')
    (run / 'result.json').unlink(), (run / 'checkpoint-abc').mkdir()
    last = T.last_checkpoint(run)
    (last / name).write_bytes((last / name).read_bytes()[:-7])
    assert T.last_checkpoint(run).name == 'checkpoint-4' and last.name == 'checkpoint-6'
    again = T.train('pasta-sft', config, run, resume=True)
    one, other = trained(result['out']), trained(run)
    assert again['steps'] == 6 and losses(run) == losses(result['out']) and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize('name,junk', [
    ('log.jsonl', b'junk\n'), ('log.jsonl', b'[1]\n'), ('log.jsonl', b'{"step": 1}\n'), ('log.jsonl', b'\xff\xfe\n'), ('log.jsonl', b'\n\n'),
    ('result.json', b'{'), ('result.json', b'[]'), ('result.json', b'{}'), ('result.json', b'\xff'),
    ('run.yaml', b'a: ['), ('run.yaml', b'- 1'), ('run.yaml', b'\xff\xff'), ('run.yaml', b'')])
def test_damaged_files_are_named(straight, tmp_path, name, junk):
    config, result = straight
    run = shutil.copytree(result['out'], tmp_path / 'run', ignore=shutil.ignore_patterns('checkpoint-*', 'model.safetensors'))
    if name == 'log.jsonl': (run / 'result.json').unlink()
    (run / name).write_bytes(junk)
    with pytest.raises(T.TrainError, match=name if junk else 'recipe was None'): T.train('pasta-sft', config, run, resume=True)
    assert (run / name).read_bytes() == junk


def test_a_log_that_is_gone(straight, tmp_path):
    "Nothing is left to do, and nothing is known of what was done."
    run = shutil.copytree(straight[1]['out'], tmp_path / 'run')
    (run / 'result.json').unlink(), (run / 'log.jsonl').unlink()
    with pytest.raises(T.TrainError, match='without a step .*log.jsonl'): T.train('pasta-sft', straight[0], run, resume=True)


def test_rows_that_have_changed(straight, tmp_path):
    "A run, finished or not, goes on only with the rows that it began with."
    config, result = straight
    rows = tmp_path / 'rows.jsonl'
    shutil.copy(config['data'] if isinstance(config, dict) else config.data, rows)
    run = shutil.copytree(result['out'], tmp_path / 'run')
    told = yaml.safe_load((run / 'run.yaml').read_text())
    again = dict({k: v for k, v in told.items() if k not in ('recipe', 'rows_sha256')}, data=str(rows))
    (run / 'run.yaml').write_text(yaml.safe_dump(told | dict(data=str(rows))))
    assert T.train('pasta-sft', again, run, resume=True)['steps'] == result['steps']
    rows.write_text(rows.read_text() + rows.read_text().splitlines()[0] + '\n')
    with pytest.raises(T.TrainError, match='rows have changed .*rows.jsonl'): T.train('pasta-sft', again, run, resume=True)
    (run / 'run.yaml').write_text(yaml.safe_dump({k: v for k, v in told.items() if k != 'rows_sha256'} | dict(data=str(rows))))
    assert T.train('pasta-sft', again, run, resume=True)['steps'] == result['steps']


def test_half_a_checkpoint_does_not_count(tmp_path):
    for step, text in ((2, '{"global_step": 2}'), (10, '{"global_step": 1'), (12, '{"global_step": 2}'), (14, None), (16, '[]'), (18, '{}')):
        make_checkpoint(tmp_path, step, text)
    (tmp_path / 'checkpoint-abc').mkdir(), (tmp_path / 'checkpoint-99').write_text('')
    assert T.last_checkpoint(tmp_path).name == 'checkpoint-2'
    assert T.last_checkpoint(tmp_path / 'nothing') is None


def test_folders_of_other_runs(straight):
    config, result = straight
    with pytest.raises(T.TrainError, match='there is a run already'): T.train('pasta-sft', config, result['out'])
    with pytest.raises(T.TrainError, match='batch was 4 and is 2 now'): T.train('pasta-sft', config | dict(batch=2), result['out'], resume=True)
    with pytest.raises(T.TrainError, match='recipe was'): T.train('baseline-sft', config, result['out'], resume=True)


def test_runs_that_cannot_start(data, tmp_path):
    rows = tiny(data / 'rows.jsonl')
    with pytest.raises(T.TrainError, match='no recipe'): T.train('pasta', rows, tmp_path / 'a')
    with pytest.raises(T.TrainError, match='no data'): T.train('pasta-sft', rows | dict(data=''), tmp_path / 'b')
    with pytest.raises(JobError, match='no such file'): T.train('pasta-sft', rows | dict(data='none.jsonl'), tmp_path / 'c')
    with pytest.raises(T.TrainError, match='cannot be shared out'): T.train('pasta-sft', rows | dict(batch=3), tmp_path / 'd')


def test_a_loss_that_is_no_number(data, tmp_path, monkeypatch):
    usual = T.PastaTrainer.loss
    monkeypatch.setattr(T.PastaTrainer, 'loss', lambda self, *args: usual(self, *args) * (math.nan if self.state.global_step else 1))
    with pytest.raises(T.TrainError, match='the loss is nan .step 1'): T.train('pasta-sft', tiny(data / 'rows.jsonl'), tmp_path / 'a')


@pytest.mark.parametrize('save_every', [3, 50])
@pytest.mark.parametrize('lora', [0, 4])
def test_a_destroyed_model_is_not_saved(data, tmp_path, monkeypatch, save_every, lora):
    "The loss of the last step is fine; the update after it isn't."
    class Break(T.Journal):
        def on_log(self, args, state, control, **kw):
            super().on_log(args, state, control, **kw)
            if state.global_step == 3: next(p for p in self.trainer.model.parameters() if p.requires_grad).data[0, 0] = math.inf
    monkeypatch.setattr(T, 'Journal', Break)
    run = tmp_path / 'run'
    run.mkdir(), (run / 'model.safetensors').write_bytes(b'mine')
    with pytest.raises(T.TrainError, match='is not finite .after step 3.*learning rate'):
        T.train('pasta-sft', tiny(data / 'rows.jsonl', max_steps=3, save_every=save_every, lora=lora), run)
    assert (run / 'model.safetensors').read_bytes() == b'mine' and not (run / 'result.json').exists()
    assert T.last_checkpoint(run) is None


def test_a_failed_start_may_be_tried_again(data, tmp_path, monkeypatch):
    rows, out = tiny(data / 'rows.jsonl', max_steps=1), tmp_path / 'run'
    (tmp_path / 'empty').mkdir()
    for wrong in (dict(data='none.jsonl'), dict(model=str(tmp_path / 'empty')), dict(batch=3), dict(model_options=dict(layer=1))):
        with pytest.raises(T.PastaError): T.train('pasta-sft', rows | wrong, out)
        assert not (out / 'run.yaml').exists()
    with pytest.raises(T.PastaError): T.train('pasta-bon', bon(data, reference=str(tmp_path / 'empty')), out)
    assert not (out / 'run.yaml').exists() and T.train('pasta-sft', rows, out)['steps'] == 1
    def never(*args, **kw): raise AssertionError('a model was opened')
    monkeypatch.setattr(T, 'prepare', never)
    with pytest.raises(T.TrainError, match='there is a run already'): T.train('pasta-sft', rows, out)
    (out / 'run.yaml').unlink()
    with pytest.raises(T.TrainError, match='a run without its run.yaml'): T.train('pasta-sft', rows, out)


def test_folders_that_cannot_be(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'file').write_text('')
    for out in ('', '.', Path('')):
        with pytest.raises(T.TrainError, match='a folder of its own'): T.train('pasta-sft', tiny(data / 'rows.jsonl'), out)
    for out in ('file', 'file/run'):
        with pytest.raises(T.TrainError, match="can't make the folder .*file"): T.train('pasta-sft', tiny(data / 'rows.jsonl'), out)


@pytest.mark.parametrize('recipe,row,says', [
    ('pasta-sft', dict(prompt='p'), 'without tagged_text'), ('pasta-sft', dict(tagged_text='t'), 'without prompt'),
    ('baseline-sft', dict(prompt='p', response=3), 'without tagged_text or response'), ('apar-sft', dict(prompt='p'), 'without tagged_text'),
    ('pasta-bon', dict(prompt='p', chosen='c'), 'without rejected'), ('pasta-bon', dict(chosen='a', rejected='b'), 'without prompt')])
def test_rows_that_lack_something_have_a_place(tmp_path, recipe, row, says):
    fine = dict(id='0', prompt='p', tagged_text='t', chosen='a', rejected='b')
    path = tmp_path / 'some rows.jsonl'
    path.write_text(f'\ufeff{json.dumps(fine)}\n\n{json.dumps(row)}\n', encoding='utf-8')
    with pytest.raises(T.TrainError, match=f'{says} .*some rows.jsonl, line 3'):
        T.train(recipe, tiny(path, tags='apar' if recipe == 'apar-sft' else 'compact'), tmp_path / 'run')


def test_data_that_is_not_there(data, tmp_path):
    (tmp_path / 'empty.jsonl').write_text('\n')
    with pytest.raises(T.TrainError, match='no rows .*empty.jsonl'): T.train('pasta-sft', tiny(tmp_path / 'empty.jsonl'), tmp_path / 'run')
    for text in (f'{data}/rows.jsonl,', ',', f'{data}/rows.jsonl,,{data}/rows.jsonl'):
        with pytest.raises(T.TrainError, match='a file without a name'): T.train('pasta-sft', tiny(text), tmp_path / 'run')


HOSTILE = (5, 5.5, True, {}, [], [999_999, 5], [-1], [1, 'a'], '\ud800', dict(role='user', content='p'), [dict(role='user')],
           [dict(role='user', content='\udfff')], [dict(role='user', content=3)], [[]])


@pytest.mark.parametrize('kind', ['pasta', 'plain', 'apar'])
def test_hostile_prompts_are_dropped(tagged_tiny, kind):
    rows = [dict(id=str(n), prompt=prompt, tagged_text='fine', response='fine') for n, prompt in enumerate(('p', *HOSTILE, 'q'))]
    layouts, dropped = T.layouts_of(rows, tagged_tiny[1], kind) if kind != 'apar' else (None, None)
    if kind == 'apar':
        text = 'Tips:\n' + '\n'.join(f'{n}. {h}: do this every single day, and well.' for n, h in enumerate(('Sleep', 'Food', 'Sport'), 1))
        model, tok = T.prepare('tiny', 'apar')
        layouts, dropped = T.layouts_of([row | dict(response=text) for row in rows], tok, kind)
        assert len(layouts) == 8
    else: assert len(layouts) == 2
    assert sum(dropped.values()) == len(HOSTILE) and {'prompt: ids outside the vocabulary', 'half a surrogate pair'} <= set(dropped)
    assert all(reason.startswith(('prompt: ', 'half a')) for reason in dropped)


def test_hostile_pairs_are_dropped(tagged_tiny):
    rows = [dict(id=str(n), prompt=prompt, chosen='a', rejected='b') for n, prompt in enumerate(('p', *HOSTILE))]
    rows += [dict(prompt='p', chosen='\ud83d', rejected='b'), dict(prompt='p', chosen='a', rejected='\ude00')]
    pairs, dropped = T.pairs_of(rows, tagged_tiny[1])
    assert len(pairs) == 1 and sum(dropped.values()) == len(HOSTILE) + 2 and dropped['half a surrogate pair'] == 4


def test_steps_and_rows_are_limited(data, tmp_path):
    result = T.train('baseline-sft', tiny(data / 'rows.jsonl', tags='none', limit=5, max_steps=3, warmup=.34), tmp_path / 'run')
    assert result['steps'] == 3 and result['rows'] == 5
    assert [row['learning_rate'] for row in T.read_log(tmp_path / 'run')][0] == 0
    assert len(load(str(tmp_path / 'run'))[1]) == len(load('tiny')[1])                           # no tags


# --- pairs ------------------------------------------------------------------------------------------------------------
def answer_logp(model, layout):
    "Summed log-probability of a document, alone in the model."
    logits, label = layout_logits(model, layout).double(), torch.as_tensor(layout.label)
    return -F.cross_entropy(logits, label, ignore_index=IGNORE, reduction='sum').item()


@pytest.mark.parametrize('room', [0, 200])
def test_pairs(tagged_tiny, room):
    model, tok = tagged_tiny
    pairs, dropped = T.pairs_of(some_pairs(4) + [dict(id='x', prompt='p', chosen='a', rejected='')], tok)
    assert dropped == {'empty': 1} and len(pairs) == 4
    batch = T.PairCollator(model.config, 260, room)(pairs)
    with torch.no_grad(): found = T.answer_logps(model, batch, 8).tolist()
    assert found == pytest.approx([answer_logp(model, side) for p in pairs for side in (p.chosen, p.rejected)], abs=1e-3)


def test_pairs_that_cannot_be(tagged_tiny):
    with pytest.raises(T.TrainError, match='no pair'): T.pairs_of([dict(prompt='p', chosen='', rejected='')], tagged_tiny[1])
    with pytest.raises(T.TrainError, match='without rejected'): T.pairs_of([dict(prompt='p', chosen='a')], tagged_tiny[1])


def bon(data, **changes): return tiny(data / 'pairs.jsonl', learning_rate=5e-4, epochs=1, batch=2, micro_batch=1, margin=5.0) | changes


def test_preference_losses_by_hand(data, tmp_path):
    "The first step's loss is the formula at zero gap; the reference stays the first model."
    result = T.train('pasta-bon', bon(data), tmp_path / 'run')
    model, tok = T.prepare('tiny')
    pairs, _ = T.pairs_of(some_pairs(), tok)
    step = T.schedule([len(p.chosen) + len(p.rejected) for p in pairs], 2)[:2]
    want = np.mean([.005 * -answer_logp(model, pairs[i].chosen) + .995 * 5 ** 2 for i in step])
    assert losses(tmp_path / 'run')[0] == pytest.approx(want, rel=1e-4)
    rows = {row['id']: row for row in T.read_jsonl(tmp_path / 'run' / 'reference.jsonl')}
    for pair in pairs: assert rows[pair.id]['rejected'] == pytest.approx(answer_logp(model, pair.rejected), abs=1e-3)
    assert result['rows'] == 6


def test_preference_training_widens_the_gap(data, tmp_path):
    T.train('pasta-bon', bon(data, epochs=4), tmp_path / 'run')
    before, tok = T.prepare('tiny')
    after, _ = load(str(tmp_path / 'run'))
    gap = lambda model: np.mean([answer_logp(model, p.chosen) - answer_logp(model, p.rejected) for p in T.pairs_of(some_pairs(), tok)[0]])
    assert gap(after.eval()) > gap(before.eval()) + 1


def test_the_reference_of_another_run(data, straight, tmp_path):
    "Round two starts from round one, and its reference stays the SFT model."
    folder = straight[1]['out']
    T.train('pasta-bon', bon(data, reference=folder), tmp_path / 'run')
    model, tok = load(folder)
    rows = {row['id']: row for row in T.read_jsonl(tmp_path / 'run' / 'reference.jsonl')}
    for pair in T.pairs_of(some_pairs(), tok)[0]:
        assert rows[pair.id]['chosen'] == pytest.approx(answer_logp(model, pair.chosen), abs=1e-3)


@pytest.mark.parametrize('change', [dict(micro_batch=2), dict(micro_batch=2, room=300)])
def test_pairs_share_forwards(data, tmp_path, change):
    T.train('pasta-bon', bon(data), tmp_path / 'a')
    T.train('pasta-bon', bon(data, **change), tmp_path / 'b')
    assert losses(tmp_path / 'a') == pytest.approx(losses(tmp_path / 'b'), rel=1e-4)


# --- adapters ---------------------------------------------------------------------------------------------------------
def test_adapter_runs(data, tmp_path):
    "An adapter is trained, saved, opened again, and trained on."
    config = tiny(data / 'rows.jsonl', lora=4, model_options=dict(tie=True), learning_rate=1e-2)
    first = T.train('pasta-sft', config, tmp_path / 'a')
    assert losses(first['out'])[-1] < losses(first['out'])[0]
    half = T.read_config(config | dict(epochs=1.0))
    model, tok = T.prepare(first['out'], tie=True)
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    assert any('lora' in n for n in names) and any('trainable_tokens' in n for n in names)
    opened, _ = load(first['out'], tie=True)
    row = torch.tensor([[1, 2, *tok.convert_tokens_to_ids(TagVocab().tokens), 3]])
    assert torch.allclose(model(row).logits, opened(row).logits, atol=1e-4)
    on = T.train('pasta-sft', half, tmp_path / 'b', overrides=[f'model={first["out"]}'])
    assert losses(on['out'])[0] < losses(first['out'])[0] - .5


# --- several processes ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('recipe', ['pasta-sft', 'pasta-bon'])
def test_two_processes(straight, data, tmp_path, recipe):
    "Two processes (as accelerate and torchrun set them up; accelerate starts one on a CPU): the same losses as one."
    config = straight[0] | dict(micro_batch=1) if recipe == 'pasta-sft' else bon(data)
    one = straight[1]['out'] if recipe == 'pasta-sft' else T.train(recipe, config, tmp_path / 'one')['out']
    (tmp_path / 'c.yaml').write_text(yaml.safe_dump(config))
    command = [sys.executable, '-m', 'torch.distributed.run', '--nproc_per_node', '2', '--standalone',
               '-m', 'pasta_lib.train', recipe, '--config', str(tmp_path / 'c.yaml'), '--out', str(tmp_path / 'two')]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result['processes'] == 2 and result['steps'] == len(losses(one)) and losses(tmp_path / 'two') == pytest.approx(losses(one), abs=1e-4, rel=1e-4)
    assert result['tokens'] == T.read_log(one)[-1]['tokens']


def test_the_command(data, tmp_path, capsys):
    (tmp_path / 'c.yaml').write_text(yaml.safe_dump(tiny(data / 'rows.jsonl')))
    arguments = ['pasta-sft', '--config', str(tmp_path / 'c.yaml'), '--out', str(tmp_path / 'run'), 'max_steps=2']
    assert T.main(arguments) == 0 and json.loads(capsys.readouterr().out)['steps'] == 2
    assert T.main(arguments) == 2 and 'there is a run already' in capsys.readouterr().err
    assert T.main([*arguments, '--resume']) == 0


# --- parity -----------------------------------------------------------------------------------------------------------
def parity(model, tok, tolerance):
    from pasta_lib.engine import Engine
    from pasta_lib.pasta import pasta
    write = lambda text: tok.encode(text, add_special_tokens=False)
    script = {'main': write('Two:<promise topic="a" tokens="10"/><promise topic="b" tokens="20"/><sync/> end') + [tok.eos_token_id],
              'fork 1': write('one</async>'), 'fork 2': write('more</async>')}
    result, = Engine(model, tok).run(pasta('What?', script=script), keep_logits=True)
    layouts, _ = T.layouts_of([dict(prompt='What?', tagged_text=TWO), dict(prompt='else', tagged_text='noise')], tok)
    batch = T.Collator(model.config, tok.pad_token_id or 0, room=512)(layouts)                    # packed with another
    with torch.no_grad(): logits, labels, owner = T.labelled_logits(model, batch)
    assert abs(T.sft_loss(logits[owner == 0], labels[owner == 0]).item() - T.runtime_loss(result)) < tolerance
    with pytest.raises(T.TrainError, match='no logits'): T.runtime_loss(Engine(model, tok).run(pasta('What?', script=script))[0])


def test_parity_tiny(tagged_tiny): parity(*tagged_tiny, 1e-4)


@pytest.mark.smollm2
def test_parity_smollm2(smollm2):
    import copy
    model, tok = copy.deepcopy(smollm2[0]), copy.deepcopy(smollm2[1])
    add_tokens(model, tok, TagVocab())
    parity(model, tok, 1e-4)


# --- what is drawn ----------------------------------------------------------------------------------------------------
def test_pictures(straight, tagged_tiny):
    layouts, _ = T.layouts_of(some_rows(3), tagged_tiny[1])
    assert T.show_batch(layouts, room=200) is not None
    assert len(T.plot_losses({'run': straight[1]['out']}, smooth=3).lines[0].get_xdata()) == 6
    assert 'predicts' in T.label_table(layouts[1], tagged_tiny[1])


# --- faster on a CPU --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('options', [dict(), dict(tie=True), dict(heads=4, kv_heads=4), dict(attention_bias=True), dict(sliding_window=9)],
                         ids=str)
def test_quickened_models_compute_the_same(options):
    "Logits and all gradients are peft's, before and after training, packed with other rows."
    found = []
    for quick in (False, True):
        model, tok = T.prepare('tiny', lora=4, **options)
        layouts, _ = T.layouts_of(some_rows(5), tok)
        draw = torch.Generator().manual_seed(1)
        for n, p in model.named_parameters():
            if p.requires_grad: p.data += .05 * torch.randn(p.shape, generator=draw)
        if quick: T.quicken(T.quicken(model))                                                     # twice is once
        logits, labels, _ = T.labelled_logits(model, T.Collator(model.config, 260, 300)(layouts))
        T.sft_loss(logits, labels).backward()
        found.append((logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.requires_grad}))
    (usual, grads), (ours, quick_grads) = found
    assert torch.allclose(usual, ours, atol=2e-5) and set(grads) == set(quick_grads)
    for n in grads: assert torch.allclose(grads[n], quick_grads[n], atol=2e-6, rtol=1e-4), n


def test_a_quickened_model_without_its_adapter():
    model, _ = T.prepare('tiny', lora=4)
    base, _ = T.prepare('tiny')
    for n, p in model.named_parameters():
        if 'lora_B' in n: p.data += .1
    T.quicken(model), T.quicken(base)
    row = dict(input_ids=torch.arange(9)[None], attention_mask=torch.zeros(1, 1, 9, 9).masked_fill(torch.ones(9, 9).triu(1).bool(), -1e9))
    with model.disable_adapter(): assert torch.allclose(model(**row).logits, base(**row).logits, atol=1e-5)
    assert not torch.allclose(model(**row).logits, base(**row).logits, atol=1e-2)


def test_quick_or_not_the_same_losses(data, tmp_path):
    config = tiny(data / 'rows.jsonl', lora=4, epochs=1)
    for name, quick in (('a', True), ('b', False)): T.train('pasta-sft', config | dict(quick=quick), tmp_path / name)
    assert losses(tmp_path / 'a') == pytest.approx(losses(tmp_path / 'b'), abs=1e-4)


def test_apar_runs(tmp_path):
    "Lists become trees: a row for the main path and one for each child; the tokenizer gets APAR's two tokens."
    text = 'Tips:\n' + '\n'.join(f'{n}. {h}: do this every single day, and well.' for n, h in enumerate(('Sleep', 'Food', 'Sport'), 1))
    write_jsonl(tmp_path / 'rows.jsonl', [dict(id='1', prompt='p', response=text), dict(id='2', prompt='p', tagged_text=TWO),
                                          dict(id='3', prompt='p', response='Plain.')])
    result = T.train('apar-sft', tiny(tmp_path / 'rows.jsonl', tags='apar', epochs=1), tmp_path / 'run')
    assert result['rows'] == 5 and sum(result['dropped'].values()) == 1                   # 1 + 3, and one plain row
    model, tok = load(str(tmp_path / 'run'))
    assert tok.convert_tokens_to_ids(['[Fork]', '[Child]']) == [261, 262]

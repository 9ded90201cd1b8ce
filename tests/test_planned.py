"""Planned Diffusion: against a full recompute at every step under a mask written from the definition, and the text grammar.

The oracle knows no segments, spans, pools or readers: a list of (token, role), one forward of the whole list per step."""
import copy
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pasta_lib.core import PastaError
from pasta_lib.diffusion import MASK, drift, noisy_layout, replay_noisy
from pasta_lib.engine import Driver, Engine, Sampling, ar, replay_deviation
from pasta_lib.masks import dense_mask, layout_logits, leak_test
from pasta_lib.metrics import critical_path
from pasta_lib.models import add_tokens, chat_ids, literal_ids, tiny_model
from pasta_lib.orders import above, running_set
from pasta_lib.pasta import pasta
from pasta_lib.planned import *
from pasta_lib.pool import check_pool
from pasta_lib.segments import IGNORE, pack
from pasta_lib.tags import GrammarError, Problem, Sync, Text, Topic, lint, parse, plain
from pasta_lib.trace import describe, timeline

TOLERANCE = 1e-4
VOCAB = 290                                            # the model has rows that are no token
DEMONSTRATIONS = sorted((Path(__file__).parents[1] / 'data' / 'demonstrations').glob('*.json'))


@pytest.fixture(scope='module')
def small():
    model, tok = tiny_model(seed=3, hidden=32, vocab=VOCAB)
    add_tokens(model, tok, plan_tokens())
    return model, tok


@pytest.fixture(scope='module')
def ids(small): return plan_ids(small[1])


@pytest.fixture(scope='module')
def engine(small): return Engine(*small, slots=2048, page_size=4)


def write(tok, *parts): return [i for p in parts for i in ([p] if isinstance(p, int) else literal_ids(tok, p))]


def plan(ids, *topics): return [part for title, n in topics for part in (ids.topic, f' {title} {n} ', ids.topic_end)]


def clean(results):
    for r in results:
        if r.error: raise r.error
    return results if len(results) > 1 else results[0]


def balanced(engine):
    check_pool(engine.pool)
    assert engine.pool.pages.free == len(engine.pool.pages) and not engine.pool.tables


# ---- the oracle

class Recompute:
    "Roles: (g, None) is main after g plans; (g, n) is span n of plan g. A token reads what the definition says."
    def __init__(self, model, tok, ids, prompt, order='entropy', ratio=1., threshold=0., scale=1., shift=0):
        self.model, self.tok, self.ids, self.order, self.ratio, self.threshold, self.scale, self.shift = model, tok, ids, order, ratio, threshold, scale, shift
        self.seq, self.roles, self.rows = list(prompt), [(0, None)] * len(prompt), []
        known = set(tok.get_vocab().values())
        self.never = [i for i in range(VOCAB) if i not in known or i == ids.mask]
        self.inside = sorted({*self.never, *(i for i in tok.added_tokens_decoder if i != ids.pad)})

    def may(self, i, j):
        (g, n), (h, m) = self.roles[i], self.roles[j]
        if m is None: return j <= i if n is None else h <= g            # main: what comes before; a span: all main up to its plan
        return (g, n) == (h, m) or h < g                                # its own span, or spans of finished plans

    def logits(self):
        N = len(self.seq)
        may = torch.tensor([[self.may(i, j) for j in range(N)] for i in range(N)])
        bias = torch.zeros(N, N).masked_fill(~may, torch.finfo(torch.float32).min)
        with torch.no_grad(): return self.model(input_ids=torch.tensor([self.seq]), attention_mask=bias[None, None]).logits[0]

    def denoise(self, lengths):
        g, spans, steps = self.roles[-1][0], [], max(1, round(max(lengths) * self.ratio))
        for n, size in enumerate(lengths):
            start = len(self.seq)
            self.seq += [self.ids.async_start, *[self.ids.mask] * size, self.ids.async_end]
            self.roles += [(g, n)] * (size + 2)
            spans.append(list(range(start + 1, start + 1 + size)))
        for step in range(10 ** 6):
            spans = [s for s in spans if s]
            if not spans: return
            rows = self.logits()
            self.rows.append(rows[[i - self.shift for s in spans for i in s]])
            for s in spans: self.reveal(s, rows, max(1, steps - step))

    def reveal(self, left, rows, steps):
        proposed = {}
        for i in left:
            row = rows[i - self.shift].clone()
            row[self.inside] = -math.inf
            p = row.softmax(-1)
            proposed[i] = int(p.argmax()), float(p.max()), float(-(p[p > 0] * p[p > 0].log()).sum())
        rank = {'entropy': lambda i: proposed[i][2], 'confidence': lambda i: -proposed[i][1], 'left_to_right': lambda i: i}[self.order]
        chosen = sorted(left, key=rank)[:-(-len(left) // steps)]
        sure = [i for i in chosen if proposed[i][1] >= self.threshold] or [max(chosen, key=lambda i: proposed[i][1])]
        for i in sure:
            self.seq[i] = proposed[i][0]
            left.remove(i)

    def run(self, script, budget):
        "Main says its script, then what the model says, until `budget` tokens were decided."
        script, topics, said = list(script), [], []
        while budget > 0:
            row = self.logits()[-1]
            row[[*self.never, self.ids.pad]] = -math.inf
            token, g = script.pop(0) if script else int(row.argmax()), self.roles[-1][0]
            budget, said = budget - 1, [*said, token]
            if token == self.ids.topic_end:
                begin = len(said) - 1 - said[::-1].index(self.ids.topic)
                topics.append(int(self.tok.decode(said[begin + 1:-1]).split()[-1]))
            if topics and token in (self.ids.sync, self.tok.eos_token_id):
                sizes = [max(1, round(10 * n * self.scale)) for n in topics]
                self.denoise(sizes)
                budget, topics, g = budget - sum(sizes), [], g + 1
            self.seq.append(token)
            self.roles.append((g, None))
            if token == self.tok.eos_token_id: return


GRID = [dict(), dict(order='confidence', steps_ratio=.4), dict(order='left_to_right', steps_ratio=.3, length_scale=.7),
        dict(confidence_threshold=.02, steps_ratio=.01), dict(steps_ratio=.5, alignment='shifted', length_scale=1.25)]


@pytest.mark.parametrize('knobs', GRID, ids=str)
def test_every_step_is_a_full_recompute(small, ids, engine, knobs):
    model, tok = small
    script = write(tok, 'Hi ', *plan(ids, ('a', 1), ('bc', 2)), ids.sync, 'then ', *plan(ids, ('d', 1)), ids.sync)
    prompt = write(tok, 'Tell me of it.')
    r = clean(engine.run(planned(prompt, script={'main': script}, max_new_tokens=len(script) + 60, ignore_eos=True, **knobs), keep_logits=True))
    names = dict(steps_ratio='ratio', confidence_threshold='threshold', length_scale='scale', order='order')
    o = Recompute(model, tok, ids, prompt, shift=int('alignment' in knobs), **{names[k]: v for k, v in knobs.items() if k in names})
    o.run(script, len(script) + 60)
    by_position = [t for _, t in sorted(zip(r.record.position, r.record.token))]
    assert by_position == o.seq[:len(by_position)] and sorted(r.record.position) == list(range(len(by_position))) and len(o.seq) == len(by_position)
    denoising = [n.logits for n in r.record.noisy if MASK_IN(n, ids)]
    assert len(denoising) == len(o.rows) == r.counts['steps']
    assert max(float((a - b).abs().max()) for a, b in zip(denoising, o.rows)) < TOLERANCE
    assert replay_noisy(model, r) < TOLERANCE and drift(model, r).largest < TOLERANCE and drift(model, r).tokens > 5
    assert r.counts['plans'] == 2 and r.counts['spans'] == r.forks == 3 and ids.mask not in r.token_ids
    assert r.counts['rows'] == sum(len(n.queries.tokens) for n in r.record.noisy if MASK_IN(n, ids))
    balanced(engine)


def MASK_IN(copy_, ids): return ids.mask in copy_.queries.tokens


def scripts(tok, ids, rng, n=8):
    "Answers that a trained model might give."
    out = []
    for _ in range(n):
        topics = [(f't{k}', int(rng.integers(1, 4))) for k in range(rng.integers(0, 4))]
        tail = [ids.sync, 'end', tok.eos_token_id] if rng.random() < .7 else [tok.eos_token_id]
        out.append(write(tok, 'ok ', *plan(ids, *topics), *(tail if topics else ['end', tok.eos_token_id])))
    return out


@pytest.mark.parametrize('temperature', [0., 1.])
def test_a_batch_is_what_each_is_alone(small, ids, engine, temperature):
    rng = np.random.default_rng(1)
    knobs = [dict(steps_ratio=float(rng.choice([.2, .5, 1])), confidence_threshold=float(rng.choice([0, .02])), order=order, commit=commit)
             for order, commit in itertools.product(('entropy', 'random', 'margin', 'above:0.02'), ('exact', 'fast'))]
    asked = [planned(write(small[1], 'Q' * (n + 1)), script={'main': s}, seed=n, temperature=temperature, max_new_tokens=150, **k)
             for n, (s, k) in enumerate(zip(scripts(small[1], ids, rng), knobs))]
    mixed = [*asked, ar('Other', max_new_tokens=20), pasta('And this', tags='text', max_new_tokens=15)]
    together, alone = engine.run(mixed, keep_logits=True), [engine.run(q)[0] for q in mixed]
    for a, b in zip(together, alone):
        assert a.error is None and a.token_ids == b.token_ids and a.record.step == b.record.step and a.counts == b.counts
    for r, k in zip(together, knobs):
        if k['commit'] == 'exact': assert replay_noisy(small[0], r) < TOLERANCE
        assert critical_path(r.record).length == r.critical_path == max(r.record.step)
    balanced(engine)


def test_seeds_draw_and_greedy_does_not(small, ids, engine):
    script = write(small[1], *plan(ids, ('a', 2)), small[1].eos_token_id)
    hot, again, other = (clean(engine.run(planned('Q', script={'main': script}, temperature=1., seed=s))) for s in (1, 1, 2))
    assert hot.token_ids == again.token_ids != other.token_ids


def test_no_mask_and_no_row_that_is_no_token_is_ever_chosen(small, ids):
    model, tok = copy.deepcopy(small[0]), small[1]
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        mean = head.mean(0)
        for i in (ids.mask, ids.sync, ids.async_end, len(tok), VOCAB - 1, tok.eos_token_id): head[i] = 30 * mean + head[i]
        model.get_input_embeddings().weight[ids.mask] += 3 * mean
    script = write(tok, *plan(ids, ('a', 2), ('b', 3)), ids.sync)
    for order in ('entropy', 'random', 'all_at_once'):
        r = clean(Engine(model, tok, slots=512).run(planned('Q', script={'main': script}, order=order, ignore_eos=True, max_new_tokens=90)))
        spans = [t for t, n, c in zip(r.record.token, r.record.thread, r.record.control) if n and not c]
        assert not {ids.mask, *range(len(tok), VOCAB)} & set(r.token_ids) and not set(spans) & {*ids.kinds, tok.eos_token_id}
        assert r.record.token[:r.prompt_tokens] == chat_ids(tok, 'Q') and len(spans) == 50


def test_without_a_plan_it_is_autoregressive(small, ids, engine):
    ask = dict(max_new_tokens=25, ignore_eos=True)
    a, b = engine.run([planned('Say something', **ask), ar('Say something', **ask)], keep_logits=True)
    taken = {ids.mask, ids.pad, *ids.kinds, *range(len(small[1]), VOCAB)}
    n = next((n for n, t in enumerate(b.token_ids) if t in taken), 25)
    assert a.token_ids[:n] == b.token_ids[:n] and n > 3 and a.counts['plans'] == 0
    assert replay_noisy(small[0], a) < TOLERANCE


# ---- what may be said, and by whom

TEXTS = ['a', 'b 3', ' hats', '12', '\n', ' -2 ', '7', ' 0', '&lt;', ' 120 ', 'É', '>']
PARTS = st.lists(st.one_of(st.sampled_from(TEXTS), st.sampled_from(['<topic>', '</topic>', '<sync/>', '<async>', '</async>'])), max_size=12)


def spoken(small, ids, parts, policy='repair'):
    tags, reader = dict(zip(('<topic>', '</topic>', '<async>', '</async>', '<sync/>'), ids.strings)), PlanReader(ids, small[1], policy)
    return [e for p in parts for i in ([tags[p]] if p in tags else literal_ids(small[1], p)) for e in reader.push(i)] + reader.close()


@settings(max_examples=200, deadline=None)
@given(PARTS)
def test_ids_mean_what_text_means(small, ids, parts):
    "The same answer as tag tokens and as text: the same topics, syncs and broken rules. (Tags in backticks differ, and aren't here.)"
    from pasta_lib.tags import TextReader, escape
    text = ''.join(p if p.startswith('<') else escape(p, 'plan') for p in parts)
    reader = TextReader('plan')
    want = reader.push(text) + reader.close()
    kinds = lambda events: [(type(e).__name__, getattr(e, 'rule', None) or getattr(e, 'title', None), getattr(e, 'length', None))
                            for e in events if not isinstance(e, Text)]
    got = spoken(small, ids, parts)
    assert [k for k in kinds(got) if k[1] != 'spelling'] == [k for k in kinds(want) if k[1] != 'spelling']
    said = lambda events: ''.join(e.text for e in events if isinstance(e, Text))
    assert said(got).replace('&lt;', '<') == said(want).replace('&lt;', '<')


MALFORMED = {'no number': (['<topic>', ' hats ', '</topic>'], ('hats', 4), 'length-missing'),
             'zero': (['<topic>', ' hats 0 ', '</topic>'], ('hats', 1), 'length-too-small'),
             'negative': (['<topic>', ' hats -3 ', '</topic>'], ('hats', 1), 'length-too-small'),
             '120': (['<topic>', ' hats 120 ', '</topic>'], ('hats', 12), 'length-too-large'),
             'huge': (['<topic>', ' hats 99999 ', '</topic>'], ('hats', 99), 'length-too-large'),
             'untitled': (['<topic>', ' 4 ', '</topic>'], ('untitled', 4), 'topic-empty'),
             'nothing': (['<topic>', '</topic>'], ('untitled', 4), 'topic-empty'),
             'open at the end': (['<topic>', ' hats 2'], ('hats', 2), 'unclosed-topic'),
             'open at a line': (['<topic>', ' hats 2', '\n', 'next'], ('hats', 2), 'unclosed-topic'),
             'open at a topic': (['<topic>', ' hats 2', '<topic>', ' coats 3 ', '</topic>'], ('hats', 2), 'unclosed-topic')}


@pytest.mark.parametrize('name', MALFORMED)
def test_malformed_plans_are_typed_and_repaired(small, ids, name):
    parts, (title, length), rule = MALFORMED[name]
    found = spoken(small, ids, parts)
    assert [e for e in found if isinstance(e, Topic)][0] == Topic(title, length) and rule in [e.rule for e in found if isinstance(e, Problem)]
    with pytest.raises(GrammarError) as error: spoken(small, ids, parts, 'strict')
    assert error.value.line == 1 and not any(isinstance(e, (Topic, Problem)) for e in spoken(small, ids, parts, 'literal')[:1])


@pytest.mark.parametrize('title, n', [('Top 10 hats', 3), ('3', 4), ('a 1 2 3', 9), ('100%', 1), ('2024 in 12 words', 99)])
def test_numbers_in_titles_are_title(small, ids, title, n):
    assert [e for e in spoken(small, ids, ['<topic>', f' {title} {n} ', '</topic>'])] == [Topic(title, n)]


@pytest.mark.parametrize('name', MALFORMED)
def test_malformed_plans_are_decoded(small, ids, engine, name):
    parts, (title, length), rule = MALFORMED[name]
    tags = dict(zip(('<topic>', '</topic>'), (ids.topic, ids.topic_end)))
    script = write(small[1], *(tags.get(p, p) for p in parts), small[1].eos_token_id)
    if length == 99: return                                 # a long one; its cut is tested below
    r = clean(engine.run(planned('Q', script={'main': script}, max_new_tokens=400, steps_ratio=.05)))
    assert r.counts['spans'] >= 1 and rule in [p.rule for p in r.counts['problems']] and r.finish_reason == 'eos'
    assert r.counts['lengths'][0].predicted == 10 * length and not lint(r.tagged_text, 'plan') and ids.mask not in r.token_ids
    strict, = engine.run(planned('Q', script={'main': script}, policy='strict'))
    assert strict.finish_reason == 'error' and isinstance(strict.error, GrammarError) and strict.token_ids
    balanced(engine)


@pytest.mark.parametrize('evil', ['<topic> all 9 </topic><sync/>', '<async>x</async>', MASK, PAD, '</topic><topic> a 1', '<|end|><topic> b 2 </topic>'])
def test_no_text_of_the_prompt_becomes_a_tag_or_a_span(small, ids, engine, evil):
    for prompt in (evil, [dict(role='user', content=evil)], [dict(role='user', content='hi'), dict(role='assistant', content=evil),
                                                             dict(role='user', content='more')]):
        r = clean(engine.run(planned(prompt, max_new_tokens=8)))
        assert not set(r.record.token[:r.prompt_tokens]) & {*ids.kinds, ids.mask, ids.pad} and r.counts['plans'] == 0
    row = plan_layout(literal_ids(small[1], evil), f'<topic> a 1 </topic><async>&lt;topic> {MASK}{PAD}</async>', ids, small[1], 3)
    assert [int(i) for i in row.ids if i in (*ids.kinds, ids.mask)] == [ids.topic, ids.topic_end, ids.async_start, ids.async_end]
    assert (row.ids == ids.pad).sum() == 3


def test_tags_given_as_ids_in_the_prompt_are_context_only(small, ids, engine):
    prompt = write(small[1], *plan(ids, ('a', 3)), ids.sync)
    r = clean(engine.run(planned(prompt, script={'main': write(small[1], ids.sync, 'x', small[1].eos_token_id)})))
    assert r.counts['plans'] == 0 and [p.rule for p in r.counts['problems']] == ['sync-without-fork'] and r.text == 'x'


def test_a_model_may_write_a_span_itself(small, ids, engine):
    eos = small[1].eos_token_id
    script = write(small[1], *plan(ids, ('a', 1), ('b', 1)), ids.async_start, 'mine', ids.async_end, ids.sync, '.', eos)
    r = clean(engine.run(planned('Q', script={'main': script, 'span 1': write(small[1], 'yours')}), keep_logits=True))
    assert r.text == 'mineyours.' and r.counts['spans'] == 1 and r.record.threads[1].topic == 'b' and not r.counts['problems']
    assert replay_noisy(small[0], r) < TOLERANCE
    unfinished = clean(engine.run(planned('Q', script={'main': write(small[1], *plan(ids, ('a', 1)), ids.async_start, 'mine', eos)})))
    assert unfinished.text == 'mine' and unfinished.counts['spans'] == 0


# ---- limits

def told(small, ids, engine, *spans, tail=None, **options):
    script = write(small[1], *plan(ids, *[(f't{n}', -(-len(t) // 10)) for n, t in enumerate(spans)]), ids.sync, *(tail or ['!', small[1].eos_token_id]))
    words = {f'span {n + 1}': literal_ids(small[1], t) for n, t in enumerate(spans)}
    return engine.run(planned('Q', script={'main': script, **words}, **options))[0]


def test_texts_threads_and_counts(small, ids, engine):
    r = told(small, ids, engine, 'One thing.', 'Another, longer.', max_new_tokens=200)
    assert r.text == 'One thing.Another, longer.!' and r.finish_reason == 'eos' and r.forks == 2
    assert r.tagged_text == '<topic> t0 1 </topic><topic> t1 2 </topic><async>One thing.</async><async>Another, longer.</async><sync/>!'
    assert r.threads == {'main': 'eos', 'span 1': 'end', 'span 2': 'end'}
    assert [(n.predicted, n.masks, n.used) for n in r.counts['lengths']] == [(10, 10, 10), (20, 20, 16)]
    assert r.counts['steps'] == 20 and r.counts['rows'] == 10 * 12 + 20 * 22 and r.counts['commit_rows'] == 34 and r.counts['plan_tokens'] == 16
    assert r.generated_tokens == 16 + 3 + 34 and r.forwards == 16 + 20 + 2
    assert r.parallelism == pytest.approx((10 + 16 + 1) / r.critical_path) and r.json()['lengths'][0]['title'] == 't0'
    assert 'span 2' in describe(r.record)
    timeline(r.record, small[1])


@pytest.mark.parametrize('limit', [1, 5, 16, 17, 18, 25, 30, 47, 48, 49])
def test_a_limit_cuts_spans_and_loses_nothing(small, ids, engine, limit):
    r = told(small, ids, engine, 'One thing.', 'Another, longer.', max_new_tokens=limit)
    counted = [i for i, c, n in zip(r.record.token, r.record.control, r.record.thread) if i not in (ids.async_start, ids.async_end)][r.prompt_tokens:]
    assert r.error is None and len(counted) == min(limit, 49) and ids.mask not in r.token_ids
    assert r.finish_reason == ('eos' if limit == 49 else 'length') and {p.rule for p in lint(r.tagged_text, 'plan')} <= {'topic-without-span', 'unclosed-topic', 'unfinished-tag', 'spelling', 'length-missing'}
    balanced(engine)


def test_limits_of_spans(small, ids, engine):
    r = told(small, ids, engine, 'One thing.', 'Two.', 'Three.', max_spans=2, max_thread_tokens=4, max_new_tokens=200)
    assert r.text == 'One Two.!' and r.forks == 2 and r.refused_forks == 1
    assert r.threads == {'main': 'eos', 'span 1': 'length', 'span 2': 'length', 'span 3': 'max_forks'}
    none = told(small, ids, engine, 'One.', max_spans=0, max_new_tokens=200)
    assert none.text == '!' and none.forks == 0 and none.finish_reason == 'eos' and not none.counts['spans']


def test_stop_texts_see_main(small, ids, engine):
    r = told(small, ids, engine, 'stop', tail=['go on stop it', small[1].eos_token_id], stop='stop', max_new_tokens=200)
    assert r.text == 'stopgo on ' and r.finish_reason == 'stop' and r.tagged_text.endswith('<sync/>go on ')


def test_a_full_pool_and_a_cancel_keep_what_was_decided(small, ids):
    engine = Engine(*small, slots=128, page_size=4)
    r = told(small, ids, engine, 'A' * 100, 'B' * 100, max_new_tokens=400, reserve=20)
    assert r.finish_reason == 'pool_full' and len(r.token_ids) >= 16 and ids.mask not in r.token_ids
    balanced(engine)
    request = planned('Q', script={'main': write(small[1], *plan(ids, ('a', 2)), ids.sync), 'span 1': literal_ids(small[1], 'A' * 20)}, max_new_tokens=99,
                      order='left_to_right')
    from pasta_lib.engine import Driver
    driver = Driver(engine, [request])
    for _ in range(15): driver.turn()
    request.cancel()
    driver.turn()
    r, = driver.finished()
    done = r.tagged_text.count('A')
    assert r.finish_reason == 'cancelled' and 3 <= done <= 12 and r.threads['span 1'] == 'cancelled' and ids.sync in r.token_ids and ids.mask not in r.token_ids
    balanced(engine)


@pytest.mark.parametrize('bad', [dict(steps_ratio=0), dict(steps_ratio=math.inf), dict(steps_ratio='1'), dict(confidence_threshold=1.5), dict(confidence_threshold='$T'),
                                 dict(length_scale=-1), dict(order='best'), dict(commit='late'), dict(alignment='left'), dict(max_spans=-1), dict(policy='lax')])
def test_bad_knobs_are_one_line(engine, bad):
    r, = engine.run(planned('Q', **bad))
    assert r.finish_reason == 'error' and isinstance(r.error, PastaError) and '\n' not in str(r.error)


def test_it_needs_its_tokens(small):
    model, tok = tiny_model()
    r, = Engine(model, tok, slots=128).run(planned('Q'))
    assert isinstance(r.error, PlanError) and 'add_tokens' in str(r.error)
    r, = Engine(model, slots=128).run(planned([1, 2]))
    assert isinstance(r.error, PlanError) and 'tokenizer' in str(r.error)
    assert unsaid(small[1], VOCAB) is unsaid(small[1], VOCAB) and unsaid(small[1], VOCAB + 1) is not unsaid(small[1], VOCAB)


def test_tags_can_be_borrowed():
    "Any model can be tried: other tokens stand in for the tags."
    model, tok = tiny_model(seed=1, hidden=32)
    ids, engine = PlanIds(*range(200, 207)), Engine(model, tok, slots=512)
    script = {'main': write(tok, *plan(ids, ('a', 1), ('b', 2)), ids.sync, 'so')}
    a, b = clean(engine.run([planned(q, tags=ids, script=script, ignore_eos=True, max_new_tokens=60, steps_ratio=.2) for q in 'QR'], keep_logits=True))
    assert max(replay_noisy(model, r) for r in (a, b)) < TOLERANCE and a.counts['spans'] == 2 and not set(a.token_ids) & {ids.mask}
    assert unsaid(tok, 261, ids)[0] is ids and {*ids.kinds, ids.mask} <= set(unsaid(tok, 261, ids)[2])


def test_fast_commits_drift_and_exact_ones_do_not(small, ids, engine):
    kept = {c: told(small, ids, engine, 'A' * 20, 'B' * 9, tail=['and so on', small[1].eos_token_id], commit=c, max_new_tokens=99) for c in ('exact', 'fast')}
    assert kept['exact'].counts['stale_rows'] == 0 < kept['fast'].counts['stale_rows'] and kept['fast'].counts['commit_rows'] == 0
    script = {'main': write(small[1], *plan(ids, ('a', 2)), ids.sync, 'and so on', small[1].eos_token_id)}
    far = {(c, ratio): drift(small[0], clean(engine.run(planned('Q', script=script, commit=c, steps_ratio=ratio), keep_logits=True)))
           for c in ('exact', 'fast') for ratio in (.01, 1.)}
    assert max(far['exact', r].largest for r in (.01, 1.)) < TOLERANCE and far['fast', .01].mean > far['fast', 1.].mean > 1e-3
    assert kept['fast'].forwards == kept['exact'].forwards                      # an exact commit costs rows, no step


def test_listeners_hear_everything(small, ids, engine):
    heard = []
    script = {'main': write(small[1], *plan(ids, ('a', 1)), ids.sync, 'x', small[1].eos_token_id), 'span 1': literal_ids(small[1], 'word')}
    r, = engine.run(planned('Q', script=script), listen=heard.append)
    assert ''.join(c.text for c in heard if c.thread == 'span 1') == 'word' and heard[-1].text == 'x' and r.text == 'wordx'


# ---- training rows

def documents():
    words = st.text('ab c1.', min_size=1, max_size=12)
    span = st.tuples(words, st.integers(1, 3), words)
    return st.lists(st.one_of(words, st.lists(span, min_size=1, max_size=3)), min_size=1, max_size=4)


def render_document(parts):
    out = ''
    for n, part in enumerate(parts):
        if isinstance(part, str): out += part
        else:
            out += ''.join(f'<topic> t{title.strip()} {k} </topic>' for title, k, _ in part) + ''.join(f'<async>{text}</async>' for *_, text in part)
            if n + 1 < len(parts): out += '<sync/>'
    return out


@settings(max_examples=60, deadline=None)
@given(documents(), st.sampled_from(['fill', 0, 4]), st.sampled_from(['aligned', 'shifted', 'shifted_input']))
def test_rows_are_what_the_definition_says(small, ids, parts, padding, alignment):
    tok, prompt = small[1], [5, 6, 7]
    row = plan_layout(prompt, render_document(parts), ids, tok, padding, alignment, eos_id=tok.eos_token_id)
    want, roles, g = list(prompt), [(0, None)] * 3, 0
    for n, part in enumerate(parts):
        if isinstance(part, str): new, role = literal_ids(tok, part), [(g, None)]
        else:
            new = write(tok, *[x for title, k, _ in part for x in (ids.topic, f' t{" ".join(title.split())} {k} ', ids.topic_end)])
            want += new; roles += [(g, None)] * len(new)
            for m, (_, k, text) in enumerate(part):
                inside = literal_ids(tok, text)
                pads = max(0, 10 * k - len(inside)) if padding == 'fill' else padding
                want += [ids.async_start, *inside, *[ids.pad] * pads, ids.async_end]
                roles += [(g, m)] * (len(inside) + pads + 2)
            g, new, role = g + 1, [ids.sync] if n + 1 < len(parts) else [], [(g + 1, None)]
        want += new; roles += role * len(new)
    assert row.ids.tolist() == want and row.position.tolist() == list(range(len(want)))
    o = Recompute(None, tok, ids, [])
    o.roles = roles
    assert dense_mask(row).tolist() == [[o.may(i, j) for j in range(len(want))] for i in range(len(want))]
    main = [i for i, (_, m) in enumerate(roles) if m is None]
    for i, label in enumerate(row.label.tolist()):
        inner = roles[i][1] is not None and want[i] not in (ids.async_start, ids.async_end)
        if roles[i][1] is None: expect = IGNORE if i < 2 else want[main[main.index(i) + 1]] if i != main[-1] else tok.eos_token_id
        elif alignment == 'aligned': expect = want[i] if inner else IGNORE
        else: expect = want[i + 1] if want[i] != ids.async_end and want[i + 1] != ids.async_end else IGNORE
        assert label == expect, (i, roles[i])


def test_random_padding_is_0_to_10(small, ids):
    rng = torch.Generator().manual_seed(0)
    pads = [int((plan_layout([1], '<topic> a 1 </topic><async>b</async>', ids, small[1], generator=rng).ids == ids.pad).sum()) for _ in range(200)]
    assert min(pads) == 0 and max(pads) == 10 and len(set(pads)) == 11


@pytest.mark.parametrize('text, error', [('<topic> a 1 </topic><async>b</async> c', 'behind spans'), ('<topic> a </topic><async>b</async>', 'without a length'),
                                         ('<topic> a 1 </topic>', 'fewer spans'), ('<async>b</async>', 'more spans'), ('x<sync/>', 'nothing to wait')])
def test_rows_that_cannot_be(small, ids, text, error):
    with pytest.raises(PastaError, match=error): plan_layout([1], text, ids, small[1])


@pytest.mark.parametrize('bad', [dict(padding='some'), dict(padding=-1), dict(alignment='right')])
def test_bad_settings_of_rows(small, ids, bad):
    with pytest.raises(PastaError): plan_layout([1], 'a', ids, small[1], **bad)


ROW = 'Go: <topic> a 1 </topic><topic> bc 2 </topic><async>first</async><async>second one</async><sync/> end'


@pytest.mark.parametrize('alignment', ['aligned', 'shifted', 'shifted_input'])
@pytest.mark.parametrize('t', [0., .3, 1.])
def test_noise_and_labels_belong_together(small, ids, alignment, t):
    row = plan_layout([1, 2], ROW, ids, small[1], 'fill', alignment, eos_id=9)
    noisy, told = corrupt(row, t, ids.mask, torch.Generator().manual_seed(1), alignment)
    inner, masked = span_rows(row), noisy.ids == ids.mask
    assert not masked[~inner].any() and (noisy.ids == np.where(masked, ids.mask, row.ids)).all() and (t != 1 or masked[inner].all())
    where = {'aligned': masked, 'shifted': np.append(masked[1:], False), 'shifted_input': masked & (row.label != IGNORE)}[alignment]
    spans = ~np.array(row.table.causal)[row.segment]
    assert (told == where).all() and ((noisy.label != IGNORE) == np.where(spans, told, row.label != IGNORE)).all()
    assert (noisy.label[told] == row.ids[np.flatnonzero(told) + (alignment != 'aligned')]).all()


def test_noise_in_copies_leaves_the_clean_text_alone(small, ids):
    row = plan_layout([1, 2], ROW, ids, small[1], 'fill', eos_id=9)
    inplace, _ = corrupt(row, .6, ids.mask, torch.Generator().manual_seed(1))
    noisy, told = corrupt(row, .6, ids.mask, torch.Generator().manual_seed(1), copies=True)
    n, spans = len(row), ~np.array(row.table.causal)[row.segment]
    assert (noisy.ids[:n] == row.ids).all() and not told[:n].any() and (noisy.label[:n][spans] == IGNORE).all()
    logits, clean_, dirty = (layout_logits(small[0], x) for x in (noisy, row, inplace))
    assert torch.allclose(logits[:n], clean_, atol=1e-5) and torch.allclose(logits[n:], dirty[spans], atol=1e-5)
    assert all(not leak_test(small[0], noisy, name).leaks for name in noisy.table.names)
    packed = pack([noisy, noisy])
    assert np.array_equal(span_rows(packed)[:len(noisy)], span_rows(noisy))
    twice, told_ = corrupt(pack([row, row]), 1., ids.mask, copies=True)
    assert told_.sum() == 2 * span_rows(row).sum()


def test_training_rows_are_what_decoding_builds(small, ids, engine):
    "The row of the decoded answer has the segments' relations, positions and tokens of its record."
    r = told(small, ids, engine, 'One thing.', 'Another, longer.', max_new_tokens=200)
    row = plan_layout(r.record.token[:r.prompt_tokens], r.tagged_text, ids, small[1], 'fill')
    order = np.argsort([p for p, s in zip(r.record.position, r.record.slot)])
    record = [r.record.token[i] for i in order if r.record.slot[i] >= 0]
    assert row.ids.tolist()[:len(record)] == record and len(row) - len(record) == 0


# ---- from PASTA

@pytest.mark.parametrize('path', DEMONSTRATIONS, ids=lambda p: p.stem)
@pytest.mark.parametrize('counted', [True, False])
def test_demonstrations_become_plans(small, ids, path, counted):
    row = json.loads(path.read_text(encoding='utf-8'))
    made = to_plan(row, small[1] if counted else None)
    doc = parse(made['tagged_text'], 'plan', 'strict')
    assert plain(doc) == row['response'] and made['prompt'] == row['prompt']
    assert sum(isinstance(n, Topic) for n in doc.nodes) == row['tagged_text'].count('<promise')
    layout = plan_layout([1], made['tagged_text'], ids, small[1], 0)
    assert small[1].decode([i for i in layout.ids[1:] if i not in ids.kinds]).count(' 1 ') >= 0 and not isinstance(doc.nodes[-1], Sync)


def test_text_between_blocks_finds_a_place(small):
    p = lambda topic: f'<promise topic="{topic}" tokens="10"/><async>{topic}</async>'
    make = lambda text, **k: to_plan(dict(tagged_text=text), **k)['tagged_text']
    assert make(f'1. {p("x")}\n2. {p("y")}') == '1. <topic> x 1 </topic><topic> y 1 </topic><async>x</async><async>\n2. y</async>'
    assert make(f'{p("x")} and {p("y")}', glue=2) == '<topic> x 1 </topic><async>x</async><sync/> and <topic> y 1 </topic><async>y</async>'
    assert make(f'{p("x")}<sync/>{p("y")}!') == '<topic> x 1 </topic><async>x</async><sync/><topic> y 1 </topic><async>y</async><sync/>!'
    assert make('no plan at all') == 'no plan at all' and make('') == ''
    assert make(p('Top 10 &lt;topic> 3')) == '<topic> Top 10 &lt;topic> 3 1 </topic><async>Top 10 &amp;lt;topic> 3</async>'
    with pytest.raises(PlanError, match='990'): to_plan(dict(tagged_text=p('z' * 300) .replace('>zzz', '>' + 'z' * 1000)), small[1])
    with pytest.raises(GrammarError): make('<promise topic="a" tokens="10"/> b')


# ---- a pretrained model

@pytest.fixture(scope='module')
def pretrained(smollm2):
    model, tok = copy.deepcopy(smollm2[0]), copy.deepcopy(smollm2[1])
    add_tokens(model, tok, plan_tokens())
    return model, tok


@pytest.mark.smollm2
@pytest.mark.parametrize('alignment', ['aligned', 'shifted'])
def test_parity_on_smollm2(pretrained, alignment):
    model, tok = pretrained
    ids, engine = plan_ids(tok), Engine(model, tok, slots=512)
    script = {'main': write(tok, *plan(ids, ('sun', 1), ('rain', 1)), ids.sync, ' So')}
    ask = planned('<topic> two 2 </topic>', script=script, alignment=alignment, steps_ratio=.3, max_new_tokens=40, ignore_eos=True)
    r, other = clean(engine.run([ask, ar('Hello', max_new_tokens=2)], keep_logits=True))
    assert replay_noisy(model, r) < TOLERANCE and drift(model, r).tokens >= 1 and len(r.record.noisy) == r.counts['steps'] + 1 == 4
    assert not {ids.mask, ids.topic} & set(r.record.token[:r.prompt_tokens]) and ids.mask not in r.token_ids and r.counts['spans'] == 2


@pytest.mark.smollm2
def test_a_pretrained_head_is_shifted(pretrained):
    "Before any fine-tuning, the place before a masked token knows more of it than the masked place."
    from pasta_lib.losses import sft_loss
    model, tok = pretrained
    ids, loss = plan_ids(tok), {}
    text = '<topic> France 2 </topic><async>Paris is the capital of France. It lies on the river Seine and has two million people.</async>'
    for alignment in ('aligned', 'shifted', 'shifted_input'):
        row = plan_layout(chat_ids(tok, 'Tell me about Paris.'), text, ids, tok, 0, alignment)
        noisy, told = corrupt(row, .3, ids.mask, torch.Generator().manual_seed(0), alignment)
        loss[alignment] = float(sft_loss(layout_logits(model, noisy)[told], torch.from_numpy(noisy.label[told])))
    print(loss)
    assert loss['shifted'] < loss['aligned'] - 1


@pytest.mark.parametrize('options, words', [(dict(top_k=3), 'top_k in planned'), (dict(top_p=.5), 'top_p in planned'), (dict(steps_ratio=1e308), 'at most 1000'),
                                            (dict(length_scale=1e9), 'at most 1000'), (dict(order=above), 'use random')])
def test_options_that_no_span_can_follow(options, words):
    model, tok = tiny_model(layers=1, hidden=32, heads=2, kv_heads=2)
    add_tokens(model, tok, plan_tokens())
    r, = Engine(model, tok, slots=256).run([planned('Q', **options)])
    assert r.finish_reason == 'error' and words in str(r.error) and '\n' not in str(r.error)


# ---- nothing decoded is lost, and what is reported is what happened

def walked(engine, request, turns):
    "A request that is cancelled after so many turns; with its forwards in place."
    driver = Driver(engine, [request])
    for _ in range(turns): driver.turn()
    request.cancel()
    driver.turn()
    r, = driver.finished()
    return r


def honest(r, ids):
    "Every token with a slot was fed there; all that was chosen is there once; counts are of forwards that were made."
    fed = {(int(s), int(t)) for n in r.record.noisy for s, t in zip(n.queries.slots, n.queries.tokens)}
    denoised = [not r.record.table.causal[s] for s in r.record.segment]
    assert all((s, t) in fed for s, t, d in zip(r.record.slot, r.record.token, denoised) if d and s >= 0) or r.counts['stale_rows']
    slots = [s for s in r.record.slot if s >= 0]
    assert len(slots) == len(set(slots)) and ids.mask not in r.token_ids
    assert r.counts['rows'] == sum(len(n.queries.tokens) for n in r.record.noisy if MASK_IN(n, ids))
    assert r.counts['spans'] == len(r.counts['lengths']) == sum(t.parent is not None and t.finish_reason not in ('max_forks',) for t in r.record.threads)
    assert sum(r.record.token[i] == ids.sync for i in r.record.order) == r.tagged_text.count('<sync/>')


@pytest.mark.parametrize('commit', ['exact', 'fast'])
@pytest.mark.parametrize('turns', [7, 8, 9, 12, 18, 19, 20])
def test_a_cancel_before_or_after_the_commit_is_told_as_it_was(small, ids, commit, turns):
    "The plan takes 8 turns with its prompt, denoising 10 more, the commit is the next."
    engine = Engine(*small, slots=128, page_size=4)
    script = {'main': write(small[1], *plan(ids, ('a', 1)), ids.sync, 'xyz'), 'span 1': literal_ids(small[1], 'A' * 10)}
    r = walked(engine, planned('Q', script=script, order='left_to_right', commit=commit, max_new_tokens=99), turns)
    assert r.finish_reason == 'cancelled' and (ids.sync in r.token_ids) == (turns > 7)
    if turns < 8: return
    fed, at = turns > 18, r.record.token.index(ids.sync)
    assert (r.record.slot[at] >= 0) == fed and (r.record.threads[1].joined is not None) == fed
    assert r.counts['commit_rows'] == (12 if fed and commit == 'exact' else 0) and r.tagged_text.count('A') == min(10, turns - 8)
    honest(r, ids)
    balanced(engine)


@pytest.mark.parametrize('slots', range(8, 15))
def test_a_full_pool_while_spans_are_opened_or_committed(small, ids, slots):
    "Pages of one slot: the pool ends in the plan, in the first span, in the second, or at the sync."
    model, tok = small
    prompt = write(tok, 'Q')
    script = write(tok, *plan(ids, ('a', 1), ('b', 1)), ids.sync, 'x')
    size = len(prompt) + len(script) - 2 + 4 * (slots - 8)
    engine = Engine(model, tok, slots=size, page_size=1)
    r, = engine.run(planned(prompt, script={'main': script}, reserve=1, max_new_tokens=60, raw=True))
    said = [t for t, n in zip(r.record.token, r.record.thread) if n == 0][len(prompt):]
    assert said == script[:len(said)] and ids.sync in said and r.finish_reason in ('pool_full', 'length')
    honest(r, ids)
    balanced(engine)


def test_a_strict_reader_loses_no_token(small, ids, engine):
    script = write(small[1], 'so ', ids.sync)
    r, = engine.run(planned('Q', script={'main': script}, policy='strict'))
    assert isinstance(r.error, GrammarError) and r.token_ids == script


@pytest.mark.parametrize('room', [0, 1, 2, 3, 7, 12, 13, 25, 26, 27, 40])
def test_spans_end_where_the_models_positions_do(ids, room):
    from transformers import GPT2Config, GPT2LMHeadModel
    tok = tiny_model(vocab=VOCAB)[1]
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=None)).eval()
    ids, script = PlanIds(*range(200, 207)), write(tok, *plan(PlanIds(*range(200, 207)), ('a', 1), ('b', 1)), 205 - 1, 'xy')
    prompt = [7] * (64 - room - (len(script) - 3))
    r, = Engine(model, tok, slots=256).run(planned(prompt, script={'main': script}, tags=ids, max_new_tokens=99, ignore_eos=True), keep_logits=True)
    assert r.error is None and max(r.record.position) <= 64 and [n.masks for n in r.counts['lengths']] == [n for n in (min(10, room - 2), min(10, room - 14)) if n > 0]
    assert r.finish_reason == 'length' and replay_noisy(model, r) < TOLERANCE
    assert all(p < 64 for p, s in zip(r.record.position, r.record.slot) if s >= 0)


@pytest.mark.parametrize('make', [lambda ids, tok: to_plan({}), lambda ids, tok: to_plan(None), lambda ids, tok: to_plan(dict(tagged_text=3)),
                                  lambda ids, tok: plan_layout([1], None, ids, tok), lambda ids, tok: plan_layout(None, 'a', ids, tok),
                                  lambda ids, tok: plan_pieces(7, ids, tok), lambda ids, tok: unsaid(tok, VOCAB, 5)])
def test_what_is_no_row_no_answer_and_no_ids(small, ids, make):
    with pytest.raises(PastaError) as error: make(ids, small[1])
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('bad', [dict(tags=5), dict(script={'main': [-1]}), dict(script={'main': ['x']}), dict(script={'main': [VOCAB]}), dict(script={'main': [True]}),
                                 dict(script={'span 1': [1.5]})])
def test_a_bad_request_fails_alone(small, engine, bad):
    r, other = engine.run([planned('Q', **bad), ar('Q', max_new_tokens=2)])
    assert r.finish_reason == 'error' and isinstance(r.error, PastaError) and '\n' not in str(r.error) and other.finish_reason == 'length' and not other.error
    balanced(engine)


def test_several_blocks_of_a_span_at_once(small, ids, engine):
    "Multi-block decoding inside spans: never outside the running set, with parity, and one block at a time where the buffer has one."
    script = write(small[1], *plan(ids, ('a', 2), ('b', 1)), ids.sync, 'so', small[1].eos_token_id)
    for buffer in (1, 2, 4):
        r = clean(engine.run(planned('Q', script={'main': script}, order=running_set(5, buffer, .02), max_new_tokens=90), keep_logits=True))
        assert replay_noisy(small[0], r) < TOLERANCE and drift(small[0], r).largest < TOLERANCE and ids.mask not in r.token_ids
        for n in (1, 2):
            steps = np.array([s for s, thread, kind in zip(r.record.step, r.record.thread, r.record.kind) if thread == n and kind == 'sampled'])
            first, done = steps.reshape(-1, 5).min(1), steps.reshape(-1, 5).max(1)
            assert (first[buffer:] > done[:-buffer]).all() and (np.diff(first) >= 0).all()
    balanced(engine)

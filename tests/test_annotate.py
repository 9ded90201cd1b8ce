"Annotators: form on random markdown, likelihood against two ordinary passes, Gemini over real HTTP with injected faults."
import http.server
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import pasta_lib.annotate as module
from pasta_lib.annotate import (Drop, Gemini, GeminiClient, GeminiError, Likelihood, RateLimit, Structural, annotate,
                                area_under_curve, asked_wait, block_length, carry_over, counter, dependence, draw_dependence,
                                find_parts, hidden_layout, in_sequence, keep_only, load_demonstrations, measured_parts,
                                refusal, repeats, split_block, tidy, topic_of, unfenced, verify, visible_layout)
from pasta_lib.core import PastaError
from pasta_lib.jobs import read_jsonl
from pasta_lib.masks import dense_mask, layout_logits
from pasta_lib.tags import Async, Document, Promise, Sync, Text, lint, parse, plain, render
from pasta_lib.tasks import usable_answer

ROOT = Path(__file__).resolve().parents[1]
TAGS = re.compile(r'<promise topic="[^"]*" tokens="\d+"/>|</?async>|<sync/>')
WORDS = ('copper lake walks green seven quiet music bread window early river paper harbour violin cheese winter orange doctor planet '
         'basket silver garden rocket thunder pencil castle monkey yellow feather market island button tunnel spring leather bridge').split()


def sentence(n, words=10):
    return ' '.join(random.Random(n).sample(WORDS, words)) + f' in place {n} of town {n}.'


def one(text, prompt='What is there?', **row):
    return Structural()(dict(id='x', prompt=prompt, text=text, **row))


def blocks(row): return [node.text for node in parse(row['tagged_text']).nodes if isinstance(node, Async)]


def topics(row): return [node.topic for node in parse(row['tagged_text']).nodes if isinstance(node, Promise)]


# ---- verification
def test_verify_needs_the_text_the_grammar_and_the_count():
    good = dict(response='Hi: a b', tagged_text='Hi:<promise topic="a" tokens="10"/><async> a</async> b', chunks=1)
    assert verify(good) is good
    for change, reason in [(dict(response='Hi: a  b'), 'text differs'), (dict(chunks=0), 'wrong count'),
                           (dict(tagged_text='Hi: a b<sync/>'), 'lint: sync-without-fork'), (dict(response='Hi: a b c'), 'text differs')]:
        with pytest.raises(Drop) as e: verify(good | change)
        assert e.value.reason == reason


def test_a_row_needs_an_answer_and_keeps_what_it_knows():
    for row in (dict(id='a'), dict(id='a', text=' \n'), dict(id='a', text=None, reference=5)):
        with pytest.raises(Drop, match='no response'): Structural()(row)
    row = Structural()(dict(id='a', prompt='p', reference='Just so.', sample=3, source='s', kind='plain', seed=4))
    assert row == dict(id='a', prompt='p', response='Just so.', tagged_text='Just so.', annotator='structural', chunks=0,
                       reason='no parts', kind='plain', source='s', sample=3)


# ---- form
@pytest.mark.parametrize('marker', ['{n}. ', '{n}) ', '- ', '* ', '• ', '+ ', '  {n}. '])
@pytest.mark.parametrize('gap', ['\n', '\n\n'])
@pytest.mark.parametrize('heading', ['', '**Head {n}**: ', '**Head {n}:** ', '**Head {n}** - ', 'Head {n}: ', '*Head {n}*: ', '__Head {n}__: '])
def test_lists_of_every_form(marker, gap, heading):
    items = [marker.format(n=n) + heading.format(n=n) + sentence(n) for n in range(1, 5)]
    text = f'Some things:\n\n{gap.join(items)}\n\nSo these are they.'
    row = one(text)
    assert row['chunks'] == 4 and row['tagged_text'].startswith('Some things:<promise')
    assert blocks(row) == ['\n\n' + items[0], *[gap + item for item in items[1:]]]
    assert row['tagged_text'].endswith('</async><sync/>\n\nSo these are they.')
    if heading: assert topics(row) == [f'Head {n}' for n in range(1, 5)]
    assert not lint(row['tagged_text']) and TAGS.sub('', row['tagged_text']) == text


def test_nothing_follows_no_sync_and_trailing_space_stays_inside():
    items = '\n'.join(f'- {sentence(n)}' for n in range(3))
    row = one(items + '\n')
    assert row['chunks'] == 3 and '<sync/>' not in row['tagged_text'] and row['tagged_text'].startswith('<promise')
    assert row['tagged_text'].endswith('\n</async>')


def test_items_of_several_lines_and_paragraphs():
    text = f'1. **A**\n\n{sentence(1)}\n\n   - {sentence(11)}\n2. **B**\n\n{sentence(2)}\n\n   - {sentence(12)}\n\nThat is all of it.'
    row = one(text)
    assert row['chunks'] == 2 and topics(row) == ['A', 'B'] and row['tagged_text'].endswith('<sync/>\n\nThat is all of it.')
    assert sentence(12) in blocks(row)[1]
    nested = f'- {sentence(1)}\n  - {sentence(2)}\n- {sentence(3)}\nand more of it.\n\nEnd of list here.'
    assert [b.count('\n') for b in blocks(one(nested))] == [1, 2]
    loose = f'1. {sentence(1)}\n- {sentence(2)}\n2. {sentence(3)}\n- {sentence(4)}'
    assert len(blocks(one(loose))) == 2


def test_a_list_in_one_line():
    text = f'Three: 1. **A**: {sentence(1)} 2. {sentence(2)} 3. {sentence(3)}\n\nThat is all.'
    row = one(text)
    assert row['chunks'] == 3 and blocks(row)[1] == f' 2. {sentence(2)}' and row['tagged_text'].endswith('<sync/>\n\nThat is all.')
    assert one(text.split('\n')[0])['chunks'] == 3 and one(f'In 2. {sentence(1)} 3. {sentence(2)}')['chunks'] == 0
    assert one(f'1. {sentence(1)} 2. {sentence(2)}')['chunks'] == 0 and one(f'1. {sentence(1)}\nmore 2. {sentence(2)} 3. {sentence(3)}')['chunks'] == 0


def test_sections():
    text = f'# Title\n\nHello.\n\n## Introduction\nWe begin.\n\n## One\n{sentence(1)}\n\n## 2. Two\n{sentence(2)}\n### Sub\n{sentence(3)}\n\n## Conclusion\nDone.'
    row = one(text)
    assert topics(row) == ['One', 'Two'] and '### Sub' in blocks(row)[1] and row['tagged_text'].endswith('<sync/>\n\n## Conclusion\nDone.')
    text = f'**Rain**\n{sentence(1)}\n\n**Snow:**\n{sentence(2)}\n\nOverall, both are wet.'
    assert topics(one(text)) == ['Rain', 'Snow'] and '<sync/>\n\nOverall' in one(text)['tagged_text']
    assert one('## Only\n' + sentence(1))['chunks'] == 0


def test_two_groups_wait_for_prose_but_not_for_a_heading():
    first, second = ('\n'.join(f'- {sentence(n)}' for n in ns) for ns in ((1, 2), (3, 4)))
    heading = one(f'Pros:\n{first}\n\nCons:\n{second}')['tagged_text']
    prose = one(f'Pros:\n{first}\n\nThat was good to know.\n\nCons:\n{second}\n\nThe end of it.')['tagged_text']
    assert heading.count('<sync/>') == 0 and heading.count('<promise') == 4 and '</async>\n\nCons:<promise' in heading
    assert prose.count('<sync/>') == 2 and '<sync/>\n\nThat was' in prose and '<sync/>\n\nThe end' in prose


def test_paragraphs_need_something_in_common():
    same = '\n\n'.join(f'For {w}, {sentence(n)}' for n, w in enumerate(['speed', 'comfort', 'money']))
    another = '\n\n'.join([f'One way: {sentence(1)}', f'Another way: {sentence(2)}', f'A third way: {sentence(3)}'])
    assert one('See.\n\n' + same)['chunks'] == 3 and one(another)['chunks'] == 3
    openers = '\n\n'.join(['First, ' + sentence(1), 'Moreover, ' + sentence(2), 'Furthermore, ' + sentence(3)])
    assert one(openers)['chunks'] == 3
    assert one('\n\n'.join([sentence(1), sentence(2), sentence(3)]))['reason'] == 'no parts'
    assert one('roses are red\nsky\n\nroses are blue\nsea\n\nroses are dead\nsee')['reason'] == 'no parts'


@pytest.mark.parametrize('extra, reason', [
    ('```python\nx\n```', 'code'), ('def f(x):', 'code'), ('| a | b |', 'table'), ('So x = 4 here.', 'maths'), ('We get 3 + 4.', 'maths'),
    (r'\[ x \]', 'maths'), ('Step 2: go', 'steps'), ('**Ingredients:**', 'steps'), ('Use the option above.', 'refers'), ('As mentioned above, no.', 'refers')])
def test_what_speaks_against_promises(extra, reason):
    items = '\n'.join(f'- {sentence(n)}' for n in range(3))
    row = one(f'{extra}\n\n{items}')
    assert (row['chunks'], row['reason'], row['tagged_text']) == (0, reason, row['response'])
    assert one(items)['chunks'] == 3 and Structural(refuse=False)(dict(id=1, text=f'{extra}\n\n{items}'))['chunks'] == 3


def test_kinds_prompts_and_sequence():
    items = '\n'.join(f'- {sentence(n)}' for n in range(3))
    for kind in ('steps', 'code', 'maths'): assert one(items, kind=kind)['reason'] == kind
    assert one(items, prompt='A recipe, please')['reason'] == 'steps'
    assert one(items, prompt='Write me a short poem')['reason'] == 'poem'
    assert one(items, prompt=None)['chunks'] == 3
    ordered = '\n'.join(f'- {w}, {sentence(n)}' for n, w in enumerate(['First', 'Then', 'Lake']))
    assert one(ordered)['reason'] == 'steps' and not in_sequence(find_parts('\n'.join(f'- First, {sentence(n)}' for n in range(3)))[0])


def test_short_long_repeated_and_same():
    assert one('- eggs\n- milk\n- flour')['reason'] == 'short'
    with pytest.raises(Drop, match='repeats'): one('\n'.join(f'- {sentence(n % 2)}' for n in range(4)))
    same = '\n'.join(f'- Copper lake walks green {" ".join(WORDS[n:n + 8])}' for n in (4, 12, 20))
    assert one(same)['reason'] == 'same topics'
    twelve = one('\n'.join(f'{n}. {n * 7} {sentence(n)} {n * 13} {n * 17} {n * 19} {n * 23} {n * 29}' for n in range(1, 13)))
    assert twelve['chunks'] == 8 and '</async><sync/>\n9. ' in twelve['tagged_text'] and twelve['tagged_text'].count('<sync/>') == 1
    assert Structural(most=3)(dict(id=1, text=twelve['response']))['chunks'] == 3


def test_topics_and_lengths():
    count = counter()
    assert topic_of('The Benefits of Drinking Plenty of Water', '', count) == 'The Benefits of Drinking'
    assert topic_of('', 'Drink a lot of cold water every day', count) == 'Drink lot cold water'
    assert topic_of('', 'of the', count) == 'of' and topic_of('', '…', count) == 'part' and len(topic_of('', 'x' * 99, count)) == 40
    assert [block_length('w ' * n, lambda t: len(t.split())) for n in (1, 8, 9, 500)] == [10, 10, 20, 160]
    shared = '\n'.join(f'- **Tip**: {WORDS[n]} {WORDS[n + 1]} {sentence(n)}' for n in range(3))
    assert len(set(topics(one(shared)))) == 3


def test_lengths_are_those_of_the_tokens(tiny):
    row = Structural(tiny[1])(dict(id=1, text='\n'.join(f'- {sentence(n, 2)}' for n in range(3))))
    said = [node for node in parse(row['tagged_text']).nodes]
    for promise, block in zip(said[::2], said[1::2]):
        assert promise.tokens == -(-(len(block.text.encode()) + 2) // 10) * 10 and len(promise.topic) <= 6


def test_tags_in_an_answer_are_words():
    items = '\n'.join(f'- `<async>` {sentence(n)} <sync/> &lt;sync/>' for n in range(3))
    row = one(items + '\n\n<promise topic="x" tokens="10"/>')
    assert row['chunks'] == 3 and plain(parse(row['tagged_text'])) == row['response']


pieces = st.sampled_from(['1. ', '2. ', '3) ', '- ', '* ', '## ', '# ', '**', '**Head**: ', '**Head**\n', 'Head: ', '  ', '\t', '\n', '\n\n', '\r\n', '`', '```\n', '|',
                          ' = ', 'In conclusion, ', 'Then ', 'Another ', '<sync/>', '<async>', '</async>', '<promise topic="', '" tokens="5"/>', '&lt;', '&amp;', '#96;', 'é ', '漢字 ',
                          '\u2028', '\x0b', *[sentence(n) for n in range(6)], *[w + ' ' for w in WORDS]])
lines = st.builds(lambda marker, n, words, end: f'{marker.format(n=n)}{sentence(n, words)}{end}',
                  st.sampled_from(['{n}. ', '- ', '* **Head {n}**: ', '## Head {n}\n', '**Head {n}**\n', '', 'For {n}, ', '  - ']),
                  st.integers(1, 9), st.integers(1, 14), st.sampled_from(['\n', '\n\n', '\n\n\n', ' \n']))
markdown = st.lists(st.one_of(pieces, lines, st.text(max_size=5)), min_size=1, max_size=30).map(''.join)


@settings(max_examples=150, deadline=None)
@given(markdown, st.booleans())
def test_random_markdown_always_gives_its_text_back(text, refuse):
    try: row = Structural(refuse=refuse, least=3)(dict(id=1, prompt='', text=text))
    except Drop as drop:
        assert drop.reason in ('repeats', 'no response')
        return
    assert row['response'] == text == plain(parse(row['tagged_text'])) and not lint(row['tagged_text'])
    assert row['chunks'] == 0 and row['reason'] or 2 <= row['chunks'] <= 8 and 'reason' not in row
    for block in blocks(row): assert block.strip()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=6), st.lists(st.booleans(), min_size=30, max_size=30))
def test_taking_promises_back_keeps_the_text(stages, keep):
    nodes, n = [], 0
    for size, follows in stages:
        for _ in range(size):
            nodes += [Promise(f't{n}', 10), Async(f' block{n}')]
            n += 1
        nodes += [Sync(), Text(f' main{n}')] * follows
    out = keep_only(nodes, keep)
    assert plain(Document(out)) == plain(Document(nodes)) and not lint(render(Document(out)))
    for stage in re.split('<sync/>', render(Document(out))): assert stage.count('<async>') != 1
    kept = {node.topic for node in out if isinstance(node, Promise)}
    assert kept <= {f't{m}' for m in range(n) if keep[m]} and tidy(out) == out


# ---- jobs
def test_annotate_counts_resumes_and_shards(tmp_path):
    rows = [dict(id=n, text='\n'.join(f'- {sentence(m + n)}' for m in range(3)) if n % 3 else '') for n in range(12)]
    report = annotate(rows, Structural(), tmp_path / 'a.jsonl', progress=False)
    assert (report.rows, report.written, report.dropped) == (12, 8, {'no response': 4})
    assert annotate(rows, Structural(), tmp_path / 'a.jsonl', progress=False).resumed == 12
    for shard in ('1/2', '2/2'): annotate(rows, Structural(), tmp_path / 'b.jsonl', shard=shard, workers=3, progress=False)
    key = lambda path: sorted(json.dumps(row) for row in read_jsonl(path))
    assert key(tmp_path / 'a.jsonl') == key(tmp_path / 'b.jsonl')
    samples = [dict(id='p', sample=n, text='Yes.') for n in range(3)]
    assert annotate(samples, Structural(), tmp_path / 'c.jsonl', key=('id', 'sample'), progress=False).written == 3
    bad = lambda row: dict(id=row['id'], response=row['text'], tagged_text='changed', chunks=0)
    assert annotate(samples[:1], bad, tmp_path / 'd.jsonl', progress=False).dropped == {'text differs': 1}


BAD = [(dict(text=None), 'no response'), (dict(text=['a', 'list']), 'no response'), (dict(finish_reason='eos'), 'no response'), (dict(text=''), 'no response'),
       (dict(prompt=5, text='Yes.'), 'prompt is no text'), (dict(prompt=['Hello?'], text='Yes.'), 'prompt is no text'), (dict(prompt=0, text='Yes.'), 'prompt is no text'),
       (dict(text='half \ud83d'), 'half a character'), (dict(prompt='\ude00?', response='Yes.'), 'half a character')]


@pytest.mark.parametrize('row, reason', BAD)
def test_one_bad_row_is_dropped(row, reason, tmp_path, tiny):
    rows = [dict(id=0, text='Yes.'), dict(id=1) | row, dict(id=2, prompt=None, text='No. \U0001f600')]
    for n, annotator in enumerate((Structural(tiny[1]), lambda row: Structural(tiny[1])(usable_answer(row) if 'finish_reason' in row else row))):
        report = annotate(rows, annotator, tmp_path / f'{n}.jsonl', progress=False)
        assert (report.written, report.dropped) == (2, {reason: 1})


def test_annotators_are_not_mixed(tmp_path):
    rows = [dict(id=n, text='Yes.') for n in range(3)]
    annotate(rows[:1], Structural(), tmp_path / 'a.jsonl', progress=False, made_by=dict(annotator='structural'))
    with pytest.raises(PastaError, match="annotator was 'structural' and is now 'gemini'"):
        annotate(rows, Structural(), tmp_path / 'a.jsonl', progress=False, made_by=dict(annotator='gemini'))
    with pytest.raises(PastaError, match='workers=0'): annotate(rows, Structural(), tmp_path / 'b.jsonl', workers=0, progress=False)


# ---- likelihood
def test_hidden_layout_hides_siblings_only():
    parts = [('text', [9, 8]), ('chunk', [7, 6]), ('text', [5]), ('chunk', [4]), ('sync', []), ('chunk', [3]), ('chunk', [2, 1]), ('text', [0])]
    layout = hidden_layout([1, 1], parts)
    kind = ['m', 'm', 'm', 'm', 'a', 'a', 'm', 'b', 'c', 'd', 'd', 'm']        # who wrote it
    reads = dict(a='ma', b='mb', c='mabc', d='mabd')
    mask = dense_mask(layout).numpy()
    for q, k in np.ndindex(12, 12):
        own = reads.get(kind[q], 'm' if q < 11 else 'mab')
        assert mask[q, k] == (k <= q and kind[k] in own), (q, k)
    assert layout.ids.tolist() == [1, 1, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0] and layout.position.tolist() == list(range(12))
    assert (dense_mask(visible_layout(layout)).numpy() == np.tri(12, dtype=bool)).all()


def test_dependence_against_two_plain_passes(tiny):
    model, tok = tiny
    row = Structural(tok)(dict(id=1, prompt='Why?', text='See:\n- red bread is fine indeed\n- blue lakes are far away\n- ten owls see all of it\n\nThus.'))
    costs, parts, places = dependence(model, tok, row, topic_free=False), *measured_parts(row, tok)
    from pasta_lib.models import chat_ids
    prompt = chat_ids(tok, 'Why?')
    whole = [i for _, ids in parts for i in ids]
    assert bytes(whole).decode() + '\n\nThus.' == row['response']

    def logp(ids, positions):
        import torch
        with torch.no_grad():
            return model(input_ids=torch.tensor([ids]), position_ids=torch.tensor([positions]), attention_mask=torch.ones(1, len(ids))).logits[0].log_softmax(-1).double().numpy()
    base, chunks, at = prompt + parts[0][1], [ids for kind, ids in parts if kind == 'chunk'], len(prompt) + len(parts[0][1])
    full = logp(prompt + whole, list(range(len(prompt) + len(whole))))
    for ids, (first, second, end), cost in zip(chunks, places, costs):
        alone = logp(base + ids, [*range(len(base)), *range(at, at + len(ids))])        # the prefix and this chunk, siblings left out
        skip = len(prompt) + first - at
        body = ids[skip:]
        assert len(body) == end - first and first < second < end
        mine = [alone[len(base) + skip + n - 1, token] for n, token in enumerate(body)]
        theirs = [full[at + skip + n - 1, token] for n, token in enumerate(body)]
        assert abs(np.mean(theirs) - np.mean(mine) - cost) < 1e-4
        at += len(ids)
    assert abs(costs[0]) < 1e-5 and len(costs) == 3


def test_likelihood_takes_promises_back(tiny, monkeypatch):
    model, tok = tiny
    row = dict(id=1, prompt='?', text='A:\n' + '\n'.join(f'- {sentence(n)}' for n in range(4)) + '\n\nEnd.')
    for costs, chunks in [([0, .1, .2, .3], 4), ([0, .1, 2, .1], 2), ([0, 2, 2, 2], 0), ([0, 2, .1, .1], 2)]:
        monkeypatch.setattr(module, 'dependence', lambda *_: costs)
        out = Likelihood(model, tok, threshold=.5)(row)
        assert (out['chunks'], out['annotator'], out['costs']) == (chunks, 'likelihood', costs)
        assert ('reason' in out) == (chunks == 0) and verify(out)
    assert Likelihood(model, tok)(dict(id=1, text='Yes.')) == Structural(tok)(dict(id=1, text='Yes.')) | dict(annotator='likelihood')


def test_area_under_curve_and_picture():
    assert area_under_curve([1, 2, 3, 4], [0, 0, 1, 1]) == 1 and area_under_curve([1, 1], [0, 1]) == .5 and area_under_curve([2, 1], [0, 1]) == 0
    with pytest.raises(PastaError): area_under_curve([1], [True])
    ax = draw_dependence([('a', [.1, .9], [False, True]), ('b', [.3], [False])], .6)
    assert len(ax.patches) == 3 and [t.get_text() for t in ax.get_xticklabels()] == ['a', 'b']


def test_cases_are_what_they_say():
    cases = read_jsonl(ROOT / 'data' / 'dependence_cases.jsonl')
    separate = [case for case in cases if not any(case['dependent'])]
    assert len(cases) >= 24 and len(separate) * 2 == len(cases) == len({case['id'] for case in cases})
    for case in cases:
        row = Structural(refuse=False)(case)
        assert row['chunks'] == len(case['dependent']) == 3 and not case['dependent'][0], case['id']


@pytest.mark.smollm2
def test_stories_cost_more_than_lists(smollm2):
    model, tok = smollm2
    cases = {case['id']: case for case in read_jsonl(ROOT / 'data' / 'dependence_cases.jsonl')}
    cost = {name: max(dependence(model, tok, Structural(tok, refuse=False)(cases[name]))) for name in ('planets', 'rooms', 'lighthouse', 'apples')}
    assert max(cost['planets'], cost['rooms']) < min(cost['lighthouse'], cost['apples']) - .2


# ---- demonstrations
def test_demonstrations_give_their_text_back(tmp_path):
    rows = load_demonstrations()
    assert len(rows) == 7
    for row in rows:
        assert TAGS.sub('', row['tagged_text']) == row['response'] and not lint(row['tagged_text'])
        for node in parse(row['tagged_text']).nodes:
            if isinstance(node, Promise): assert len(node.topic.split()) <= 5 and node.tokens % 10 == 0
    covers = ' '.join(row['covers'] for row in rows)
    for word in ('list', 'paragraphs', 'dependent steps', 'code', 'refusal', 'unequal', 'two groups'): assert word in covers
    assert sorted(row['chunks'] for row in rows)[:2] == [0, 0] and max(row['tagged_text'].count('<sync/>') for row in rows) == 2
    with pytest.raises(PastaError, match='no demonstrations'): load_demonstrations(tmp_path)


@pytest.mark.smollm2
def test_demonstrated_lengths(smollm2):
    count = counter(smollm2[1])
    for row in load_demonstrations():
        nodes = parse(row['tagged_text']).nodes
        for promise, block in zip(nodes, nodes[1:]):
            if isinstance(promise, Promise): assert promise.tokens == block_length(block.text, count), (row['covers'], promise, count(block.text) + 2)


# ---- Gemini, over HTTP
def answer(text, finish='STOP', **more):
    return dict(candidates=[dict(finishReason=finish, content=dict(role='model', parts=[dict(text=text)]), **more)])


def tag(text): return Structural()(dict(id='', text=text))['tagged_text']


def asked_text(request): return request['contents'][-1]['parts'][0]['text'].split('\n\nText:\n', 1)[1]


class Server:
    """Speaks `POST /v1beta/models/MODEL:generateContent`. `script(request, number of this text's call)` returns what to do: a dict of
    `body` (dict, str or bytes), `status`, `headers`, `cut` (bytes sent), `delay` (seconds)."""
    def __init__(self, script):
        self.script, self.requests, self.times, self.counts, self.lock = script, [], [], {}, threading.Lock()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = 'HTTP/1.1'

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
                text = asked_text(request)
                with outer.lock:
                    outer.times.append(time.monotonic())
                    outer.requests.append((self.path, dict(self.headers), request))
                    outer.counts[text] = number = outer.counts.get(text, 0) + 1
                act = outer.script(request, number)
                time.sleep(act.get('delay', 0))
                body = act['body'] if isinstance(act['body'], bytes) else (act['body'] if isinstance(act['body'], str) else json.dumps(act['body'])).encode()
                try:
                    self.send_response(act.get('status', 200))
                    for name, value in {'Content-Type': 'application/json', 'Content-Length': str(len(body)), **act.get('headers', {})}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(body[:act.get('cut', len(body))])
                except (BrokenPipeError, ConnectionResetError): pass
                if 'cut' in act or act.get('delay'): self.close_connection = True

            def log_message(self, *args): pass
        self.http = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.url = f'http://127.0.0.1:{self.http.server_port}'

    def __enter__(self): return self
    def __exit__(self, *_): self.http.shutdown(), self.http.server_close()


def client(server, **options):
    return GeminiClient(**dict(key='a key', endpoint=server.url, per_minute=None, first_wait=.005, timeout=5) | options)


TEXT = 'There are three:\n' + '\n'.join(f'{n}. {sentence(n)}' for n in (1, 2, 3)) + '\n\nThat is all there is.'
FAULTS = dict(
    busy=dict(status=429, body=dict(error=dict(code=429, message='slow down', status='RESOURCE_EXHAUSTED'))),
    busy_header=dict(status=429, body=dict(error=dict(code=429, message='slow down')), headers={'Retry-After': '0.2'}),
    busy_detail=dict(status=429, body=dict(error=dict(code=429, message='x', details=[{'@type': 'type.googleapis.com/google.rpc.RetryInfo', 'retryDelay': '0.2s'}]))),
    broken=dict(status=500, body=dict(error=dict(code=500, message='internal'))),
    unavailable=dict(status=503, body='<html>503</html>'),
    odd=dict(status=502, body='"not an object"'),
    cut=dict(body=answer('x' * 100), cut=40),
    silence=dict(body=answer('x'), cut=0),
    no_json=dict(body='<html>hello</html>'),
    half_json=dict(body='{"candidates": [{"content"'),
    wrong_json=dict(body=dict(candidates=5)),
    no_utf8=dict(body=b'{"candidates": "\xff\xfe'),
    late=dict(body=answer('x'), delay=1.))


@pytest.mark.parametrize('fault', FAULTS)
def test_what_passes_is_tried_again(fault):
    with Server(lambda request, number: FAULTS[fault] if number <= 2 else dict(body=answer(tag(asked_text(request))))) as server:
        gemini = Gemini(client(server, timeout=.3 if fault == 'late' else 5))
        row = gemini(dict(id='a', prompt='Which?', text=TEXT))
        assert row['chunks'] == 3 and row['annotator'] == 'gemini' and row['repairs'] == [] and gemini.client.calls == 3
        if fault in ('busy_header', 'busy_detail'): assert min(np.diff(server.times)) >= .19


def test_the_request_is_gemini_s_own(monkeypatch):
    monkeypatch.setenv('GEMINI_API_KEY', 'from the environment')
    monkeypatch.delenv('GOOGLE_API_KEY', raising=False)
    with Server(lambda request, number: dict(body=answer(asked_text(request)))) as server:
        row = Gemini(GeminiClient(model='gemini-x', endpoint=server.url, per_minute=None))(dict(id='a', prompt='Which <sync/>?', text='The tag <sync/> waits.'))
        path, headers, request = server.requests[0]
    assert path.startswith('/v1beta/models/gemini-x:generateContent') and headers['x-goog-api-key'] == 'from the environment'
    assert [turn['role'] for turn in request['contents']] == ['user', 'model'] * 7 + ['user'] and request['generationConfig']['temperature'] == 0
    assert 'promise' in request['systemInstruction']['parts'][0]['text'] and asked_text(request) == 'The tag &lt;sync/> waits.'
    assert row['chunks'] == 0 and row['reason'] == 'left whole' and row['response'] == 'The tag <sync/> waits.'


@pytest.mark.parametrize('body, reason', [
    (dict(promptFeedback=dict(blockReason='SAFETY')), 'blocked'), (dict(candidates=[]), 'no candidates'), ({}, 'no candidates'),
    (answer('', 'SAFETY'), 'blocked'), (answer('x', 'RECITATION'), 'blocked'), (answer(TEXT[:40], 'MAX_TOKENS'), 'reply too long'),
    (dict(candidates=[dict(finishReason='STOP')]), 'empty reply'), (answer(' \n'), 'empty reply'),
    (answer(TEXT[:-20]), 'text differs'), (answer(tag(TEXT).replace('three', 'four')), 'text differs'), (answer('Sure! ' + tag(TEXT)), 'text differs')])
def test_what_cannot_be_used_is_dropped_with_its_reason(body, reason, tmp_path):
    with Server(lambda *_: dict(body=body)) as server:
        report = annotate([dict(id='a', prompt='?', text=TEXT)], Gemini(client(server)), tmp_path / 'out.jsonl', progress=False)
        assert report.dropped == {reason: 1} and len(server.requests) == 1
        assert read_jsonl(tmp_path / 'out.jsonl.dropped.jsonl')[0]['reason'] == reason


@pytest.mark.parametrize('slip', [
    lambda t: t.replace('tokens="30"', 'tokens="about 27"', 1), lambda t: t.replace('<async>\n', '\n<async>'),
    lambda t: '```\n' + t + '\n```', lambda t: t.replace('\n', '\n\n'), lambda t: t + '\n', lambda t: t.replace('<sync/>', '<sync />'),
    lambda t: t.replace('<promise', '<promise', 1).replace('</async><promise', '</async> <promise'), lambda t: t.replace('<async>', '<async> ')])
def test_slips_are_mended(slip):
    with Server(lambda request, number: dict(body=answer(slip(tag(asked_text(request)))))) as server:
        row = Gemini(client(server))(dict(id='a', prompt='?', text=TEXT))
    assert row['response'] == TEXT == plain(parse(row['tagged_text'])) and not lint(row['tagged_text']) and row['chunks'] >= 2


def test_a_block_that_swallows_the_others_is_taken_back():
    with Server(lambda request, number: dict(body=answer(tag(asked_text(request)).replace('</async>', '', 1)))) as server:
        row = Gemini(client(server))(dict(id='a', prompt='?', text=TEXT))
    assert (row['chunks'], row['reason'], row['tagged_text']) == (0, 'one part', TEXT) and 'nested-promise' in row['repairs']


def test_lengths_are_counted_and_topics_cut():
    long = 'one two three four five six seven eight nine ten'
    reply = tag(TEXT).replace('tokens="30"', 'tokens="900"')
    reply = re.sub('topic="[^"]*"', f'topic="{long}"', reply, count=1)
    with Server(lambda *_: dict(body=answer(reply))) as server: row = Gemini(client(server))(dict(id='a', text=TEXT))
    assert [n.tokens for n in parse(row['tagged_text']).nodes if isinstance(n, Promise)] == [30, 30, 30] and len(topics(row)[0].split()) <= 6


def test_what_will_not_pass_stops_the_job(tmp_path, monkeypatch):
    rows = [dict(id=n, prompt='?', text=f'{n}. {TEXT}') for n in range(9)]
    for status in (400, 401, 403, 404):
        with Server(lambda *_: dict(status=status, body=dict(error=dict(code=status, message='no such thing')))) as server:
            with pytest.raises(GeminiError, match='no such thing'): annotate(rows, Gemini(client(server)), tmp_path / f'{status}.jsonl', progress=False)
            assert len(server.requests) == (3 if status == 401 else 1)          # google-auth itself asks thrice on 401
            assert not read_jsonl(tmp_path / f'{status}.jsonl')
    with Server(lambda *_: FAULTS['busy'] | dict(headers={'Retry-After': '3600'})) as server:
        with pytest.raises(GeminiError, match='asks to wait 3600'): Gemini(client(server))(rows[0])
    for name in ('GOOGLE_API_KEY', 'GEMINI_API_KEY'): monkeypatch.delenv(name, raising=False)
    with pytest.raises(GeminiError, match='no key'): GeminiClient()
    monkeypatch.setitem(sys.modules, 'google.ai', None)
    with pytest.raises(GeminiError, match='not installed'): GeminiClient(key='k').client()
    assert 'secret' not in repr(GeminiClient(key='secret'))


def test_one_bad_row_is_dropped_but_an_outage_stops(tmp_path):
    rows = [dict(id=n, prompt='?', text=f'{TEXT} {n}') for n in range(12)]
    with Server(lambda request, number: FAULTS['broken'] if asked_text(request).endswith(' 3') else dict(body=answer(tag(asked_text(request))))) as server:
        report = annotate(rows, Gemini(client(server, tries=3)), tmp_path / 'a.jsonl', progress=False)
        assert report.written == 11 and report.dropped == {'no reply': 1} and len(server.requests) == 14
    with Server(lambda *_: FAULTS['broken']) as server:
        with pytest.raises(GeminiError, match='3 rows failed'): annotate(rows, Gemini(client(server, tries=2, patience=3)), tmp_path / 'b.jsonl', progress=False)
    dead = Gemini(client(SimpleNamespace(url='http://127.0.0.1:9'), tries=1, patience=1))
    with pytest.raises(GeminiError, match='1 rows failed'): dead(rows[0])


def test_replies_are_cached_by_content(tmp_path):
    with Server(lambda request, number: dict(body=answer(tag(asked_text(request))))) as server:
        make = lambda **options: Gemini(client(server, cache=tmp_path / 'cache', **options))
        row = dict(id='a', prompt='?', text=TEXT)
        assert make()(row) == make()(row) and len(server.requests) == 1
        make()(row | dict(prompt='!')), make(model='other')(row)
        assert len(server.requests) == 3
    assert sum(path.stat().st_size for path in (tmp_path / 'cache').rglob('*.json')) < 8000         # not the demonstrations, again and again


def test_the_rate_holds_over_threads(tmp_path):
    rows = [dict(id=n, prompt='?', text=f'{TEXT} {n}') for n in range(8)]
    with Server(lambda request, number: dict(body=answer(tag(asked_text(request))))) as server:
        report = annotate(rows, Gemini(client(server, per_minute=1200)), tmp_path / 'a.jsonl', workers=4, progress=False)
        assert report.written == 8 and max(server.times) - min(server.times) >= 4 * .05          # eight at once without it
    now, slept = [0.], []
    limit = RateLimit(60, lambda: now[0], slept.append)
    for _ in range(3): limit.wait()
    limit.hold(10)
    limit.wait()
    now[0] = 50.
    limit.wait()
    assert slept == [1, 2, 10] and RateLimit().gap == 0


def test_waits_grow_and_are_shaken(monkeypatch):
    waits = []
    monkeypatch.setattr(module, 'time', SimpleNamespace(sleep=waits.append, monotonic=time.monotonic, time=time.time))
    c = GeminiClient(key='k', tries=9, first_wait=1)
    for attempt in range(1, 9): c.rest(ValueError('x'), attempt)
    for n, wait in enumerate(waits): assert .5 * min(60, 2 ** n) <= wait <= 1.5 * min(60, 2 ** n)
    assert len(set(waits)) == 8


def test_asked_wait():
    with_header = lambda value: SimpleNamespace(response=SimpleNamespace(headers={'Retry-After': value}))
    from email.utils import formatdate
    assert asked_wait(with_header('3')) == 3 and asked_wait(with_header('soon')) == 0 and asked_wait(ValueError()) == 0
    assert 18 < asked_wait(with_header(formatdate(time.time() + 20, usegmt=True))) <= 20
    assert asked_wait(SimpleNamespace(details=[dict(retryDelay='1.5s')])) == 1.5 and asked_wait(SimpleNamespace(details=[5, {}])) == 0


def test_fences_and_carrying_over():
    assert unfenced('```xml\na\nb\n```', 'a') == 'a\nb' and unfenced('```\na\n```', '```\na\n```') == '```\na\n```' and unfenced('a', 'a') == 'a'
    nodes = [Text(' a'), Promise('p', 10), Async(' '), Promise('q', 10), Async('b\n'), Text('\n'), Sync(), Text('c')]
    assert carry_over(nodes, 'a\n\nb c ') == [Text('a'), Promise('q', 10), Async('\n\nb'), Sync(), Text(' c ')]
    with pytest.raises(Drop, match='text differs'): carry_over([Text('a')], 'ab')


JOB = '''
import sys
from pasta_lib.annotate import *
rows = [dict(id=n, prompt='?', text=open(sys.argv[2]).read() + f' {n}') for n in range(40)]
client = GeminiClient(key='k', endpoint=sys.argv[1], per_minute=None, first_wait=.01, cache=sys.argv[4])
annotate(rows, Gemini(client), sys.argv[3], workers=3, progress=False)
'''


def test_kill_and_resume_loses_and_doubles_nothing(tmp_path):
    (tmp_path / 'text').write_text(TEXT)
    faults = ['busy', 'broken', 'cut', 'no_json']

    def script(request, number):
        n = int(asked_text(request).split()[-1])
        if n % 5 == 2 and number == 1: return FAULTS[faults[n // 5 % 4]]
        return dict(body=answer('' if n == 11 else tag(asked_text(request)), 'SAFETY' if n == 11 else 'STOP'), delay=.03)
    with Server(script) as server:
        command = [sys.executable, '-c', JOB, server.url, str(tmp_path / 'text'), str(tmp_path / 'out.jsonl'), str(tmp_path / 'cache')]
        environment = os.environ | dict(PYTHONPATH=str(ROOT), OMP_NUM_THREADS='1')
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 120
        while len(server.requests) < 15 and time.monotonic() < deadline and process.poll() is None: time.sleep(.005)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        first = len(read_jsonl(tmp_path / 'out.jsonl')) if (tmp_path / 'out.jsonl').read_bytes().endswith(b'\n') else 1
        assert process.returncode == -signal.SIGKILL and 0 < first < 39
        jobs = [dict(id=n, prompt='?', text=f'{TEXT} {n}') for n in range(40)]
        go = lambda: annotate(jobs, Gemini(client(server, cache=tmp_path / 'cache')), tmp_path / 'out.jsonl', workers=3, progress=False)
        done, again = go(), go()
    rows = read_jsonl(tmp_path / 'out.jsonl')
    assert sorted(row['id'] for row in rows) == [n for n in range(40) if n != 11] and all(verify(row)['chunks'] == 3 for row in rows)
    assert [row['id'] for row in read_jsonl(tmp_path / 'out.jsonl.dropped.jsonl')] == [11]
    assert done.resumed >= first - 1 and done.resumed + done.written + done.dropped.get('blocked', 0) == 40 and again.resumed == 40
    # a reply that came in before the kill is asked for once more at most: three were in flight
    assert len(server.requests) <= 40 + 8 + 3 + 1


@pytest.mark.parametrize('unit', ['-', '#', '!', '( ', '-|', '| ', '**', '\n', '1. ', '- a\n', 'a: ', 'step ', '\\[', 'a.\n\n', '**a:** b '])
def test_form_in_linear_time(unit):
    "Half a minute at the first try, for some of these."
    for annotator in (Structural(), Structural(refuse=False, paragraphs=True)):
        start = time.process_time()
        try: annotator(dict(id='1', prompt='p', response=(unit * 30_000)[:30_000] + '\n\nfoo'))
        except Drop: pass
        assert time.process_time() - start < 5

"""PASTA's runtime against a simulation written from the rules, the golden case, training's layout, and every kind of mistake.

The model keeps to a script where the threads' words matter: keys, masks and positions are real."""
import random
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from golden_case import TABLE, of_record, tuples
from test_engine import PROMPTS, build, deviation, empty
from pasta_lib.core import PastaError
from pasta_lib.engine import *
from pasta_lib.masks import dense_mask
from pasta_lib.metrics import critical_path, written_steps
from pasta_lib.models import add_tokens, byte_tokenizer, tiny_model
from pasta_lib.pasta import *
from pasta_lib.segments import IGNORE, Layout, pasta_layout
from pasta_lib.tags import GrammarError, MissingTags, Promise, Sync, AsyncEnd, TagVocab, encode, parse, pieces, plain


@pytest.fixture(scope='module')
def talker():
    model, tokenizer = tiny_model(seed=1, layers=1, hidden=32)
    add_tokens(model, tokenizer, TagVocab('compact'))
    return model, tokenizer


@pytest.fixture(scope='module')
def mute():
    "A tokenizer without tags: each byte is a token."
    return tiny_model(seed=1, layers=1, hidden=32)


def engine_of(pair, **options): return Engine(*pair, **{**dict(slots=2048, page_size=16), **options})


def write(tokenizer, text): return tokenizer.encode(text, add_special_tokens=False)


def script(tokenizer, main, *forks, eos=True):
    said = {'main': write(tokenizer, main) + [tokenizer.eos_token_id] * eos}
    return said | {f'fork {n + 1}': write(tokenizer, text) for n, text in enumerate(forks)}


def whole_layout(record):
    return Layout(record.token, record.segment, record.position, [IGNORE] * len(record.token), record.table)


# ---- the golden case

def test_golden_case(talker):
    model, tokenizer = talker
    tags, word = TagVocab('compact').bind(tokenizer), write(tokenizer, 'x')[0]
    promises = {tags.ids['" tokens="40"/>']: Promise('coordinates', 40), tags.ids['" tokens="30"/>']: Promise('length formula', 30)}
    class OneToken(Voice):
        "A single token is a whole promise, as in the figures."
        def reader(self, inside=None):
            said, heard = promises | {tags.sync: Sync(), tags.async_end: AsyncEnd()}, []
            return SimpleNamespace(push=lambda i: heard.append(i) or ([replace(said[i], span=(len(heard) - 1, len(heard)))] if i in said else []))
    one, two = promises
    said = {'main': [word, word, one, two, tags.sync, word, word], 'fork 1': [word] * 32 + [tags.async_end],
            'fork 2': [word] * 19 + [tags.async_end]}
    r, = engine_of(talker).run(pasta([word] * 19, script=said, tags=OneToken(tokenizer), max_new_tokens=60), keep_logits=True)
    assert of_record(r.record)[:79] == tuples(TABLE)
    assert [i for i, t in enumerate(r.record.thread) if t == 2][:3] == [25, 27, 29] and deviation(model, r) < 1e-4
    assert critical_path(r.record).clock == written_steps(r.record)
    assert r.threads == {'main': 'length', 'fork 1': 'end', 'fork 2': 'end'}


# ---- a simulation by hand

def random_document(rng, tokenizer, joined=False):
    "Main as a list of (kind, ids, k) and the forks' bodies, closing tags included."
    tags, main, bodies, open_ = TagVocab('compact').bind(tokenizer), [], [], 0
    words = lambda a, b: write(tokenizer, ''.join(rng.choice('abc de') for _ in range(rng.randint(a, b))))
    for _ in range(rng.randint(1, 3)):
        main.append(('text', words(0, 6), 0))
        for _ in range(rng.randint(0, 3)):
            k = rng.randint(1, 16) * 10
            ids = [tags.promise, *write(tokenizer, rng.choice(['a', 'topic', 'ö €'])), tags.end(k)]
            main += [('promise', ids, k), ('text', words(0, 3), 0)]
            bodies.append(words(0, 14) + [tags.async_end])
            open_ += 1
        if open_ and rng.random() < .7 or not open_ and not joined and rng.random() < .2:
            main.append(('sync' if open_ else 'text', [tags.sync], 0))
            open_ = 0
    main.append(('text', words(1, 5), 0))
    return main, bodies


def simulate(prompt, main, bodies, opening, closing, eos, constant=None, longest=False, limit=None):
    """The rules, thread by thread. Rows in the order of the pool: dict(token, position, slot, step, thread, kind, sees);
    `sees` are the rows that a token may read. Tokens that never enter the pool come last, with slot -1."""
    rows, loose = [], []
    def put(thread, token, kind, step, fed=True):
        row = dict(token=token, position=thread['next'], step=step, thread=thread['n'], kind=kind, slot=len(rows) if fed else -1)
        thread['next'] += 1
        row['sees'] = thread['sees'] | ({len(rows)} if fed else set())
        if fed: thread['sees'] = row['sees']
        (rows if fed else loose).append(row)
    head = dict(n=0, next=0, sees=frozenset())
    for token in prompt: put(head, token, 'prompt', 0)
    say = [(token, kind if n == len(ids) - 1 else 'text', k) for kind, ids, k in main for n, token in enumerate(ids)] + [(eos, 'eos', 0)]
    forks, since, step, held, ended = [], [], 0, None, False
    while not (ended and all(f['done'] for f in forks)):
        step += 1
        feed, born = [], None
        if held is None and not ended:
            token, kind, k = say.pop(0)
            if kind == 'sync': held = token
            elif kind == 'eos': ended = (token, step)
            else: feed.append((head, token, 'sampled'))
            if kind == 'promise': born = k
        for f in forks:
            if f['done']: continue
            token = f['say'].pop(0)
            f['count'] += 1
            feed.append((f, token, 'sampled'))
            f['done'] = not f['say'] or f['count'] == limit
            if f['done'] and f['say']: feed.append((f, closing, 'forced'))
        if born is not None:
            fork = dict(n=len(forks) + 1, say=list(bodies[len(forks)]), count=0, done=False)
            feed.append((fork, opening, 'forced'))
        for thread, token, kind in feed:
            if thread.get('next') is None:                         # it begins behind its promise, and reads what main has read
                thread |= dict(next=head['next'], sees=head['sees'])
                forks.append(thread)
                since.append(thread)
                head['next'] += constant or born
            put(thread, token, kind, step, fed=not (ended and thread.get('done')))
        if held is not None and all(f['done'] for f in since):
            for f in since: head['sees'] |= f['sees']
            if longest: head['next'] = max([head['next']] + [f['next'] for f in since])
            put(head, held, 'sampled', step)
            held, since = None, []
    token, step = ended
    put(head, token, 'sampled', step, fed=False)
    return rows + loose


COLUMNS = 'token', 'position', 'slot', 'step', 'thread', 'kind'


@pytest.mark.parametrize('seed', range(12))
def test_runtime_does_what_the_rules_say(talker, seed):
    "12 x 10 random documents, ten at a time."
    rng, (_, tokenizer), cases = random.Random(seed), talker, []
    tags = TagVocab('compact').bind(tokenizer)
    for n in range(10):
        main, bodies = random_document(rng, tokenizer)
        options = dict(constant=rng.choice([None, 25]), longest=rng.random() < .3, limit=rng.choice([None, None, 1, 3, 8]))
        prompt = [rng.randrange(250) for _ in range(rng.randint(1, 20))]
        rows = simulate(prompt, main, bodies, tags.async_start, tags.async_end, tokenizer.eos_token_id, **options)
        said = {'main': [i for _, ids, _ in main for i in ids] + [tokenizer.eos_token_id]} | {f'fork {n + 1}': b for n, b in enumerate(bodies)}
        modes = dict(positions='constant', constant=25) if options['constant'] else {}
        cases.append((rows, bodies, options, pasta(prompt, script=said, max_new_tokens=500, max_thread_tokens=options['limit'],
                                                   after_sync='max' if options['longest'] else 'main', **modes)))
    engine = engine_of(talker, slots=8192, page_size=rng.choice([1, 5, 16]))
    for (expected, bodies, options, _), r in zip(cases, engine.run([request for *_, request in cases], keep_logits=True)):
        follows_the_rules(talker[0], r, expected, bodies, options)
    empty(engine)


def follows_the_rules(model, r, expected, bodies, options):
    record = r.record
    seen = sorted(zip(*(getattr(record, c) for c in COLUMNS)), key=lambda row: (row[2] < 0, row[2], row[4], row[3], row[1]))
    rows = sorted(expected, key=lambda row: (row['slot'] < 0, row['slot'], row['thread'], row['step'], row['position']))
    assert seen == [tuple(row[c] for c in COLUMNS) for row in rows]
    mask = dense_mask(whole_layout(record)).numpy()
    for i, slot in enumerate(record.slot):
        if slot < 0: continue
        reads = {record.slot[k] for k in np.flatnonzero(mask[i]) if record.slot[k] >= 0}
        assert reads == rows[slot]['sees']
    assert deviation(model, r) < 1e-4
    finish = {n: 'end' for n in r.threads} | {'main': 'eos'}
    for n, body in enumerate(bodies):
        if options['limit'] and len(body) > options['limit']: finish[f'fork {n + 1}'] = 'length'
    assert r.threads == finish and r.finish_reason == 'eos'
    assert r.forwards == max(s for s, slot in zip(record.step, record.slot) if slot >= 0)
    if options['limit'] is None:
        path = critical_path(record)
        assert path.clock == written_steps(record) and path.length == r.critical_path == max(record.step)


def test_promises_of_the_prompts_end(talker):
    "A promise is the very first thing said, and a fork may be empty."
    tokenizer = talker[1]
    r, = engine_of(talker).run(pasta('Q', script=script(tokenizer, '<promise topic="a" tokens="10"/>', '</async>')))
    assert r.tagged_text == '<promise topic="a" tokens="10"/><async></async>' and r.text == ''
    assert r.threads == {'main': 'eos', 'fork 1': 'end'}


# ---- training and decoding agree

@pytest.mark.parametrize('modes', [dict(), dict(positions='constant', constant=30), dict(after_sync='max')])
def test_training_lays_out_what_the_runtime_did(talker, modes):
    tokenizer, requests = talker[1], []
    for seed in range(14):
        main, bodies = random_document(random.Random(1000 + seed), tokenizer, joined=True)
        said = {'main': [i for _, ids, _ in main for i in ids] + [tokenizer.eos_token_id]} | {f'fork {n + 1}': b for n, b in enumerate(bodies)}
        requests.append(pasta(PROMPTS[seed % 4], script=said, max_new_tokens=500, **modes))
    for r in engine_of(talker, slots=8192).run(requests): agrees_with_training(tokenizer, r, modes)


def agrees_with_training(tokenizer, r, modes):
    tags, prompt = TagVocab('compact').bind(tokenizer), r.request.prompt
    record, order = r.record, [i for i in range(len(r.record.token)) if r.record.kind[i] == 'prompt'] + r.record.order
    order = [i for i in order if record.token[i] != tokenizer.eos_token_id]
    document = [record.token[i] for i in order[len(prompt):]]
    layout = pasta_layout(prompt, pieces(document, tags, tokenizer, policy='strict'), **modes)
    assert layout.ids.tolist() == [record.token[i] for i in order]
    assert layout.position.tolist() == [record.position[i] for i in order]
    mine = dense_mask(whole_layout(record))[order][:, order]
    assert torch.equal(dense_mask(layout), mine)
    again, _ = encode(r.tagged_text, tags, tokenizer, policy='strict')
    assert again == document


# ---- parity on real models, batches, no promise

def voiced(kind, seed=0):
    tokenizer = byte_tokenizer()
    model = build(kind, seed)
    add_tokens(model, tokenizer, TagVocab('compact'))
    return model, tokenizer


def half_scripted(tokenizer, seed):
    "Main's tags are given, all else is drawn: forks speak freely until their limit."
    rng = random.Random(seed)
    main, bodies = random_document(rng, tokenizer)
    return pasta(PROMPTS[seed % 4][:rng.randint(1, 30)], script={'main': [i for _, ids, _ in main for i in ids]}, temperature=1., seed=seed,
                 max_thread_tokens=rng.randint(1, 12), max_new_tokens=90, after_sync=rng.choice(['main', 'max']))


@pytest.mark.parametrize('kind', ['gemma3_text', 'mistral', 'smollm3', 'qwen3'])
def test_replay_parity_and_batches(kind):
    pair = voiced(kind)
    requests = [half_scripted(pair[1], n) for n in range(4)]
    plain_ones = [ar(PROMPTS[n], max_new_tokens=20, temperature=1., seed=n) for n in range(2)]
    engine = engine_of(pair, page_size=8, chunk=11)
    both = engine.run([plain_ones[0], *requests, plain_ones[1]], keep_logits=True)
    for r in both:
        assert r.error is None and deviation(pair[0], r) < 1e-4
        single, = engine_of(pair).run(replace(r.request))
        assert single.token_ids == r.token_ids and single.threads == r.threads and single.text == r.text
    empty(engine)


def test_no_promise_is_plain_decoding(talker):
    for options in (dict(), dict(temperature=1., seed=3), dict(stop='a'), dict(max_new_tokens=1)):
        options = dict(max_new_tokens=25) | options
        tags = TagVocab('compact').bind(talker[1])
        def silence(ids, row):
            row = row.clone()
            row[list(tags.kinds)] = -torch.inf
            return row
        a, p = engine_of(talker).run([s('Tell me', processors=(silence,), **options) for s in (ar, pasta)])
        assert (a.token_ids, a.text, a.finish_reason, a.forwards, a.critical_path) == (p.token_ids, p.text, p.finish_reason, p.forwards, p.critical_path)
        assert a.record.position == p.record.position and a.record.slot == p.record.slot and p.forks == 0


@pytest.mark.smollm2
def test_smollm2_parity_in_text_mode(smollm2):
    model, tokenizer = smollm2
    main = 'Two tips:<promise topic="light" tokens="20"/><promise topic="food" tokens="20"/><sync/> So'
    said = dict(main=write(tokenizer, main))
    engine = Engine(model, tokenizer, slots=1024)
    r, s = engine.run([pasta('How do I sleep well?', script=said, max_new_tokens=70, max_thread_tokens=10, temperature=t, seed=1) for t in (0., 1.)],
                      keep_logits=True)
    for x in (r, s):
        assert x.error is None and x.forks == 2 and replay_deviation(model, x) < 1e-4
        assert x.text == plain(parse(x.tagged_text)) and not any(tag in x.text for tag in ('<promise', 'async>', '<sync', 'tokens='))
        assert [t.joined is not None for t in x.record.threads] == [False, True, True]
    empty(engine)


@pytest.mark.smollm2
def test_tags_cut_anywhere_by_a_real_tokenizer(smollm2):
    "The tags' letters fall into any tokens: forks and syncs are found all the same."
    tokenizer, rng = smollm2[1], random.Random(0)
    model = tiny_model(vocab=len(tokenizer), layers=1, hidden=32)[0]
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    engine = Engine(model, tokenizer, slots=4096)
    def cut(text):
        at = sorted(rng.sample(range(1, len(text)), rng.randint(0, min(25, len(text) - 1))))
        return [i for a, b in zip([0, *at], [*at, len(text)]) for i in write(tokenizer, text[a:b])]
    for n in range(12):
        said = {'main': cut('Tips:<promise topic="é: a > b" tokens="20"/> and <promise topic="sun" tokens="10"/>.<sync/> Enjoy!') + [tokenizer.eos_token_id],
                'fork 1': cut(' Drink <b>.</async>'), 'fork 2': cut('Wear a hat. </async>')}
        r, = engine.run(pasta('Hi', script=said, max_new_tokens=400))
        assert r.error is None and r.forks == 2 and r.threads == {'main': 'eos', 'fork 1': 'end', 'fork 2': 'end'}
        assert [t.topic for t in r.record.threads[1:]] == ['é: a > b', 'sun'] and r.text == 'Tips: Drink <b>. and Wear a hat. . Enjoy!'
        assert not r.counts['problems']


# ---- text mode

def test_text_mode_forks_as_ids_do(talker, mute):
    "The same words, a byte a token: same threads, same text, same topics; its tags just cost more tokens."
    main = 'Go <promise topic="a" tokens="20"/>, <promise topic="ü" tokens="10"/><sync/> then <promise topic="c" tokens="30"/>.'
    bodies = ['One.</async>', 'Two two</async>', '<i>3</i></async>']
    a, = engine_of(talker).run(pasta('Hi', script=script(talker[1], main, *bodies), max_new_tokens=999))
    b, = engine_of(mute).run(pasta('Hi', script=script(mute[1], main, *bodies), max_new_tokens=999), keep_logits=True)
    assert a.text == b.text == 'Go One., Two two then <i>3</i>.' and a.tagged_text == b.tagged_text and a.threads == b.threads
    facts = lambda r: [(t.name, t.parent, t.topic, t.predicted, t.finish_reason) for t in r.record.threads]
    assert facts(a) == facts(b) and deviation(mute[0], b) < 1e-4
    for r, (_, tokenizer) in ((a, talker), (b, mute)):
        for t in r.record.threads[1:]:
            upto = [r.record.token[i] for i in range(t.at + 1) if r.record.thread[i] == 0]
            assert tokenizer.decode(upto).endswith('"/>') and r.record.position[t.at] + 1 == r.record.position[r.record.segment.index(t.segment)]
        words = [i for i in r.record.order if not r.record.control[i]]
        assert tokenizer.decode([r.record.token[i] for i in words]) == a.text
    assert critical_path(b.record).clock == written_steps(b.record)


def test_text_mode_by_request(talker):
    said = {'main': list(b'A<promise topic="x" tokens="10"/><sync/>') + [256], 'fork 1': list(b'B</async>')}
    r, = engine_of(talker).run(pasta('Hi', tags='text', script=said, max_new_tokens=99))
    assert r.forks == 1 and r.text == 'AB' and r.tagged_text == 'A<promise topic="x" tokens="10"/><async>B</async><sync/>'


def test_minimal_vocabulary():
    model, tokenizer = tiny_model(seed=1, layers=1, hidden=32)
    add_tokens(model, tokenizer, TagVocab('minimal'))
    said = script(tokenizer, 'A<promise topic="x" tokens="70"/>B<sync/>C', 'D</async>')
    for tags in ('auto', 'minimal', TagVocab('minimal')):
        r, = engine_of((model, tokenizer)).run(pasta('Hi', script=said, tags=tags, max_new_tokens=99))
        assert r.text == 'ADBC' and r.record.threads[1].predicted == 70 and r.counts['problems'] == []
    with pytest.raises(MissingTags): find_tags(tokenizer, 'compact')


def test_find_tags(talker, mute):
    assert find_tags(talker[1]).vocab == TagVocab('compact', 160) and find_tags(mute[1]) is None
    with pytest.raises(PastaError, match='unknown tags'): find_tags(mute[1], 'nonsense')
    model, tokenizer = tiny_model(layers=1, hidden=32)
    add_tokens(model, tokenizer, TagVocab('compact', 40))
    assert find_tags(tokenizer).vocab.max_tokens == 40
    r, s = engine_of(mute).run([pasta('Hi', tags='compact'), pasta('Hi', tags='text', max_new_tokens=3)])
    assert isinstance(r.error, MissingTags) and s.error is None


def test_pasta_needs_a_tokenizer(mute):
    r, = Engine(mute[0], slots=64).run(pasta([1, 2]))
    assert 'tokenizer' in str(r.error)


@pytest.mark.parametrize('options, words', [(dict(positions='oracle'), 'future'), (dict(positions='x'), 'position mode'), (dict(after_sync='x'), 'after a sync'),
                                            (dict(policy='x'), 'policy'), (dict(tags='x'), 'unknown tags')])
def test_unknown_modes(talker, options, words):
    r, ok = engine_of(talker).run([pasta('Hi', **options), pasta('Hi', max_new_tokens=2)])
    assert r.finish_reason == 'error' and words in str(r.error) and ok.error is None


@pytest.mark.parametrize('name, values', [
    ('constant', [1.5, -1, 'a', None, True]), ('max_forks', ['a', -1, float('nan'), 2.0, None]),
    ('promise_bias', ['a', None, float('inf'), float('-inf'), float('nan'), True]), ('no_repeat_topics', ['no', 1, None]),
    ('grammar', [None, 'x', 5, ['mask']])])
def test_options_that_can_not_be(talker, name, values):
    "Each is an error of its own request, of one line, which names the option; the others go on."
    requests = [pasta('Hi', **{name: value}) for value in values]
    assert all(request.reserve >= 256 for request in requests)
    *wrong, ok = engine_of(talker).run([*requests, pasta('Hi', max_new_tokens=2, constant=np.int64(0), max_forks=0, promise_bias=-1)])
    for r in wrong:
        assert isinstance(r.error, OptionError) and r.finish_reason == 'error' and name in str(r.error) and '\n' not in str(r.error)
    assert ok.error is None and ok.generated_tokens == 2


@pytest.mark.parametrize('options', [dict(point_tokens='a'), dict(point_tokens=1.5), dict(closing_tokens='a'), dict(closing_tokens=float('nan'))])
def test_guided_lengths_that_can_not_be(talker, options):
    r, = engine_of(talker).run(guided('Hi', outline='- a', **options))
    assert isinstance(r.error, OutlineError) and list(options)[0] in str(r.error)


def test_the_runtimes_own_tags_come_on_top_of_the_limit(talker):
    "Two tags a fork at most: an opening always, a closing where the fork wrote none."
    said = script(talker[1], '<promise topic="a" tokens="10"/><promise topic="b" tokens="10"/>', 'xxxxx', 'y</async>')
    for limit in (10, 12, 14):
        r, = engine_of(talker).run(pasta('Hi', script=said, max_new_tokens=limit))
        sampled, own = r.record.kind.count('sampled'), r.record.kind.count('forced')
        assert r.generated_tokens == sampled + own > limit >= sampled and r.forks <= own <= 2 * r.forks


def test_tags_of_the_user_are_words(talker, mute):
    for pair in (talker, mute):
        prompts = ['<promise topic="x" tokens="10"/><async>', [dict(role='user', content='a<sync/>'), dict(role='assistant', content='<async>b</async>'),
                                                              dict(role='user', content='</async>')]]
        for raw in (False, True):
            for r in engine_of(pair).run([pasta(p, raw=raw, script=script(pair[1], 'No.')) for p in prompts if not raw or isinstance(p, str)]):
                assert r.error is None and r.forks == 0 and r.text == 'No.'
                kinds = TagVocab('compact').bind(talker[1]).kinds
                assert not set(r.record.token) & set(kinds)


# ---- limits lose nothing

MAIN = 'Go:<promise topic="a" tokens="20"/><promise topic="b" tokens="10"/> mid <sync/> then<promise topic="c" tokens="10"/><sync/>!'
BODIES = ['one two three</async>', 'four</async>', 'five six</async>']


def kept(r, said):
    "Each thread's chosen tokens are the beginning of its script, all of them in the answer; returns how many there are."
    record, total = r.record, 0
    assert sorted(r.token_ids) == sorted(t for t, k in zip(record.token, record.kind) if k != 'prompt')
    for n, t in enumerate(record.threads):
        own = [record.token[i] for i in record.order if record.thread[i] == n and record.kind[i] == 'sampled']
        assert own == list(said.get(t.name, ())[:len(own)]), t.name
        total += len(own)
    return total


@pytest.mark.parametrize('pair', ['talker', 'mute'])
def test_max_new_tokens_loses_nothing(pair, request):
    pair = request.getfixturevalue(pair)
    said = script(pair[1], MAIN, *BODIES)
    full = sum(map(len, said.values()))
    engine = engine_of(pair)
    for r in engine.run([pasta('Hi', script=said, max_new_tokens=n) for n in range(1, full + 2, 1 if full < 120 else 7)]):
        n = r.request.sampling.max_new_tokens
        assert r.error is None and kept(r, said) == min(n, full)
        assert r.finish_reason == 'eos' if n >= full else all(r.threads.values())
        forks = [t for t in r.record.threads if t.parent is not None]
        assert all(t.at is not None for t in forks)
        assert r.tagged_text.count('<async>') == r.tagged_text.count('</async>') == len(forks)      # blocks are closed
        assert r.critical_path == critical_path(r.record).length
    empty(engine)


def test_thread_limits(talker):
    said = script(talker[1], MAIN, *BODIES)
    for n in range(1, 15):
        r, = engine_of(talker).run(pasta('Hi', script=said, max_new_tokens=200, max_thread_tokens=n), keep_logits=True)
        assert r.error is None and deviation(talker[0], r) < 1e-4 and r.finish_reason == 'eos'
        for k, body in enumerate(BODIES):
            ids = write(talker[1], body)
            assert r.threads[f'fork {k + 1}'] == ('length' if len(ids) > n else 'end')
        assert r.tagged_text.count('</async>') == 3 and parse(r.tagged_text, policy='strict') and kept(r, said)


@pytest.mark.parametrize('most', [0, 1, 2])
def test_fork_limit(talker, most):
    said = script(talker[1], MAIN, *BODIES[:most])
    r, = engine_of(talker).run(pasta('Hi', script=said, max_new_tokens=200, max_forks=most), keep_logits=True)
    assert r.error is None and r.finish_reason == 'eos' and deviation(talker[0], r) < 1e-4
    assert [r.threads[f'fork {n + 1}'] for n in range(3)] == ['end'] * most + ['max_forks'] * (3 - most)
    assert r.text == 'Go:' + ''.join(b[:-8] for b in BODIES[:min(most, 2)]) + ' mid  then' + '!' and kept(r, said)
    assert r.record.position == sorted(r.record.position) if most == 0 else True


def test_pool_full_loses_nothing(talker):
    said = script(talker[1], MAIN, *BODIES)
    whole, = engine_of(talker).run(pasta([1, 2], script=said, max_new_tokens=200))
    for slots in [*range(3, len(whole.record.token), 3), len(whole.record.token) + 1]:
        engine = engine_of(talker, slots=slots, page_size=1)
        r, = engine.run(pasta([1, 2], script=said, max_new_tokens=200, reserve=0))
        kept(r, said)
        if r.finish_reason == 'eos': assert r.token_ids == whole.token_ids
        else:
            assert r.finish_reason == 'pool_full' and set(r.threads.values()) <= {'pool_full', 'end'}
            assert len(r.token_ids) >= slots - 2
            assert [t for t, s in zip(r.record.token, r.record.slot) if s >= 0] == whole.record.token[:sum(s >= 0 for s in r.record.slot)]
            steps = max(r.record.step)                             # everything chosen up to this step is there
            expected = sum(k == 'sampled' and s <= steps and t != 256 for k, s, t in zip(whole.record.kind, whole.record.step, whole.record.token))
            assert sum(k == 'sampled' for k in r.record.kind) >= expected
        empty(engine)


def test_a_held_sync_is_not_lost(talker):
    "The pool fills up, or somebody cancels, while main waits at its sync."
    said = script(talker[1], 'A<promise topic="a" tokens="10"/><sync/>', 'on and on and on</async>')
    engine = engine_of(talker, slots=16, page_size=1)
    r, = engine.run(pasta([1], script=said, reserve=0))
    assert r.finish_reason == 'pool_full' and r.tagged_text.endswith('<sync/>') and r.threads == {'main': 'pool_full', 'fork 1': 'pool_full'}
    empty(engine)
    request = pasta([1], script=said)
    def listen(chunk):
        if chunk.thread == 'fork 1' and chunk.step > 8: request.cancel()
    r, = engine_of(talker).run(request, listen=listen)
    assert r.finish_reason == 'cancelled' and r.tagged_text.endswith('<sync/>') and kept(r, said) >= 10


def test_a_promise_with_the_last_token(talker):
    "Main's budget ends with the promise: no fork is begun that nothing could be written in."
    said = script(talker[1], 'A<promise topic="a" tokens="10"/>', 'body</async>')
    r, = engine_of(talker).run(pasta('Hi', script=said, max_new_tokens=4))
    assert r.error is None and r.finish_reason == 'length' and r.forks == 0 and kept(r, said) == 4


def test_forks_that_end_themselves(talker):
    "eos inside a fork closes it; a stop text too."
    tokenizer = talker[1]
    said = script(tokenizer, 'A<promise topic="a" tokens="10"/><sync/>Z', 'body')
    said['fork 1'] += [tokenizer.eos_token_id]
    r, = engine_of(talker).run(pasta('Hi', script=said), keep_logits=True)
    assert r.tagged_text == 'A<promise topic="a" tokens="10"/><async>body</async><sync/>Z' and r.threads == {'main': 'eos', 'fork 1': 'eos'}
    assert deviation(talker[0], r) < 1e-4 and critical_path(r.record).clock == written_steps(r.record)
    said['fork 1'] = write(tokenizer, 'body STOP more')
    r, = engine_of(talker).run(pasta('Hi', script=said, stop='STOP'), keep_logits=True)
    assert r.threads == {'main': 'eos', 'fork 1': 'stop'} and deviation(talker[0], r) < 1e-4
    assert r.text == 'Abody Z'


# ---- malformed output

WRONG = [
    ('A<promise topic="a" tokens="ten"/><sync/>Z', ['x</async>']), ('A<promise topic="a" tokens="0"/><sync/>Z', ['x</async>']),
    ('A<promise topic="a" tokens="-5"/><sync/>Z', ['x</async>']), ('A<promise topic="a"/><sync/>Z', ['x</async>']),
    ('A<promise topic="a" tokens="25"/><sync/>Z', ['x</async>']), ('A<promise tokens="20"/><sync/>Z', ['x</async>']),
    ('A<promise topic="" tokens="20"/><sync/>Z', ['x</async>']), ('A<promise topic="a "quoted" b" tokens="20"/><sync/>Z', ['x</async>']),
    ('A<promise topic="a > 🙂 日本" tokens="20"/><sync/>Z', ['x</async>']), ('A<promise topic="a" tokens="20"/><sync/>Z', ['x<promise topic="in" tokens="10"/>y</async>']),
    ('A<promise topic="a" tokens="20"/><sync/>Z', ['never closed']), ('A<promise topic="a" tokens="20"/><sync/>Z', ['x</async></async>']),
    ('A</async>B</async>Z', []), ('A<sync/>Z', []), ('A<sync/><sync/>Z', []), ('A<async>B</async>Z', []), ('A<promise topic="a', []),
    ('A<promise topic="a" tokens="1', []), ('Write `<sync/>` and `<promise topic="q" tokens="10"/>` so.', []), ('A<promise', []),
    ('A<promise topic="a" tokens="20"/><async>B</async><sync/>Z', ['x</async>']), ('A<promise topic="a" tokens="20"/><sync/>Z', ['x<sync/>y</async>']),
    ('A<promise topic="a" tokens="20"/><sync/>Z', ['x<async>y</async>z</async>']), ('A<promise topic="a" tokens="99999999999999999999"/>Z', ['x</async>']),
    ('A<promise topic="a" tokens="20"/></promise></sync>Z', ['x</async>']), ('<promise><promise/><promise topic="b" tokens="10"/><sync/>', ['', 'x</async>']),
    ('A< promise topic="a"/>< /async>B', []), ('A<promise topic="a" tokens="20"/><sync/><sync/>Z', ['</async>']), ('A' + '<' * 50, []),
    ('A<promise topic="' + 'long ' * 100 + '" tokens="10"/><sync/>', ['x</async>']),
]


@pytest.mark.parametrize('policy', ['repair', 'strict', 'literal'])
@pytest.mark.parametrize('pair', ['talker', 'mute'])
def test_malformed_output_never_hurts_a_batch(pair, policy, request):
    pair = request.getfixturevalue(pair)
    tokenizer, engine = pair[1], engine_of(pair, slots=40000, share_prefix=False)
    good = pasta('Hi', script=script(tokenizer, MAIN, *BODIES), max_new_tokens=500)
    expected, = engine.run(good)
    scripts = [script(tokenizer, main, *forks) for main, forks in WRONG]
    results = engine.run([good, *(pasta('Hi', policy=policy, script=s, max_new_tokens=700, max_thread_tokens=40) for s in scripts), replace(good)], keep_logits=True)
    assert results[0].token_ids == results[-1].token_ids == expected.token_ids
    for said, (main, forks), r in zip(scripts, WRONG, results[1:-1]):
        assert r.error is None or policy == 'strict' and isinstance(r.error, GrammarError), (main, r.error)
        own = [r.record.token[i] for i in r.record.order if r.record.thread[i] == 0]
        assert own == said['main'][:len(own)], main
        assert r.error is not None or own == said['main'] or '<promise topic' in main, main
        if r.error is None: assert own == said['main']
        else: assert r.finish_reason == 'error' and len(own) >= 1
        assert deviation(pair[0], r) < 1e-4
        for n, t in enumerate(r.record.threads[1:], 1):
            if t.finish_reason == 'max_forks': continue
            words = tokenizer.decode([r.record.token[i] for i in r.record.order if r.record.thread[i] == n])
            assert words.startswith('<async>') and (words.endswith('</async>') or r.error), (main, words)
    empty(engine)


def test_problems_are_counted(talker):
    r, = engine_of(talker).run(pasta('Hi', script=script(talker[1], 'A<sync/>B</async>')))
    assert [p.rule for p in r.counts['problems']] == ['sync-without-fork', 'end-without-async'] and r.forks == 0
    assert r.text == 'A' + 'B'


def test_a_broken_rule_loses_no_token(talker):
    "Under strict the run ends at the mistake; what was chosen up to it, by all threads, is there."
    said = script(talker[1], 'A<promise topic="a" tokens="10"/>bc</async>', 'forks talk on and on</async>')
    r, = engine_of(talker).run(pasta('Hi', policy='strict', script=said))
    assert isinstance(r.error, GrammarError) and r.finish_reason == 'error'
    assert r.tagged_text.endswith('bc</async>') and kept(r, said) == len(said['main']) - 1 + 3


@pytest.mark.parametrize('seed', range(10))
def test_wild_talk(talker, mute, seed):
    "A model that loves tags: random talk of any kind decodes to its end, and its record replays."
    rng = random.Random(seed)
    policy = rng.choice(['repair', 'literal'])
    tags = TagVocab('compact').bind(talker[1])
    loved = torch.tensor([i for i in tags.kinds if tags.kinds[i] != 'end' or rng.random() < .3])
    def love(ids, row):
        row = row.clone()
        row[loved] += rng_bias
        return row
    rng_bias = rng.choice([2., 4., 6.])
    engine = engine_of(talker, slots=4000, page_size=7)
    requests = [pasta('Hi', policy=policy, processors=(love,), temperature=1., seed=seed * 10 + n, max_new_tokens=rng.randint(1, 120),
                      max_thread_tokens=rng.choice([None, 3, 20]), max_forks=rng.choice([1, 4, 16]), after_sync=rng.choice(['main', 'max'])) for n in range(8)]
    for r in engine.run(requests, keep_logits=True):
        assert r.error is None and r.finish_reason in ('eos', 'length') and all(r.threads.values())
        assert deviation(talker[0], r) < 1e-4 if r.record.logits else True
        sampled = sum(k == 'sampled' for k in r.record.kind)
        assert sampled <= r.request.sampling.max_new_tokens
        assert sorted(r.record.order) == [i for i, k in enumerate(r.record.kind) if k != 'prompt']
        critical_path(r.record)
        for t in r.record.threads[1:]: assert t.at is not None and r.record.thread[t.at] == 0
    empty(engine)


# ---- streaming, and what a result says

@pytest.mark.parametrize('pair', ['talker', 'mute'])
def test_streams_of_threads(pair, request):
    pair, heard = request.getfixturevalue(pair), []
    said = script(pair[1], MAIN.replace('Go', 'Größe 🙂'), *BODIES)
    request_ = pasta('Hi', script=said, max_new_tokens=500)
    r, = engine_of(pair).run(request_, listen=heard.append)
    for n, t in enumerate(r.record.threads):
        ids = [r.record.token[i] for i in r.record.order if r.record.thread[i] == n and r.record.token[i] != 256]
        mine = [c for c in heard if c.thread == t.name]
        assert ''.join(c.text for c in mine) == pair[1].decode(ids) and [c.token for c in mine] == ids
        assert [c.step for c in mine] == sorted(c.step for c in mine)
    assert r.text == 'Größe 🙂:one two threefour mid  thenfive six!'
    silent, = engine_of(pair).run(pasta('Hi', script=said, max_new_tokens=500))
    assert silent.token_ids == r.token_ids and silent.text == r.text


def test_result(talker):
    said = script(talker[1], MAIN, *BODIES)
    r, = engine_of(talker).run(pasta('Hi', script=said, max_new_tokens=500))
    assert r.forks == 3 and r.generated_tokens == len(r.token_ids) == sum(map(len, said.values())) + 3
    assert [t.parent for t in r.record.threads] == [None, 0, 0, 0] and [t.predicted for t in r.record.threads] == [None, 20, 10, 10]
    joined = [t.joined for t in r.record.threads[1:]]
    sync = TagVocab('compact').bind(talker[1]).sync
    assert joined[0] == joined[1] < joined[2] and all(r.record.token[j] == sync for j in joined)
    words = sum(len(w) for w in ('Go:', ' mid ', ' then', '!', 'one two three', 'four', 'five six'))
    assert r.parallelism == pytest.approx(words / r.critical_path)
    assert r.critical_path == max(r.record.step) < len(r.token_ids) and r.json()['problems'] == []


def test_many_forks_at_once_reuse_their_rows(talker):
    main = ''.join(f'<promise topic="t{n}" tokens="10"/>' for n in range(16)) + '<sync/>Z'
    said = script(talker[1], main * 2, *['ab</async>'] * 32)
    engine = engine_of(talker)
    r, = engine.run(pasta('Hi', script=said, max_new_tokens=999, max_forks=32), keep_logits=True)
    assert r.forks == 32 and set(r.threads.values()) == {'eos', 'end'} and deviation(talker[0], r) < 1e-4
    assert r.text == ('ab' * 16 + 'Z') * 2


# ---- guided

OUTLINE = 'Advice:\n- sleep (10)\n- food\n---\nIn short,'


def test_guided(talker):
    model, tokenizer = talker
    engine = engine_of(talker)
    r, s = engine.run([guided('How?', outline=OUTLINE, parallel=p, point_tokens=9, max_new_tokens=60) for p in (True, False)], keep_logits=True)
    for x in (r, s): assert x.error is None and deviation(model, x) < 1e-4
    assert r.forks == 2 and s.forks == 0 and r.critical_path < s.critical_path
    for x in (r, s):
        for part in ('Advice:', 'sleep', 'food', 'In short,'): assert part in x.text
    assert [t.topic for t in r.record.threads[1:]] == ['sleep', 'food'] and all(t.joined is not None for t in r.record.threads[1:])
    empty(engine)


@pytest.mark.parametrize('outline, words', [('', 'without points'), ('just text', 'without points'), ('- a\ntext', 'text between'), ('- ', 'without a topic'),
                                            ('- (5)', 'without a topic'), ('- a (0)', 'length 0')])
def test_outlines_that_can_not_be_followed(talker, outline, words):
    with pytest.raises(OutlineError, match=words): read_outline(outline)
    r, = engine_of(talker).run(guided('How?', outline=outline))
    assert isinstance(r.error, OutlineError)


def test_read_outline(tmp_path):
    stages = [Stage('Advice:', [Point('sleep', 10), Point('food')]), Stage('In short,', [])]
    assert read_outline(OUTLINE) == stages
    (tmp_path / 'o.txt').write_text(OUTLINE)
    assert read_outline(tmp_path / 'o.txt') == stages
    assert read_outline(['a', 'b (20)']) == [Stage('', [Point('a'), Point('b', 20)]), Stage('', [])]


# ---- stop texts: what a person reads

@pytest.mark.parametrize('pair', ['talker', 'mute'])
def test_no_tag_is_a_stop_text(pair, request):
    "Whatever stands inside tags ends nothing; the same letters outside of them do, and are cut."
    pair = request.getfixturevalue(pair)
    said = script(pair[1], MAIN, *BODIES)
    free, = engine_of(pair).run(pasta('Hi', script=said, max_new_tokens=500))
    for stop in ('"/>', 'tokens', '"', '>', 'topic="a', '<', '</async>', 'sync', '<promise'):
        r, = engine_of(pair).run(pasta('Hi', script=said, stop=stop, max_new_tokens=500))
        assert (r.finish_reason, r.text, r.tagged_text, r.token_ids) == ('eos', free.text, free.tagged_text, free.token_ids), stop
    r, = engine_of(pair).run(pasta('Hi', script=said, stop='mid', max_new_tokens=500), keep_logits=True)
    assert r.finish_reason == 'stop' and r.text == 'Go:one two threefour ' and r.tagged_text.endswith('</async> ') and r.forks == 2
    assert deviation(pair[0], r) < 1e-4
    r, = engine_of(pair).run(pasta('Hi', script=said, stop=['two', 'hen'], max_new_tokens=500))
    assert r.text == 'Go:one four mid  t' and r.threads == {'main': 'stop', 'fork 1': 'stop', 'fork 2': 'end'}
    assert r.tagged_text.endswith('<sync/> t') and '<async>one </async>' in r.tagged_text


def test_no_stop_text_reaches_over_a_tag(talker, mute):
    for pair in (talker, mute):
        said = script(pair[1], 'ST<promise topic="x" tokens="10"/>OP<sync/>STOP.', 'ST</async>')
        r, = engine_of(pair).run(pasta('Hi', script=said, stop='STOP', max_new_tokens=500))
        assert r.finish_reason == 'stop' and r.text == 'STSTOP' and r.tagged_text.endswith('OP<sync/>')


@pytest.mark.smollm2
def test_stop_texts_cut_anywhere_by_a_real_tokenizer(smollm2):
    "A token holds the end of a tag and the beginning of a stop text, or the other way round."
    tokenizer = smollm2[1]
    model = tiny_model(vocab=len(tokenizer), layers=1, hidden=32)[0]
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    for stop in ('.\n', ' END', '>END', '\n\n'):
        said = {'main': write(tokenizer, f'Go<promise topic="a" tokens="10"/>.<sync/> so{stop} more'), 'fork 1': write(tokenizer, f'b{stop} c</async>')}
        r, = Engine(model, tokenizer, slots=512).run(pasta('Hi', script=said, stop=stop, max_new_tokens=90))
        assert r.text == 'Gob. so' and r.finish_reason == 'stop' and r.threads['fork 1'] == 'stop', stop


# ---- the grammar

def shape(tokenizer, ids):
    "A stream of ids as letters: P promise, E its end, A <async>, Z </async>, S sync, $ eos, q not in a topic, blank, t text."
    tags = TagVocab('compact').bind(tokenizer)
    special = {'promise': 'P', 'end': 'E', 'async': 'A', '/async': 'Z', 'sync': 'S'}
    def letter(i):
        if i in tags.kinds: return special[tags.kinds[i]]
        if i == tokenizer.eos_token_id: return '$'
        word = tokenizer.decode([i])
        return 'q' if i in tokenizer.all_special_ids or set(word) & set('"<\n\r') else 'b' if not word.strip() else 't'
    return ''.join(map(letter, ids))


WORD, PROMISE = '[tqb]', 'Pt[tb]{0,23}E'
LEGAL = {'main': f'({WORD}|({PROMISE}{WORD}*)+S)*({PROMISE}{WORD}*)*\\$?', 'fork': f'{WORD}+Z?'}
REST = '', 'E', 'tE', 'Z', 't', 'tZ'                               # what may complete a legal beginning


def may_begin(kind, stream): return any(re.fullmatch(LEGAL[kind], stream + rest) for rest in REST)


class Stub(SimpleNamespace):
    "With a name of its own, so that it can be a key."
    __hash__ = object.__hash__


def listener(tokenizer, kind):
    "A grammar, a line, and a function that lets the line say a token: the runtime's side, without a model."
    line = Stub(ids=[], controls=[], sampled=0)
    h = SimpleNamespace(counts={}, tokenizer=tokenizer, eos={tokenizer.eos_token_id}, total=0, sampling=SimpleNamespace(max_new_tokens=10**9),
                        engine=SimpleNamespace(facts=SimpleNamespace(vocab=10**9)))
    voice = Voice(tokenizer)
    ear = Ear(voice, line, inside=None if kind == 'main' else 'async')
    run = SimpleNamespace(voice=voice, h=h, ears={}, forks=[], open=[], max_forks=99, main=line if kind == 'main' else Stub())
    run.ears[run.main] = ear
    def say(token):
        line.sampled += 1
        for e in ear.hear(token):
            if isinstance(e, Promise): run.forks.append(e), run.open.append(e)
            if isinstance(e, Sync): run.open.clear()
    return Grammar(run, 'count'), line, say


@pytest.mark.parametrize('kind', ['main', 'fork'])
@pytest.mark.parametrize('seed', range(4))
def test_what_is_legal(talker, kind, seed):
    "At every place of a random legal text: a token is legal if, and only if, a legal text goes on with it."
    rng, tokenizer = random.Random(seed), talker[1]
    tags = TagVocab('compact').bind(tokenizer)
    pool = [*write(tokenizer, 'abc "<\n'), tags.promise, tags.promise, tags.end(10), tags.end(160), tags.sync, tags.async_start, tags.async_end, tokenizer.eos_token_id]
    for _ in range(6):
        (grammar, line, say), ids = listener(tokenizer, kind), []
        for _ in range(rng.choice([3, 10, 60])):
            rule = grammar.rule(line, 1)
            legal = [i for i in pool if may_begin(kind, shape(tokenizer, ids + [i]))]
            assert [i for i in pool if rule.allows(i)] == legal, shape(tokenizer, ids)
            legal = [i for i in legal if i not in (tokenizer.eos_token_id, tags.async_end)]
            ids.append(rng.choice(legal))
            say(ids[-1])


def loving(tags, much, eos=None):
    "A processor that makes a model talk in tags."
    loved = torch.tensor(list(tags.kinds))
    def love(ids, row):
        row = row.clone()
        row[loved] += much
        if eos is not None: row[eos] -= 3
        return row
    return love


@pytest.mark.parametrize('seed', range(6))
def test_masked_answers_are_well_formed(talker, seed):
    "Random talk at temperature 5, in love with tags: the strict reader finds nothing, at any budget; its record replays."
    rng, (model, tokenizer) = random.Random(seed), talker
    tags = TagVocab('compact').bind(tokenizer)
    requests = [pasta('Hi', grammar='mask', temperature=5., processors=(loving(tags, 9., tokenizer.eos_token_id),), seed=seed * 100 + n,
                      max_new_tokens=rng.choice([1, 2, 3, 4, 5, 7, 10, 20, 60, 200]), max_thread_tokens=rng.choice([None, 1, 3, 20]),
                      max_forks=rng.choice([0, 1, 4, 16]), promise_bias=rng.choice([0., 30.]), no_repeat_topics=rng.random() < .5) for n in range(16)]
    results = engine_of(talker, slots=6000, page_size=7).run(requests, keep_logits=True)
    for r in results:
        assert r.error is None and r.counts['problems'] == [] and deviation(model, r) < 1e-4
        ids = [i for i in r.token_ids if i != tokenizer.eos_token_id]
        found = pieces(ids, tags, tokenizer, policy='strict')
        assert [i for p in found for i in p.ids] == ids and sum(p.kind == 'promise' for p in found) == r.forks <= r.request.options['max_forks']
        assert parse(tokenizer.decode(ids), policy='strict').problems == []
        record = r.record
        for n, t in enumerate(record.threads):
            said = shape(tokenizer, [record.token[i] for i in record.order if record.thread[i] == n and record.kind[i] == 'sampled'])
            assert re.fullmatch(LEGAL['fork' if n else 'main'], said), said
        assert 'max_forks' not in r.threads.values() and r.counts['grammar_tokens'] == record.kind.count('sampled')
        if r.request.options['no_repeat_topics']:
            own = [record.token[i] for i in record.order if record.thread[i] == 0]
            firsts = [b for a, b in zip(own, own[1:]) if a == tags.promise]
            assert len(firsts) == len(set(firsts))
    for r in results[::3]:
        alone, = engine_of(talker, slots=6000).run(replace(r.request))
        assert (alone.token_ids, alone.threads, alone.counts) == (r.token_ids, r.threads, r.counts)


def test_minimal_tags_under_the_grammar():
    "Five tag tokens: the attributes are words, and spelled right all the same."
    model, tokenizer = tiny_model(seed=1, layers=1, hidden=32)
    add_tokens(model, tokenizer, TagVocab('minimal'))
    tags, engine = TagVocab('minimal').bind(tokenizer), engine_of((model, tokenizer), slots=8000)
    quote = write(tokenizer, '"')[0]
    def love(ids, row):
        row = loving(tags, 6.)(ids, row)
        row[quote] += 6
        return row
    requests = [pasta('Hi', grammar='mask', temperature=1., processors=(love,), seed=n, max_new_tokens=40 + 30 * n) for n in range(9)]
    results = engine.run(requests)
    for r in results:
        ids = [i for i in r.token_ids if i != tokenizer.eos_token_id]
        assert r.error is None and r.counts['problems'] == [] and pieces(ids, tags, tokenizer, policy='strict')
    assert sum(r.forks for r in results) > 3 and {t.predicted for r in results for t in r.record.threads[1:]} <= set(range(10, 161, 10))
    said = script(tokenizer, 'A<promise topic="x" tokens="70"/>B<sync/>C', 'D</async>')
    r, = engine.run(pasta('Hi', script=said, grammar='count', max_new_tokens=200))
    assert r.counts['grammar_needed'] == 0 and r.counts['grammar_tokens'] == sum(map(len, said.values()))
    r, = engine.run(pasta('Hi', script=script(tokenizer, 'A<promise topic="x" tokens="75"/>B'), grammar='count', max_new_tokens=200, max_thread_tokens=1))
    assert r.counts['grammar_needed'] >= 1


def test_the_grammar_is_counted(talker):
    said = script(talker[1], 'A<sync/>B</async><promise topic="" tokens="10"/><sync/>', '</async>')
    r, = engine_of(talker).run(pasta('Hi', script=said, grammar='count', max_new_tokens=99))
    assert r.counts['grammar_needed'] == 4 and r.counts['grammar_tokens'] == sum(map(len, said.values())) and r.json()['grammar_needed'] == 4
    r, = engine_of(talker).run(pasta('Hi', script=script(talker[1], MAIN, *BODIES), grammar='mask', max_new_tokens=200))
    assert r.counts['grammar_needed'] == 0
    r, = engine_of(talker).run(pasta('Hi', max_new_tokens=5))
    assert set(r.counts) == {'problems'}


def test_count_changes_nothing_and_the_record_keeps_the_models_logits(talker):
    options = dict(temperature=1., seed=5, max_new_tokens=60, probabilities=True)
    tags = TagVocab('compact').bind(talker[1])
    off, count, mask = engine_of(talker).run([pasta('Hi', processors=(loving(tags, 3.),), grammar=g, **options) for g in ('off', 'count', 'mask')], keep_logits=True)
    assert off.token_ids == count.token_ids != mask.token_ids and count.counts['grammar_needed'] > 0
    for r in (off, count, mask): assert deviation(talker[0], r) < 1e-4 and all(torch.isfinite(row).all() for row in r.record.logits.values())
    one, = engine_of(talker).run(pasta('Hi', grammar='mask', max_new_tokens=1, probabilities=True), keep_logits=True)
    row = next(iter(one.record.logits.values())).clone()
    row[[i for i in tags.kinds]] = -torch.inf
    assert one.record.prob[-1] == pytest.approx(float(row.softmax(-1).max()), rel=1e-4)


def test_the_models_own_choice_is_counted(talker):
    "Greedy: a token needed the mask where the model's best token is another than the one said."
    model, tokenizer = talker
    tags = TagVocab('compact').bind(tokenizer)
    r, = engine_of(talker).run(pasta('Hi', grammar='mask', max_new_tokens=40), keep_logits=True)
    best = [int(row.argmax()) for row in r.record.logits.values()]
    said = [t for t, k in zip(r.record.token, r.record.kind) if k == 'sampled']
    if r.forks == 0: assert r.counts['grammar_needed'] == sum(a != b for a, b in zip(best, said))


def test_promise_bias(talker):
    ask = lambda **more: pasta('Hi', max_new_tokens=80, max_thread_tokens=3, seed=2, temperature=1., **more)
    none, some, many, off = engine_of(talker).run([ask(grammar='mask', promise_bias=b) for b in (-1e9, 5., 1e9)] + [ask(promise_bias=1e9)])
    assert none.forks == 0 < many.forks and none.forks <= some.forks <= many.forks
    tags = TagVocab('compact').bind(talker[1])
    assert [t for t, n in zip(off.record.token, off.record.thread) if n == 0 and t == tags.promise]


def test_topics_are_not_repeated(talker):
    "Greedy, a model that says one topic for ever says it once."
    tags = TagVocab('compact').bind(talker[1])
    ask = lambda **more: pasta('Hi', grammar='mask', promise_bias=1e9, max_new_tokens=150, max_thread_tokens=2, **more)
    def short(ids, row):
        row = row.clone()
        row[tags.end(10)] += 1e6
        row[ord('x')] += 1e3
        return row
    same, fresh, bare = engine_of(talker).run([ask(processors=(short,)), ask(processors=(short,), no_repeat_topics=True),
                                               pasta('Hi', script=script(talker[1], MAIN, *BODIES), no_repeat_topics=True, max_new_tokens=150)])
    for r, least in ((same, 3), (fresh, 3), (bare, 2)):
        own = [r.record.token[i] for i in r.record.order if r.record.thread[i] == 0]
        first = [b for a, b in zip(own, own[1:]) if a == tags.promise]
        assert len(first) > least and first[0] == ord('a' if r is bare else 'x') and len(set(first)) == (1 if r is same else len(first))


@pytest.mark.parametrize('options, words', [(dict(grammar='x'), 'unknown grammar'), (dict(grammar='mask', tags='text'), 'needs tag tokens'),
                                            (dict(promise_bias=1., tags='text'), 'needs tag tokens'), (dict(no_repeat_topics=True, tags='text'), 'needs tag tokens')])
def test_grammars_that_can_not_be(talker, options, words):
    r, = engine_of(talker).run(pasta('Hi', **options))
    assert r.finish_reason == 'error' and words in str(r.error)


@pytest.mark.smollm2
def test_the_grammar_on_a_real_vocabulary(smollm2):
    "A real tokenizer with both vocabularies: forced to promise, it promises well."
    import copy
    for kind in ('compact', 'minimal'):
        tokenizer = copy.deepcopy(smollm2[1])
        model = tiny_model(vocab=len(tokenizer), layers=1, hidden=32)[0]
        add_tokens(model, tokenizer, TagVocab(kind))
        tags = TagVocab(kind).bind(tokenizer)
        requests = [pasta('Hi', grammar='mask', promise_bias=30., temperature=1., seed=n, max_new_tokens=120, max_thread_tokens=5) for n in range(4)]
        for r in Engine(model, tokenizer, slots=4096).run(requests):
            ids = [i for i in r.token_ids if i != tokenizer.eos_token_id]
            assert r.error is None and r.forks > 0 and pieces(ids, tags, tokenizer, policy='strict') and not r.counts['problems']


# ---- room for what the runtime writes itself

def test_reserves():
    assert pasta('x', max_new_tokens=90).reserve == 90 + 2 * 16 and pasta('x', max_new_tokens=9, tags='text').reserve == 9 + 3 * 16
    assert pasta('x', max_new_tokens=90, reserve=5).reserve == 5 and pasta('x', max_forks=1).reserve == 258
    assert guided('x', outline='', max_new_tokens=10).reserve >= 10 and guided('x', outline='- a', reserve=7).reserve == 7
    assert guided('x', outline=None).options['outline'] is None


def test_outline_room_covers_the_headings(talker, tmp_path):
    tokenizer = talker[1]
    (tmp_path / 'o.txt').write_text('\ufeff' + OUTLINE, encoding='utf-8')
    for outline in (OUTLINE, tmp_path / 'o.txt', ['a', 'b (20)'], '- ä\n- ö\n---\n- 日本\n---\nSo,'):
        for parallel in (True, False):
            request = guided('How?', outline=outline, parallel=parallel, heading='*** {topic} ***', point_tokens=4, max_new_tokens=30)
            r, = engine_of(talker).run(request)
            assert r.error is None
            assert len([k for k in r.record.kind if k != 'prompt']) <= request.reserve


@pytest.mark.parametrize('parallel', [True, False])
def test_a_small_pool_changes_no_guided_answer(talker, parallel):
    "Long headings, little room: the requests wait for each other, and none runs out of slots."
    outline = '\n'.join(f'- point number {n} of a long and wordy outline' for n in range(6)) + '\n---\nSo,'
    requests = [guided('How?', outline=outline, parallel=parallel, point_tokens=5, closing_tokens=5, max_new_tokens=36, seed=n, temperature=1.) for n in range(3)]
    small = dict(slots=640, page_size=16, share_prefix=False)
    alone = [engine_of(talker, **small).run(replace(r))[0] for r in requests]
    for a, b in zip(alone, engine_of(talker, **small).run(requests)):
        assert b.error is None and (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason) and a.finish_reason != 'pool_full'


def test_guided_honours_stop_texts(talker):
    "At once, a stop text ends its point; in turn, it ends main and so the answer; in the closing sentence too."
    tokenizer = talker[1]
    ask = lambda said, **more: guided('How?', outline='- a\n- b\n---\nSo,', point_tokens=20, script={n: write(tokenizer, t) for n, t in said.items()}, **more)
    said = {'main': ' well END and more\n', 'fork 1': ' one END two\n', 'fork 2': ' three\n'}
    r, free = engine_of(talker).run([ask(said, stop='END'), ask(said)], keep_logits=True)
    assert r.text == '- **a**: one \n\n- **b**: three\n\nSo, well ' and r.finish_reason == 'stop' and deviation(talker[0], r) < 1e-4
    assert r.threads == {'main': 'stop', 'fork 1': 'stop', 'fork 2': 'end'} and free.threads == {'main': 'end', 'fork 1': 'end', 'fork 2': 'end'}
    said = {'main': ' one\n two END three\n well'}
    r, free = engine_of(talker).run([ask(said, parallel=False, stop='END'), ask(said, parallel=False)], keep_logits=True)
    assert r.text == '- **a**: one\n\n- **b**: two ' and r.finish_reason == 'stop' and deviation(talker[0], r) < 1e-4
    assert free.text.startswith('- **a**: one\n\n- **b**: two END three\n\nSo, well')
    said = {'main': ' one\n two\n well END'}
    r, = engine_of(talker).run(ask(said, parallel=False, stop='END'))
    assert r.text == '- **a**: one\n\n- **b**: two\n\nSo, well ' and r.finish_reason == 'stop'
    said = {'main': ' one\n two\n free\n\nEND'}
    r, = engine_of(talker).run(guided('How?', outline='- a\n- b\n---', parallel=False, stop='\n\n', script={n: write(tokenizer, t) for n, t in said.items()}))
    assert r.text == '- **a**: one\n\n- **b**: two\n\n free' and r.finish_reason == 'stop'


@pytest.mark.parametrize('options', [dict(outline=5), dict(outline=None), dict(outline='- a', heading='{foo}'), dict(outline='- a', heading='{'),
                                     dict(outline='- a', heading='{0}'), dict(outline='- a', heading=None), dict(outline='- a', heading=' ')])
def test_outlines_and_headings_that_cannot_be(options):
    model, tok = tiny_model(seed=0)
    r, = Engine(model, tok, slots=128).run(guided('Hi', **options))
    assert isinstance(r.error, OutlineError) and '\n' not in str(r.error)

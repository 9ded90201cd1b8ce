"Judges: both orders, exact rules, a local server for Gemini, batches against single passes, and what judges are worth."
import json
import math
import random
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from hypothesis import given, settings, strategies as st

from pasta_lib.annotate import GeminiClient, GeminiError
from pasta_lib.jobs import Drop, each
from pasta_lib.judge import (SPOILS, ExactJudge, GeminiJudge, Judge, JudgeError, Judgement, LikelihoodJudge,
                             LocalJudge, Worth, answer_logps, batches, best_and_worst, both_orders, calibrate, compare,
                             cut_fairly, draw_orders, fair_cap, judge_worth, known_pairs, pair_row, qualities, quality,
                             read_verdict, same_number, score, settled, spoil, worth_table)


class ByLength(Judge):
    "The longer answer wins; remembers what it was asked."
    def __init__(self, confidence=1.): self.asked, self.confidence = [], confidence
    def __call__(self, prompt, a, b):
        self.asked.append((prompt, a, b))
        return Judgement('a' if len(a) > len(b) else 'b' if len(b) > len(a) else 'tie', self.confidence)


class FirstIsBest(Judge):
    def __call__(self, prompt, a, b): return Judgement('a', .9)


# ---- judgements and orders
def test_judgement_as_a_number():
    assert [float(Judgement(w, .4)) for w in ('a', 'b', 'tie')] == [.4, -.4, 0]
    for w in ('a', 'b', 'tie'):
        j = Judgement(w, .4)
        assert float(j.swapped()) == -float(j) and j.swapped().swapped() == j and j.swapped().order == 'ba' and j.preference == float(j)


@pytest.mark.parametrize('wrong', [('c',), (None,), ('A',), ('a', -.1), ('a', 1.1), ('a', math.nan), ('a', '1'), ('a', None)], ids=repr)
def test_judgements_that_cannot_be(wrong):
    with pytest.raises(JudgeError, match='no winner|a confidence of'): Judgement(*wrong)


def test_both_orders_reach_the_judge():
    judge = ByLength(.6)
    first, second = both_orders(judge, 'p', 'long answer', 'short')
    assert judge.asked == [('p', 'long answer', 'short'), ('p', 'short', 'long answer')]
    assert (first.winner, second.winner, first.order, second.order) == ('a', 'a', 'ab', 'ba') and float(second) == .6
    assert [float(j) for j in both_orders(FirstIsBest(), 'p', 'x', 'y')] == [.9, -.9]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.text(max_size=4), st.text(max_size=4)), max_size=6))
def test_compare_many_is_compare_one(pairs):
    asked = [('p', a, b) for a, b in pairs]
    together = compare(ByLength(), asked)
    assert together == [both_orders(ByLength(), *one) for one in asked]
    for (one, two), (a, b) in zip(together, pairs):
        assert float(one) == float(two) and math.isfinite(float(one))
        if not a.strip() and b.strip(): assert one.winner == 'b' and one.note == 'empty'
        if a.strip() == b.strip(): assert one.winner == 'tie'


def test_settled():
    assert settled('x', 'y') is None and settled(' x', 'x ').note == 'same' and settled('', ' ').note == 'both empty'
    assert settled('', 'x').winner == 'b' and settled('x', '\n').winner == 'a'
    judge = ByLength()
    compare(judge, [('p', '', 'x'), ('p', 'x', 'x')])
    assert not judge.asked


# ---- exact
def test_exact_judge():
    judge = ExactJudge({'p': '42', 'q': '1,000.50'})
    assert judge('p', 'it is 42', 'it is 41') == Judgement('a', 1.) and judge('p', '41', '40').winner == 'tie'
    assert judge('q', 'none', 'So 1000.5.').winner == 'b'
    with pytest.raises(JudgeError, match='no reference'): judge('r', '1', '2')
    graded = ExactJudge({'p': 'abc'}, check=lambda answer, reference: len(set(answer) & set(reference)) / 3)
    assert graded('p', 'ab', 'a').winner == 'a' and graded('p', 'ab', 'a').confidence == pytest.approx(1 / 3)


@pytest.mark.parametrize('grade', [math.nan, math.inf, None, 'well', [1]], ids=repr)
def test_grades_that_are_no_numbers(grade):
    judge = ExactJudge({'p': '42'}, check=lambda answer, reference: grade if answer == 'x' else 1)
    for asked in (('p', 'x', 'y'), ('p', 'y', 'x')):
        with pytest.raises(JudgeError, match="not a finite number .'p'"): judge(*asked)
    with pytest.raises(JudgeError, match='no reference'): judge(5, 'x', 'y')


@pytest.mark.parametrize('bad', [5, None, b'bytes', ['list'], '\ud800', 'a\udfff'], ids=ascii)
def test_what_local_judges_cannot_read(tiny, bad):
    for judge in (LocalJudge(*tiny), LikelihoodJudge(*tiny)):
        for asked in ((bad, 'a', 'b'), ('p', bad, 'b'), ('p', 'a', bad)):
            for ask in (judge, lambda *one: both_orders(judge, *one)):
                with pytest.raises(JudgeError, match='as prompt or answer|half a surrogate pair'): ask(*asked)
        with pytest.raises(JudgeError): calibrate(judge, [('p', 'a', bad)]) if isinstance(judge, LocalJudge) else judge.scores([('p', bad)])


@pytest.mark.parametrize('answer,reference,same', [('', '3', False), ('3', '', False), ('-3', '3', False), ('a 3 b 4', '4', True),
                                                   ('3.0', '3', True), ('It costs 1,200.', '1200', True), ('none', 'none', False), ('pages 3-5', '5', True),
                                                   ('\u22125', '-5', True), ('coordinates 1,2', '12', False), ('x = 3/4', '4', False)])
def test_same_number(answer, reference, same): assert same_number(answer, reference) is same


# ---- local judges, on the tiny model: any model will do
@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 400))
def test_fair_cap(a, b, room):
    cap = fair_cap(a, b, room)
    assert min(a, cap) + min(b, cap) <= room
    if a + b > room: assert min(a, cap + 1) + min(b, cap + 1) > room                   # no larger cap fits


def test_long_answers_are_cut_alike(tiny):
    tok = tiny[1]
    a, b, note = cut_fairly(tok, 'x' * 300, 'y' * 500, 200)
    assert a == 'x' * 100 and b == 'y' * 100 and note == 'cut to 100 tokens'
    assert cut_fairly(tok, 'x' * 30, 'y' * 500, 200)[:2] == ('x' * 30, 'y' * 170)
    assert cut_fairly(tok, 'x', 'y', 200) == ('x', 'y', '')


def test_cuts_are_reported(tiny):
    judge = LocalJudge(*tiny, max_tokens=700)
    one, two = both_orders(judge, 'Which?', 'x ' * 400, 'y ' * 900)
    assert one.note.startswith('cut to ') and one.note == two.note
    assert len(judge.ids('Which?', 'x ' * 400, 'y ' * 900)[0]) <= 700
    assert not judge('Which?', 'x', 'y').note


@given(st.lists(st.integers(1, 40), max_size=20), st.integers(1, 100))
def test_batches_hold_every_row_once(lengths, tokens):
    rows = [list(range(1, n + 1)) for n in lengths]
    seen = []
    for batch, ids in batches(rows, tokens):
        seen += batch
        assert ids.shape[0] == 1 or ids.numel() <= tokens
        for i, row in zip(batch, ids.tolist()): assert row == rows[i] + [0] * (ids.shape[1] - len(rows[i]))
    assert sorted(seen) == list(range(len(rows)))


def test_local_judge_equals_single_passes(tiny):
    "Batched, padded log odds are those of one plain pass per question."
    model, tok = tiny
    judge = LocalJudge(model, tok)
    asked = [('Name a bird.', 'lark', 'A spoon is not a bird.'), ('Why?', 'because', 'so'), ('Say much ' * 9, 'x' * 70, 'y')]
    rows = [judge.ids(*one)[0] for one in asked]
    for row, z in zip(rows, judge.log_odds(rows)):
        with torch.no_grad(): logits = model(torch.tensor([row])).logits[0, -1]
        a, b = judge.letters
        assert z == pytest.approx(float(logits[a] - logits[b]), abs=1e-4)
        p = torch.stack([logits[a], logits[b]]).softmax(0)
        said = judge.many(asked)[rows.index(row)]
        assert said.winner == 'ab'[int(p.argmax())] and said.confidence == pytest.approx(float(abs(p[0] - p[1])), abs=1e-4)
    assert judge.many([]) == [] and both_orders(judge, 'Why?', '', 'so')[0].winner == 'b'


def test_prompts_cannot_fill_in_fields(tiny):
    "Braces in a prompt or an answer are text."
    judge = LocalJudge(*tiny)
    text = tiny[1].decode(judge.ids('use {a} and {b}', 'first {b}', 'second')[0])
    assert 'use {a} and {b}' in text and 'first {b}' in text


def test_calibration_takes_the_place_off(tiny):
    judge = LocalJudge(*tiny)
    asked = [('Why?', 'because', 'so'), ('Who?', 'me', 'you two'), ('When?', 'now', 'later on')]
    mended = calibrate(judge, asked)
    rows = [judge.ids(p, *ab)[0] for p, a, b in asked for ab in ((a, b), (b, a))]
    assert sum(judge.log_odds(rows)) / 6 == pytest.approx(mended.offset, abs=1e-6)
    z = [math.atanh(float(j)) for two in compare(mended, asked) for j in (two[0], two[1].swapped())]
    assert sum(z) == pytest.approx(0, abs=1e-4)
    assert calibrate(judge, []).offset == 0


def test_letters_must_differ(tiny):
    class SameLetter:
        def encode(self, text, **kw): return [7]
        added_tokens_decoder = {}
    with pytest.raises(JudgeError, match='same tokens'): LocalJudge(tiny[0], SameLetter())


def test_answer_logps_by_a_plain_pass(tiny):
    from pasta_lib.models import chat_ids
    model, tok = tiny
    asked = [('Name a bird.', 'lark'), ('Why?', 'because it is so, I think'), ('Hm', '')]
    for (prompt, answer), found in zip(asked, answer_logps(model, tok, asked)):
        given, own = chat_ids(tok, prompt), tok.encode(answer, add_special_tokens=False)
        with torch.no_grad(): logps = model(torch.tensor([given + own])).logits[0].double().log_softmax(-1)
        expected = [logps[len(given) - 1 + i, t] for i, t in enumerate(own + [tok.eos_token_id])]
        assert found.tolist() == pytest.approx([float(x) for x in expected], abs=1e-4)


def test_likelihood_judge_has_no_place(tiny):
    judge = LikelihoodJudge(*tiny)
    for one, two in compare(judge, [('Why?', 'because', 'so'), ('Who?', 'me', 'you'), ('Who?', '', 'me')]):
        assert float(one) == pytest.approx(float(two), abs=1e-5)
    (gain, ending, flow), = judge.parts([('Please write something.', 'a lark')])
    logps = answer_logps(*tiny, [('Please write something.', 'a lark')])[0]
    assert gain == pytest.approx(0, abs=1e-4)                                            # a prompt that tells nothing
    assert (ending, flow) == pytest.approx((float(logps[-1]), float(logps[:-1].mean())), abs=1e-4)
    assert all(map(math.isfinite, judge.scores([('Why?', '')])))


def test_score_of_a_reading_by_plain_passes(tiny):
    asked, blank = [('Name a bird.', 'a lark'), ('Why?', 'so')], 'Please write something.'
    judge = LikelihoodJudge(*tiny, ending=2., flow=7., sharpness=.3)
    expected = []
    for prompt, answer in asked:
        known, alone = answer_logps(*tiny, [(prompt, answer)])[0], answer_logps(*tiny, [(blank, answer)])[0]
        expected.append(float(known[:-1].sum() - alone[:-1].sum() + 2 * known[-1] + 7 * known[:-1].mean()))
    assert judge.scores(asked) == pytest.approx(expected, abs=1e-3)
    a, b = judge.scores([('Why?', 'so'), ('Why?', 'because')])
    assert float(judge('Why?', 'so', 'because')) == pytest.approx(math.tanh(.15 * (a - b)), abs=1e-5)


def test_no_question_is_read_twice(tiny, monkeypatch):
    from pasta_lib import judge as module
    calls, real = [], module.forward
    monkeypatch.setattr(module, 'forward', lambda model, ids, *args, **kw: calls.append(len(ids)) or real(model, ids, *args, **kw))
    judge = LocalJudge(*tiny)
    first = judge.many([('Why?', 'so', 'thus')] * 3)
    assert sum(calls) == 1 and judge('Why?', 'so', 'thus') == first[0] == first[2] and sum(calls) == 1


def test_a_verdict_that_is_no_number(tiny):
    class Broken(LocalJudge):
        def log_odds(self, rows): return [math.nan] * len(rows)
    with pytest.raises(JudgeError, match='not a number'): Broken(*tiny)('p', 'a', 'b')


# ---- Gemini, over real HTTP
class Service:
    "A server that speaks the REST protocol and plays a script of replies; the last one is repeated."
    def __init__(self, *script):
        self.script, self.bodies, service = list(script), [], self
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                service.bodies.append(json.loads(self.rfile.read(int(self.headers['Content-Length']))))
                service.path = self.path
                item = service.script.pop(0) if len(service.script) > 1 else service.script[0]
                status, body, cut = item if isinstance(item, tuple) else (200, item, 0)
                data = body.encode()
                self.send_response(status)
                self.send_header('Content-Type', 'application/json'); self.send_header('Content-Length', str(len(data)))
                self.end_headers()
                self.wfile.write(data[:len(data) - cut])
            def log_message(self, *args): pass
        self.server = ThreadingHTTPServer(('127.0.0.1', 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self): return self
    def __exit__(self, *args): self.server.shutdown(); self.server.server_close()

    def client(self, **kw):
        pytest.importorskip('google.generativeai')
        url = f'http://127.0.0.1:{self.server.server_port}'
        return GeminiClient(**dict(model='gemini-x', key='k', endpoint=url, first_wait=.01, timeout=5., tries=4, per_minute=None) | kw)


def reply(text, reason='STOP'):
    return json.dumps(dict(candidates=[dict(content=dict(parts=[dict(text=text)], role='model'), finishReason=reason)]))


def fault(status, message='no'): return status, json.dumps(dict(error=dict(code=status, message=message, status='X'))), 0


good = reply('{"better": "A", "confidence": 0.75}')


def test_gemini_verdict_over_http():
    with Service(good) as service:
        judge = GeminiJudge(service.client())
        assert judge('Name {a} bird.', 'a lark', 'a spoon') == Judgement('a', .75)
        assert [float(j) for j in both_orders(judge, 'p', 'x', 'y')] == [.75, -.75]
        text = service.bodies[0]['contents'][0]['parts'][0]['text']
        assert 'Name {a} bird.' in text and '<answer_a>\na lark\n</answer_a>' in text and '<answer_b>\na spoon' in text
        assert 'confidence' in service.bodies[0]['systemInstruction']['parts'][0]['text']
        assert 'gemini-x:generateContent' in service.path and len(service.bodies) == 3


@pytest.mark.parametrize('trouble', [fault(429), fault(500), fault(503), fault(504), (200, good, 9), (200, '{"candidates": [{', 0)])
def test_gemini_tries_again(trouble):
    with Service(trouble, trouble, good) as service:
        assert GeminiJudge(service.client())('p', 'x', 'y').winner == 'a' and len(service.bodies) == 3


@pytest.mark.parametrize('item,reason', [
    (fault(503), 'no reply'), (reply('I like both.'), 'malformed verdict'), (reply('{"better": "A", "confidence": "very"}'), 'malformed verdict'),
    (json.dumps(dict(promptFeedback=dict(blockReason='SAFETY'))), r'blocked \(SAFETY\)'),
    (json.dumps(dict(candidates=[dict(finishReason='SAFETY')])), r'blocked \(SAFETY\)'), ('{}', 'no candidates')])
def test_gemini_drops_with_a_reason(item, reason):
    with Service(item) as service:
        with pytest.raises(Drop, match=reason): GeminiJudge(service.client(tries=2))('p', 'x', 'y')
        assert len(service.bodies) == (2 if reason == 'no reply' else 1)


@pytest.mark.parametrize('item', [fault(401), fault(403), fault(404)])
def test_gemini_stops_when_not_let_in(item):
    "A wrong key must end the job, not drop every row."
    with Service(item) as service:
        with pytest.raises(GeminiError): GeminiJudge(service.client())('p', 'x', 'y')


def test_gemini_needs_a_key(monkeypatch):
    for name in 'GOOGLE_API_KEY', 'GEMINI_API_KEY': monkeypatch.delenv(name, raising=False)
    with pytest.raises(GeminiError, match='no key'): GeminiJudge()


def test_gemini_cache(tmp_path):
    with Service(good) as service:
        for _ in range(2):
            judge = GeminiJudge(service.client(cache=tmp_path))
            assert judge('p', 'x', 'y') == Judgement('a', .75)
        assert len(service.bodies) == 1
        assert judge('p', 'y', 'x').winner == 'a' and len(service.bodies) == 2            # the other order is another question


def test_drops_are_counted_by_jobs():
    class NoIdea:
        def say(self, instruction, turns): return 'no idea'
    judge = GeminiJudge(NoIdea())
    def work(row): return dict(quality=quality(row['prompt'], 'x', ['y'], judge))
    (_, result), = each(work)([dict(id='1', prompt='p')])
    assert isinstance(result, Drop) and result.reason == 'malformed verdict'


@pytest.mark.parametrize('text,expected', [
    ('{"better": "A", "confidence": 1}', Judgement('a', 1.)), ('```json\n{"better":"b","confidence":0}\n```', Judgement('b', 0.)),
    ('{"why": "x"} {"better": "tie", "confidence": 0.5}', Judgement('tie', .5))])
def test_verdicts(text, expected): assert read_verdict(text) == expected


def test_the_last_verdict_counts():
    text = 'First {"better": "A", "confidence": 0.6}, but {"better": "B", "confidence": 0.9, "why": {"facts": {"n": 2}}} in the end. {}'
    assert read_verdict(text) == Judgement('b', .9)


@pytest.mark.parametrize('lam', [-1, -math.inf, math.nan, 'much'])
def test_a_weight_that_cannot_be(lam):
    with pytest.raises(JudgeError, match='λ is'): best_and_worst([dict(speedup=1., quality=1.), dict(speedup=2., quality=0.)], lam)


@pytest.mark.parametrize('text', ['', None, 'A', '[]', '{"better": "A"}', '{"better": "A", "confidence": true}', '{better: A}',
                                  '{"better": "A", "confidence": NaN}', '{"better": null, "confidence": 1}', '{"better": "A", "confidence": -1}'])
def test_malformed_verdicts(text):
    with pytest.raises(Drop, match='malformed verdict'): read_verdict(text)


# ---- quality and pairs
class Scripted(Judge):
    def __init__(self, told): self.told = told
    def __call__(self, prompt, a, b): return self.told[a, b]


def test_quality_by_hand():
    told = {('s', 'o1'): Judgement('a', .8), ('o1', 's'): Judgement('a', .4), ('s', 'o2'): Judgement('tie', 1.), ('o2', 's'): Judgement('b', .6)}
    assert quality('p', 's', ['o1', 'o2'], Scripted(told)) == pytest.approx((.8 + .6 + .5) / (.4 + .5))


def test_quality_stays_finite():
    for judge in ByLength(), FirstIsBest(), ExactJudge({'p': '1'}):
        found = qualities(judge, 'p', ['', 'x', '1', 'long answer'], ['x', ''])
        assert all(math.isfinite(q) and q > 0 for q in found)
    assert qualities(ByLength(), 'p', ['', 'x'], ['', '']) == [1, 9] and qualities(ByLength(), 'p', ['x', 'y'], []) == [1, 1]
    assert qualities(FirstIsBest(), 'p', ['x'], ['y', 'z']) == [1]                        # a judge of places knows nothing
    assert qualities(ByLength(), 'p', ['xx', 'x'], ['y']) == [quality('p', s, ['y'], ByLength()) for s in ('xx', 'x')]


def test_score():
    assert score(1.5, 2., 0) == 1.5 and score(1.5, 2., 4) == 9.5 and score(1.5, 2., math.inf) == 2


def some(values): return [dict(id='i', prompt='p', sample=n, tagged_text=str(n), speedup=s, quality=q) for n, (s, q) in enumerate(values)]


@given(st.lists(st.tuples(st.sampled_from([1., 1.5, 2.]), st.sampled_from([.5, 1., 3.])), min_size=2, max_size=8), st.sampled_from([0, 1, 8, math.inf]))
def test_best_and_worst_by_definition(values, lam):
    samples = some(values)
    key = [q if lam == math.inf else s + lam * q for s, q in values]
    if len(set(key)) == 1:
        with pytest.raises(Drop, match='score the same'): best_and_worst(samples, lam)
        return
    best, worst = best_and_worst(samples, lam)
    assert best['sample'] == min(i for i, k in enumerate(key) if k == max(key))
    assert worst['sample'] == min(i for i, k in enumerate(key) if k == min(key))
    row = pair_row(samples, lam)
    assert row['scores'] == [max(key), min(key)] and row['samples'] == [best['sample'], worst['sample']]
    assert (row['id'], row['prompt'], row['chosen'], row['rejected']) == ('i', 'p', best['tagged_text'], worst['tagged_text'])


def test_pairs_that_cannot_be():
    with pytest.raises(Drop, match='fewer than two'): best_and_worst(some([(1, 1)]), 1)
    with pytest.raises(Drop, match='fewer than two'): best_and_worst([], 1)
    with pytest.raises(Drop, match='score the same'): best_and_worst(some([(0, 0), (0, 0)]), 1)
    for bad in math.nan, math.inf:
        with pytest.raises(JudgeError, match='not a finite number'): best_and_worst(some([(1, bad), (1, 2)]), 1)


@pytest.mark.parametrize('key', ['speedup', 'quality', 'id', 'prompt', 'tagged_text', 'sample'])
@pytest.mark.parametrize('value', [None, 'gone', math.nan], ids=repr)
def test_samples_that_lack_something(key, value):
    for at in (0, 1):
        samples = some([(1, 1), (2, 3)])
        samples[at][key] = value
        if value == 'gone': del samples[at][key]
        if value is math.nan and key not in ('speedup', 'quality'): continue
        if key == 'id' and at == 0 or key == 'prompt' and at == 0: continue                       # the best one's are taken
        with pytest.raises(JudgeError, match=f'{key} is None' if value is not math.nan else 'finite'): pair_row(samples, 1)
    for other in ([None, *some([(1, 1)])], some([(1, 'x'), (1, 2)]), some([(True, 1), (1, 2)])):
        with pytest.raises(JudgeError, match='a sample whose'): best_and_worst(other, 1)
    with pytest.raises(JudgeError, match='λ is None'): best_and_worst(some([(1, 1), (2, 2)]), None)


def test_nothing_to_show():
    with pytest.raises(JudgeError, match='no judges'): worth_table({})
    with pytest.raises(JudgeError, match='no judges'): draw_orders({})


# ---- worth
answers = [dict(prompt=f'Question {n}?', text=f'First {n} we begin. Then the {n} goes on. After that {n} rests. In the end {n} is done well.')
           for n in range(8)]


def test_spoils_are_worse_in_the_way_they_say():
    text = answers[0]['text']
    assert text.startswith(spoil('cut', text)) and len(spoil('cut', text)) < .6 * len(text)
    assert Counter(spoil('shuffled', text, seed=1).split()) == Counter(text.split())
    assert spoil('off topic', text, 'other') == 'other'
    looped = spoil('looped', text)
    assert max(Counter(zip(*(looped.split()[i:] for i in range(4)))).values()) >= 4
    with pytest.raises(JudgeError, match='no way to spoil'): spoil('fried', text)
    for kind in SPOILS: assert isinstance(spoil(kind, '', ''), str) and isinstance(spoil(kind, 'One', 'Two'), str)


def test_known_pairs():
    pairs = known_pairs(answers)
    assert pairs == known_pairs(answers) and {p['kind'] for p in pairs} == set(SPOILS) and len(pairs) >= 30
    assert all(p['good'] != p['bad'] for p in pairs)
    assert [p['kind'] for p in known_pairs([dict(prompt='p', text='One sentence only.')])] == ['cut', 'looped']


class Oracle(Judge):
    def __call__(self, prompt, a, b):
        texts = {r['text'] for r in answers if r['prompt'] == prompt}
        return Judgement('a' if a in texts else 'b', .8)


def test_worth_of_judges_that_are_known():
    pairs = known_pairs(answers)
    perfect, place, wrong = (judge_worth(j, pairs) for j in (Oracle(), FirstIsBest(), Contrary()))
    assert perfect.right['all'].value == 100 and perfect.steady == 100 and perfect.first == 50
    assert place.right['all'].value == 50 and place.steady == 0 and place.first == 100
    assert wrong.right['all'].value == 0 and wrong.steady == 100 and wrong.first == 50
    assert set(perfect.right) == set(SPOILS) | {'all'} and perfect.pairs == len(pairs) == len(perfect.judgements)
    table = worth_table(dict(perfect=perfect, place=place)).splitlines()
    assert table[0].split() == ['judge', *SPOILS[:2], 'off', 'topic', 'looped', 'all', 'interval', 'steady', 'first']
    assert table[1].split()[1:] == ['100'] * 5 + ['100-100', '100', '50'] and place.row('x')['first'] == 100
    with pytest.raises(JudgeError, match='no pairs'): judge_worth(Oracle(), [])


class Contrary(Oracle):
    def __call__(self, *asked): return Judgement(super().__call__(*asked).swapped().winner, .8)


def test_worth_of_a_coin():
    rng = random.Random(0)
    class Coin(Judge):
        def __call__(self, prompt, a, b): return Judgement(rng.choice('ab'), rng.random())
    worth = judge_worth(Coin(), known_pairs(answers) * 10)
    assert worth.right['all'].low < 50 < worth.right['all'].high and 40 < worth.steady < 60 and 44 < worth.first < 56


def test_picture():
    import matplotlib.pyplot as plt
    worths = dict(one=judge_worth(Oracle(), known_pairs(answers)), two=judge_worth(FirstIsBest(), known_pairs(answers)))
    axes = draw_orders(worths)
    assert [ax.get_title(loc='left') for ax in axes] == ['one', 'two']
    assert {tuple(p) for c in axes[0].collections for p in c.get_offsets().tolist()} == {(.8, .8)}
    assert {tuple(p) for c in axes[1].collections for p in c.get_offsets().tolist()} == {(.9, -.9)}
    assert draw_orders(worths, axes=axes) == axes
    plt.close('all')


@pytest.mark.smollm2
def test_reading_finds_answers_off_topic(smollm2):
    "What the chapter claims of reading: an answer to another prompt is noticed."
    rows = [dict(prompt='How do I make tea?', text='Boil water, pour it over the leaves and wait three minutes before you drink it.'),
            dict(prompt='Why is the sky blue?', text='Air scatters blue light more than red light, so blue reaches us from all sides.'),
            dict(prompt='How do I care for a cactus?', text='Put it in a sunny window and water it only when the soil is dry.')]
    worth = judge_worth(LikelihoodJudge(*smollm2), known_pairs(rows, ['off topic']))
    assert worth.right['all'].value == 100 and worth.steady == 100

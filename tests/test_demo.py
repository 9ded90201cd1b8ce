"The demo on the tiny model: table, texts, files, interruption."
import io
import json

import pytest
from rich.console import Console

from pasta_lib import demo as D
from pasta_lib.core import PastaError
from pasta_lib.demo import PROMPTS, Prompt, answer_twice, demo, explain, means, outlined
from pasta_lib.engine import Engine
from pasta_lib.models import add_tokens, tiny_model
from pasta_lib.pasta import pasta, read_outline
from pasta_lib.tags import TagVocab

LIMITS = dict(point_tokens=5, closing_tokens=4, dtype='float32')


def console(terminal=False): return Console(file=io.StringIO(), force_terminal=terminal, width=160, highlight=False, force_jupyter=False)


def test_the_built_in_prompts():
    assert len(PROMPTS) == 8 == len({p.question for p in PROMPTS})
    for p in PROMPTS:
        first, last = read_outline(p.outline)
        assert 3 <= p.points <= 5 and last.say and not last.points and p.question.endswith('?')
    assert outlined('Q', 'a', 'b', say='Well:', closing='So').outline == 'Well:\n- a\n- b\n---\nSo'


def test_answer_twice_is_the_same_work_in_another_order(tiny):
    pair = answer_twice(Engine(*tiny, slots=1024), PROMPTS[0], point_tokens=6, closing_tokens=5, rounds=2)
    a, b = pair.in_turn, pair.at_once
    assert a.prompt_tokens == b.prompt_tokens and (a.forks, b.forks) == (0, PROMPTS[0].points)
    assert pair.theoretical == a.critical_path / b.critical_path > 1.5 and pair.realised > 0
    for topic in ('Space', 'Training', 'In short,'): assert topic in a.text and topic in b.text
    sampled = lambda r: sum(k == 'sampled' for k in r.record.kind)
    assert max(sampled(a), sampled(b)) <= PROMPTS[0].points * 6 + 5
    assert pair.row()['parts'] == 4


def test_errors_reach_the_caller(tiny):
    with pytest.raises(PastaError): answer_twice(Engine(*tiny, slots=1024), Prompt('Q', 'no points'))


def test_means_and_words():
    rows = [dict(question='a', theoretical=2., realised=1.), dict(question='b', theoretical=8., realised=4.)]
    m = means(rows)
    assert m['geometric theoretical'] == pytest.approx(4) and m['arithmetic theoretical'] == 5 and m['geometric realised'] == pytest.approx(2)
    assert '2.00 times as fast' in explain(rows) and '4.00 times' in explain(rows) and 'outline' in explain(rows) and means([]) == {}


@pytest.mark.parametrize('terminal', [False, True])
def test_demo(tmp_path, terminal):
    c = console(terminal)
    out = demo('tiny', tmp_path / 'd', prompts=PROMPTS[:2], console=c, **LIMITS)
    said = c.file.getvalue()
    assert ('\x1b[' in said) == terminal
    for text in ('geometric mean', 'arithmetic mean', PROMPTS[1].question, 'report.html', 'column per thread', 'outline'): assert text in said
    assert ('file://' in said) == terminal
    page = (tmp_path / 'd' / 'report.html').read_text()
    assert page.count('one part after the other') >= 2
    assert json.loads((tmp_path / 'd' / 'results.json').read_text()) == out
    assert len(out['rows']) == len(out['answers']) == 2 and not out['interrupted'] and out['hardware']['model'] == 'tiny'


def test_quiet(tmp_path, capsys):
    out = demo('tiny', tmp_path, quiet=True, prompts=PROMPTS[:1], **LIMITS)
    assert capsys.readouterr().out == '' and out['rows']


def test_no_prompts(tmp_path):
    with pytest.raises(PastaError, match='no prompts'): demo('tiny', tmp_path, prompts=[])


@pytest.mark.parametrize('where', ['in the engine', 'outside'])
def test_ctrl_c_leaves_a_partial_report(tmp_path, monkeypatch, where):
    import pasta_lib.engine as E
    real, calls = answer_twice, []
    def second_is_interrupted(engine, prompt, **kw):
        calls.append(prompt)
        if len(calls) == 3:                                              # after warming up and the first question
            if where == 'outside': raise KeyboardInterrupt
            step = engine.answer
            def answer(*a):
                if engine.steps > before + 3: raise KeyboardInterrupt
                return step(*a)
            before = engine.steps
            monkeypatch.setattr(engine, 'answer', answer)
        return real(engine, prompt, **kw)
    monkeypatch.setattr(D, 'answer_twice', second_is_interrupted)
    c = console()
    out = demo('tiny', tmp_path, prompts=PROMPTS[:3], console=c, **LIMITS)
    assert out['interrupted'] and [r['question'] for r in out['rows']] == [PROMPTS[0].question]
    assert (tmp_path / 'report.html').is_file() and 'interrupted' in c.file.getvalue()


def test_ctrl_c_before_anything(tmp_path, monkeypatch):
    def load(*a, **k): raise KeyboardInterrupt
    monkeypatch.setattr(D, 'load', load)
    c = console()
    out = demo('tiny', tmp_path, console=c)
    assert out['rows'] == [] and out['interrupted'] and 'report' not in out and 'no question was finished' in c.file.getvalue()


def test_picture():
    import matplotlib.pyplot as plt
    rows = [dict(question='a', theoretical=2., realised=1.8), dict(question='b', theoretical=3., realised=2.)]
    ax = D.plot_speedups(rows)
    assert [round(p.get_width(), 1) for p in ax.patches] == [2., 3., 1.8, 2.]
    plt.close('all')


# ---- a model that decides by itself

@pytest.fixture
def knowing():
    model, tokenizer = tiny_model()
    add_tokens(model, tokenizer, TagVocab())
    return model, tokenizer




def test_the_same_words_in_turn(knowing):
    engine = Engine(*knowing, slots=1024)
    pair = D.answer_freely(engine, PROMPTS[0], answer_tokens=40, rounds=2, warm=1)
    assert pair.in_turn.text == pair.at_once.text and pair.in_turn.forks == 0 and pair.realised > 0
    words = sum(not c and k != 'prompt' for c, k in zip(pair.at_once.record.control, pair.at_once.record.kind))
    assert pair.in_turn.generated_tokens == pair.in_turn.critical_path == words and pair.theoretical == words / pair.at_once.critical_path
    assert pair.made['grammar_tokens'] == 40 - 0 and 'outline' not in pair.made and pair.in_turn.request.name == 'ar'


def test_forks_are_read_in_their_places(knowing):
    "The words again, in the order in which a person reads them."
    tokenizer = knowing[1]
    write = lambda text: tokenizer.encode(text, add_special_tokens=False)
    said = {'main': write('A<promise topic="x" tokens="10"/><sync/>C') + [tokenizer.eos_token_id], 'fork 1': write('B</async>')}
    engine = Engine(*knowing, slots=1024)
    r, = engine.run(pasta('Q?', script=said))
    a, = engine.run(D.again(r))
    assert r.text == a.text == 'ABC' and a.generated_tokens == 3 and a.prompt_tokens == r.prompt_tokens


def test_against_a_baseline(knowing, tiny):
    pair = D.answer_freely(Engine(*knowing, slots=1024), PROMPTS[0], baseline=Engine(*tiny, slots=1024), answer_tokens=20)
    assert pair.in_turn.request.name == 'ar' and not pair.in_turn.request.sampling.script and pair.in_turn.generated_tokens <= 20


@pytest.mark.parametrize('there', [(), ('smollm2-pasta-bon',), ('smollm2-pasta-bon', 'smollm2-baseline')])
def test_demo_of_a_trained_model(tmp_path, monkeypatch, knowing, tiny, there):
    "Checkpoints that are there are used, and what is compared is said."
    opened = []
    def load(name, **options):
        opened.append(name)
        return knowing if name == 'smollm2-pasta-bon' else tiny
    monkeypatch.setattr(D, 'checkpoint_folder', lambda name: tmp_path if name in there else None)
    monkeypatch.setattr(D, 'load', load)
    c = console()
    limits = dict(answer_tokens=12) if there else dict(point_tokens=4, closing_tokens=3)
    out = demo('smollm2-pasta-bon', tmp_path, prompts=PROMPTS[:2], console=c, **limits)
    way = ['guided', 'same words', 'baseline'][len(there)]
    said = c.file.getvalue()
    assert opened == (list(there) or ['smollm2']) and out['way'] == way and out['compared'] in said and out['hardware']['model'] == opened[0]
    assert ('grammar mask was needed in' in said) == ('grammar_needed' in out['answers'][0]) == ('outline' not in out['answers'][0]) == bool(there)
    assert ('no checkpoint smollm2-pasta-bon' in said) == (not there) and len(out['rows']) == 2
    assert json.loads((tmp_path / 'results.json').read_text()) == out and D.EXPLAINED[way] in said
    assert (tmp_path / 'report.html').read_text().count(D.IN_TURN[way]) >= 2


def test_which_model(monkeypatch, tmp_path):
    monkeypatch.setattr(D, 'checkpoint_folder', lambda name: None)
    assert [D.choose_model(m, g) for m in (None, 'tiny', 'smollm2-pasta-bon') for g in (None, True)] == ['smollm2', 'smollm2', 'tiny', 'tiny', 'smollm2', 'smollm2']
    monkeypatch.setattr(D, 'checkpoint_folder', lambda name: tmp_path)
    assert [D.choose_model(m, g) for m in (None, 'tiny', 'smollm2-pasta-bon') for g in (None, True)] == \
        ['smollm2-pasta-bon', 'smollm2', 'tiny', 'tiny', 'smollm2-pasta-bon', 'smollm2-pasta-bon']


def test_guided_or_not_by_request(tmp_path, monkeypatch, knowing):
    monkeypatch.setattr(D, 'load', lambda name, **options: knowing)
    out = demo('mine', tmp_path, quiet=True, prompts=PROMPTS[:1], guided=True, point_tokens=4, closing_tokens=3)
    assert out['way'] == 'guided' and out['answers'][0]['outline'] == PROMPTS[0].outline
    monkeypatch.undo()
    with pytest.raises(PastaError, match='knows no tags'): demo('tiny', tmp_path, guided=False, prompts=PROMPTS[:1], dtype='float32')

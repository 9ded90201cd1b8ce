"The demo on the tiny model: table, texts, files, interruption."
import io
import json

import pytest
from rich.console import Console

from pasta_lib import demo as D
from pasta_lib.core import PastaError
from pasta_lib.demo import PROMPTS, Prompt, answer_twice, demo, explain, means, outlined
from pasta_lib.engine import Engine
from pasta_lib.pasta import read_outline

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
    for topic in ('Evening habits', 'Food and drink', 'In short,'): assert topic in a.text and topic in b.text
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

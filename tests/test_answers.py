"Answers: what the last box holds, and when two answers are the same; what math-verify can't tell is pinned here too."
import builtins
import threading

import pytest
from hypothesis import given, settings, strategies as st

from pasta_lib.metrics import (MetricError, answer_value, boxed_answer, clean_answer, given_answer, reasoning_row,
                               same_answer)


@pytest.mark.parametrize('text, want', [
    (r'\boxed{7}', '7'), (r'\boxed{1} then \boxed{2}', '2'), (r'\boxed{\frac{1}{2}}', r'\frac{1}{2}'), (r'\boxed {\text{a {b} c}} end', r'\text{a {b} c}'),
    (r'\boxed{\{1, 2\}}', r'\{1, 2\}'), (r'\boxed{\left\{x\right.}', r'\left\{x\right.'), (r'\boxed{1} and \boxed{2', None), (r'\boxed{', None),
    (r'\boxed{}', ''), ('no box', None), ('', None), (r'boxed{3}', None), (r'\boxed{a\\}', r'a\\'), (r'\boxed{\boxed{4}}', '4'), ('\\boxed{\n5\n}', '5')])
def test_boxed(text, want): assert boxed_answer(text) == want


@settings(max_examples=200, deadline=None)
@given(st.recursive(st.text('ab1 ', max_size=4), lambda inner: st.tuples(inner, inner).map(lambda p: p[0] + '{' + p[1] + '}'), max_leaves=8), st.text('a{}1 ', max_size=8))
def test_any_balanced_content_comes_back(content, before):
    assert boxed_answer(before + r'\boxed{' + content + '} so') == content.strip()
    assert boxed_answer(before + r'\boxed{' + content) is None


@pytest.mark.parametrize('text, want', [
    ('48 + 24 = 72\n#### 72', '72'), ('#### 1\nno\n####  -2 \n', '-2'), (r'\boxed{3} #### 4', '3'), (r'#### 4 \boxed{3', None), ('72', None), ('####', None), ('####\n5', None)])
def test_given_answer(text, want): assert given_answer(text) == want


SAME = [
    ('025', '25'), ('25', 25), (25.0, '25'), ('000', '0'), ('-07', '-7'), ('1,234', '1234'), (r'1{,}234', '1234'), (r'1\,234', '1234'), ('1 234', '1234'), ('1,234,567.50', '1234567.5'),
    (r'\text{25}', '25'), (r'\mathbf{25}', '25'), (r'\textbf{\mathrm{25}}', '25'), (r'$25$', '25'), (r'\$25', '25'), ('$25', '25'), ('25.', '25'), ('+25', '25'), ('−5', '-5'), ('.5', '0.5'),
    ('25 cm', '25'), (r'25\text{ cm}', '25'), (r'25\text{cm}^2', '25'), ('25 apples', '25'), ('25 m', '25'), ('1/2 cup', '0.5'), ('10/4', '2.5'), (r'25^\circ', '25'), (r'25^{\circ}', '25'), ('25°', '25'), ('25%', '25'), (r'25\%', '0.25'),
    (r'\frac{1}{2}', '0.5'), (r'\dfrac12', '1/2'), (r'1\frac{1}{2}', r'\frac32'), (r'-\frac{1}{3}', '-1/3'), (r'\sqrt{8}', r'2\sqrt2'), (r'x^2+2x+1', '(x+1)^2'), ('6 - 5i', '6-5i'),
    (r'\{2, 1\}', r'\{1,2\}'), ('(3, \\frac{\\pi}{2})', r'\left(3,\pi/2\right)'), ('x = 5', '5'), (r'x \in [1,2]', '[1,2]'), (r'2.5\times 10^3', '2500'), (r'\text{Even}', 'even'), (r'\text{(C)}', 'C'),
    (r'so \boxed{72}', '#### 72'), ('#### 72', 72), (r'\boxed{1} \boxed{2}', '2'), ('Monday', r'\text{monday}')]
DIFFERENT = [
    ('711', '11'), ('11', '711'), ('2511', '25'), ('25', '-25'), ('1,23', '123'), ('1,2', '2'), ('25.1', '25'), ('5x', '5'), ('5 xy', '5 '), (None, '25'), ('', '25'), ('25', ''), (r'\boxed{25', '25'), (r'\boxed{}', '25'),
    (r'\boxed{25} but \boxed{26', '25'), ('0.333', r'\frac13'), ('(2,1)', '(1,2)'), ('[1,2)', '[1,2]'), (r'2\pi', '2'), ('listen', 'silent'), ('Monday', 'Tuesday'), ('12_5', '12_7'), ('no answer', '25'),
    ('9^{9^{9^{9}}}', '1'), ('2^{99999999}', '1'), ('2**99999999', '1'), ('99999999!', '1'), ('1' * 400, '1'), ('x' * 2000 + '1', '1'), ('{' * 50, '1'), ('####', '1')]


@pytest.mark.parametrize('given_, reference', SAME)
def test_same(given_, reference): assert same_answer(given_, reference) and same_answer(reference, given_)


@pytest.mark.parametrize('given_, reference', DIFFERENT)
def test_different(given_, reference): assert not same_answer(given_, reference)


@pytest.mark.parametrize('given_, reference, verdict', [
    ('five', '5', False),                 # number words
    ('10:30', '10.5', False),             # a time is read as a ratio,
    ('10:30', '1/3', True),               # so this is taken for the same
    ('12_5', '12', True),                 # the base of a number is dropped if the other side names none
    ('25 cm', '25 m', True),              # units don't count, whichever they are
    ('1 half', '0.5', False)])
def test_what_it_cannot_tell(given_, reference, verdict):
    "Not what one would wish, but what happens: whoever changes it should notice."
    assert same_answer(given_, reference) is verdict


@settings(max_examples=200, deadline=None)
@given(st.integers(-10 ** 9, 10 ** 9), st.integers(0, 4), st.sampled_from(['', ' cm', '.', '.0', r'\text{ km}', '%']), st.sampled_from([',', '{,}', '']))
def test_a_number_is_itself_however_it_is_written(n, zeros, after, comma):
    written = ('-' if n < 0 else '') + '0' * zeros + str(abs(n)) if not comma or zeros else f'{n:,}'.replace(',', comma)
    assert same_answer(written + after, n) and answer_value(clean_answer(written + after)) == n
    assert not same_answer(f'{n}1', n) and not same_answer(written, n + 1)


def test_other_threads_may_ask():
    found = []
    thread = threading.Thread(target=lambda: found.append(same_answer(r'\sqrt{8}', r'2\sqrt{2}')))
    thread.start(), thread.join()
    assert found == [True]


def test_without_math_verify_only_numbers_can_be_compared(monkeypatch):
    real = builtins.__import__
    monkeypatch.setattr(builtins, '__import__', lambda name, *a, **k: (_ for _ in ()).throw(ImportError(name)) if name == 'math_verify' else real(name, *a, **k))
    assert same_answer('025 cm', '25') and not same_answer('24', '25') and same_answer(r'\sqrt2', r'\sqrt2')
    with pytest.raises(MetricError, match=r"math-verify is not installed: pip install 'pasta_lib\[train\]'"): same_answer(r'\sqrt{8}', r'2\sqrt{2}')


def test_reasoning_row():
    samples = [dict(id=n // 4, correct=n in (0, 1, 2, 3, 4, 5), live=10 * (n + 1), tokens=n + 1, seconds=2., peak=50 + n) for n in range(8)]
    row = reasoning_row('tip', samples)
    assert row['accuracy'].value == 75 and row['accuracy'].low <= 75 <= row['accuracy'].high and row['samples'] == 8
    assert row['live'] == pytest.approx(sum(10 * k * k for k in range(1, 9)) / 36) and row['peak'] == 53.5
    assert row['tokens_per_second'] == 36 / 16 and row['seconds'] == 16 and row['method'] == 'tip'
    assert set(reasoning_row('bare', [dict(id=1, correct=True)])) == {'method', 'accuracy', 'samples'}
    uneven = [dict(id=1, correct=1), dict(id=2, correct=0), dict(id=2, correct=0), dict(id=2, correct=1)]
    assert reasoning_row('x', uneven)['accuracy'].value == pytest.approx((100 + 100 / 3) / 2)
    with pytest.raises(MetricError, match='no samples'): reasoning_row('x', [])

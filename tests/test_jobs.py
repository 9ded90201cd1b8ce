"Jobs: rows neither lost nor doubled, whatever happens; shards that partition; locks; a cache."
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from pasta_lib.core import PastaError
from pasta_lib.jobs import (DiskCache, Drop, Growing, JobError, JobReport, ShardTaken, at_least_one, draw_runs, each, in_shard, read_jsonl, read_shard,
                            run_job, shard_lock, write_jsonl)

ROWS = [dict(id=f'r{i}', x=i) for i in range(20)]


def double(row):
    if row['x'] % 5 == 3: raise Drop('three', f"x={row['x']}")
    return dict(y=2 * row['x'])


def quiet(rows, work, out, **kw): return run_job(rows, work, out, progress=False, **kw)


def counts(report): return report.rows, report.written, report.dropped, report.resumed


def python(code, *args, **kw):
    "A process of its own that runs `code`."
    return subprocess.Popen([sys.executable, '-c', textwrap.dedent(code), *map(str, args)], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **kw)


# reading and writing

JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.dictionaries(st.text(), JSON, max_size=4), max_size=5))
def test_round_trip(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp('rows') / 'a.jsonl'
    assert write_jsonl(path, rows) == len(rows)
    assert read_jsonl(path) == rows


@pytest.mark.parametrize('text', ['a\u2028b\x85c\x0bd', 'line\nbreak\r\n', '\ud800', '😀', ''])
def test_texts_that_break_lines(tmp_path, text):
    file = Growing(tmp_path / 'a.jsonl')
    file.add(dict(text=text))
    file.add(dict(text='next'))
    assert [r['text'] for r in file.rows()] == [r['text'] for r in read_jsonl(tmp_path / 'a.jsonl')] == [text, 'next']


def test_reading_is_forgiving_about_space_not_about_json(tmp_path):
    path = tmp_path / 'a.jsonl'
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n  \n{"a": 2}')
    assert read_jsonl(path) == [dict(a=1), dict(a=2)]
    for bad, line, said in (('{"a": 1}\n{"a": \n{}', 2, 'not JSON'), ('{}\n\n[1]\n', 3, 'a JSON list'), ('3', 1, 'a JSON int')):
        path.write_text(bad)
        with pytest.raises(JobError, match=f'{said}.*line {line}'): read_jsonl(path)
    path.write_bytes(b'{"a": "\xff"}\n')
    with pytest.raises(JobError, match='line 1'): read_jsonl(path)
    with pytest.raises(JobError, match='no such file'): read_jsonl(tmp_path / 'none.jsonl')


def test_writing_is_all_or_none(tmp_path):
    path = tmp_path / 'deep' / 'a.jsonl'
    write_jsonl(path, [dict(a=1)])
    for bad in (dict(a=float('nan')), dict(a={1, 2}), [1]):
        with pytest.raises(JobError): write_jsonl(path, [dict(a=2), bad])
    assert read_jsonl(path) == [dict(a=1)]
    assert [p.name for p in path.parent.iterdir()] == ['a.jsonl']


def test_write_that_fails_leaves_no_part(tmp_path, monkeypatch):
    def broken(*a): raise OSError('disk')
    monkeypatch.setattr(os, 'replace', broken)
    with pytest.raises(OSError): write_jsonl(tmp_path / 'a.jsonl', [dict(a=1)])
    assert list(tmp_path.iterdir()) == []


# torn lines

@pytest.mark.parametrize('cut', range(1, 26))
def test_every_torn_last_line(tmp_path, cut):
    "Cut the file anywhere in its last row: the rows before it stay, and the row is done again or was whole."
    path = tmp_path / 'a.jsonl'
    whole = b'{"id": "r0", "y": 0}\n{"id": "r1", "y": "\xc3\xa9"}\n'
    first = whole.index(b'\n') + 1
    if cut >= len(whole) - first: return
    path.write_bytes(whole[:len(whole) - cut])
    report = quiet(ROWS[:2], each(lambda r: dict(y='é' if r['x'] else 0)), path)
    assert counts(report) == (2, 1 if cut > 1 else 0, {}, 1 if cut > 1 else 2)
    assert path.read_bytes().removesuffix(b'\n') == whole.removesuffix(b'\n')         # a run that adds nothing changes nothing


@pytest.mark.parametrize('torn', [b'{', b'{"', b'{"id": "r1"', b'{"id": "r1", "text": "\xc3'])
def test_torn_remains_are_cut(tmp_path, torn):
    path = tmp_path / 'a.jsonl'
    path.write_bytes(b'{"id": "r0"}\n' + torn)
    file = Growing(path)
    file.add(dict(id='r9'))
    assert path.read_bytes() == b'{"id": "r0"}\n{"id": "r9"}\n'


@pytest.mark.parametrize('text', [
    'It was a dark\nand stormy night', 'one line', '[1, 2]', '12', '"id"', '{\n  "a": 1\n}', '{\\rtf1 A letter.}', '{"id": "r0"}\nnonsense\n{"id"',
    '{"id": "r0"}\n\0\0\0', '{"id": "r0"}\nnonsense', 'hello\nworld\n', '{"x": 1}', '{"x": 1}\n'])
def test_a_file_of_another_kind_stays_as_it_is(tmp_path, text):
    path = tmp_path / 'a.txt'
    path.write_text(text)
    with pytest.raises(JobError, match='a.txt'): quiet(ROWS, each(double), path)
    if not text.endswith(('\n', '1}')):
        with pytest.raises(JobError, match='a.txt'): Growing(path).add(dict(id='r9'))
    assert path.read_text() == text and [p.name for p in tmp_path.iterdir()] == ['a.txt']


@pytest.mark.parametrize('path', ['/dev/full', '/dev/null', '/dev/zero', '.'])
def test_only_regular_files(path, tmp_path):
    before = sorted(Path('/dev').glob('*.lock'))
    for use in (lambda: quiet(ROWS, each(double), path), lambda: Growing(path)):
        with pytest.raises(JobError, match='not a regular file'): use()
    os.mkfifo(tmp_path / 'pipe')
    with pytest.raises(JobError, match='not a regular file'): quiet(ROWS, each(double), tmp_path / 'pipe')
    assert sorted(Path('/dev').glob('*.lock')) == before and [p.name for p in tmp_path.iterdir()] == ['pipe']


def test_bad_line_in_the_middle_stops_the_job(tmp_path):
    path = tmp_path / 'a.jsonl'
    path.write_text('{"id": "r0"}\nnonsense\n{"id": "r1"}\n')
    with pytest.raises(JobError, match='line 2'): quiet(ROWS, each(double), path)
    assert not list(tmp_path.glob('*.lock'))


# the job

def test_all_rows_then_none(tmp_path):
    out = tmp_path / 'deep' / 'o.jsonl'
    report = quiet(ROWS, each(double), out)
    assert counts(report) == (20, 16, dict(three=4), 0) and report.seconds > 0
    assert read_jsonl(out) == [dict(id=r['id'], y=2 * r['x']) for r in ROWS if r['x'] % 5 != 3]
    drops = read_jsonl(f'{out}.dropped.jsonl')
    assert drops[0] == dict(id='r3', reason='three', detail='x=3') and len(drops) == 4
    before = out.read_bytes()
    assert counts(quiet(ROWS, each(lambda r: pytest.fail('worked again')), out)) == (20, 0, {}, 20)
    assert out.read_bytes() == before
    assert sorted(p.name for p in out.parent.iterdir()) == ['o.jsonl', 'o.jsonl.dropped.jsonl']


def test_earlier_drops_are_told_apart(tmp_path):
    quiet(ROWS[:10], each(double), tmp_path / 'o.jsonl')
    report = quiet(ROWS, each(double), tmp_path / 'o.jsonl')
    assert counts(report) == (20, 8, dict(three=2), 10) and report.dropped_before == 2
    (tmp_path / 'o.jsonl.dropped.jsonl').unlink()                                   # try them again
    assert counts(quiet(ROWS, each(lambda r: {}), tmp_path / 'o.jsonl')) == (20, 4, {}, 16)


def test_settings_are_noted_and_not_mixed(tmp_path):
    out, made = tmp_path / 'o.jsonl', dict(model='a', warmth=.5, stop=('x',))
    quiet(ROWS[:10], each(double), out, made_by=made)
    rows = read_jsonl(out) + read_jsonl(f'{out}.dropped.jsonl')
    assert len(rows) == 10 and all(row['made_by'] == dict(model='a', warmth=.5, stop=['x']) for row in rows)
    assert counts(quiet(ROWS, each(double), out, made_by=made)) == (20, 8, dict(three=2), 10)
    before = out.read_bytes()
    for other, said in ((made | dict(warmth=1), 'warmth was 0.5 and is now 1'), (dict(model='b'), "model was 'a' and is now 'b'"),
                        (made | dict(grammar='mask'), "grammar was None and is now 'mask'"), (dict(model='a', stop=['x']), 'warmth was 0.5 and is now None')):
        with pytest.raises(JobError, match=f'{said} .*o.jsonl.*another file'): quiet(ROWS, each(double), out, made_by=other)
    assert out.read_bytes() == before and not list(tmp_path.glob('*.lock'))
    quiet(ROWS[3:4], each(double), tmp_path / 'p.jsonl', made_by=made)               # its only row was dropped
    with pytest.raises(JobError, match='model was'): quiet(ROWS, each(double), tmp_path / 'p.jsonl', made_by=dict(model='b'))
    with pytest.raises(JobError, match='as JSON'): quiet(ROWS, each(double), tmp_path / 'q.jsonl', made_by=dict(model=double))


def test_rows_that_say_nothing_of_settings_pass(tmp_path):
    quiet(ROWS[:5], each(double), tmp_path / 'o.jsonl')
    assert quiet(ROWS, each(double), tmp_path / 'o.jsonl', made_by=dict(model='a')).resumed == 5
    assert quiet(ROWS, each(double), tmp_path / 'o.jsonl').resumed == 20               # nor does a run that has none ask


def test_more_rows_later(tmp_path):
    quiet(ROWS[:7], each(double), tmp_path / 'o.jsonl')
    assert counts(quiet(iter(ROWS), each(double), tmp_path / 'o.jsonl')) == (20, 10, dict(three=3), 7)


def test_no_rows(tmp_path):
    assert quiet([], each(double), tmp_path / 'o.jsonl').json() | dict(seconds=0) == dict(rows=0, written=0, dropped={}, resumed=0, dropped_before=0, seconds=0)
    assert [p.name for p in tmp_path.iterdir()] == ['o.jsonl']


def test_keys(tmp_path):
    rows = [dict(id='a', sample=s, text=t) for s, t in ((0, 'x'), (1, 'y'), (0, 'z'))]
    echo = each(lambda r: dict(id='wrong', sample=7, text=r['text']))
    report = quiet(rows, echo, tmp_path / 'o.jsonl', key=('id', 'sample'))
    assert counts(report) == (3, 2, {'two rows with one key': 1}, 0)
    assert read_jsonl(tmp_path / 'o.jsonl') == rows[:2]
    assert counts(quiet(rows, echo, tmp_path / 'o.jsonl', key=('id', 'sample'))) == (3, 0, {'two rows with one key': 1}, 2)
    assert quiet([dict(n=1), dict(n='1'), dict(n=None)], each(lambda r: {}), tmp_path / 'p.jsonl', key='n').written == 3
    with pytest.raises(JobError, match="without 'id'.*it has x"): quiet([dict(x=1)], each(double), tmp_path / 'q.jsonl')
    with pytest.raises(JobError, match="without 'n'.*o.jsonl"): quiet(ROWS, each(double), tmp_path / 'o.jsonl', key='n')


def test_work_that_leaves_rows_out(tmp_path):
    some = lambda rows: ((r, dict(y=1)) for r in rows if r['x'] < 5)
    assert counts(quiet(ROWS, some, tmp_path / 'o.jsonl')) == (20, 5, {}, 0)
    assert counts(quiet(ROWS, each(double), tmp_path / 'o.jsonl'))[::3] == (20, 5)


def test_work_in_any_order(tmp_path):
    backwards = lambda rows: ((r, dict(y=1)) for r in list(rows)[::-1])
    quiet(ROWS, backwards, tmp_path / 'o.jsonl')
    assert [r['id'] for r in read_jsonl(tmp_path / 'o.jsonl')] == [r['id'] for r in ROWS[::-1]]


def test_each_row_is_on_disk_before_the_next(tmp_path):
    def work(rows):
        for n, row in enumerate(rows):
            assert not (tmp_path / 'o.jsonl').exists() or len(read_jsonl(tmp_path / 'o.jsonl')) == n
            yield row, dict(y=n)
    assert quiet(ROWS, work, tmp_path / 'o.jsonl').written == 20


@pytest.mark.parametrize('error', [ValueError('no'), KeyboardInterrupt()])
def test_a_failure_keeps_what_is_done(tmp_path, error):
    def fn(row):
        if row['x'] == 9: raise error
        return double(row)
    with pytest.raises(type(error)): quiet(ROWS, each(fn), tmp_path / 'o.jsonl')
    assert len(read_jsonl(tmp_path / 'o.jsonl')) == 7 and not list(tmp_path.glob('*.lock'))
    assert counts(quiet(ROWS, each(double), tmp_path / 'o.jsonl')) == (20, 9, dict(three=2), 9)


def test_a_result_that_is_no_json(tmp_path):
    with pytest.raises(JobError, match='JSON'): quiet(ROWS, each(lambda r: dict(y=object())), tmp_path / 'o.jsonl')
    with pytest.raises(JobError, match='JSON'): quiet(ROWS, each(lambda r: dict(y=float('inf'))), tmp_path / 'o.jsonl')


def test_progress_is_on_stderr(tmp_path, capsys):
    run_job(ROWS, each(double), tmp_path / 'o.jsonl', description='doubling')
    said = capsys.readouterr()
    assert said.out == '' and 'doubling' in said.err and '20/20' in said.err and 'dropped=4' in said.err
    run_job(iter(ROWS), each(double), tmp_path / 'o.jsonl')
    assert 'o.jsonl: 20row' in capsys.readouterr().err.replace(' ', '').replace('o.jsonl:', 'o.jsonl: ')


# kill -9

WORKER = '''
    import sys, time
    from pasta_lib.jobs import run_job, each, Drop
    def slow(row):
        time.sleep(.004)
        if row['x'] % 7 == 0: raise Drop('seven')
        return dict(y=row['x'], text='é' * 3000)
    rows = [dict(id=i, x=i) for i in range(150)]
    report = run_job(rows, each(slow, workers=int(sys.argv[2])), sys.argv[1], progress=False, shard=sys.argv[3])
    print(report.json())
'''


@pytest.mark.parametrize('workers', [1, 4])
def test_kill_9_loses_nothing_and_doubles_nothing(tmp_path, workers):
    out, kills = tmp_path / 'o.jsonl', 0
    for delay in (.05, .12, .2):
        process = python(WORKER, out, workers, '1/1')
        while process.poll() is None and (not out.exists() or not out.stat().st_size): time.sleep(.005)
        start, size = time.time(), out.stat().st_size
        while process.poll() is None and (time.time() - start < delay or out.stat().st_size == size): time.sleep(.005)
        kills += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if process.returncode == 0: break
    done = len(out.read_bytes().splitlines())
    finished = sum(path.read_bytes().count(b'\n') for path in tmp_path.glob('o.jsonl*.jsonl')) + done == 150        # killed behind its last row: no locks
    assert kills and (finished or list(tmp_path.glob('*.lock')))
    said, error = python(WORKER, out, workers, '1/1').communicate()
    assert not error and done > 0
    rows, drops = read_jsonl(out), read_jsonl(f'{out}.dropped.jsonl')
    assert sorted(r['id'] for r in rows) == [i for i in range(150) if i % 7]
    assert sorted(r['id'] for r in drops) == [i for i in range(150) if i % 7 == 0]
    assert "'rows': 150" in said and not list(tmp_path.glob('*.lock'))


def test_shards_write_to_one_file_at_once(tmp_path):
    out = tmp_path / 'o.jsonl'
    processes = [python(WORKER, out, 2, f'{i}/3') for i in (1, 2, 3)]
    assert [p.communicate()[1] for p in processes] == ['', '', '']
    assert sorted(r['id'] for r in read_jsonl(out) + read_jsonl(f'{out}.dropped.jsonl')) == list(range(150))


# shards

@settings(max_examples=60, deadline=None)
@given(st.lists(st.text() | st.integers(), unique_by=lambda k: (type(k), k), max_size=30), st.integers(1, 9))
def test_shards_partition(keys, n):
    for key in keys: assert sum(in_shard(key, f'{i}/{n}') for i in range(1, n + 1)) == 1


def test_shards_are_stable_and_even():
    sizes = [sum(in_shard(f'r{i}', f'{s}/4') for i in range(2000)) for s in (1, 2, 3, 4)]
    assert sum(sizes) == 2000 and min(sizes) > 420
    code = 'from pasta_lib.jobs import in_shard; print([in_shard(f"r{i}", "1/4") for i in range(40)])'
    said, _ = python(code, env=os.environ | dict(PYTHONHASHSEED='77')).communicate()
    assert said.strip() == str([in_shard(f'r{i}', '1/4') for i in range(40)])


def test_a_prompts_samples_stay_together(tmp_path):
    rows = [dict(id=f'p{i}', sample=s) for i in range(12) for s in range(4)]
    reports = [quiet(rows, each(lambda r: {}), tmp_path / f'{i}.jsonl', key=('id', 'sample'), shard=f'{i}/3') for i in (1, 2, 3)]
    assert sum(r.rows for r in reports) == 48
    groups = [{r['id'] for r in read_jsonl(tmp_path / f'{i}.jsonl')} for i in (1, 2, 3)]
    assert sum(map(len, groups)) == len(set.union(*groups)) == 12


@pytest.mark.parametrize('bad', ['0/4', '5/4', '1', '1/0', 'a/b', '-1/4', '1/2/3', ''])
def test_bad_shards(bad, tmp_path):
    with pytest.raises(JobError, match='no shard'): read_shard(bad)
    with pytest.raises(JobError, match='no shard'): quiet(ROWS, each(double), tmp_path / 'o.jsonl', shard=bad)


# locks

def test_two_jobs_on_one_shard_refuse_each_other(tmp_path):
    out = tmp_path / 'o [1].jsonl'
    with shard_lock(out, '1/2'):
        lock, = tmp_path.glob('*.lock')
        assert json.loads(lock.read_text())['pid'] == os.getpid()
        for same in ('1/2', '1/1', '3/4'):
            with pytest.raises(ShardTaken, match=f'process {os.getpid()}'): quiet(ROWS, each(double), out, shard=same)
        assert quiet(ROWS, each(double), out, shard='2/2').written
        assert quiet(ROWS, each(double), tmp_path / 'other.jsonl').written
    assert quiet(ROWS, each(double), out, shard='1/2').written
    assert not list(tmp_path.glob('*.lock'))


def test_another_process_is_refused_until_the_first_ends(tmp_path):
    hold = '''
        import sys, time
        from pasta_lib.jobs import shard_lock
        with shard_lock(sys.argv[1], '1/1'):
            print('held', flush=True)
            sys.stdin.read()
    '''
    out = tmp_path / 'o.jsonl'
    process = python(hold, out, stdin=subprocess.PIPE)
    assert process.stdout.readline() == 'held\n'
    with pytest.raises(ShardTaken, match=f'process {process.pid} on'): quiet(ROWS, each(double), out)
    process.kill()
    process.wait()
    assert list(tmp_path.glob('*.lock'))                      # a stale lock
    assert quiet(ROWS, each(double), out).written == 16
    assert not list(tmp_path.glob('*.lock'))


def test_stale_locks_of_another_division_do_not_matter(tmp_path):
    (tmp_path / 'o.jsonl.2-of-5.lock').write_text('{"pid": 1, "host": "x"}\n')
    (tmp_path / 'o.jsonl.1-of-1.lock').write_text('')
    assert quiet(ROWS, each(double), tmp_path / 'o.jsonl').written == 16
    with shard_lock(tmp_path / 'o.jsonl', '1/1'):
        (tmp_path / 'o.jsonl.1-of-1.lock').write_text('')     # a holder that hasn't said who it is yet
        with pytest.raises(ShardTaken, match=r'process \?'): quiet(ROWS, each(double), tmp_path / 'o.jsonl')


def test_locks_under_a_rush(tmp_path):
    "Many threads want one lock: never two at once, although each takes its file away when it is done."
    inside, worst, taken = [], [], []
    def want():
        for _ in range(30):
            try:
                with shard_lock(tmp_path / 'o.jsonl', '1/1'):
                    inside.append(1)
                    worst.append(len(inside))
                    time.sleep(.001)
                    inside.pop()
                    taken.append(1)
            except ShardTaken: time.sleep(.0005)
    threads = [threading.Thread(target=want) for _ in range(6)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert max(worst) == 1 and taken


# each

@pytest.mark.parametrize('workers', [1, 2, 5, 50])
def test_each_gives_every_row_once(workers):
    got = [(row['id'], str(result)) for row, result in each(double, workers)(iter(ROWS))]
    want = [(r['id'], f"three (x={r['x']})" if r['x'] % 5 == 3 else str(dict(y=2 * r['x']))) for r in ROWS]
    assert sorted(got) == sorted(want)
    assert list(each(double, workers)([])) == []


@pytest.mark.parametrize('workers', [0, -1])
def test_at_least_one(workers):
    with pytest.raises(JobError, match=f'workers={workers}: at least 1'): each(double, workers)
    with pytest.raises(JobError, match=f'limit={workers}'): at_least_one(n=3, limit=workers)
    at_least_one(n=1, limit=None)


def test_each_works_at_once_but_takes_no_more_than_it_can_do():
    barrier, taken = threading.Barrier(4), []
    def rows():
        for r in ROWS[:8]:
            taken.append(r)
            yield r
    stream = each(lambda r: barrier.wait(5) and {} or {}, 4)(rows())
    next(stream)
    assert len(taken) <= 8 and len(taken) >= 4
    assert len(list(stream)) == 7


def test_each_finishes_what_is_in_flight_when_one_fails():
    started = threading.Barrier(3)
    def fn(row):
        started.wait(5)
        if row['x'] == 1: raise ValueError('bad row')
        time.sleep(.05)
        return dict(y=row['x'])
    got = []
    with pytest.raises(ValueError, match='bad row'):
        for row, result in each(fn, 3)(iter(ROWS)): got.append(result['y'])
    assert sorted(got) == [0, 2]


# the small things

def test_drop_and_report():
    drop = Drop('too long', '300 words')
    assert isinstance(drop, PastaError) and str(drop) == 'too long (300 words)' and str(Drop('x')) == 'x'
    assert (copy := pickle.loads(pickle.dumps(drop))).reason == 'too long' and copy.detail == '300 words'
    assert JobReport(3, 2, dict(x=1)).json() == dict(rows=3, written=2, dropped=dict(x=1), resumed=0, dropped_before=0, seconds=0.0)


def test_cache(tmp_path):
    cache = DiskCache(tmp_path / 'c')
    assert cache.get(dict(a=1)) is None
    cache.put(dict(a=1, b=[2, 'é']), dict(text='ü\n'))
    assert cache.get(dict(b=[2, 'é'], a=1)) == dict(text='ü\n')
    assert cache.get(dict(a=1, b=['é', 2])) is None and cache.get(dict(a='1', b=[2, 'é'])) is None
    cache.put(dict(a=1, b=[2, 'é']), dict(text='new'))
    assert DiskCache(tmp_path / 'c').get(dict(a=1, b=[2, 'é'])) == dict(text='new')
    file, = (tmp_path / 'c').rglob('*.*')
    assert json.loads(file.read_text())['content'] == dict(a=1, b=[2, 'é'])
    file.write_text('{"val')
    with pytest.raises(JobError, match='broken entry.*delete it'): cache.get(dict(a=1, b=[2, 'é']))


def test_cache_under_many_threads(tmp_path):
    cache, wrong = DiskCache(tmp_path), []
    def use(n):
        for i in range(40):
            cache.put(dict(k=i % 3), dict(v='x' * 5000))
            if (cache.get(dict(k=i % 3)) or {}).get('v') != 'x' * 5000: wrong.append(i)
    threads = [threading.Thread(target=use, args=(n,)) for n in range(4)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert not wrong and not list(tmp_path.rglob('*.part'))


def test_draw_runs():
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    ax = draw_runs([dict(run=1, order=1), dict(run=1, order=0), dict(run=2, order=2)])
    assert [c.get_offsets().tolist() for c in ax.collections] == [[[0, 1], [1, 0]], [[2, 2]]]
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ['run 1', 'run 2']
    plt.close('all')


def test_a_row_that_was_made_from_something_else(tmp_path):
    "A known id with another source is refused, whatever the order; what is in the file stays."
    rows, out = [dict(id=str(n), x=n) for n in range(4)], tmp_path / 'out.jsonl'
    source = lambda row: row['x']
    work = each(lambda row: dict(x=row['x'], y=2 * row['x']))
    assert counts(quiet(rows, work, out, source=source)) == (4, 4, {}, 0) and counts(quiet(rows, work, out, source=source)) == (4, 0, {}, 4)
    before = out.read_bytes()
    with pytest.raises(JobError, match=r'something else \(\["2"\] in .*out.jsonl\): write to another file'):
        quiet([*rows[:2], dict(id='2', x=7), dict(id='new', x=1)], work, out, source=source)
    assert out.read_bytes() == before and counts(quiet([dict(id='2', x=7)], work, out)) == (1, 0, {}, 1)


def test_json_that_is_nested_too_deep(tmp_path):
    (tmp_path / 'deep.jsonl').write_text('{"id": 1}\n{"id": ' + '[' * 100_000 + ']' * 100_000 + '}\n')
    with pytest.raises(JobError, match='nested too deep .*line 2'): read_jsonl(tmp_path / 'deep.jsonl')

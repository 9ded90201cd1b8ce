"`pasta sample`, `annotate` and `train`: what they print, write, resume and refuse."
import json

import pytest
from typer.testing import CliRunner

import pasta_lib.commands  # noqa: F401  (adds the commands to the app)
from pasta_lib.cli import app
from pasta_lib.commands import read_answers, read_prompts
from pasta_lib.core import PastaError
from pasta_lib.jobs import read_jsonl, write_jsonl

LIST = '1. **Heron**: It stands in shallow water for hours and waits for a fish.\n\n2. **Swift**: It sleeps in the air and only lands to breed in spring.\n'


def pasta(*args, code=0):
    "The command's standard output; its exit code is checked."
    r = CliRunner().invoke(app, [str(a) for a in args])
    if r.exception and not isinstance(r.exception, SystemExit): raise r.exception
    assert r.exit_code == code, r.output
    return r.stdout


@pytest.fixture
def answers(tmp_path):
    "Three rows as `pasta sample` writes them: two good ones and one that was cut."
    row = dict(prompt='Name two birds.', sample=0, tagged_text=LIST, finish_reason='eos', token_ids=[1], generated_tokens=60)
    rows = [row | dict(id='a', text=LIST), row | dict(id='b', text=LIST), row | dict(id='c', text=LIST, finish_reason='length')]
    write_jsonl(tmp_path / 'answers.jsonl', rows)
    return tmp_path / 'answers.jsonl'


def test_annotate(answers, tmp_path):
    out = tmp_path / 'annotated.jsonl'
    found = json.loads(pasta('annotate', answers, '--model', 'tiny', '--out', out, '--json'))
    assert (found['rows'], found['written'], found['resumed']) == (3, 2, 0)
    assert found['dropped'] == {'cut by length': 1}
    assert [row['response'] for row in read_jsonl(out)] == [LIST, LIST]
    assert all('<promise topic="Heron"' in row['tagged_text'] for row in read_jsonl(out))
    again = json.loads(pasta('annotate', answers, '--model', 'tiny', '--out', out, '--json'))
    assert again['written'] == 0 and again['resumed'] == 3 or again['resumed'] == 2
    assert len(read_jsonl(out)) == 2
    text = pasta('annotate', answers, '--model', 'tiny', '--out', tmp_path / 'new.jsonl')
    assert '2 rows written' in text and '1 dropped: cut by length' in text


def test_annotate_by_likelihood(answers, tmp_path):
    found = json.loads(pasta('annotate', answers, '--annotator', 'likelihood', '--threshold', 100, '--model', 'tiny', '--dtype', 'float32',
                             '--out', tmp_path / 'a.jsonl', '--json'))
    assert found['written'] == 2
    assert read_jsonl(tmp_path / 'a.jsonl')[0]['annotator'] == 'likelihood'


def test_annotate_responses_of_a_set(tmp_path):
    write_jsonl(tmp_path / 'set.jsonl', [dict(id='x', prompt='Name two birds.', reference=LIST)])
    assert '1 rows written' in pasta('annotate', tmp_path / 'set.jsonl', '--model', 'tiny', '--out', tmp_path / 'out.jsonl')
    write_jsonl(tmp_path / 'none.jsonl', [dict(id='x', prompt='Name two birds.')])
    with pytest.raises(PastaError, match='no answers'): read_answers(str(tmp_path / 'none.jsonl'))


def test_sample_is_resumed(tmp_path):
    out = tmp_path / 'out.jsonl'
    options = ['made:2', '--model', 'tiny', '--n', 2, '--max-new-tokens', 4, '--dtype', 'float32', '--slots', 2048, '--out', out]
    first = json.loads(pasta('sample', *options, '--json'))
    assert (first['written'], first['resumed'], first['out']) == (4, 0, str(out))
    rows = read_jsonl(out)
    assert len({(row['id'], row['sample']) for row in rows}) == 4
    out.write_text('\n'.join(map(json.dumps, rows[:3])) + '\n')
    again = json.loads(pasta('sample', *options, '--json'))
    assert (again['written'], again['resumed']) == (1, 3)
    key = lambda row: (row['id'], row['sample'])
    assert sorted(read_jsonl(out), key=key) == sorted(rows, key=key)


def test_two_shards_are_the_whole(tmp_path):
    options = ['made:6', '--model', 'tiny', '--max-new-tokens', 2, '--dtype', 'float32', '--slots', 2048]
    for i in (1, 2): pasta('sample', *options, '--shard', f'{i}/2', '--out', tmp_path / f'{i}.jsonl')
    pasta('sample', *options, '--out', tmp_path / 'all.jsonl')
    ids = lambda name: sorted(row['id'] for row in read_jsonl(tmp_path / f'{name}.jsonl')) if (tmp_path / f'{name}.jsonl').exists() else []
    assert sorted(ids(1) + ids(2)) == ids('all') and len(ids('all')) == 6


def test_train_and_resume(answers, tmp_path):
    pasta('annotate', answers, '--model', 'tiny', '--out', tmp_path / 'annotated.jsonl')
    options = ['train', 'pasta-sft', 'model=tiny', f'data={tmp_path / "annotated.jsonl"}', 'batch=2', 'max_steps=1', 'device=cpu', '--out', tmp_path / 'run']
    found = json.loads(pasta(*options, '--json'))
    assert found.keys() >= {'steps', 'tokens', 'seconds', 'loss', 'out'} and found['steps'] == 1
    assert json.loads(pasta(*options, '--resume', '--json')) == found                   # it is finished: nothing is trained twice
    assert pasta(*options, code=2) == ''                                                 # a run is there, and --resume was not said
    assert '1 steps' in pasta(*options, '--resume')
    text = pasta('sample', 'made:1', '--model', tmp_path / 'run', '--strategy', 'pasta', '--grammar', 'mask', '--max-new-tokens', 4,
                 '--dtype', 'float32', '--slots', 1024, '--out', tmp_path / 'new.jsonl')
    assert '1 rows written' in text


@pytest.mark.parametrize('arguments, words', [
    (['sample', 'made:many'], 'made:100'), (['sample', 'self:many', '--model', 'tiny'], 'self:100'), (['sample', 'no-such-file'], 'no-such-file'),
    (['train', 'pasta-sft', 'learning_rat=1'], 'learning_rate'), (['train', 'no-recipe'], 'pasta-sft'), (['annotate', 'no-such.jsonl'], 'no-such.jsonl'),
])
def test_wrong_use(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    r = CliRunner().invoke(app, arguments)
    assert r.exit_code == 2 and words in r.output and 'Traceback' not in r.output


def test_prompts():
    assert read_prompts('made:5') == read_prompts('made:9')[:5] == read_prompts('made:9', limit=5)
    with pytest.raises(PastaError, match='no prompts'): read_prompts('made:0')

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
    assert '0 rows written to' in (text := pasta('annotate', answers, '--model', 'tiny', '--out', tmp_path / 'new.jsonl'))
    assert f'2 were there already, 1 dropped before ({tmp_path}/new.jsonl.dropped.jsonl)' in text
    (tmp_path / 'new.jsonl.dropped.jsonl').unlink()
    assert '1 dropped: cut by length' in pasta('annotate', answers, '--model', 'tiny', '--out', tmp_path / 'new.jsonl')


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


def refused(*args, words):
    "The command ends with 2, one line that has these words, and no traceback."
    r = CliRunner().invoke(app, [str(a) for a in args])
    assert r.exit_code == 2 and isinstance(r.exception, SystemExit), r.output
    assert words in r.output and 'Traceback' not in r.output, r.output


def test_answers_are_told_from_prompts_by_any_row(tmp_path):
    path = tmp_path / 'a.jsonl'
    path.write_text('{"id": "x", "note": "no answer"}\n\n{"id": "y", "text": "Yes."}\n')
    rows, key = read_answers(str(path))
    assert [row['id'] for row in rows] == ['x', 'y'] and key == ('id',) and read_answers(str(path), limit=1)[0] == rows[:1]
    assert '1 dropped: no response' in pasta('annotate', path, '--model', 'tiny', '--out', tmp_path / 'out.jsonl')
    path.write_text('{"id": "x", "text": "Yes."}\n\n{"id": "x", "text": "No.", "sample": 1}\n')
    with pytest.raises(PastaError, match="without 'sample' .*a.jsonl, line 1.*id and sample"): read_answers(str(path))
    path.write_text('{"id": "x", "text": "Yes."}\n\n{"text": "No."}\n')
    with pytest.raises(PastaError, match="without 'id' .*a.jsonl, line 3"): read_answers(str(path))
    path.write_text('')
    with pytest.raises(PastaError, match='an empty file'): read_answers(str(path))


def test_a_file_is_not_annotated_into_itself(answers, tmp_path):
    before = answers.read_bytes()
    (tmp_path / 'link.jsonl').symlink_to(answers)
    for source in (answers, f'prompts={answers}', tmp_path / 'link.jsonl'):
        for command in ('annotate', 'sample'): refused(command, source, '--model', 'tiny', '--out', answers, words='--out is the file that is read')
    assert answers.read_bytes() == before


def test_bad_rows_are_counted(tmp_path):
    rows = [dict(id=0, text=None), dict(id=1, text=['a']), dict(id=2, text=LIST, prompt=5), dict(id=3, finish_reason='eos'), dict(id=4, text='x \ud800'),
            dict(id=5, text=None, finish_reason='eos'), dict(id=6, text=LIST, prompt='Name two birds.')]
    (tmp_path / 'a.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    found = json.loads(pasta('annotate', tmp_path / 'a.jsonl', '--model', 'tiny', '--out', tmp_path / 'out.jsonl', '--json'))
    assert (found['written'], found['dropped']) == (1, {'no response': 4, 'prompt is no text': 1, 'half a character': 1})
    row, = read_jsonl(tmp_path / 'out.jsonl')
    assert row['made_by'] == dict(annotator='structural', model='tiny')
    refused('annotate', tmp_path / 'a.jsonl', '--model', 'tiny', '--annotator', 'likelihood', '--out', tmp_path / 'out.jsonl', words="annotator was 'structural'")


def test_a_wrong_setting_drops_nothing(tmp_path):
    out = tmp_path / 'out.jsonl'
    options = ['sample', 'made:3', '--model', 'tiny', '--dtype', 'float32', '--max-new-tokens', 4, '--out', out]
    for _ in range(2): refused(*options, '--slots', 2048, '--strategy', 'pasta', '--grammar', 'bogus', words="unknown grammar 'bogus'")
    refused(*options, '--slots', 64, words='make the pool larger: --slots N')
    refused(*options, '--slots', 2048, '--grammar', 'mask', words='--grammar with --strategy ar')
    assert read_jsonl(out) == [] and [p.name for p in tmp_path.iterdir()] == ['out.jsonl']
    assert '3 rows written' in pasta(*options, '--slots', 2048)
    refused(*options, '--slots', 2048, '--temperature', '.5', words='temperature was 1.0 and is now 0.5')
    made_by = dict(strategy='ar', temperature=1.0, top_p=1.0, max_new_tokens=4, model='tiny', dtype='float32')
    assert all(row['made_by'] == made_by for row in read_jsonl(out))


def test_a_tiny_random_model_is_cut(tmp_path):
    pasta('sample', 'made:3', '--model', 'tiny', '--max-new-tokens', 64, '--dtype', 'float32', '--slots', 2048, '--out', tmp_path / 'a.jsonl')
    found = json.loads(pasta('annotate', tmp_path / 'a.jsonl', '--model', 'tiny', '--out', tmp_path / 'b.jsonl', '--json'))
    assert found['written'] == 0 and sum(found['dropped'].values()) == 3


@pytest.mark.parametrize('command', ['sample', 'annotate'])
@pytest.mark.parametrize('json_', [[], ['--json']])
def test_interrupted(command, json_, answers, tmp_path, monkeypatch):
    def stop(*args, **options): raise KeyboardInterrupt
    monkeypatch.setattr('pasta_lib.tasks.sample_answers', stop)
    monkeypatch.setattr('pasta_lib.annotate.annotate', stop)
    r = CliRunner().invoke(app, [command, 'made:2' if command == 'sample' else str(answers), '--model', 'tiny', '--out', str(tmp_path / 'x.jsonl'), *json_])
    assert r.exit_code == 130 and f'what is finished is in {tmp_path}/x.jsonl, and the same command goes on' in r.stderr
    assert json.loads(r.stdout) == dict(error='interrupted') if json_ else r.stdout == ''


def test_help_names_what_a_source_may_be():
    from pasta_lib.tasks import FILES, SOURCES
    text = ' '.join(pasta('sample', '--help').split())
    assert all(name in text for name in [*SOURCES, *FILES, 'made:N', 'self:N', 'tag tokens', 'At most so many'])


@pytest.mark.parametrize('arguments', [['--help'], ['pasta-sft', '--help'], ['-h']])
def test_help_of_train_lists_recipes_and_settings(arguments):
    from pasta_lib.train import RECIPES, TrainConfig, settings_help
    said = pasta('train', *arguments)
    assert settings_help() in said and all(f'  {name}=' in said for name in vars(TrainConfig()))
    words = ' '.join(said.split())
    assert all(f'{name} {recipe.about}' in words for name, recipe in RECIPES.items()) and 'Settings' not in pasta('sample', '--help')


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
    (['sample', 'made:²'], 'made:100'), (['sample', 'made:99999999'], '6900 at most'), (['sample', 'made:' + '9' * 5000], 'made:100'), (['sample', 'made:0'], 'at least 1'),
    (['sample', 'self:0'], 'at least 1'), (['sample', 'self:-1'], 'self:100'), (['sample', 'made:2', '--n', '0'], 'n=0: at least 1'),
    (['sample', 'made:2', '--n', '-3'], 'n=-3: at least 1'), (['sample', 'made:2', '--limit', '-1'], 'limit=-1: at least 1'),
    (['sample', 'made:2', '--limit', '0'], 'limit=0: at least 1'), (['sample', 'made:2', '--batch', '0'], 'batch=0: at least 1'),
    (['sample', 'made:2', '--batch', '-1'], 'batch=-1: at least 1'), (['annotate', 'a', '--workers', '0'], 'workers=0: at least 1'),
    (['annotate', 'a', '--workers', '-1'], 'workers=-1: at least 1'), (['annotate', 'a', '--limit', '0'], 'limit=0: at least 1'),
    (['sample', 'made:1', '--model', 'tiny', '--out', '/dev/full'], 'not a regular file'), (['sample', 'made:1', '--model', 'tiny', '--out', '.'], 'not a regular file'),
])
def test_wrong_use(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    r = CliRunner().invoke(app, arguments)
    assert r.exit_code == 2 and words in r.output and 'Traceback' not in r.output


def test_prompts():
    assert read_prompts('made:5') == read_prompts('made:9')[:5] == read_prompts('made:9', limit=5)
    for wrong in (dict(source='made:0'), dict(source='made:3', limit=0), dict(source='no-such-file', limit=-1)):
        with pytest.raises(PastaError, match='at least 1'): read_prompts(**wrong)


# ---- registers
SUM = 'I have 4 apples.\n3 * 4 = 12\n12 - 2 = 10\nSo there are 10 left in the bag, and nobody has eaten any of them so far, which is good.\n'


@pytest.fixture
def sums(tmp_path):
    row = dict(prompt='How many?', finish_reason='eos', text=SUM)
    write_jsonl(tmp_path / 'sums.jsonl', [row | dict(id='a'), row | dict(id='b', text=SUM * 2), row | dict(id='c', finish_reason='length')])
    return tmp_path / 'sums.jsonl'


@pytest.mark.parametrize('annotator, options, made_by', [
    ('program', [], dict(annotator='program')), ('numbers', ['--registers', 3, '--by', 'sentences'], dict(annotator='numbers', registers=3, by='sentences')),
    ('last-use', ['--model', 'tiny', '--dtype', 'float32', '--threshold', 1], dict(annotator='last-use', model='tiny', threshold=1.0))])
def test_annotated_steps_can_be_trained_on(sums, tmp_path, annotator, options, made_by, monkeypatch):
    from pasta_lib.registers import verify_steps
    if annotator != 'last-use': monkeypatch.setattr('pasta_lib.models.load', None)                # these need no model
    if annotator == 'program': write_jsonl(sums, [dict(id=n, text=f'a = 3 * {n}\nb = a - 2\nc = a * b\nprint(c)\n') for n in range(2)] + [dict(id=2)])
    found = json.loads(pasta('annotate', sums, '--annotator', annotator, *options, '--out', tmp_path / 'steps.jsonl', '--json'))
    if annotator == 'program': assert (found['written'], found['dropped']) == (2, {'no response': 1})
    else: assert (found['written'], found['dropped']) in ((2, {'cut by length': 1}), (1, {'loops': 1, 'cut by length': 1}))
    for row in read_jsonl(tmp_path / 'steps.jsonl'): assert verify_steps(row) is row and row['made_by'] == made_by and '<reg_0>' in row['tagged_text']
    pasta('lint', tmp_path / 'steps.jsonl', '--lang', 'tip')
    assert json.loads(pasta('annotate', sums, '--annotator', annotator, *options, '--out', tmp_path / 'steps.jsonl', '--json'))['written'] == 0


def test_the_annotators_of_steps(monkeypatch):
    from pasta_lib import registers as R
    from pasta_lib.commands import STEPS, Annotator, make_step_annotator
    monkeypatch.setenv('GEMINI_API_KEY', 'x')
    made = {kind: make_step_annotator(kind, None, None, 1.5, registers=5) for kind in STEPS if kind != 'gemini-steps'}
    assert [type(a) for a in made.values()] == [R.Program, R.Program, R.LastUse] and all(a.registers == 5 for a in made.values())
    assert made['numbers'].reads is R.number_steps and made['program'].reads is R.program_steps and made['last-use'].threshold == 1.5
    assert set(STEPS) < {a.value for a in Annotator}


@pytest.mark.parametrize('arguments, words', [
    (['--annotator', 'structural', '--registers', '4'], '--registers with --annotator structural: it is for program, numbers, last-use, gemini-steps'),
    (['--annotator', 'program', '--threshold', '1'], '--threshold with --annotator program: it is for likelihood and last-use'),
    (['--annotator', 'numbers', '--by', 'pages'], "no steps by 'pages'"), (['--annotator', 'likelihood', '--by', 'lines'], '--by with --annotator likelihood'),
    (['--annotator', 'numbers', '--registers', '0'], '--registers')])
def test_options_of_other_annotators(sums, tmp_path, arguments, words):
    refused('annotate', sums, '--out', tmp_path / 'x.jsonl', *arguments, words=words)
    assert not (tmp_path / 'x.jsonl').exists()


# ---- strategies of sample
@pytest.fixture(scope='module')
def speakers(tmp_path_factory):
    "Models that have the tokens of TIP, of APAR, and of plans."
    from pasta_lib.models import save
    from pasta_lib.train import prepare
    folder = tmp_path_factory.mktemp('speakers')
    for tags in ('registers', 'apar'): save(*prepare('tiny', tags), folder / tags)
    save(*prepare('tiny', 'plan'), folder / 'plan', block_size=4)
    return folder


@pytest.mark.parametrize('strategy, options', [
    ('tip', []), ('tip', ['--layout', 'aligned']), ('tip', ['--option', 'layout=aligned']), ('dense', []), ('streaming_llm', ['--window', 64]),
    ('streaming_llm', ['--option', 'window=64', '--option', 'keep_prompt=true', '--option', 'sinks=2']), ('paged_h2o', ['--budget', 128]), ('sot', []),
    ('sot', ['--option', 'max_points=2']), ('apar', ['--option', 'depth=2']), ('planned', ['--option', 'steps_ratio=0.5', '--option', 'order=margin']),
    ('single_block', ['--block', 2]), ('multi_block', []), ('multi_block', ['--option', 'block=2', '--option', 'eager=true'])])
def test_strategies_by_name(speakers, tmp_path, strategy, options):
    own = dict(apar='apar', planned='plan', single_block='plan', multi_block='plan')
    out, model = tmp_path / 'out.jsonl', speakers / own.get(strategy, 'registers')
    pasta('sample', 'made:2', '--model', model, '--strategy', strategy, *options, '--max-new-tokens', 6, '--slots', 4096, '--dtype', 'float32', '--out', out)
    rows = read_jsonl(out)
    assert len(rows) == 2 and all(row['made_by']['strategy'] == strategy and row['generated_tokens'] for row in rows)
    told = dict(option.split('=') for option in map(str, options) if '=' in option)
    assert all(str(rows[0]['made_by'][key]).lower() == value for key, value in told.items())
    if strategy == 'multi_block' or '--block' in options: assert rows[0]['made_by']['block'] == (2 if options else 4)


@pytest.mark.parametrize('arguments, words', [
    (['--strategy', 'streaming_llm'], 'streaming_llm needs a window: write --window N'), (['--strategy', 'paged_h2o'], 'paged_h2o needs a budget: write --budget N'),
    (['--strategy', 'dense', '--window', '9'], '--window with --strategy dense'), (['--strategy', 'ar', '--option', 'depth=2'], "ar has no option 'depth'"),
    (['--option', 'depth'], "not an option: 'depth'"), (['--strategy', 'guided'], 'guided'), (['--strategy', 'planned', '--block', '4'], '--block with --strategy planned')])
def test_options_of_other_strategies(arguments, words, tmp_path, monkeypatch):
    monkeypatch.setattr('pasta_lib.models.load', None)                                             # before the model is loaded
    refused('sample', 'made:2', '--model', 'tiny', '--out', tmp_path / 'x.jsonl', *arguments, words=words)


@pytest.mark.parametrize('strategy, words', [
    (['tip'], 'pasta train tip-sft'), (['apar'], 'pasta train apar-sft'), (['planned'], 'pasta train planned-sft'),
    (['single_block', '--block', 4], 'pasta train block-sft'), (['multi_block'], 'multi_block needs a block, and the model says none: write --block N')])
def test_strategies_whose_tokens_are_missing(strategy, words, tmp_path):
    refused('sample', 'made:2', '--model', 'tiny', '--slots', 2048, '--strategy', *strategy, '--out', tmp_path / 'x.jsonl', words=words)


def test_the_tiny_evaluation_has_its_own_prompts():
    refused('eval', 'pasta', '--prompts', 'nonsense', words='--prompts with --scale tiny')

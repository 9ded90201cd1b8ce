"The `pasta` command: streams, exit codes, JSON, what it shows on a terminal; in this process and as a program."
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from typer.testing import CliRunner

import pasta_lib.cli as cli
from pasta_lib.core import PastaError

KEYS = {'text', 'tagged_text', 'token_ids', 'finish_reason', 'prompt_tokens', 'generated_tokens', 'forwards', 'prefill_forwards',
        'critical_path', 'parallelism', 'forks', 'seconds', 'threads'}


def pasta(*args, input=None):
    "What came of `pasta args`."
    r = CliRunner().invoke(cli.app, [str(a) for a in args], input=input)
    if r.exception and not isinstance(r.exception, SystemExit): raise r.exception
    return r


def only_json(r) -> dict:
    "The one object on standard output."
    assert r.stdout.count('\n') == 1 and r.stdout.isascii()
    return json.loads(r.stdout)


@pytest.fixture(autouse=True)
def no_reload(monkeypatch, tiny):
    "`tiny` is made once; other names go the usual way."
    from pasta_lib import models
    honest = models.load
    monkeypatch.setattr(models, 'load', lambda name, **kw: tiny if name == 'tiny' else honest(name, **kw))


@pytest.fixture
def outline(tmp_path):
    path = tmp_path / 'plan.txt'
    path.write_text('Two plans.\n- the sea (20)\n- the hills (20)\n---\n')
    return path


# ---- lint
GOOD = '<promise topic="a" tokens="10"/><async>x</async> y<sync/> z'
BAD = 'Hi\n<promise topic="a" tokens="15"/><async>x'


@pytest.mark.parametrize('text, rules', [(GOOD, []), (BAD, ['tokens-not-multiple', 'unclosed-async']), ('', []), ('plain', [])])
def test_lint_text(tmp_path, text, rules):
    path = tmp_path / 'a.txt'
    path.write_text(text)
    r = pasta('lint', path, '--json')
    found = only_json(r)
    assert [e['rule'] for e in found['errors']] == rules and found['documents'] == 1 and r.exit_code == bool(rules)
    assert all({'document', 'line', 'column', 'rule', 'message', 'repair'} <= set(e) for e in found['errors'])
    r = pasta('lint', path)
    lines = r.stdout.splitlines()
    assert len(lines) == len(rules) + 1 and r.exit_code == bool(rules) and not r.stderr
    if rules: assert lines[0].startswith(f'{path}:2:1: tokens-not-multiple')
    assert pasta('lint', '-', '--json', input=text).stdout == json.dumps(found) + '\n'


def test_lint_jsonl_and_field(tmp_path):
    path = tmp_path / 'a.jsonl'
    path.write_text('\n'.join(json.dumps({'mine': t}) for t in (GOOD, BAD, GOOD)) + '\n')
    found = only_json(pasta('lint', path, '--field', 'mine', '--json'))
    assert found['documents'] == 3 and {e['document'] for e in found['errors']} == {2}
    r = pasta('lint', path, '--field', 'mine')
    assert f'{path}:2:2:1: tokens-not-multiple' in r.stdout and '3 documents: 2 findings' in r.stdout


def test_lint_languages(tmp_path):
    path = tmp_path / 'a.txt'
    path.write_text(GOOD)
    assert pasta('lint', path, '--lang', 'plan').exit_code == 1
    assert pasta('lint', path, '--lang', 'tip').exit_code == 0
    assert pasta('lint', path, '--lang', 'latin').exit_code == 2


def test_lint_input_that_names_a_file_is_text(tmp_path, monkeypatch):
    (tmp_path / 'bad').write_text(BAD)
    monkeypatch.chdir(tmp_path)
    assert pasta('lint', '-', input='bad').exit_code == 0


def test_lint_not_utf8(tmp_path):
    r = pasta('lint', '-', '--json', input=b'abc\xff')
    assert r.exit_code == 1 and only_json(r)['errors'][0]['rule'] == 'not-utf8'


@pytest.mark.parametrize('name', ['nowhere.txt', '.'])
def test_lint_what_cannot_be_read(name):
    r = pasta('lint', name, '--json')
    assert r.exit_code == 2 and r.stderr == f'pasta: {only_json(r)["error"]}\n' and r.stderr.count('\n') == 1
    r = pasta('lint', name)
    assert r.exit_code == 2 and r.stdout == '' and r.stderr.startswith('pasta: ') and r.stderr.count('\n') == 1


# ---- generate
def test_ar_is_the_engine(tiny):
    from pasta_lib.engine import Engine, ar
    r = pasta('generate', '-m', 'tiny', '--strategy', 'ar', '--prompt', 'Hello', '--max-new-tokens', 12, '--json')
    found, want = only_json(r), Engine(*tiny).run(ar('Hello', max_new_tokens=12))[0]
    assert r.exit_code == 0 and KEYS <= set(found) and found['token_ids'] == want.token_ids and found['text'] == want.text
    assert found['strategy'] == 'ar' and found['finish_reason'] == want.finish_reason


def test_text_goes_to_stdout_and_notes_to_stderr():
    r = pasta('generate', '-m', 'tiny', '--prompt', 'Hello', '--max-new-tokens', 5)
    found = only_json(pasta('generate', '-m', 'tiny', '--prompt', 'Hello', '--max-new-tokens', 5, '--json'))
    assert r.stdout.encode() == (found['text'] + '\n').encode() and '5 tokens in' in r.stderr and r.exit_code == 0


@pytest.mark.parametrize('given', [('--prompt', '-'), ()])
def test_prompt_from_stdin(given):
    args = ('generate', '-m', 'tiny', '--max-new-tokens', 4, '--json')
    assert only_json(pasta(*args, *given, input='Hello\n'))['token_ids'] == only_json(pasta(*args, '--prompt', 'Hello'))['token_ids']


@pytest.mark.parametrize('strategy', [('--strategy', 'pasta'), ('--strategy', 'guided'), ()])
def test_an_outline_is_guided(outline, strategy, tmp_path):
    page = tmp_path / 'out.html'
    r = pasta('generate', '-m', 'tiny', *strategy, '--outline', outline, '--prompt', 'Where?', '--max-new-tokens', 30,
              '--point-tokens', 12, '--json', '--trace', page)
    found = only_json(r)
    assert found['strategy'] == 'guided'
    assert found['forks'] == 2 and found['critical_path'] < found['generated_tokens'] and 'the sea' in found['text']
    assert '<html' in page.read_text()[:200] and 'trace:' in r.stderr


def test_an_outline_in_turn(outline):
    found = only_json(pasta('generate', '-m', 'tiny', '--strategy', 'ar', '--outline', outline, '--prompt', 'Where?',
                            '--max-new-tokens', 30, '--point-tokens', 12, '--json'))
    assert found['forks'] == 0 and found['strategy'] == 'ar' and 'the hills' in found['text']


def test_pasta_takes_its_options():
    args = ('generate', '-m', 'tiny', '--prompt', 'Hi', '--max-new-tokens', 5, '--json')
    plain = only_json(pasta(*args))['token_ids']
    r = pasta(*args, '--strategy', 'pasta', '--tags', 'text', '--positions', 'constant', '--constant', 20, '--after-sync', 'max',
              '--max-forks', 3, '--policy', 'literal')
    assert only_json(r)['token_ids'] == plain and only_json(r)['strategy'] == 'pasta'


@pytest.mark.parametrize('strategy, options', [('dense', []), ('streaming_llm', ['--window', 16, '--sinks', 2]), ('paged_h2o', ['--budget', 32]),
                                               ('paged_h2o', ['--budget', 32, '--keep-prompt'])])
def test_policies_of_forgetting(strategy, options):
    asked = ['--model', 'tiny', '--prompt', 'word ' * 9, '--raw', '--max-new-tokens', 40]
    found = only_json(pasta('generate', '--strategy', strategy, *asked, '--page-size', 8, *options, '--json'))
    assert KEYS <= set(found) and found['strategy'] == strategy and found['generated_tokens'] == 40
    if strategy == 'dense':
        assert found['token_ids'] == only_json(pasta('generate', '--strategy', 'ar', *asked, '--json'))['token_ids']
        assert found['live'] == found['dense'] and found['evictions'] == 0 and found['fragmentation'] >= 1
    else: assert found['evictions'] > 0 and found['live'] < found['dense'] and ('--keep-prompt' not in options or found['peak'] > found['prompt_tokens'])


def test_strategies_that_need_tokens_of_their_own(tmp_path):
    for strategy, says in (('tip', 'no registers: train a model that has them: pasta train tip-sft'), ('apar', 'no [Fork]: train a model that has it: pasta train apar-sft')):
        r = pasta('generate', '--strategy', strategy, '--model', 'tiny', '--prompt', 'x')
        assert r.exit_code == 2 and says in r.stderr and r.stderr.count('pasta:') == 1 and 'add_tokens' not in r.stderr
    r = pasta('generate', '--strategy', 'tip', '--window', 9, '--model', 'tiny', '--prompt', 'x')
    assert r.exit_code == 2 and '--window with --strategy tip: that flag is for streaming_llm; flags of tip: --layout' in r.stderr
    r = pasta('generate', '--strategy', 'tip', '--outline', __file__, '--model', 'tiny', '--prompt', 'x')
    assert r.exit_code == 2 and '--outline with --strategy tip' in r.stderr


def no_model(monkeypatch):
    def refuse(*args, **kw): raise AssertionError('the model was loaded')
    monkeypatch.setattr(cli, 'open_engine', refuse)


@pytest.mark.parametrize('args, says', [
    (('streaming_llm',), 'streaming_llm needs a window: write --window N'), (('streaming_llm', '--sinks', 2), 'write --window N'),
    (('paged_h2o',), 'paged_h2o needs a budget: write --budget N'), (('paged_h2o', '--window', 9), '--window with --strategy paged_h2o'),
    (('dense', '--window', 100), '--window with --strategy dense: that flag is for streaming_llm; flags of dense: none'),
    (('sot', '--layout', 'aligned'), 'flags of sot: --point-tokens'), (('ar', '--keep-prompt'), '--keep-prompt with --strategy ar')])
def test_flags_of_other_strategies_are_told_before_the_model_is_loaded(args, says, monkeypatch):
    no_model(monkeypatch)
    r = pasta('generate', '-m', 'tiny', '--prompt', 'Hi', '--strategy', *args)
    assert r.exit_code == 2 and says in r.stderr and r.stderr.count('pasta:') == 1 and 'max_new_tokens' not in r.stderr


def test_the_table_of_flags_is_that_of_the_strategies():
    import inspect
    from pasta_lib.pasta import guided
    makers = {name: cli.find_strategy(name) for name in cli.HOMES} | dict(guided=guided)
    takes = {name: set(inspect.signature(make.generator).parameters) for name, make in makers.items()}
    every = {flag for flags in cli.FLAGS.values() for flag in flags}
    takes['planned'].remove('tags')                                        # ids of an experiment, no flag
    assert {name: set(flags) for name, flags in cli.FLAGS.items()} == {name: every & takes[name] for name in cli.FLAGS} and set(cli.FLAGS) == {s.value for s in cli.Strategy}
    assert every <= set(inspect.signature(cli.generate).parameters)


@pytest.fixture(scope='module')
def diffuser(tmp_path_factory):
    "A random model that has the tokens of plans and a block size."
    from pasta_lib.models import save
    from pasta_lib.train import prepare
    folder = tmp_path_factory.mktemp('diffuser')
    save(*prepare('tiny', 'plan'), folder, block_size=4)
    return folder


@pytest.mark.parametrize('strategy, flags, options', [
    ('planned', ['--steps-ratio', .5, '--confidence-threshold', .1, '--length-scale', 1.5, '--order', 'above:0.9', '--commit', 'fast', '--alignment', 'shifted',
                 '--max-spans', 2, '--policy', 'strict'],
     dict(steps_ratio=.5, confidence_threshold=.1, length_scale=1.5, order='above:0.9', commit='fast', alignment='shifted', max_spans=2, policy='strict')),
    ('single_block', ['--commit', 'fused', '--block', 3, '--tau-m2t', .3, '--tau-t2t', .5, '--dmax'], dict(block=3, commit='fused', tau_m2t=.3, tau_t2t=.5, dmax=True)),
    ('single_block', [], dict(block=4)),
    ('multi_block', ['--buffer', 2, '--tau-add', 0, '--tau-stable', .1, '--tau-semi', .2, '--eager'], dict(block=4, buffer=2, tau_add=0., tau_stable=.1, tau_semi=.2, eager=True))])
def test_strategies_of_denoising(strategy, flags, options, diffuser, monkeypatch):
    "Every flag reaches its strategy, and what is printed is what the strategy says; the block size is the checkpoint's own."
    from pasta_lib import buffer, planned
    from pasta_lib.engine import Engine
    from pasta_lib.models import load
    home, asked = planned if strategy == 'planned' else buffer, []
    honest = getattr(home, strategy)
    def noting(prompt, **given):
        asked.append(given)
        return honest(prompt, **given)
    monkeypatch.setattr(home, strategy, noting)
    found = only_json(pasta('generate', '-m', diffuser, '--prompt', 'Hi', '--max-new-tokens', 9, '--strategy', strategy, *flags, '--json'))
    assert options.items() <= asked[-1].items() and found['strategy'] == strategy and found['generated_tokens'] == 9
    assert found['token_ids'] == Engine(*load(str(diffuser))).run(honest('Hi', max_new_tokens=9, **options))[0].token_ids


@pytest.mark.parametrize('strategy, flags, says', [
    ('planned', [], 'the tokenizer lacks <topic> </topic> <async> </async> <sync/> <mask> <pad>: train a model that has them: pasta train planned-sft'),
    ('single_block', ['--block', 4], 'the tokenizer has no mask: train a model that has one: pasta train block-sft'),
    ('multi_block', ['--block', 4], 'the tokenizer has no mask: train a model that has one: pasta train block-sft'),
    ('single_block', [], 'single_block needs a block, and the model says none: write --block N'),
    ('multi_block', ['--block', 0], 'block=0: use a whole number of tokens'), ('multi_block', ['--block', 4, '--buffer', 0], 'buffer=0: use a whole number of blocks'),
    ('multi_block', ['--block', 4, '--top-k', 3], 'top_k in block decoding: leave it out'),
    ('multi_block', ['--block', 4, '--commit', 'fused'], '--commit with --strategy multi_block: that flag is for planned, single_block'),
    ('planned', ['--tags', 'auto'], '--tags with --strategy planned: that flag is for pasta'), ('planned', ['--order', 'best'], "order='best': use random, entropy"),
    ('planned', ['--outline', __file__], '--outline with --strategy planned')])
def test_denoising_that_cannot_be(strategy, flags, says):
    r = pasta('generate', '-m', 'tiny', '--prompt', 'Hi', '--strategy', strategy, *flags)
    assert r.exit_code == 2 and f'pasta: {says}' in r.stderr and r.stderr.count('pasta:') == 1 + says.count('pasta:') and 'add_tokens' not in r.stderr


def test_view_titles_come_from_plans():
    view = cli.View(lang='plan')
    view.hear(types.SimpleNamespace(thread='main', text='<topic> the sea 2 </topic><topic> hills 1 '))
    view.hear(types.SimpleNamespace(thread='span 1', text=' Swim.'))
    assert view.topics == ['the sea'] and 'the sea' in drawn(view) and view.title('span 2') == 'span 2'


def test_a_page_without_a_folder_is_noticed_first(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        no_model(patch)
        r = pasta('generate', '-m', 'tiny', '--prompt', 'Hi', '--trace', tmp_path / 'none' / 'a.html')
        assert r.exit_code == 2 and f'no such folder ({tmp_path}/none)' in r.stderr
    monkeypatch.chdir(tmp_path)
    assert pasta('generate', '-m', 'tiny', '--prompt', 'Hi', '--max-new-tokens', 3, '--trace', 'a.html').exit_code == 0 and (tmp_path / 'a.html').exists()


@pytest.mark.parametrize('text, options, rules', [
    ('<reg_3>a', [], []), ('<reg_16>a', [], ['register-out-of-range']), ('<reg_16>a', ['--registers', 32], []), ('<reg_3>a', ['--registers', 3], ['register-out-of-range']),
    ('<reg_' + '9' * 20 + '>a', [], ['register-out-of-range']), ('<REG_0>a', [], [])])
def test_lint_of_registers(text, options, rules):
    r = pasta('lint', '-', '--lang', 'tip', '--json', *options, input=text)
    assert [e['rule'] for e in only_json(r)['errors']] == rules


def test_registers_are_those_of_tip():
    r = pasta('lint', '-', '--registers', 4, input='a')
    assert r.exit_code == 2 and '--registers with --lang pasta: it is for --lang tip' in r.stderr
    assert pasta('lint', '-', '--lang', 'tip', '--registers', 0, input='a').exit_code == 2


def test_problems_of_an_answer_are_json(tiny, monkeypatch):
    "An answer that breaks a rule is told as plain values."
    from pasta_lib import pasta as module
    ids = tiny[1].encode('A<sync/>B')
    honest = module.pasta
    monkeypatch.setattr(module, 'pasta', lambda prompt, **kw: honest(prompt, script={'main': ids}, **kw))
    found = only_json(pasta('generate', '-m', 'tiny', '--strategy', 'pasta', '--prompt', 'Hi', '--max-new-tokens', len(ids), '--json'))
    assert found['problems'] and found['problems'][0]['rule']


def test_sampling_by_seed():
    draw = lambda seed: only_json(pasta('generate', '-m', 'tiny', '--prompt', 'Hi', '--max-new-tokens', 12, '--json', '--temperature', 1,
                                        '--top-p', 0.9, '--top-k', 50, '--seed', seed))['token_ids']
    assert draw(1) == draw(1) != draw(2)


def test_raw_and_stop():
    args = ('generate', '-m', 'tiny', '--prompt', 'Hi', '--json', '--max-new-tokens', 12)
    assert only_json(pasta(*args, '--raw'))['prompt_tokens'] == 2 < only_json(pasta(*args))['prompt_tokens']
    text = only_json(pasta(*args))['text']
    letter = next(c for c in text if c.isascii() and c.isprintable())
    found = only_json(pasta(*args, '--stop', letter))
    assert found['finish_reason'] == 'stop' and found['text'] == text[:text.index(letter)]


@pytest.mark.parametrize('args, says', [
    (('--strategy', 'guided', '--prompt', 'Hi'), 'outline'), (('--prompt', 'Hi', '--max-forks', 3), '--max-forks with --strategy ar: that flag is for pasta, apar; flags of ar: none'),
    (('--prompt', 'Hi', '--outline', 'nowhere.txt'), 'nowhere.txt'), (('--prompt', '  '), 'empty'), (('--prompt', ''), 'empty'),
    (('--prompt', 'Hi', '--temperature', -1), 'temperature'), (('--prompt', 'Hi', '--max-new-tokens', 0), 'max_new_tokens'),
    (('--prompt', 'Hi', '--dtype', 'float33'), 'float33'), (('--prompt', 'A' * 80, '--slots', 64), 'larger: --slots N'),
    (('--prompt', 'Hi', '--device', 'mars'), "no device 'mars'"), (('--prompt', 'Hi', '--device', 'cuda:77'), "no device 'cuda:77'"),
    (('--prompt', 'Hi', '--slots', 10**16), 'smaller: --slots N'), (('--prompt', 'Hi', '--slots', -3), 'slots=-3'),
    (('--prompt', 'Hi', '--slots', 0), 'slots'), (('--strategy', 'pasta', '--prompt', 'Hi', '--positions', 'nowhere'), 'nowhere'),
    (('--strategy', 'pasta', '--prompt', 'Hi', '--tags', 'compact'), '<async>'), (('--strategy', 'pasta', '--prompt', 'Hi', '--policy', 'x'), 'x')])
@pytest.mark.parametrize('as_json', [False, True])
def test_wrong_use_is_2_and_one_line(args, says, as_json, monkeypatch):
    if '--dtype' in args or '--device' in args: monkeypatch.undo()
    r = pasta('generate', '-m', 'tiny', *args, *['--json'] * as_json)
    lines = [line for line in r.stderr.splitlines() if line.startswith('pasta: ')]
    assert r.exit_code == 2 and len(lines) == 1 and says in lines[0]
    assert only_json(r)['error'] == lines[0].removeprefix('pasta: ') if as_json else not r.stdout.strip()


def test_outlines_that_cannot_be_read(tmp_path):
    for name, data in (('empty', b''), ('bytes', b'- a\xff'), ('order', b'- a\ntext\n')):
        (tmp_path / name).write_bytes(data)
        r = pasta('generate', '-m', 'tiny', '--prompt', 'Hi', '--outline', tmp_path / name)
        assert r.exit_code == 2 and r.stdout == '' and r.stderr.count('\n') == 1 and (name == 'bytes') == (str(tmp_path / name) in r.stderr)


def test_options_that_the_parser_refuses():
    for args in (('generate', '--strategy', 'magic'), ('generate', '--max-new-tokens', 'many'), ('nonsense',), ('lint',), ('bench', 'x')):
        r = pasta(*args)
        assert r.exit_code == 2 and r.stdout == '' and r.stderr
        r = pasta(*args, '--json')
        assert r.exit_code == 2 and only_json(r)['error'] and only_json(r)['error'].split()[0] in r.stderr


def test_an_unknown_model(tmp_path):
    r = pasta('generate', '-m', tmp_path, '--prompt', 'Hi')
    assert r.exit_code == 2 and r.stderr.startswith('pasta: ') and r.stderr.count('\n') == 1


def test_a_full_pool_keeps_the_text():
    r = pasta('generate', '-m', 'tiny', '--prompt', 'Hi', '--slots', 64, '--max-new-tokens', 90, '--json')
    found = only_json(r)
    assert r.exit_code == 1 and found['finish_reason'] == 'pool_full' and found['generated_tokens'] > 50 and 'page' in r.stderr


@pytest.mark.parametrize('as_json', [False, True])
def test_ctrl_c_keeps_the_text(monkeypatch, as_json):
    from pasta_lib.engine import Engine
    honest, calls = Engine.answer, []
    def answer(self, *args):
        calls.append(1)
        if len(calls) == 6: raise KeyboardInterrupt
        return honest(self, *args)
    monkeypatch.setattr(Engine, 'answer', answer)
    r = pasta('generate', '-m', 'tiny', '--prompt', 'Hi', *['--json'] * as_json)
    assert r.exit_code == 130 and 'cancelled' in (r.stdout if as_json else r.stderr)
    if as_json: assert only_json(r)['generated_tokens'] == 5


def test_ctrl_c_while_loading(monkeypatch):
    def interrupted(*args, **kw): raise KeyboardInterrupt
    monkeypatch.setattr(cli, 'open_engine', interrupted)
    assert pasta('generate', '-m', 'tiny', '--prompt', 'Hi').exit_code == 130
    r = pasta('generate', '-m', 'tiny', '--prompt', 'Hi', '--json')
    assert r.exit_code == 130 and only_json(r) == {'error': 'interrupted'}


def test_no_memory_is_a_line(monkeypatch):
    def full(*args, **kw): raise MemoryError
    monkeypatch.setattr(cli, 'open_engine', full)
    r = pasta('generate', '-m', 'tiny', '--prompt', 'Hi', '--json')
    assert r.exit_code == 2 and only_json(r)['error'].startswith('out of memory') and r.stderr.count('\n') == 1


def test_an_answer_is_one_object_even_if_its_trace_can_not_be_written(tmp_path):
    args = ('generate', '-m', 'tiny', '--prompt', 'Hi', '--max-new-tokens', 3, '--trace', tmp_path)
    r = pasta(*args, '--json')
    assert r.exit_code == 2 and only_json(r)['generated_tokens'] == 3 and 'Is a directory' in r.stderr
    assert pasta(*args).stdout


def test_refused_forks_are_told(tiny, monkeypatch):
    from pasta_lib import pasta as module
    script, honest = {'main': tiny[1].encode('A<promise topic="a" tokens="10"/>B<sync/>C')}, module.pasta
    monkeypatch.setattr(module, 'pasta', lambda prompt, **kw: honest(prompt, script=script, **kw))
    args = ('generate', '-m', 'tiny', '--strategy', 'pasta', '--prompt', 'Hi', '--max-new-tokens', 60, '--max-forks', 0)
    found = only_json(pasta(*args, '--json'))
    assert (found['forks'], found['refused_forks']) == (0, 1) and '0 forks (1 refused)' in pasta(*args).stderr


def test_a_failing_request_is_1(monkeypatch):
    from pasta_lib import engine
    def broken(h, lines, logits):
        if h.total > 2: raise ValueError('odd\nlogits')
        return engine_choose(h, lines, logits)
    engine_choose = engine._choose
    monkeypatch.setattr(engine, '_choose', broken)
    r = pasta('generate', '-m', 'tiny', '--prompt', 'Hi')
    assert r.exit_code == 1 and 'pasta: odd logits' in r.stderr


# ---- on a terminal
def test_on_a_terminal_threads_grow_and_the_answer_stays(monkeypatch, outline):
    heard, honest = [], cli.View.hear
    monkeypatch.setattr(cli, 'on_terminal', lambda: True)
    monkeypatch.setattr(cli.View, 'hear', lambda self, chunk: (heard.append(chunk.thread), honest(self, chunk)))
    args = ('generate', '-m', 'tiny', '--outline', outline, '--prompt', 'Where?', '--max-new-tokens', 20, '--point-tokens', 8)
    shown = pasta(*args)
    want = only_json(pasta(*args, '--json'))['text']
    assert {'main', 'fork 1', 'fork 2'} <= set(heard) and shown.stdout.endswith(want + '\n')


def chunk(thread, text): return types.SimpleNamespace(thread=thread, text=text)


def drawn(view, width=80) -> str:
    import io
    from rich.console import Console
    console = Console(file=io.StringIO(), width=width)
    console.print(view)
    return console.file.getvalue()


def test_view_titles_come_from_the_promises():
    view = cli.View()
    for thread, text in (('main', 'A <promise topic="the s'), ('main', 'ea" tokens="10"/>'), ('fork 1', 'waves'), ('fork 2', '?')):
        view.hear(chunk(thread, text))
    assert [view.title(t) for t in ('main', 'fork 1', 'fork 2')] == ['main', 'the sea', 'fork 2']
    assert 'the sea' in drawn(view) and 'waves' in drawn(view)


def test_view_fits_the_screen_and_takes_markup_as_text():
    view = cli.View(['[red]a[/red]'], height=12)
    view.hear(chunk('main', '\n'.join(map(str, range(50)))))
    view.hear(chunk('fork 1', '[bold]x[/nonsense] \x1b'))
    text = drawn(view)
    assert len(text.splitlines()) <= 12 and '49' in text and ' 3 ' not in text
    assert '[red]a[/red]' in text and '[bold]x[/nonsense]' in text
    for n in range(2, 20): view.hear(chunk(f'fork {n}', 'x'))
    assert 'fork 19' in drawn(view)


def test_view_of_nothing(): assert drawn(cli.View()).strip() == ''


def test_tail():
    assert cli.tail('a b c d', 3, 1) == ['c d'] and cli.tail('', 5, 2) == [] and cli.tail('a\n\nb', 5, 2) == ['', 'b']


def test_closed_streams(monkeypatch, tmp_path):
    "Python has None for a stream that the shell closed."
    monkeypatch.setattr(sys, 'stdin', None)
    for prompt in (None, '-'):
        with pytest.raises(PastaError, match='closed'): cli.read_prompt(prompt)
    monkeypatch.setattr(sys, 'stdout', None)
    assert not cli.on_terminal()
    monkeypatch.setattr(sys, 'stderr', None)
    cli.say('into the void')


@pytest.mark.slow
@pytest.mark.parametrize('command', ['generate -m tiny --json <&-', 'generate -m tiny --json --prompt - <&-', 'lint - --json <&-'])
def test_closed_stdin_as_a_program(command):
    code = "from pasta_lib.cli import main; main()"
    r = subprocess.run(['bash', '-c', f'{sys.executable} -c "{code}" {command}'], capture_output=True, text=True)
    assert r.returncode == 2 and 'closed' in json.loads(r.stdout)['error'] and r.stderr.count('\n') == 1


def test_no_prompt_on_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, 'stdin', types.SimpleNamespace(isatty=lambda: True))
    with pytest.raises(PastaError, match='no prompt'): cli.read_prompt(None)


# ---- check, bench, demo
def test_check(monkeypatch):
    r = pasta('check', '-m', 'tiny', '--only', 'replay of', '--json')
    found = only_json(r)
    assert r.exit_code == 0 and found['passed'] and found['model'] == 'tiny' and len(found['checks']) == 6 and 'ok' in r.stderr
    assert all({'name', 'system', 'deviation', 'tolerance', 'passed'} <= set(c) for c in found['checks'])
    assert '6 of 6 promises kept' in pasta('check', '-m', 'tiny', '--only', 'replay of').stdout
    assert pasta('check', '-m', 'tiny', '--only', 'no such check').exit_code == 2


def test_check_that_fails_is_1(monkeypatch):
    import pasta_lib.check as check_module
    monkeypatch.setattr(check_module, 'replay_deviation', lambda *args: 1.0)
    r = pasta('check', '-m', 'tiny', '--only', 'replay of', '--json')
    assert r.exit_code == 1 and only_json(r)['passed'] is False


def test_bench(monkeypatch, tmp_path):
    import pasta_lib.bench as module
    asked = []
    def bench(kind, model, quick=False, report=print, dtype='bfloat16'):
        asked.append((kind, model, quick, dtype))
        report('working')
        print('noise') if kind == 'threads' else None
        return dict(rows=[dict(name='a step', value=0.25, unit='s', baseline=None, ratio=None)], hardware=module.hardware('tiny'))
    monkeypatch.setattr(module, 'bench', bench)
    r = pasta('bench', 'step', '--quick', '--out', str(tmp_path / 'rows.csv'))
    assert r.exit_code == 0 and 'a step' in r.stdout and 'cores' in r.stdout and 'working' in r.stderr
    assert module.read_rows(tmp_path / 'rows.csv')['rows'][0]['value'] == 0.25
    r = pasta('bench', 'threads', '-m', 'tiny', '--json', '--dtype', 'float32')
    assert only_json(r)['rows'][0]['value'] == 0.25 and 'noise' in r.stderr
    assert only_json(pasta('bench', 'training', '-m', 'tiny', '--json'))['rows'][0]['unit'] == 's'
    assert asked == [('step', 'smollm2', True, 'bfloat16'), ('threads', 'tiny', False, 'float32'), ('training', 'tiny', False, 'bfloat16')]


def test_an_interrupted_bench_is_130(monkeypatch):
    import pasta_lib.bench as module
    monkeypatch.setattr(module, 'bench', lambda *args, **kw: dict(rows=[], hardware=module.hardware('tiny'), interrupted=True))
    assert pasta('bench', 'step', '--json').exit_code == 130


def test_demo(monkeypatch, tmp_path):
    def demo(model=None, out='demo', quiet=False, guided=None):
        print('a table')
        return dict(report=Path(out) / 'report.html', model=model, guided=guided)
    monkeypatch.setitem(sys.modules, 'pasta_lib.demo', types.SimpleNamespace(demo=demo))
    r = pasta('demo', '--out', tmp_path, '--json')
    assert only_json(r) == dict(report=str(tmp_path / 'report.html'), model=None, guided=None)      # the library chooses
    assert only_json(pasta('demo', '--out', tmp_path, '--guided', '--json'))['guided'] is True
    assert 'a table' in pasta('demo', '--out', tmp_path, '-m', 'tiny').stdout


# ---- as a program
def program(*args, **kw):
    return subprocess.run([sys.executable, '-c', 'from pasta_lib.cli import main; main()', *map(str, args)], capture_output=True, text=True,
                          env=os.environ | {'PYTHONIOENCODING': 'ascii'}, **kw)


def test_help_and_version():
    r = program('--help')
    assert r.returncode == 0 and all(name in r.stdout for name in ('lint', 'generate', 'check', 'bench', 'demo'))
    from pasta_lib import __version__
    assert program('--version').stdout == f'pasta {__version__}\n'
    assert pasta('--version').stdout == program('--version').stdout and program().returncode == 2


def test_lint_never_loads_torch(tmp_path):
    (tmp_path / 'a.txt').write_text(BAD + ' ☃')
    code = ("import sys; sys.argv[1:] = ['lint', 'a.txt']; from pasta_lib.cli import main\n"
            "try: main()\nfinally: print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])")
    r = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=tmp_path,
                       env=os.environ | {'PYTHONPATH': str(Path(cli.__file__).parents[1])})
    assert r.returncode == 1 and r.stdout.endswith('[]\n')


def test_a_text_that_stdout_cannot_spell(tmp_path):
    (tmp_path / 'a.txt').write_text('<promise topic="☃ é" tokens="15"/><async>x</async>', encoding='utf-8')
    r = program('lint', tmp_path / 'a.txt')
    assert r.returncode == 1 and r.stderr == '' and '\\u2603' in r.stdout


@pytest.mark.slow
def test_generate_as_a_program():
    r = program('generate', '-m', 'tiny', '--prompt', 'Hi', '--max-new-tokens', 4, '--json')
    assert r.returncode == 0, r.stderr
    assert json.loads(r.stdout)['generated_tokens'] == 4


@pytest.mark.smollm2
def test_smollm2_follows_an_outline(smollm2, monkeypatch, outline):
    from pasta_lib import models
    monkeypatch.setattr(models, 'load', lambda name, **kw: smollm2)
    found = only_json(pasta('generate', '--outline', outline, '--prompt', 'Where should we go?', '--max-new-tokens', 30,
                            '--point-tokens', 12, '--json'))
    assert found['forks'] == 2 and found['parallelism'] > 1.2


def test_numbers_that_json_cannot_write_are_null(capsys):
    cli.print_json(dict(a=float('nan'), b=[1.5, (float('inf'), -float('inf'))], c=dict(d=0), e='nan'))
    def refuse(word): raise ValueError(word)
    assert json.loads(capsys.readouterr().out, parse_constant=refuse) == dict(a=None, b=[1.5, [None, None]], c=dict(d=0), e='nan')

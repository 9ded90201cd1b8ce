"The repository hangs together: metadata, notebooks and modules, README, links, words that must not appear."
import ast
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
if not (ROOT / 'nbs').is_dir(): pytest.skip('not a checkout', allow_module_level=True)


def load_tool(name):
    "A script of tools/ as a module."
    spec = importlib.util.spec_from_file_location(f'tool_{name}', ROOT / 'tools' / f'{name}.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

notebooks, readme, links = load_tool('notebooks'), load_tool('readme'), load_tool('check_links')
NOTEBOOKS = notebooks.notebooks()
CHAPTERS = [p for p in NOTEBOOKS if p.stem != 'index']
MODULES = sorted(p for p in (ROOT / 'pasta_lib').glob('*.py') if p.name not in ('__init__.py', '_modidx.py'))
ids = lambda paths: [p.name for p in paths]

def settings():
    config = ConfigParser(interpolation=None)
    config.read(ROOT / 'settings.ini', encoding='utf-8')
    return config['DEFAULT']

def names(requirements):
    "Package names of a requirement list, normalised."
    return {re.split(r'[<>=!~\[;]', r)[0].lower().replace('_', '-') for r in requirements.split()}

def files():
    "Every file that belongs to the repository, as text where it is text."
    if (ROOT / '.git').exists() and shutil.which('git'):
        out = subprocess.run(['git', 'ls-files', '-co', '--exclude-standard', '-z'], cwd=ROOT, capture_output=True, check=True)
        found = [ROOT / n for n in out.stdout.decode().split('\0') if n]
    else:
        found = [p for p in ROOT.rglob('*') if not {'.venv', '_proc', '__pycache__', 'build', 'demo', '.hypothesis', '.pytest_cache'} & set(p.relative_to(ROOT).parts)]
    return [p for p in found if p.is_file() and not p.name.startswith('.coverage')]


# --- metadata -------------------------------------------------------------------------------------------------------
def run_setup(*args):
    return subprocess.run([sys.executable, 'setup.py', *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split('\n')

def test_setup_reads_settings():
    cfg, out = settings(), run_setup('--name', '--version', '--license')
    assert [line for line in out if line][-3:] == [cfg['lib_name'], cfg['version'], 'Apache-2.0']

def test_setup_works_without_nbdev():
    imported = {alias.name.split('.')[0] for node in ast.walk(ast.parse((ROOT / 'setup.py').read_text()))
                if isinstance(node, (ast.Import, ast.ImportFrom))
                for alias in (node.names if isinstance(node, ast.Import) else [ast.alias(node.module)])}
    assert imported == {'configparser', 'pathlib', 'setuptools'}

def test_installed_extras():
    "What pip sees: the four extras, the command, Python 3.11."
    from importlib.metadata import PackageNotFoundError, entry_points, metadata, requires
    try: meta = metadata('pasta_lib')
    except PackageNotFoundError: pytest.skip('pasta_lib is importable here, but not installed')
    assert set(meta.get_all('Provides-Extra')) >= {'train', 'gemini', 'dev', 'all'}
    assert meta['Requires-Python'] == '>=3.11'
    extra = lambda name: names(' '.join(r.split(';')[0].replace(' ', '') for r in requires('pasta_lib')
                                        if re.search(rf"extra == ['\"]{name}['\"]", r)))
    assert extra('all') == extra('train') | extra('gemini') | extra('dev')
    assert extra('train') == {'datasets', 'accelerate', 'peft', 'trl', 'math-verify', 'pyyaml'}
    command, = entry_points(group='console_scripts', name='pasta')
    assert command.value == 'pasta_lib.cli:main'

def test_named_packages_stand_in_settings():
    cfg = settings()
    every = set().union(*(names(v) for k, v in cfg.items() if k == 'requirements' or k.endswith('_requirements')))
    assert {'torch', 'transformers', 'jupyter', 'nbdev', 'datasets', 'google-generativeai', 'seaborn', 'pytest'} <= every

def test_every_requirement_is_pinned_and_open():
    "Ranges in the metadata, exact versions in constraints.txt, and the pins satisfy the ranges."
    from packaging.requirements import Requirement
    pins = {}
    for line in (ROOT / 'constraints.txt').read_text().splitlines():
        if line := line.split('#')[0].strip():
            name, version = line.split('==')
            pins[name.lower().replace('_', '-')] = version
    cfg = settings()
    wanted = [Requirement(r) for k, v in cfg.items() if k == 'requirements' or k.endswith('_requirements') for r in v.split()]
    for requirement in wanted:
        assert not any(s.operator == '==' for s in requirement.specifier), f'{requirement} is not open'
        assert requirement.specifier.contains(pins[requirement.name.lower().replace('_', '-')]), str(requirement)
    assert set(pins) == {r.name.lower().replace('_', '-') for r in wanted}, 'a pin that settings.ini does not name'

@pytest.mark.parametrize('target', ['demo', 'test', 'docs', 'notebooks', 'export', 'check', 'clean'])
def test_makefile_has(target):
    assert re.search(rf'^{target}:', (ROOT / 'Makefile').read_text(), re.M)

@pytest.mark.skipif(not shutil.which('make'), reason='no make on this machine')
def test_makefile_refuses_old_python(tmp_path):
    old = tmp_path / 'old'
    old.write_text('#!/bin/sh\nexit 1\n')
    old.chmod(0o755)
    run = subprocess.run(['make', 'env', f'PYTHON={old}', f'VENV={tmp_path}/venv'], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode and 'needs Python 3.11' in run.stderr and not (tmp_path / 'venv').exists()

@pytest.mark.parametrize('name', ['LICENSE', 'README.md', 'CONTRIBUTING.md', 'CHANGELOG.md', '_quarto.yml', '.ci/run',
                                  '.github/workflows/ci.yml', '.github/workflows/docs.yml', 'data/README.md'])
def test_file_exists(name): assert (ROOT / name).stat().st_size > 100

@pytest.mark.parametrize('name', ['ci', 'docs'])
def test_workflow_is_readable(name):
    yaml = pytest.importorskip('yaml')
    steps = [step for job in yaml.safe_load((ROOT / f'.github/workflows/{name}.yml').read_text())['jobs'].values() for step in job['steps']]
    assert all(('uses' in step) != ('run' in step) for step in steps)
    if name == 'ci': assert any(step.get('run') == 'bash .ci/run' for step in steps)

def test_quarto_is_one_file():
    assert (ROOT / 'nbs/_quarto.yml').is_symlink() and (ROOT / 'nbs/_quarto.yml').resolve() == ROOT / '_quarto.yml'


# --- notebooks and modules ------------------------------------------------------------------------------------------
@pytest.mark.parametrize('path', NOTEBOOKS, ids=ids(NOTEBOOKS))
def test_notebook_is_clean(path): assert notebooks.problems(path) == []

@pytest.mark.parametrize('path', CHAPTERS, ids=ids(CHAPTERS))
def test_chapter_opens_as_it_should(path):
    cells = notebooks.read(path)['cells']
    assert re.match(r'# \S.*\n\n> \S', notebooks.source(cells[0])), 'a title, and one line that says what it is about'
    second = cells[1]['cell_type'], len(notebooks.source(cells[1]).split()) >= 10
    assert second == ('markdown', True), 'the second cell promises what the reader will be able to do'

@pytest.mark.parametrize('path', CHAPTERS, ids=ids(CHAPTERS))
def test_chapter_has_its_module(path):
    assert re.fullmatch(r'\d\d_[a-z0-9_]+', path.stem)
    module = notebooks.exports_to(path)
    if module is None: return
    assert module == path.stem[3:]
    assert f'File to edit: ../nbs/{path.name}' in (ROOT / 'pasta_lib' / f'{module}.py').read_text()

@pytest.mark.parametrize('path', MODULES, ids=ids(MODULES))
def test_module_has_its_chapter(path):
    assert path.stem in {notebooks.exports_to(p) for p in CHAPTERS}, 'a stale module, or one kept by hand'

@pytest.mark.parametrize('path', MODULES, ids=ids(MODULES))
def test_module_imports_no_development_package(path):
    for node in ast.walk(ast.parse(path.read_text())):
        found = [a.name for a in node.names] if isinstance(node, ast.Import) else \
                [node.module or ''] if isinstance(node, ast.ImportFrom) and not node.level else []
        assert not {n.split('.')[0] for n in found} & {'nbdev', 'fastcore', 'execnb', 'IPython', 'pytest', 'hypothesis'}

def test_chapters_are_numbered_once():
    numbers = [p.name[:2] for p in CHAPTERS]
    assert numbers == sorted(set(numbers))

def test_cell_ids_are_unique_across_notebooks():
    seen = {}
    for path in NOTEBOOKS:
        for cell in notebooks.read(path)['cells']:
            assert seen.setdefault(cell['id'], path.name) == path.name, f"{cell['id']} in {path.name} and {seen[cell['id']]}"

def test_version_is_one():
    from pasta_lib import __version__
    assert __version__ == settings()['version']


# --- what is generated ----------------------------------------------------------------------------------------------
def test_readme_is_what_the_index_says():
    run = subprocess.run([sys.executable, 'tools/readme.py', '--check'], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr

def test_sidebar_lists_the_chapters_in_order():
    listed = re.findall(r'- ([\w.]+\.ipynb)', (ROOT / '_quarto.yml').read_text())
    assert listed == [p.name for p in NOTEBOOKS]

def test_index_maps_every_chapter():
    linked = re.findall(r'\((\d\d_\w+\.ipynb)\)', (ROOT / 'nbs/index.ipynb').read_text())
    assert linked == [p.name for p in CHAPTERS]

@pytest.mark.parametrize('name', ['README.md', 'CONTRIBUTING.md', 'CHANGELOG.md', 'data/README.md'])
def test_relative_links_lead_somewhere(name):
    page = ROOT / name
    for target in re.findall(r'\]\(([^)\s]+)\)', page.read_text()):
        if not re.match(r'[a-z]+:|#', target): assert (page.parent / target.split('#')[0]).exists(), target

HOSTS = ['pypi' + '.org', 'python' + 'hosted.org', 'registry.npm' + 'js.org', 'download.py' + 'torch.org', 'deb.deb' + 'ian.org']
PATHS = ['/' + 'work/', '/' + 'tmp/nb', '../' + 'shared', '/' + 'root/', 'scaffold' + '_try']

def test_no_registry_and_no_path_of_a_machine():
    for path in files():
        if path.suffix in ('.safetensors', '.png', '.gguf'): continue
        text = path.read_text(encoding='utf-8', errors='replace')
        if path.suffix == '.ipynb':  # pictures are base64: their letters mean nothing
            text = re.sub(r'"image/png": "[^"]*"', '', text)
        for word in HOSTS + PATHS: assert word not in text, f'{path.relative_to(ROOT)} contains {word}'

def test_no_file_is_large():
    for path in files():
        limit = 11e6 if path.suffix in ('.safetensors', '.gguf') else 1e6
        assert path.stat().st_size < limit, f'{path.relative_to(ROOT)}: {path.stat().st_size / 1e6:.1f} MB'


# --- the tools themselves -------------------------------------------------------------------------------------------
def notebook(*cells):
    make = lambda kind, text, outs: dict(cell_type=kind, metadata={}, source=text.splitlines(keepends=True), id=f'x-{len(text)}',
                                         **(dict(outputs=outs, execution_count=None) if kind == 'code' else {}))
    return dict(cells=[make(*c) for c in cells], metadata=dict(notebooks.METADATA), nbformat=4, nbformat_minor=5)

def stream(text): return dict(output_type='stream', name='stdout', text=text)

def test_normalise_strips_and_names_and_is_idempotent():
    nb = notebook(('markdown', '# A', []), ('code', '1+1', [dict(output_type='execute_result', execution_count=3, metadata={'a': 1},
                  data={'text/plain': '2', 'application/vnd.jupyter.widget-view+json': {}})]), ('code', 'x', []))
    nb['metadata']['widgets'] = {}
    nb['cells'][1].update(execution_count=3, metadata={'execution': 'now'})
    nb['cells'][2]['id'] = nb['cells'][0]['id'] = 'same'
    del nb['cells'][1]['id']
    once = json.dumps(notebooks.normalise(nb, '07_my_nb'))
    assert [c['id'] for c in nb['cells']] == ['same', '07mynb-001', '07mynb-002']
    assert nb['cells'][1]['outputs'] == [dict(output_type='execute_result', execution_count=None, metadata={}, data={'text/plain': ['2']})]
    assert nb['cells'][1]['metadata'] == {} and nb['cells'][1]['execution_count'] is None and nb['metadata'] == notebooks.METADATA
    assert json.dumps(notebooks.normalise(nb, '07_my_nb')) == once

def test_normalise_splits_the_opening():
    nb = notebook(('markdown', '# A\n\n> b\n\nYou will see.\n\nAnd more.', []), ('markdown', 'c', []))
    cells = notebooks.normalise(nb, '07_x')['cells']
    assert [notebooks.source(c) for c in cells] == ['# A\n\n> b', 'You will see.\n\nAnd more.', 'c']
    assert len({c['id'] for c in cells}) == 3 and notebooks.split_opening(cells) == cells

def test_normalise_splits_imports_from_work():
    nb = notebook(('markdown', '# A', []), ('code', '#| hide\nimport os\nfrom a import b\n\n# now\nprint(os)\nx = 1', [stream('1')]),
                  ('code', '#| export\nimport c\nd = 1', []), ('code', 'import e; f = 1', []), ('code', 'import g', []), ('code', 'h\nimport i\n\nprint(\n    1)', []))
    nb['cells'][1]['id'] = 'mine'
    cells = notebooks.normalise(nb, '07_x')['cells']
    assert [notebooks.source(c) for c in cells[1:]] == [
        '#| hide\nimport os\nfrom a import b', '#| hide\n# now\nprint(os)\nx = 1', '#| export\nimport c\nd = 1', 'import e; f = 1', 'import g', 'h', 'import i', 'print(\n    1)']
    assert (cells[1]['outputs'], cells[2]['id'], len(cells[2]['outputs'])) == ([], 'mine', 1)
    assert [notebooks.mixes(c) for c in cells[1:]] == [False, False, True, True, False, False, False, False]

@pytest.mark.parametrize('change, message', [
    (lambda nb: nb['cells'][1].update(source=['import a; print(1)']), 'mixes imports'),
    (lambda nb: nb['cells'][0].update(source=['# A\n', '\n', '> b\n', '\n', 'c']), 'cell 1'),
    (lambda nb: nb.update(nbformat_minor=4), 'format'),
    (lambda nb: nb['metadata'].update(widgets={}), 'metadata'),
    (lambda nb: nb['cells'][1].update(execution_count=1), 'execution count'),
    (lambda nb: nb['cells'][1].update(id='has space'), 'valid id'),
    (lambda nb: nb['cells'][1].update(id=nb['cells'][0]['id']), 'earlier cell'),
    (lambda nb: nb['cells'][1].update(outputs=[]), 'no output is saved'),
    (lambda nb: nb['cells'][1].update(source=['x = (9\n', '% 4)']), 'starts with %'),
    (lambda nb: nb['cells'][1]['outputs'].append(dict(output_type='error', ename='E', evalue='', traceback=[])), 'error'),
    (lambda nb: nb['cells'][1]['outputs'].append(stream([f'{ROOT}/x'])), 'path of this machine'),
    (lambda nb: nb['cells'][1]['outputs'].append(stream(['<A at 0x7f00aabbcc>'])), 'memory address'),
])
def test_problems_finds(tmp_path, change, message):
    nb, path = notebook(('markdown', '# A', []), ('code', 'print(1)', [stream(['1\n'])])), tmp_path / '07_x.ipynb'
    path.write_text(notebooks.dumps(nb))
    assert notebooks.problems(path) == []
    change(nb)
    path.write_text(notebooks.dumps(nb))
    assert any(message in line for line in notebooks.problems(path))

def test_readme_rendering():
    png = dict(output_type='display_data', data={'image/png': 'aGk='}, metadata={})
    repo = readme.repository()
    text, pictures = readme.render(notebook(
        ('markdown', f'# A\n\n[x](01_a.ipynb#b) [y]({repo}LICENSE) [z](https://h.org/) ![](images/p.png)\n\n```\n[n](m)\n```', []),
        ('code', '#| hide\nsecret', []), ('code', '#| eval: false\nprint(1)', [stream(['1\n', '\n', '2\n']), png])))
    assert '[x](nbs/01_a.ipynb#b) [y](LICENSE) [z](https://h.org/) ![](nbs/images/p.png)' in text
    assert '[n](m)' in text and 'secret' not in text and '#|' not in text
    assert '```python\nprint(1)\n```\n\n    1\n\n    2\n\n![](nbs/images/index-' in text
    assert list(pictures.values()) == [b'hi']

def test_links_finds_what_is_broken(tmp_path):
    (tmp_path / 'a.html').write_text('<a href="b.html#there">1</a><a href="b.html#gone">2</a><a href="c.html">3</a>'
                                     '<img src="no.png"><a href="https://h.org/x">4</a><a href="#">5</a><a href="../x">6</a>')
    (tmp_path / 'b.html').write_text('<h2 id="there">x</h2><a href="/a.html">1</a>')
    assert [line.split(': ', 1)[1] for line in links.broken(tmp_path)] == [
        '../x (leaves the site)', 'b.html#gone (no such anchor)', 'c.html (no such file)', 'no.png (no such file)']

"""Everything that is done to all notebooks at once.

    python tools/notebooks.py run [NB …]        run in order, save the outputs, strip what changes from run to run
    python tools/notebooks.py test [NB …]       the same without saving
    python tools/notebooks.py check [NB …]      are they as `run` leaves them?
    python tools/notebooks.py export [--check]  notebooks -> modules, README.md, sidebar; --check: fail if that changed a file
    python tools/notebooks.py list              the notebooks in reading order
"""
import argparse, ast, concurrent.futures, functools, json, os, re, shutil, subprocess, sys, time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NBS, LIB = ROOT / 'nbs', ROOT / 'pasta_lib'
SECONDS, KB = 20, 400  # what a reader is asked to wait for, and to download
ADDRESS = r' at 0x[0-9a-f]{6,}>'
METADATA = dict(kernelspec=dict(display_name='python3', language='python', name='python3'))
STAGE = {'0': 'Text and masks', '1': 'Models and PASTA', '2': 'Registers and eviction', '3': 'Diffusion',
         '4': 'Training and measuring', '5': 'Experiments', '6': 'The command'}


def notebooks(names=()) -> list[Path]:
    "The notebooks in reading order, index first; `names` picks some of them by path, file name or number."
    found = sorted(NBS.glob('*.ipynb'), key=lambda p: (p.stem != 'index', p.name))
    if not names: return found
    chosen = [p for p in found if any(Path(n).name in (p.name, p.stem, p.stem.split('_')[0]) for n in names)]
    if not chosen: sys.exit(f'no notebook is called {" or ".join(names)}: `tools/notebooks.py list` prints them')
    return chosen

def read(path: Path) -> dict: return json.loads(path.read_text(encoding='utf-8'))

def dumps(nb: dict) -> str: return json.dumps(nb, indent=1, ensure_ascii=False) + '\n'

def source(cell: dict) -> str: return ''.join(cell['source'])

def title(path: Path) -> str:
    "The notebook's H1."
    for cell in read(path)['cells']:
        if m := re.search(r'^# (.+)$', source(cell), re.M): return m[1].strip()
    return path.stem

def exports_to(path: Path) -> str | None:
    "The module that a notebook exports, from its `default_exp` line."
    for cell in read(path)['cells']:
        if cell['cell_type'] == 'code' and (m := re.search(r'^#\|\s*default_exp\s+(\S+)', source(cell), re.M)): return m[1]


def split_opening(cells: list[dict]) -> list[dict]:
    """Cells whose first holds the title, the `>` line and front matter only: nbdev makes a page's head of that cell and
    drops whatever else stands in it, so the rest becomes the second cell."""
    if not cells or cells[0]['cell_type'] != 'markdown': return cells
    parts = re.split(r'\n\s*\n', source(cells[0]))
    n = next((n for n, part in enumerate(parts) if not re.match(r'# |>|- [\w-]+:', part)), len(parts))
    if n in (0, len(parts)): return cells
    head, rest = ('\n\n'.join(p).splitlines(keepends=True) for p in (parts[:n], parts[n:]))
    return [cells[0] | {'source': head}, {'cell_type': 'markdown', 'id': '', 'metadata': {}, 'source': rest}, *cells[1:]]

def tree(code: str) -> list:
    "The top-level statements of a cell; none if it isn't Python."
    try: return ast.parse(code).body
    except SyntaxError: return []

IMPORTS = (ast.Import, ast.ImportFrom)

def mixes(cell: dict) -> bool:
    "Does this cell import something and do something else? The docs run such a cell, but not those before it."
    body, text = tree(source(cell)), source(cell)
    if cell['cell_type'] != 'code' or re.search(r'^#\|\s*eval: *false', text, re.M): return False
    kinds = {isinstance(s, IMPORTS) for s in body}
    return kinds == {True, False}

def split_imports(cells: list[dict]) -> list[dict]:
    """Give the imports of a cell that is not exported a cell of their own; its flags go with every part, its id and
    outputs with the last."""
    out = []
    for cell in cells:
        lines, body = source(cell).splitlines(keepends=True), tree(source(cell))
        cuts = [a.end_lineno for a, b in zip(body, body[1:]) if isinstance(a, IMPORTS) != isinstance(b, IMPORTS)]
        shared = any(a.end_lineno == b.lineno for a, b in zip(body, body[1:]))  # `import a; a.f()`
        if mixes(cell) and not shared and not any(re.match(r'#\|\s*export', line) for line in lines):
            flags = [line for line in lines if line.startswith('#|')]
            for a, b in zip([0, *cuts], [*cuts, len(lines)]):
                text = ''.join(line for line in lines[a:b] if line not in flags).strip('\n')
                out.append(cell | dict(id='', source=flags + text.splitlines(keepends=True), outputs=[]))
            out[-1].update(id=cell['id'], outputs=cell['outputs'])
        else: out.append(cell)
    return out


# --- clean ----------------------------------------------------------------------------------------------------------
def normalise(nb: dict, stem: str) -> dict:
    "Strip what differs from run to run; give an id `stem-number` to each cell that has none of its own. In place."
    stem, used = re.sub(r'[^a-z0-9]', '', stem.lower()), set()
    nb['cells'] = split_imports(split_opening(nb['cells']))
    taken = {cell.get('id') for cell in nb['cells']}
    for n, cell in enumerate(nb['cells']):
        if not cell.get('id') or cell['id'] in used:
            cell['id'] = next(i for k in range(n, n + 10_000) if (i := f'{stem}-{k:03d}') not in taken | used)  # ids of others stay
        used.add(cell['id'])
        cell['metadata'] = {}
        if isinstance(cell['source'], str): cell['source'] = cell['source'].splitlines(keepends=True)
        if cell['cell_type'] == 'code':
            cell['execution_count'] = None
            for out in cell['outputs']: clean_output(out)
    nb.update(metadata=METADATA, nbformat=4, nbformat_minor=5)
    return nb

def clean_output(out: dict):
    "Remove counters, widget state and memory addresses from one output, and keep its text as a list of lines."
    if 'execution_count' in out: out['execution_count'] = None
    if 'metadata' in out: out['metadata'] = {}
    bundle = out.get('data', {})
    for mime in [m for m in bundle if 'widget' in m]: del bundle[mime]
    tidy = lambda text: re.sub(ADDRESS, '>', ''.join(text)).splitlines(keepends=True)
    bundle.update({mime: tidy(value) for mime, value in bundle.items() if mime.startswith('text/')})
    if 'text' in out: out['text'] = tidy(out['text'])

def output_text(out: dict) -> str:
    "All text of one output, as a reader sees it."
    parts = [out.get('text', '')] + [v for m, v in out.get('data', {}).items() if m.startswith('text/')]
    return '\n'.join(''.join(p) for p in parts)

def prints(code: str) -> bool:
    "Does a top-level statement of this cell print something?"
    return any(isinstance(s, ast.Expr) and isinstance(s.value, ast.Call) and getattr(s.value.func, 'id', '') == 'print'
               and s.value.args for s in tree(code))

def problems(path: Path) -> list[str]:
    "What keeps this notebook from being clean: one line each."
    try: nb = read(path)
    except ValueError as e: return [f'not readable as a notebook: {e}']
    found, ids, name = [], [cell.get('id') for cell in nb['cells']], lambda n: f'cell {n + 1}'
    if (nb['nbformat'], nb['nbformat_minor']) != (4, 5): found.append('is not in notebook format 4.5')
    if len(split_opening(nb['cells'])) > len(nb['cells']): found.append('says more in cell 1 than title and `>` line: the docs drop it')
    if nb['metadata'] != METADATA: found.append('carries metadata besides the kernel')
    if path.stat().st_size > KB * 1000: found.append(f'is {path.stat().st_size // 1000} KB, more than {KB}')
    code = [cell for cell in nb['cells'] if cell['cell_type'] == 'code']
    if len(code) > 4 and not any(cell['outputs'] for cell in code): found.append('has no outputs saved')
    if re.search(r'^#\|\s*exports\b', source(nb['cells'][-1]), re.M): found.append('ends in an `exports` cell, on which the docs fail')
    for n, cell in enumerate(nb['cells']):
        if not re.fullmatch(r'[a-zA-Z0-9_-]{1,64}', cell.get('id') or ''): found.append(f'{name(n)} has no valid id')
        elif ids.index(cell['id']) != n: found.append(f'{name(n)} has the id of an earlier cell, {cell["id"]}')
        if cell['metadata']: found.append(f'{name(n)} carries metadata')
        if cell['cell_type'] != 'code': continue
        if cell['execution_count'] is not None: found.append(f'{name(n)} carries an execution count')
        if re.search(r'^%', source(cell), re.M): found.append(f'{name(n)} has a line that starts with %, which the docs drop')
        if mixes(cell): found.append(f'{name(n)} mixes imports with work, which the docs run on its own')
        shown = 'eval: false' not in source(cell) and not cell['outputs']
        if shown and prints(source(cell)): found.append(f'{name(n)} prints, but no output is saved')
        for out in cell['outputs']:
            if out['output_type'] == 'error': found.append(f'{name(n)} ends in an error')
            if out.get('execution_count') is not None: found.append(f'{name(n)} has an output with an execution count')
            if any(p in output_text(out) for p in (str(ROOT), str(Path.home()), sys.prefix)):
                found.append(f'{name(n)} shows a path of this machine')
            if re.search(ADDRESS, output_text(out)): found.append(f'{name(n)} shows a memory address')
    return found


# --- run ------------------------------------------------------------------------------------------------------------
def environment():
    "The same conditions on every machine, for this process and the kernels it starts."
    os.environ.update(PYTHONHASHSEED='0', TOKENIZERS_PARALLELISM='false', HF_HUB_DISABLE_TELEMETRY='1',
                      HF_HUB_DISABLE_PROGRESS_BARS='1', PYDEVD_DISABLE_FILE_VALIDATION='1', COLUMNS='100')
    os.environ['PYTHONPATH'] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))

def run(path: Path, save: bool, limit: float) -> bool:
    "Run one notebook, tell how long it took, and save it if all went well."
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
    nb, start = nbformat.reads(dumps(normalise(read(path), path.stem)), 4), time.time()
    if any('skip_exec: true' in source(cell) for cell in nb.cells[:1]):
        print(f'{path.name:28} not run: its front matter says so')
        return True
    client = NotebookClient(nb, timeout=max(300, limit), kernel_name='python3', extra_arguments=['--log-level=40'],
                            resources={'metadata': {'path': str(NBS)}})
    try: client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as e:
        plain = re.sub(r'\x1b\[[0-9;]*m', '', str(e))
        print(f'{path.name:28} FAILED after {time.time() - start:.1f} s\n{plain}', flush=True)
        return False
    text, seconds = dumps(normalise(json.loads(json.dumps(nb)), path.stem)), time.time() - start
    size = len(text.encode()) / 1000
    if save: path.write_text(text, encoding='utf-8')
    late, large = seconds > limit, size > KB
    note = (f'  TOO SLOW: more than {limit:g} s' if late else '') + (f'  TOO LARGE: more than {KB} KB' if large else '')
    print(f'{path.name:28} {seconds:6.1f} s {size:6.0f} KB{note}', flush=True)
    return not (late or large)

def run_all(names, save: bool, limit: float, workers: int = 1) -> int:
    "Run notebooks in reading order (index last: it may show what they made), several at a time if asked."
    environment()
    if workers > 1: os.environ['OMP_NUM_THREADS'] = '1'
    paths = sorted(notebooks(names), key=lambda p: p.stem == 'index')
    one = functools.partial(run, save=save, limit=limit)
    with concurrent.futures.ProcessPoolExecutor(workers) as pool: good = list(pool.map(one, paths))
    failed = [p.name for p, ok in zip(paths, good) if not ok]
    if failed: print(f'{len(failed)} of {len(paths)} notebooks need attention: {", ".join(failed)}')
    else: print(f'{len(paths)} notebooks ran')
    return bool(failed)


# --- export ---------------------------------------------------------------------------------------------------------
def generated() -> list[Path]:
    "The modules that nbdev wrote, stale ones included."
    return [p for p in sorted(LIB.rglob('*.py')) if p.name == '_modidx.py' or 'AUTOGENERATED! DO NOT EDIT!' in p.read_text(encoding='utf-8')[:4000]]

def sidebar() -> str:
    "The sidebar's entries: the chapters in order, under the heading of their decade (38 and 39 prepare for 40)."
    lines, last = ['      - index.ipynb'], None
    for path in notebooks()[1:]:
        stage = '4' if path.name[:2] in ('38', '39') else path.name[0]
        if stage != last: lines += [f'      - section: "{STAGE.get(stage, "More")}"', '        contents:']
        last = stage
        lines.append(f'          - {path.name}')
    return '\n'.join(lines)

def write_sidebar():
    "Put the entries between the two marks in _quarto.yml."
    file = ROOT / '_quarto.yml'
    text = re.sub(r'(# chapters, by tools/notebooks.py export\n).*?( *# end of chapters)',
                  lambda m: f'{m[1]}{sidebar()}\n{m[2]}', file.read_text(encoding='utf-8'), flags=re.S)
    file.write_text(text, encoding='utf-8')

def snapshot() -> dict[str, str]:
    "The text of everything that `export` writes."
    files = [*LIB.rglob('*.py'), ROOT / 'README.md', ROOT / '_quarto.yml', *NBS.glob('images/index-*')]
    return {str(p.relative_to(ROOT)): p.read_bytes() for p in files if p.exists()}

def export(check: bool) -> int:
    "Delete the generated modules, export all notebooks, write sidebar and README. With `check`, 1 if a file changed."
    before = snapshot()
    for path in generated(): path.unlink()
    for cache in LIB.rglob('__pycache__'): shutil.rmtree(cache)
    code = 'from nbdev.doclinks import nbdev_export; nbdev_export.__wrapped__(procs=[])'
    subprocess.run([sys.executable, '-c', code], cwd=ROOT, check=True)
    write_sidebar()
    subprocess.run([sys.executable, str(ROOT / 'tools' / 'readme.py')], check=True)
    after = snapshot()
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    for name in changed: print(f'{"written" if name in after else "removed"}: {name}')
    if not changed: print(f'up to date: {len(generated())} modules, sidebar, README.md')
    return bool(check and changed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('what', choices=['run', 'test', 'check', 'export', 'list'])
    parser.add_argument('names', nargs='*', help='notebooks, by path, file name or number; all if none is given')
    parser.add_argument('--check', action='store_true', help='export: exit 1 if a file changed')
    parser.add_argument('--seconds', type=float, default=SECONDS, help='run, test: the longest that a notebook may take')
    parser.add_argument('--workers', type=int, default=1, help='run, test: so many notebooks at a time (their times suffer)')
    args = parser.parse_args()
    if args.what in ('run', 'test'): return run_all(args.names, args.what == 'run', args.seconds, args.workers)
    if args.what == 'export': return export(args.check)
    if args.what == 'list':
        for path in notebooks(): print(f'{path.name:28} {exports_to(path) or "-":16} {title(path)}')
        return 0
    bad = 0
    for path in notebooks(args.names):
        for line in problems(path): bad, _ = bad + 1, print(f'{path.name}: {line}')
    if not bad: print(f'{len(notebooks(args.names))} notebooks are clean')
    return bool(bad)

if __name__ == '__main__': sys.exit(main())

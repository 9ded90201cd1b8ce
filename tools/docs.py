"""The documentation as a website.

    python tools/docs.py             into _proc/_site, without Quarto
    python tools/docs.py --quarto    the same with Quarto, which must be installed

nbdev stages the notebooks in _proc (its own commands would download Quarto when it is missing), then a site generator
that reads _quarto.yml renders them. Pages are named after modules, without the chapter's number.
"""
import re, shutil, subprocess, sys, time
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAGE = ROOT / '_proc'

def site_url() -> str:
    "Where the published site lies; nbdev links to it even from the site itself."
    config = ConfigParser(interpolation=None)
    config.read(ROOT / 'settings.ini', encoding='utf-8')
    return config['DEFAULT']['doc_host'] + config['DEFAULT']['doc_baseurl'] + '/'

def name_pages():
    """In the staged copy: 03_masks.ipynb -> masks.ipynb, and links follow. nbdev's links to the published site become
    relative, and those to a method lead to its class: pages have no anchors for methods."""
    numbered = {p.name: p.name[3:] for p in STAGE.glob('[0-9][0-9]_*.ipynb')}
    for old, new in numbered.items(): (STAGE / old).rename(STAGE / new)
    for path in [*STAGE.glob('*.ipynb'), STAGE / '_quarto.yml']:
        text = path.read_text(encoding='utf-8')
        for old, new in numbered.items(): text = text.replace(old, new)
        if path.suffix == '.ipynb':
            text = re.sub(re.escape(site_url()) + r'(\w+\.html#\w+)[.\w]*', r'\1', text)
            text = text.replace(f'output-file: {path.stem}.html\\n', '')
        path.write_text(text, encoding='utf-8')

def main() -> int:
    from nbdev.serve import proc_nbs
    start = time.time()
    shutil.rmtree(STAGE, ignore_errors=True)
    STAGE.mkdir()
    try: proc_nbs(force=True)
    except Exception as e:  # raised in a worker process, whose traceback is the cause
        first = re.search(r'^\w*(Error|Exception): .*$', str(e.__cause__), re.M)
        sys.exit(f'nbdev could not stage the notebooks: {first[0] if first else type(e).__name__}\n{e}')
    name_pages()
    if '--quarto' in sys.argv: command = ['quarto', 'render', str(STAGE), '--no-cache', '--no-execute']
    else: command = [str(Path(sys.executable).with_name('smalldocs')), 'render', str(STAGE), '--quiet']
    subprocess.run(command, check=True)
    code = subprocess.run([sys.executable, str(ROOT / 'tools' / 'check_links.py'), str(STAGE / '_site')]).returncode
    print(f'{time.time() - start:.0f} s; open _proc/_site/index.html')
    return code

if __name__ == '__main__': sys.exit(main())  # nbdev starts worker processes that import this file

"""README.md from nbs/index.ipynb, without Quarto.

    python tools/readme.py           write README.md (and the pictures it shows, nbs/images/index-*)
    python tools/readme.py --check   exit 1 if they are not what the notebook says

Markdown cells stay as they are; code cells become fenced blocks; text outputs become indented blocks; pictures become
files. Links that are relative to nbs/ are made relative to the repository's root.
"""
import base64, json, posixpath, re, sys
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INDEX = ROOT / 'nbs' / 'index.ipynb'
NOTE = '<!-- Generated from nbs/index.ipynb by tools/readme.py: edit the notebook. -->\n\n'

def repository() -> str:
    "The address under which the site links to the repository's files."
    config = ConfigParser(interpolation=None)
    config.read(ROOT / 'settings.ini', encoding='utf-8')
    cfg = config['DEFAULT']
    return f"{cfg['git_url']}/blob/{cfg['branch']}/"

def relink(target: str) -> str:
    "A link as seen from nbs/, as seen from the root."
    if target.startswith(repository()): return target[len(repository()):]
    if re.match(r'[a-z][a-z0-9+.-]*:|#|/', target): return target
    return posixpath.normpath(posixpath.join('nbs', target))

def markdown(text: str) -> str:
    "Relink the Markdown links and HTML attributes of a cell, outside its fenced blocks."
    parts = re.split(r'(^```.*?^```)', text, flags=re.M | re.S)
    for n in range(0, len(parts), 2):
        parts[n] = re.sub(r'(\]\()([^)\s]+)', lambda m: m[1] + relink(m[2]), parts[n])
        parts[n] = re.sub(r'((?:src|href)=")([^"]+)', lambda m: m[1] + relink(m[2]), parts[n])
    return ''.join(parts)

def outputs(cell: dict, pictures: dict) -> list[str]:
    "The blocks that show a code cell's outputs; `pictures` collects the files they need."
    blocks, text = [], ''
    for n, out in enumerate(cell.get('outputs', [])):
        data = out.get('data', {})
        if 'image/png' in data:
            name = f"images/index-{cell['id']}-{n}.png"
            pictures[name] = base64.b64decode(''.join(data['image/png']))
            blocks.append(f'![]({relink(name)})')
        elif 'text/markdown' in data: blocks.append(markdown(''.join(data['text/markdown'])))
        else: text += ''.join(out.get('text') or data.get('text/plain') or '').rstrip('\n') + '\n'
    if text.strip(): blocks.insert(0, '\n'.join(f'    {line}'.rstrip() for line in text.rstrip().split('\n')))
    return blocks

def render(nb: dict) -> tuple[str, dict]:
    "The README's text, and the pictures it shows: {path under nbs/: bytes}."
    blocks, pictures = [], {}
    for cell in nb['cells']:
        text = ''.join(cell['source']).strip()
        if cell['cell_type'] == 'markdown': blocks.append(markdown(text))
        if cell['cell_type'] != 'code' or re.search(r'^#\|\s*(hide|default_exp|include: *false)', text, re.M): continue
        code = re.sub(r'^#\|.*\n?', '', text, flags=re.M).strip()
        if code and not re.search(r'^#\|\s*echo: *false', text, re.M): blocks.append(f'```python\n{code}\n```')
        blocks += outputs(cell, pictures)
    return NOTE + '\n\n'.join(b for b in blocks if b) + '\n', pictures

def main() -> int:
    text, pictures = render(json.loads(INDEX.read_text(encoding='utf-8')))
    files = {ROOT / 'README.md': text.encode()} | {INDEX.parent / name: data for name, data in pictures.items()}
    stale = [p for p in INDEX.parent.glob('images/index-*.png') if p not in files]
    changed = [p for p, data in files.items() if not p.exists() or p.read_bytes() != data] + stale
    if '--check' in sys.argv:
        for p in changed: print(f'{p.relative_to(ROOT)} is not what nbs/index.ipynb says: run `make export`')
        return bool(changed)
    for p in stale: p.unlink()
    for p, data in files.items():
        p.parent.mkdir(exist_ok=True)
        if p in changed: p.write_bytes(data)
    return 0

if __name__ == '__main__': sys.exit(main())

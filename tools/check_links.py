"""Broken internal links, anchors and pictures of a built site: one line each, exit 1 if there are any.

    python tools/check_links.py [_proc/_site]

Links to other hosts are not followed.
"""
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

class Page(HTMLParser):
    "Collects what a page links to and the anchors it offers."
    def __init__(self, path: Path):
        super().__init__()
        self.links, self.anchors = [], {'', 'top'}
        self.feed(path.read_text(encoding='utf-8'))

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.anchors |= {attrs[k] for k in ('id', 'name') if attrs.get(k)}
        link = attrs.get('href') if tag in ('a', 'link', 'area') else attrs.get('src')
        if link is not None: self.links.append(link)

def resolve(site: Path, page: Path, path: str) -> Path:
    "The file that a link's path names."
    if not path: return page
    target = (site / path.lstrip('/') if path.startswith('/') else page.parent / path).resolve()
    return target / 'index.html' if target.is_dir() else target

def broken(site: Path) -> list[str]:
    "All broken internal links below `site`."
    site = site.resolve()
    pages, found = {p: Page(p) for p in sorted(site.rglob('*.html'))}, []
    for path, page in pages.items():
        for link in page.links:
            url = urlsplit(link)
            if url.scheme or url.netloc: continue
            target = resolve(site, path, unquote(url.path))
            if not target.is_relative_to(site): why = 'leaves the site'
            elif not target.exists(): why = 'no such file'
            elif url.fragment and target in pages and unquote(url.fragment) not in pages[target].anchors: why = 'no such anchor'
            else: continue
            found.append(f'{path.relative_to(site)}: {link} ({why})')
    return sorted(set(found))

def main() -> int:
    site = Path(sys.argv[1] if len(sys.argv) > 1 else '_proc/_site')
    if not site.is_dir(): sys.exit(f'{site} is no folder: `make docs` builds the site')
    found, pages = broken(site), len(list(site.rglob('*.html')))
    for line in found: print(line)
    print(f'{pages} pages, {len(found)} broken links')
    return bool(found or not pages)

if __name__ == '__main__': sys.exit(main())

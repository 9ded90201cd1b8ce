"""Who may read whom, at which position, with which label: written token by token from the definition.

q may read k iff k is q or an ancestor of q. A fork's parent is its promise. The token after a promise on the main
thread has that promise as its parent. A sync has as parents the previous main token and the
end of every fork still open or finished since the last sync. Nothing here knows of segments or imports the library.
"""
import random
from dataclasses import dataclass, field

IGNORE = -100


@dataclass
class Token:
    id: int
    position: int
    parents: list[int] = field(default_factory=list)   # places, in the same list, of the tokens just before this one
    label: int = IGNORE


def readable(tokens: list[Token]) -> list[list[bool]]:
    "may[q][k], by walking from every q to all its ancestors."
    may = []
    for q in range(len(tokens)):
        found, todo = set(), [q]
        while todo:
            k = todo.pop()
            if k not in found: found.add(k); todo += tokens[k].parents
        may.append([k in found for k in range(len(tokens))])
    return may


def in_window(tokens: list[Token], window: int) -> list[list[bool]]:
    return [[abs(q.position - k.position) < window for k in tokens] for q in tokens]


# --- annotated answers: prompt and pieces (kind, ids, tokens), as the builder takes them ------------------------------

def document(prompt, pieces, positions='predicted', constant=40, after_sync='main', eos_id=None) -> list[Token]:
    "The flattened row of an annotated answer."
    out: list[Token] = []
    main: list[int] = []                 # places of main's tokens
    jump = 0                             # added to main's next position, after a promise
    fork_ends: list[int] = []            # places of the last tokens of the forks since the last sync
    pieces = list(pieces)

    def add_main(id, extra_parents=(), at=None):
        nonlocal jump
        position = (out[main[-1]].position + 1 if main else 0) + jump
        out.append(Token(id, position if at is None else at, main[-1:] + list(extra_parents)))
        main.append(len(out) - 1)
        jump = 0

    for id in prompt: add_main(id)
    for n, piece in enumerate(pieces):
        if piece.kind == 'text':
            for id in piece.ids: add_main(id)
        elif piece.kind == 'sync':
            at = None
            if after_sync == 'max':
                own = (out[main[-1]].position + 1 if main else 0) + jump
                at = max([own] + [out[e].position + 1 for e in fork_ends])
            for i, id in enumerate(piece.ids): add_main(id, fork_ends if i == 0 else (), at if i == 0 else None)
            fork_ends = []
        elif piece.kind == 'promise':
            for id in piece.ids: add_main(id)
            promise = main[-1]
            block = pieces[n + 1].ids if n + 1 < len(pieces) and pieces[n + 1].kind == 'async' else []
            before = promise
            for i, id in enumerate(block):
                out.append(Token(id, out[promise].position + 1 + i, [before]))
                before = len(out) - 1
            if len(block): fork_ends = fork_ends + [before]
            jump = {'predicted': piece.tokens, 'constant': constant, 'oracle': len(block)}[positions]
    label(out, len(prompt), pieces, eos_id)
    return out


def label(out: list[Token], prompt_length: int, pieces, eos_id):
    "Reads the row left to right: what comes next, where blocks count as a detour that returns to their promise."
    place, inside, closing = prompt_length, set(), set()
    for piece in pieces:
        places = range(place, place + len(piece.ids))
        if piece.kind == 'async': inside.update(places); closing.add(places[-1])
        place += len(piece.ids)
    for i, token in enumerate(out):
        if i < prompt_length - 1 or i in closing: continue
        if i in inside: token.label = out[i + 1].id; continue
        after = next((j for j in range(i + 1, len(out)) if j not in inside), None)    # the first token after the block
        token.label = out[after].id if after is not None else IGNORE if eos_id is None else eos_id


# --- documents with nested forks --------------------------------------------------------------------------------------

def random_thread(rng: random.Random, depth: int = 0) -> list:
    "A random thread: ('text', n), ('fork', promise length, jump, thread) and ('sync', n) in any order, nested."
    items = []
    for _ in range(rng.randint(1, 5 if depth == 0 else 3)):
        kind = rng.choice(['text', 'fork', 'fork', 'sync'] if depth < 3 else ['text'])
        if kind == 'text': items.append(('text', rng.randint(0, 3)))
        elif kind == 'sync': items.append(('sync', rng.randint(1, 2)))
        else: items.append(('fork', rng.randint(1, 2), rng.randint(0, 9), random_thread(rng, depth + 1)))
    return items


def nested(thread: list, out: list[Token] | None = None, before: int | None = None, start: int = 0) -> list[Token]:
    "The flattened row of a nested document; ids are random but fixed."
    out = [] if out is None else out
    _nested(thread, out, before, start)
    return out


def _nested(thread, out, last, position) -> int | None:
    "Writes a thread that continues after token `last`; returns the place of its last token (`last` if it wrote none)."
    open_ends: list[int] = []

    def add(parents):
        nonlocal last, position
        out.append(Token(len(out) * 7 % 31, position, [p for p in parents if p is not None]))
        last, position = len(out) - 1, position + 1

    for item in thread:
        if item[0] == 'text':
            for _ in range(item[1]): add([last])
        elif item[0] == 'sync':
            for i in range(item[1]): add([last] + (open_ends if i == 0 else []))
            open_ends = []
        else:
            _, length, jump, body = item
            for _ in range(length): add([last])
            end = _nested(body, out, last, position)
            if end != last: open_ends = open_ends + [end]
            position += jump
    return last

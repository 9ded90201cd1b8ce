"""The golden case of the PASTA runtime: figures 3.3 and 3.4 of the thesis as an explicit table.

What the thesis says (section 3.3). The prefix fills slots 0-18. Main decodes slots 19-20 while it is alone ("T=0"). It
decodes a promise at T=1, upon which the runtime appends `<async>` at once; a second promise at T=2, while fork 1 writes its
first token; at T=3 three threads decode, and main's token is `<sync/>`, which does not enter the pool yet: the other two
land in slots 26 and 27. Fork 2 ends at T=22, fork 1 at T=34, and then `<sync/>` enters.

Step numbering. A runtime decodes one token per thread and step, so main's two tokens of "T=0" take two steps: here they are
T=-1 and T=0, that is steps 1 and 2 of a `Record`. In general

    step = T + OFFSET, OFFSET = 2.

The script treats both as decoded (sampled). `step` below is the step in which a token *enters the pool*; it differs from the
step that sampled it only for `<sync/>`: sampled at T=3 (`SYNC_SAMPLED`), entered at T=34, in the forward of fork 1's last
`</async>`, just after it.

Ours, where the thesis leaves it open. Every promise is a single token. Within a step the threads take their slots in the
order of their creation (main, fork 1, fork 2), so that at T=2 the second promise has slot 23, fork 1's first token 24 and the
second `<async>` 25.

The figure writes `<sync/>` at slot 80. The tokens that the text names before it are 19 of the prefix, 2 of main, 2 promises,
2 `<async>`, 33 of fork 1 (T=2..34) and 20 of fork 2 (T=3..22): 78, in slots 0-77. So `<sync/>` has slot 78 here. The figure
must hold two more tokens that its text doesn't name; a promise that takes two tokens instead of one would account for them.
"""
from dataclasses import dataclass
from math import nan

OFFSET, PREFIX, SYNC_SAMPLED, SYNC_SLOT, PAPER_SYNC_SLOT = 2, 19, 3, 78, 80
THREADS = ('main', 'fork 1', 'fork 2')
TOPICS, PREDICTED = (None, 'coordinates', 'length formula'), (None, 40, 30)
TAGS = {'promise 1': '<promise topic="coordinates" tokens="40"/>', 'promise 2': '<promise topic="length formula" tokens="30"/>',
        '<async>': '<async>', '</async>': '</async>', '<sync/>': '<sync/>'}


@dataclass(frozen=True)
class Row:
    "One token: its slot, the step in which it entered the pool (0: prefill), its thread, its kind and what it is."
    slot: int
    step: int
    thread: int
    kind: str                                  # prompt | sampled | forced
    what: str                                  # text | a key of TAGS

    @property
    def T(self) -> int | None: return self.step - OFFSET if self.step else None


def _table() -> list[Row]:
    rows = [Row(slot, 0, 0, 'prompt', 'text') for slot in range(19)]
    rows += [Row(19, 1, 0, 'sampled', 'text'), Row(20, 2, 0, 'sampled', 'text')]                     # "T=0"
    rows += [Row(21, 3, 0, 'sampled', 'promise 1'), Row(22, 3, 1, 'forced', '<async>')]              # T=1
    rows += [Row(23, 4, 0, 'sampled', 'promise 2'), Row(24, 4, 1, 'sampled', 'text'),                # T=2
             Row(25, 4, 2, 'forced', '<async>')]
    rows += [Row(26, 5, 1, 'sampled', 'text'), Row(27, 5, 2, 'sampled', 'text')]                     # T=3, and <sync/> is held
    for T in range(4, 22):                                                                           # T=4..21: two take turns
        slot = 28 + 2 * (T - 4)
        rows += [Row(slot, T + 2, 1, 'sampled', 'text'), Row(slot + 1, T + 2, 2, 'sampled', 'text')]
    rows += [Row(64, 24, 1, 'sampled', 'text'), Row(65, 24, 2, 'sampled', '</async>')]               # T=22: fork 2 ends
    rows += [Row(66 + T - 23, T + 2, 1, 'sampled', 'text') for T in range(23, 34)]                   # T=23..33: fork 1 alone
    rows += [Row(77, 36, 1, 'sampled', '</async>'), Row(78, 36, 0, 'sampled', '<sync/>')]            # T=34
    return rows


TABLE = _table()
AFTER = [Row(79, 37, 0, 'sampled', 'text'), Row(80, 38, 0, 'sampled', 'text')]     # main goes on, reading both forks
# What each thread samples, for a scripted model: forced tokens are the runtime's.
SCRIPT = {'main': ['text', 'text', 'promise 1', 'promise 2', '<sync/>', 'text', 'text'],
          'fork 1': ['text'] * 32 + ['</async>'], 'fork 2': ['text'] * 19 + ['</async>']}


def tuples(rows=TABLE) -> list[tuple[int, int, int, str]]: return [(r.slot, r.step, r.thread, r.kind) for r in rows]


def of_record(record, written=None) -> list[tuple[int, int, int, str]]:
    """The same tuples, by slot, from a runtime's record. `written`: steps of entry into the pool (default: that of the sync is
    taken from the forks it joins, so that a record may note the step in which it was sampled)."""
    if written is None:
        from pasta_lib.metrics import written_steps
        written = written_steps(record)
    return sorted((s, t, n, k) for s, t, n, k in zip(record.slot, written, record.thread, record.kind) if s >= 0)


def golden_record(words=None):
    "A `Record` built from the table by hand (no runtime), main's two last tokens included; `words` encodes the texts."
    from pasta_lib.engine import Record, Thread
    from pasta_lib.segments import SegmentTable
    table = SegmentTable()
    main = table.open((), 'main')
    fork1 = table.open((main,), 'fork 1')
    main2 = table.open((main,), 'main 2')
    fork2 = table.open((main2,), 'fork 2')
    after = table.open((main2, fork1, fork2), 'after sync')
    rows = TABLE + AFTER
    segments = [fork1 if r.thread == 1 else fork2 if r.thread == 2 else main if r.slot <= 21 else main2 if r.slot == 23
                else after for r in rows]
    first = {main: 0, fork1: 22, main2: 22 + PREDICTED[1], fork2: 22 + PREDICTED[1] + 1,
             after: 22 + PREDICTED[1] + 1 + PREDICTED[2]}
    positions = [first[s] + segments[:i].count(s) for i, s in enumerate(segments)]
    ids = [words.encode(TAGS.get(r.what, f' t{r.slot}'))[0] if words else r.slot for r in rows]
    record = Record(table)
    record.threads += [Thread('main', main, finish_reason='length')]
    record.threads += [Thread(THREADS[n], segment, 0, at, TOPICS[n], PREDICTED[n], 'end', 78)
                       for n, segment, at in ((1, fork1, 21), (2, fork2, 23))]
    for r, id, position, segment in zip(rows, ids, positions, segments):
        record.add(id, position, segment, r.slot, r.step, r.thread, nan, r.kind, r.what in TAGS)
    record.seconds += [0.] * 38
    return record

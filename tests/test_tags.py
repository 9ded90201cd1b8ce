"""Tags: readers, repair, documents, ids, lint. Oracles are written from the grammar's definition, not from the module."""
import json, pickle, random, re, subprocess, sys, time
import pytest
from hypothesis import given, settings, strategies as st
from pasta_lib.core import PastaError
from pasta_lib.tags import *

LANGS, SETTINGS = ('pasta', 'tip', 'plan'), settings(max_examples=100, deadline=None)
FRAGMENTS = ['<promise topic="', 'eggs', '" tokens="20"/>', '<promise topic="a" tokens="20"/>', '<promise', '<promise tokens=7 topic=x>', ' ', '\n', '`',
             '<async>', '</async>', '<async >', '<sync/>', '<sync', '<asy', 'nc>', '<', '>', '/', '"', '&', '&lt;', '&amp;', 'amp;', '&#96;', '&quot;', 'lt;', '`<sync/>`',
             'sync/>', '</promise>', '</sync>', '<topic>', '</topic>', '<topic> Top 10 tips 3 </topic>', ' 3 ', ' 0 ', ' 120 ', '</topic', '<reg_3>', '<reg_',
             '<reg_16>', '<reg_x>', '3>', 'é🥚', '素数', '\ufffd', '=', "topic='b'", 'tokens', '\t', '\r', 'promise topic="a" tokens="10"/>']
tagged = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=3)), max_size=14).map(''.join)
langs = st.sampled_from(LANGS)

def merge(events):
    out = []
    for e in events:
        if isinstance(e, Text) and out and isinstance(out[-1], Text): out[-1] = Text(out[-1].text + e.text)
        else: out.append(e)
    return out

def read(chunks, *args, **kwargs):
    reader = TextReader(*args, **kwargs)
    return merge([e for c in chunks for e in reader.push(c)] + reader.close())

def rules(text, lang='pasta', **kwargs): return [p.rule for p in parse(text, lang, **kwargs).problems]
def events(text, lang='pasta', **kwargs): return [e for e in read([text], lang, **kwargs) if not isinstance(e, Problem)]

# --- streaming -------------------------------------------------------------------------------------------------------

@SETTINGS
@given(tagged, langs, st.sampled_from(['repair', 'literal']), st.booleans(), st.sampled_from([None, 'async']), st.data())
def test_any_split_gives_the_same_events(text, lang, policy, document, inside, data):
    kwargs = dict(lang=lang, policy=policy, document=document, inside=inside)
    whole = read([text], **kwargs)
    assert read(list(text), **kwargs) == whole
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    assert read([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])], **kwargs) == whole

def test_every_single_cut_of_a_long_example():
    text = 'A `<b>` <promise topic="a > &quot;b" tokens="25"/> <async>x &lt;sync/></async>\n`<sync/>` <sync /> <promise tokens=3 topic=y><async>z<sync/>e'
    whole = read([text], document=True)
    assert all(read([text[:i], text[i:]], document=True) == whole for i in range(len(text)))

@pytest.mark.parametrize('text', ['if a < b', 'a <b>c</b>', 'I <promised>', 'I <promise you all', '<asynchronous', '</p', 'R&D', '&amp;', 'x <3 y', '<prom '])
def test_prose_is_not_held_back(text):
    assert merge(TextReader().push(text + ' ')) == [Text(text + ' ')]

def test_hold_back_is_bounded():
    for start in ['<promise topic="', '<promise topic="a" tokens="', '<topic> ', '&' + 'amp;' * 3000, '<sync' + ' ' * 3000]:
        for lang in LANGS:
            reader, sent = TextReader(lang), 0
            for c in start + "a" * (MAX_TAG + 100):
                sent += 1 - sum(len(e.text) for e in reader.push(c) if isinstance(e, Text))
                assert sent <= MAX_TAG + 1

ADVERSARIAL = ['<promise topic="', '<', '<async', '"', '&amp;', '<promise topic="a" tokens="x"/>', '<async>', '`<', '<promise topic="' + 'a' * 3000, '<topic> ',
               '<promise topic=">', '<promise topic="<as', '&lt;', '<sync/>', '</async>', ' <promise topic="a" tokens="10"/>', '<topic> 1 </topic><async></async>']

def clock(text, lang, size):
    start, reader = time.process_time(), TextReader(lang, document=True)
    for i in range(0, len(text), size): reader.push(text[i:i + size])
    reader.close()
    return time.process_time() - start

@pytest.mark.parametrize('unit', ADVERSARIAL, ids=lambda u: u[:20])
def test_linear_time(unit):
    lang = 'plan' if 'topic>' in unit else 'pasta'
    size = 1_000_000 if unit in ('<promise topic="', '<') else 100_000
    text = (unit * (size // len(unit) + 1))[:size]
    small, large = (min(clock(t, lang, 10**7) for _ in range(3)) for t in (text[:size // 4], text))     # quadratic would be 16 times
    assert large <= max(10 * small, .3) and large < 30

@pytest.mark.parametrize('unit', ['<promise topic="', '<promise topic="> ', '<promise topic="' + 'a"' * 1500, '<'], ids=lambda u: u[:20])
def test_linear_time_by_the_letter(unit):
    text = (unit * 40_000)[:40_000]
    small, large = (min(clock(t, 'pasta', 1) for _ in range(3)) for t in (text[:10_000], text))
    assert large <= max(10 * small, .3)

@SETTINGS
@given(st.one_of(st.text(), tagged, st.binary(max_size=60).map(lambda b: b.decode('latin-1'))), langs, st.sampled_from(POLICIES), st.booleans())
def test_nothing_crashes(text, lang, policy, document):
    try: found = read([text], lang, policy, document=document)
    except GrammarError as e:
        assert policy == 'strict' and e.rule in RULES and e.line >= 1 and e.column >= 1 and e.repair
        return
    assert policy == 'repair' or not any(isinstance(e, Problem) for e in found)

@SETTINGS
@given(tagged, langs, st.sampled_from(['repair', 'literal']), st.booleans())
def test_blocks_are_balanced_and_syncs_have_forks(text, lang, policy, document):
    open_, forks = False, 0
    for e in read([text], lang, policy, document=document):
        if isinstance(e, AsyncStart): assert not open_; open_ = True
        elif isinstance(e, AsyncEnd): assert open_; open_ = False
        elif isinstance(e, (Promise, Topic)): assert not open_; forks += 1
        elif isinstance(e, Sync): assert forks and not open_; forks = 0
    assert not open_

@SETTINGS
@given(tagged, langs)
def test_strict_raises_exactly_when_repair_reports(text, lang):
    problems = parse(text, lang).problems
    if not problems: assert parse(text, lang, 'strict') == parse(text, lang, 'literal') == parse(text, lang)
    else:
        with pytest.raises(GrammarError) as e: parse(text, lang, 'strict')
        first = problems[0]
        assert (e.value.rule, e.value.line, e.value.column, e.value.repair) == (first.rule, first.line, first.column, first.repair)

@SETTINGS
@given(tagged, langs)
def test_places(text, lang):
    for p in parse(text, lang).problems:
        before = text[:p.offset]
        assert (p.line, p.column) == (before.count('\n') + 1, len(before) - (before.rfind('\n') + 1) + 1)

def test_reader_life():
    reader = TextReader()
    reader.push('a'), reader.close()
    assert reader.close() == []
    with pytest.raises(PastaError, match='closed'): reader.push('b')
    for bad in [dict(lang='xml'), dict(policy='kind'), dict(inside='promise')]:
        with pytest.raises(PastaError): TextReader(**bad)

# --- documents -------------------------------------------------------------------------------------------------------

@SETTINGS
@given(tagged, langs, st.sampled_from(['repair', 'literal']))
def test_render_of_parse_is_stable(text, lang, policy):
    doc = parse(text, lang, policy)
    once = render(doc)
    again = parse(once, lang, policy)
    assert again.nodes == doc.nodes and render(again) == once
    if policy == 'repair': assert lint(once, lang) == []

word = st.one_of(st.text(max_size=8), st.sampled_from(FRAGMENTS), tagged)
topic = st.one_of(st.text(min_size=1, max_size=MAX_TOPIC), tagged).filter(str.strip)

@pytest.mark.parametrize('text', ['&#96;', '&#96;\n', '&amp;#96;\n', '`\n'])
def test_an_escape_before_a_tag_round_trips(text):
    doc = Document([Text(text), Promise('a', 10), Async('')])
    assert parse(render(doc)).nodes[0] == Text(text) and parse(render(doc)).problems == []


@SETTINGS
@given(st.lists(st.tuples(st.sampled_from('tps'), word, topic, st.integers(1, 1000)), max_size=6))
def test_any_pasta_document_round_trips(parts):
    doc, forks = Document(), 0
    for kind, text, name, n in parts:
        if kind == 't': doc.nodes.append(Text(text))
        elif kind == 'p': doc.nodes += [Promise(name[:MAX_TOPIC], 10 * n), Async(text)]; forks += 1
        elif forks: doc.nodes.append(Sync()); forks = 0
    again = parse(render(doc))
    assert plain(again) == plain(doc) and again.problems == []
    assert [n for n in again.nodes if not isinstance(n, Text)] == [n for n in doc.nodes if not isinstance(n, Text)]

@SETTINGS
@given(topic)
def test_any_topic_round_trips(name):
    name = name[:MAX_TOPIC] if name[:MAX_TOPIC].strip() else 'x'
    doc = parse(render(Document([Promise(name, 20), Async('b')])), policy='strict')
    assert doc.nodes == [Promise(name, 20), Async('b')] and unescape_topic(escape_topic(name)) == name

@SETTINGS
@given(st.lists(st.tuples(topic, st.integers(1, 99), word), min_size=1, max_size=4), word)
def test_any_plan_round_trips(parts, rest):
    topics = [Topic(' '.join(t[:MAX_TOPIC].split()) or 'x', n) for t, n, _ in parts]
    doc = Document(topics + [Async(text) for *_, text in parts] + [Sync(), Text(rest)], lang='plan')
    assert parse(render(doc), 'plan', 'strict').nodes == doc.nodes[:-1] + [Text(rest)] * bool(rest)

def test_spans_point_at_the_source():
    text = 'a <promise topic="b" tokens="20"/><async>c</async> d <sync/>e'
    assert [text[slice(*n.span)] for n in parse(text).nodes] == ['a ', '<promise topic="b" tokens="20"/>', '<async>c</async>', ' d ', '<sync/>', 'e']

def test_render_refuses_strangers():
    with pytest.raises(PastaError): render(Document([AsyncEnd()]))

def test_errors_survive_pickling():
    with pytest.raises(GrammarError) as e: parse('a\n <sync/>', policy='strict')
    e, again = e.value, pickle.loads(pickle.dumps(e.value))
    assert (again.rule, again.line, again.column, again.repair, str(again)) == (e.rule, 2, 2, e.repair, str(e))
    assert pickle.loads(pickle.dumps(MissingTags(['<async>']))).missing == ['<async>']

# --- every mistake ---------------------------------------------------------------------------------------------------

OK = '<promise topic="a" tokens="20"/><async>b</async>'

@pytest.mark.parametrize('attributes, topic, tokens, found', [
    ('topic="a" tokens="20"', 'a', 20, []),
    ('topic="a" tokens="abc"', 'a', 40, ['tokens-not-integer']),
    ('topic="a" tokens=""', 'a', 40, ['tokens-not-integer']),
    ('topic="a" tokens="20.5"', 'a', 20, ['tokens-not-integer']),
    ('topic="a" tokens="about 35 words"', 'a', 40, ['tokens-not-integer']),
    ('topic="a" tokens="0"', 'a', 10, ['tokens-zero']),
    ('topic="a" tokens="-20"', 'a', 10, ['tokens-negative']),
    ('topic="a" tokens="25"', 'a', 30, ['tokens-not-multiple']),
    ('topic="a" tokens="' + '9' * 900 + '"', 'a', MAX_TOKENS, ['tokens-too-large']),
    ('topic="a"', 'a', 40, ['tokens-missing']),
    ('tokens="20"', UNTITLED, 20, ['topic-missing']),
    ('topic="" tokens="20"', UNTITLED, 20, ['topic-empty']),
    ('topic="  " tokens="20"', UNTITLED, 20, ['topic-empty']),
    ('', UNTITLED, 40, ['topic-missing', 'tokens-missing']),
    ('topic="' + 'x' * 400 + '" tokens="20"', 'x' * MAX_TOPIC, 20, ['topic-too-long']),
    ('topic="5" nails" tokens="20"', '5" nails', 20, ['topic-quotes']),
    ('topic="say "hi" now" tokens="20"', 'say "hi" now', 20, ['topic-quotes']),
    ('topic="R&D "x" > y" tokens="20"', 'R&D "x" > y', 20, ['topic-quotes']),
    ('topic="a > b /> c" tokens="20"', 'a > b /> c', 20, []),
    ('topic=">" tokens="20"', '>', 20, []),
    ('topic="a < b <i>c</i>" tokens="20"', 'a < b <i>c</i>', 20, []),
    ('topic="R&D &amp; &quot;x&quot; &lt;b&gt;" tokens="20"', 'R&D & "x" <b>', 20, []),
    ('topic="Ei 🥚 素数 λ" tokens="20"', 'Ei 🥚 素数 λ', 20, []),
    ("topic='it > x' tokens='20'", None, None, None),
    ("topic='nails' tokens='20'", 'nails', 20, ['spelling']),
    ('topic=nails tokens=20', 'nails', 20, ['spelling']),
    ('tokens="20" topic="a"', 'a', 20, ['spelling']),
    ('topic="a" tokens="020"', 'a', 20, ['spelling']),
    ('topic="a" tokens="20" lang="en"', 'a', 20, ['spelling']),
    ('topic = "a"  tokens = "20" ', 'a', 20, ['spelling']),
])
def test_promise_attributes(attributes, topic, tokens, found):
    doc = parse(f'<promise {attributes}/><async>b</async>')
    assert all(isinstance(n, (Promise, Async, Text)) for n in doc.nodes)
    if found is not None: assert doc.nodes == [Promise(topic, tokens), Async('b')] and [p.rule for p in doc.problems] == found

def test_promise_without_slash():
    assert parse('<promise topic="a" tokens="20"><async>b</async>').nodes == parse(OK).nodes

@pytest.mark.parametrize('text, found, canonical', [
    (OK + '</async>c', ['end-without-async'], OK + 'c'),
    ('a<sync/>b', ['sync-without-fork'], 'ab'),
    (OK + '<sync/><sync/>b', ['sync-without-fork'], OK + '<sync/>b'),
    ('a<async>b</async>c', ['async-without-promise'], 'abc'),
    ('a<async>b', ['async-without-promise'], 'ab'),
    (OK + 'x<async>b</async>', ['async-without-promise'], OK + 'xb'),
    ('<promise topic="a" tokens="20"/> b', ['promise-without-async'], ' b'),
    ('<promise topic="a" tokens="20"/>', ['promise-without-async'], ''),
    ('<promise topic="z" tokens="20"/>' + OK, ['promise-without-async'], OK),
    ('<promise topic="a" tokens="20"/>\n <async>b</async>', ['gap'], '<promise topic="a" tokens="20"/><async>\n b</async>'),
    ('<promise topic="a" tokens="20"/><async>b', ['unclosed-async'], OK),
    ('<promise topic="a" tokens="20"/><async>b<promise topic="c" tokens="10"/></async>', ['nested-promise'], OK),
    ('<promise topic="a" tokens="20"/><async><promise topic="c" tokens="10"/><async>b</async></async>', ['nested-promise', 'nested-async'], OK),
    ('<promise topic="a" tokens="20"/><async>b<sync/>c', ['sync-in-async'], OK + '<sync/>c'),
    ('<promise topic="a" tokens="20"/><async>b<sync/>c</async>', ['sync-in-async', 'end-without-async'], OK + '<sync/>c'),
    ('<promise topic="a" tokens="20"/><async >b</ async>', ['spelling', 'unclosed-async'], '<promise topic="a" tokens="20"/><async>b</ async></async>'),
    (OK + '<sync >b', ['spelling'], OK + '<sync/>b'),
    (OK + '</promise></sync>', ['no-such-end'] * 2, OK),
    ('a <promise topic="b" to', ['unfinished-tag'], 'a '),
    ('a <sync', ['unfinished-tag'], 'a '),
    ('a <promise topic="b\nc', ['broken-tag'], 'a &lt;promise topic="b\nc'),
    ('a <promise topic="b ' + OK, ['broken-tag'], 'a &lt;promise topic="b ' + OK),
    ('<promise topic="' + 'x' * 2 * MAX_TAG, ['broken-tag'], '&lt;promise topic="' + 'x' * 2 * MAX_TAG),
    ('the tag `<sync/>` waits', [], 'the tag `&lt;sync/>` waits'),
    ('use `' + OK[:32] + '` to fork', [], 'use `&lt;promise topic="a" tokens="20"/>` to fork'),
    ('code `a`<async>', ['async-without-promise'], 'code `a`'),
    ('&lt;sync/> &amp;lt;sync/> &lt;b> &amp;', [], '&lt;sync/> &amp;lt;sync/> &lt;b> &amp;'),
])
def test_repairs(text, found, canonical):
    doc = parse(text)
    assert ([p.rule for p in doc.problems], render(doc)) == (found, canonical)

def test_code_span_must_be_open():
    assert events('x `a`' + OK + '`b`')[1] == Promise('a', 20)
    assert events('x `\n`y` `<sync/>`')[-1] == Text('x `\n`y` `<sync/>`')
    assert parse(OK + '`<sync/></async>`').nodes[-3:] == [Text('`'), Sync(), Text('`')]     # not a code span: a tag follows
    assert parse(OK + '`<sync/>').nodes[-1] == Sync()

@pytest.mark.parametrize('text', ['a<sync/>b', 'a</async>b', '<async>b</async>', '<promise topic="a" tokens="25"/> x', '<promise topic="a" tokens="20"/> x',
                                  '<promise topic="a" to', '<promise topic="a" tokens="20"/> <async>b</async>', 'x</promise>', '<promise topic="a" tokens="20"/><async >'])
def test_literal_keeps_malformed_markup(text):
    doc = parse(text, policy='literal')
    assert plain(doc) == text and doc.problems == []

def test_literal_inside_blocks():
    doc = parse('<promise topic="a" tokens="20"/><async>b<promise topic="c" tokens="10"/><sync/>', policy='literal')
    assert doc.nodes == [Promise('a', 20), Async('b<promise topic="c" tokens="10"/><sync/>')]

def test_runtime_reader_reports_promises_at_once():
    reader = TextReader()
    assert reader.push('a<promise topic="b" tokens="20"/>') == [Text('a'), Promise('b', 20)]
    assert reader.push('\n') == [] and reader.push('c<sync/>') == [Text('\nc'), Sync()]
    assert reader.push('<promise topic="b" tokens="20"/> <async>c') == [Promise('b', 20), Problem('gap', *RULES['gap'], 2, 41, 74), AsyncStart(), Text(' '), Text('c')]
    assert [type(e) for e in reader.close()] == [Problem, AsyncEnd]

def test_fork_reader():
    assert events('b <promise topic="c" tokens="10"/></async>', inside='async') == [Text('b '), AsyncEnd()]
    assert [p.rule for p in read(['b'], inside='async') if isinstance(p, Problem)] == ['unclosed-async']
    assert events('b<sync/>c', inside='async') == [Text('b'), AsyncEnd(), Sync(), Text('c')]
    assert events('b</async>', 'plan', inside='async', document=True) == [Text('b'), AsyncEnd()]

@pytest.mark.parametrize('text, nodes, found', [
    ('a<reg_0>b<reg_15>', [Text('a'), Register(0), Text('b'), Register(15)], []),
    ('<reg_16>b', [Text('b')], ['register-out-of-range']),
    ('<reg_x><reg_><reg_-1><reg_1.5>', [], ['register-malformed'] * 4),
    ('<reg_03><reg_ 3 >', [Register(3)] * 2, ['spelling'] * 2),
    ('</reg_3>', [], ['no-such-end']),
    ('<reg_3', [], ['unfinished-tag']),
    ('<reg_' + '1' * 30 + '>a', [Text('a')], ['register-out-of-range']),
    ('<reg_' + '9' * 2040 + '>a', [Text('a')], ['register-out-of-range']),
    ('<reg_' + '1' * 30 + 'x>', [Text('<reg_' + '1' * 30 + 'x>')], []),
    ('<REG_0>', [Text('<REG_0>')], []),                                  # as <SYNC/> in Pasta-Lang: names are written small
    ('`<reg_3>` &lt;reg_3> <regs>', [Text('`<reg_3>` <reg_3> <regs>')], []),
    ('<sync/>', [Text('<sync/>')], []),
])
def test_registers(text, nodes, found):
    doc = parse(text, 'tip')
    assert (doc.nodes, [p.rule for p in doc.problems]) == (nodes, found)

def test_more_registers(): assert parse('<reg_31>', 'tip', 'strict', registers=32).nodes == [Register(31)]

T, A = '<topic> A 2 </topic>', '<async>a</async>'

@pytest.mark.parametrize('text, found, canonical', [
    (T + A + '<sync/>b', [], T + A + '<sync/>b'),
    (T + T + A + A + '<sync/>' + T + A, [], T + T + A + A + '<sync/>' + T + A),
    ('no plan', [], 'no plan'),
    ('<topic> Top 10 tips 3 </topic>' + A, [], '<topic> Top 10 tips 3 </topic>' + A),
    ('<topic> A </topic>' + A, ['length-missing'], '<topic> A 4 </topic>' + A),
    ('<topic> A 2.5 </topic>' + A, ['length-missing'], '<topic> A 2.5 4 </topic>' + A),
    ('<topic> A 0 </topic>' + A, ['length-too-small'], '<topic> A 1 </topic>' + A),
    ('<topic> A -3 </topic>' + A, ['length-too-small'], '<topic> A 1 </topic>' + A),
    ('<topic> A 120 </topic>' + A, ['length-too-large'], '<topic> A 12 </topic>' + A),
    ('<topic> A 99999 </topic>' + A, ['length-too-large'], '<topic> A 99 </topic>' + A),
    ('<topic> 3 </topic>' + A, ['topic-empty'], f'<topic> {UNTITLED} 3 </topic>' + A),
    ('<topic></topic>' + A, ['topic-empty', 'length-missing'], f'<topic> {UNTITLED} 4 </topic>' + A),
    ('<topic> A 2\n' + A, ['unclosed-topic'], T + '\n' + A),
    ('<topic> A 2 ' + T + A + A, ['unclosed-topic'], T + T + A + A),
    ('<topic> A 2', ['unclosed-topic', 'topic-without-span'], T + '<async></async>'),
    ('<topic> A 2 </topic >' + A, ['spelling'], T + A),
    ('<topic> A 2 </topic x>' + A, ['unclosed-topic'], T + '&lt;/topic x>' + A),
    ('<topic>', ['unfinished-tag'], ''), ('<topic>\na', ['broken-tag'], '&lt;topic>\na'), ('<topics> a', [], '&lt;topics> a'),
    ('<topic> A ' + 'x' * 400 + ' 2 </topic>' + A, ['topic-too-long'], '<topic> A ' + 'x' * (MAX_TOPIC - 2) + ' 2 </topic>' + A),
    ('</topic>a', ['end-without-topic'], 'a'),
    (T + A + A, ['span-without-topic'], T + A + 'a'),
    (T + T + A + '<sync/>b', ['topic-without-span'], T + T + A + '<async></async><sync/>b'),
    (T, ['topic-without-span'], T + '<async></async>'),
    (T + A + T + A, ['topic-without-sync'], T + A + '<sync/>' + T + A),
    (T + '<async>a' + T + '</async>', ['nested-topic'], T + A),
    (T + T + '<async><async>a</async></async>' + A, ['nested-async'], T + T + A + A),
    (T + '<async>a', ['unclosed-async'], T + A),
    ('<sync/>a', ['sync-without-fork'], 'a'),
    ('<promise topic="a" tokens="20"/>', [], '<promise topic="a" tokens="20"/>'),
])
def test_plans(text, found, canonical):
    doc = parse(text, 'plan')
    assert ([p.rule for p in doc.problems], render(doc)) == (found, canonical)

def test_plan_while_the_model_writes():
    assert events(T + '<topic> B 3 </topic><sync/>c', 'plan') == [Topic('A', 2), Topic('B', 3), Sync(), Text('c')]
    assert plain(parse('<topic> A </topic>' + T, 'plan', 'literal')) == '<topic> A </topic>'

def test_every_rule_is_reachable_and_explained():
    assert all(message and repair for message, repair in RULES.values())
    assert rules_table().count('\n') == len(RULES) + 1
    here = open(__file__).read()
    assert [rule for rule in RULES if f"'{rule}'" not in here] == []

# --- lint ------------------------------------------------------------------------------------------------------------

def test_lint_is_sorted():
    found = lint('<promise topic="" tokens="20"/>\n<sync/>x</async>')
    assert [(p.line, p.column, p.rule) for p in found] == [(1, 1, 'topic-empty'), (1, 1, 'promise-without-async'), (2, 1, 'sync-without-fork'), (2, 9, 'end-without-async')]

def test_lint_documents(tmp_path):
    keys = {'document', 'line', 'column', 'rule', 'message', 'repair'}
    rows = [json.dumps(dict(response='ok')), '', '{bad', '[1]', '{"q": 1}', json.dumps(dict(text='a\n<sync/>', output='</async>')), '[' * 100_000,
            json.dumps(dict(conversations=[{'from': 'human', 'value': '<sync/>'}, {'from': 'gpt', 'value': '<sync/>'}, 3], messages=None))]
    path = tmp_path / 'rows.jsonl'
    path.write_text('\n'.join(rows))
    for source in (path, str(path)):
        found = lint_documents(source)
        assert all(set(f) == keys for f in found)
        assert [(f['document'], f['line'], f['column'], f['rule']) for f in found] == [
            (3, 1, 2, 'not-json'), (4, 1, 1, 'not-json'), (5, 1, 1, 'no-text-field'), (6, 2, 1, 'sync-without-fork'), (6, 1, 1, 'end-without-async'),
            (7, 1, 1, 'not-json'), (8, 1, 1, 'sync-without-fork')]
    assert lint_documents('\n'.join(rows)) == lint_documents(path)
    assert [f['rule'] for f in lint_documents('{"a": "<sync/>"}\n{"a": 3}', field='a')] == ['sync-without-fork', 'no-text-field']
    assert lint_documents('a\n<sync/>')[0]['line'] == 2 and lint_documents('') == [] and lint_documents('{a} <b>') == []
    assert lint_documents('<reg_20>', 'tip')[0]['rule'] == 'register-out-of-range' and lint_documents('<reg_20>', 'tip', registers=32) == []
    with pytest.raises(PastaError): lint_documents('a', 'xml')
    with pytest.raises(FileNotFoundError): lint_documents(tmp_path / 'none.txt')

def test_lint_of_a_file_that_is_not_utf8(tmp_path):
    path = tmp_path / 'a.txt'
    path.write_bytes(b'ab\nc\xff <sync/>')
    assert [(f['rule'], f['line'], f['column']) for f in lint_documents(path)] == [('not-utf8', 2, 2), ('sync-without-fork', 2, 4)]

# --- ids -------------------------------------------------------------------------------------------------------------

VOCABS = [TagVocab(), TagVocab('minimal'), TagVocab(max_tokens=30)]

def byte_tokenizer(tags):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tok = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    tok = PreTrainedTokenizerFast(tokenizer_object=tok)
    tok.add_tokens(list(tags))
    return tok

@pytest.fixture(scope='module')
def bound():
    made = [(byte_tokenizer(v.tokens + ['<reg_3>']), v) for v in VOCABS]
    return [(v.bind(tok), tok) for tok, v in made]

def read_ids(ids, *args, **kwargs):
    reader = IdReader(*args, **kwargs)
    return merge([e for i in ids for e in reader.push(i)] + reader.close())

def skeleton(events): return [e if not isinstance(e, Problem) else e.rule for e in events]

def test_vocabulary():
    assert TagVocab().tokens == ['<promise topic="', *[f'" tokens="{n}"/>' for n in range(10, 170, 10)], '<async>', '</async>', '<sync/>']
    assert TagVocab('minimal').tokens == ['<promise', '/>', '<async>', '</async>', '<sync/>']
    for bad in [dict(kind='big'), dict(max_tokens=0), dict(max_tokens=15)]:
        with pytest.raises(PastaError): TagVocab(**bad)

def test_binding_names_what_is_missing(bound):
    with pytest.raises(MissingTags) as e: TagVocab('minimal').bind(bound[0][1])
    assert e.value.missing == ['<promise', '/>'] and '/>' in str(e.value)
    tags, tok = bound[0]
    assert tags.async_start == tok.convert_tokens_to_ids('<async>') and tags.end(20) == tok.convert_tokens_to_ids('" tokens="20"/>') and tags.end(999) == tags.end(160)
    assert pickle.loads(pickle.dumps(tags)) == tags

@settings(max_examples=60, deadline=None)
@given(text=tagged)
def test_encode_agrees_with_the_tokenizer_and_both_readers_agree(bound, text):
    doc = parse(text)
    for tags, tok in bound:
        ids, report = encode(text, tags, tok)
        clean = Document([Promise(n.topic, min(n.tokens, tags.vocab.max_tokens)) if isinstance(n, Promise) and tags.vocab.kind == 'compact' else n for n in doc.nodes])
        for document in (False, True):
            assert read_ids(ids, tags, tok, document=document) == read([render(clean)], document=document)
        assert report.problems == doc.problems
        assert report.clipped == sum(isinstance(n, Promise) and n.tokens > tags.vocab.max_tokens and tags.vocab.kind == 'compact' for n in doc.nodes)
        cut = pieces(ids, tags, tok, 'strict')
        assert [i for p in cut for i in p.ids] == ids
        assert [(p.topic, p.tokens) for p in cut if p.kind == 'promise'] == [(n.topic, n.tokens) for n in clean.nodes if isinstance(n, Promise)]
        if '<' not in plain(doc) and '&' not in plain(doc) and '/>' not in plain(doc) and '`' not in text and not report.clipped and all('"' not in n.topic and '/>' not in n.topic for n in doc.nodes if isinstance(n, Promise)):
            assert tok.encode(render(clean)) == ids

@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_ids_never_crash_and_lose_nothing(bound, data):
    for tags, tok in bound:
        some = st.one_of(st.sampled_from(sorted(tags.kinds)), st.integers(0, len(tok) - 1))
        ids = data.draw(st.lists(some, max_size=25))
        for inside in (None, 'async'):
            for policy in ('repair', 'literal'):
                found = read_ids(ids, tags, tok, policy, inside)
                assert policy == 'repair' or not any(isinstance(e, Problem) for e in found)
        cut = pieces(ids, tags, tok)
        again = [i for p in cut for i in p.ids]
        assert [(p.kind, p.ids) for p in pieces(again, tags, tok)] == [(p.kind, p.ids) for p in cut]
        try: strict = pieces(ids, tags, tok, 'strict')
        except GrammarError: continue
        assert strict == cut and again == ids

@settings(max_examples=60, deadline=None)
@given(text=tagged)
def test_prompts_never_hold_tag_tokens(bound, text):
    for tags, tok in bound:
        ids = encode_literal(text, tok)
        assert not set(ids) & (set(tags.kinds) | {tok.convert_tokens_to_ids('<reg_3>')}) and tok.decode(ids) == text

def test_literal_check_fires():
    class Stubborn:
        def get_added_vocab(self): return {'<sync/>': 7}
        def encode(self, text, add_special_tokens): return [7]
        def convert_ids_to_tokens(self, ids): return ['<sync/>']
    with pytest.raises(PastaError, match='sync'): encode_literal('a', Stubborn())

def test_id_reader_details(bound):
    tags, tok = bound[0]
    enc = lambda s: tok.encode(s)
    reader = IdReader(tags, tok)
    assert reader.push(enc('é')[0]) == [] and reader.push(enc('é')[1]) == [Text('é')]          # half a character waits
    assert reader.push(enc('é')[0]) == [] and reader.push(tags.promise) == [Text('\ufffd')]      # … until a tag
    assert [reader.push(i) for i in enc('a')] == [[]] and reader.push(tags.end(20)) == [Promise('a', 20)]
    assert reader.push(tags.sync) == [Sync()] and reader.close() == [] and reader.close() == []
    with pytest.raises(PastaError, match='closed'): reader.push(0)
    assert skeleton(read_ids([tags.promise, *enc('ab')], tags, tok)) == ['unfinished-tag']
    assert skeleton(read_ids([tags.promise, *enc('ab'), tags.sync], tags, tok)) == ['broken-tag', Text('<promise topic="ab'), 'sync-without-fork']
    assert skeleton(read_ids([tags.end(20)], tags, tok)) == [Text('" tokens="20"/>')]
    assert skeleton(read_ids([tags.promise, tags.end(20)], tags, tok)) == ['topic-empty', Promise(UNTITLED, 20)]
    assert skeleton(read_ids([tags.promise, *enc('x' * 3000)], tags, tok))[0] == 'broken-tag'
    flood = read_ids(enc('é')[:1] * 20, tags, tok)
    assert flood == [Text('\ufffd' * 20)]

def test_minimal_attributes_are_mended(bound):
    tags, tok = bound[1]
    ids = [tags.promise, *tok.encode(' tokens="15" topic=""'), tags.end(0), tags.async_start, tags.async_end]
    assert skeleton(read_ids(ids, tags, tok, document=True)) == ['topic-empty', 'tokens-not-multiple', Promise(UNTITLED, 20), AsyncStart(), AsyncEnd()]
    cut = pieces(ids, tags, tok)
    assert tok.decode(cut[0].ids) == f'<promise topic="{UNTITLED}" tokens="20"/>' and cut[1].ids == ids[-2:]
    assert tok.decode(encode_literal('<br/>', tok)) == '<br/>' and read_ids(tok.encode('<br/>'), tags, tok) == [Text('<br/>')]

def test_pieces_of_a_broken_response(bound):
    tags, tok = bound[0]
    ids, _ = encode('a' + OK + '<sync/>c', tags, tok)
    kinds = lambda ids: [p.kind for p in pieces(ids, tags, tok)]
    assert kinds(ids) == ['text', 'promise', 'async', 'sync', 'text']
    assert kinds([i for i in ids if i != tags.async_end]) == ['text', 'promise', 'async', 'sync', 'text']
    assert kinds([i for i in ids if i not in (tags.async_start, tags.async_end)]) == ['text']
    assert [i for p in pieces([i for i in ids if i != tags.async_end], tags, tok) for i in p.ids] == ids
    assert pieces([], tags, tok) == []

def test_ids_cost_no_more_as_text_grows(bound):
    tags, tok = bound[0]
    def clock(n):
        start, reader = time.process_time(), IdReader(tags, tok)
        for i in tok.encode('a b' * n): reader.push(i)
        return time.process_time() - start
    small, large = clock(1000), clock(4000)
    assert large < max(10 * small, .5)

def test_words_keep_their_spaces():
    "A tokenizer that marks word starts drops a leading space when one id is decoded alone."
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    words = ['<unk>', '▁Two', '▁ways', 'b', '▁salt', '▁', '.']
    tok = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, '<unk>'))
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tok = PreTrainedTokenizerFast(tokenizer_object=tok)
    tok.add_tokens(TagVocab().tokens)
    tags = TagVocab().bind(tok)
    assert read_ids([1, 2, 4], tags, tok) == [Text('Two ways salt')]

# --- picture and imports ---------------------------------------------------------------------------------------------

def test_picture():
    import matplotlib
    matplotlib.use('Agg')
    text = 'Wait.<sync/> $5 ' + OK + '\n<sync/>'
    ax = draw_events(text, width=20, cuts=[3, 9])
    assert len(ax.lines) == 2 + len(lint(text)) and len(ax.texts) == len(text)
    assert sum(p.get_width() for p in ax.patches) == len(text) - len('<sync/>')
    assert draw_events('', 'tip') is not None

def test_import_is_light():
    code = 'import sys, pasta_lib.tags; print([m for m in ("torch", "transformers", "matplotlib", "numpy", "nbdev", "fastcore") if m in sys.modules])'
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout.strip() == '[]'

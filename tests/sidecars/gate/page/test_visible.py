"""The HTML of any record contains only our markup and represents every byte by printable characters."""

import json
import re
import unicodedata
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browsing import PHONE, Chromium, Visit
from gating import Gate, serving
from hypothesis import given, settings
from hypothesis import strategies as st
from running import eventually, wald

from wald_gate.page.frame import PLACES, marked, visible
from wald_gate.page.records import SHOWN_BYTES, headers, line, shown

MARKUP = (
    b"<script>alert(1)</script>",
    b'"><img src=x onerror=alert(2)>',
    b"</script><script>alert(3)</script>",
    b"</pre></bdi></td></table></template><svg onload=alert(4)>",
    b"]]><script>alert(5)</script><![CDATA[",
    b"<!--><script>alert(6)</script>-->",
    b"'-alert(7)-'",
    b'<a href="javascript:alert(8)">here</a>',
    b'<meta http-equiv=refresh content="0;url=http://192.0.2.1/">',
    b'<link rel=stylesheet href="//192.0.2.1/x.css"><style>*{display:none}</style>',
    b'<iframe src="//192.0.2.1/"></iframe><base href="//192.0.2.1/">',
    b'<form action="//192.0.2.1/"><input autofocus onfocus=alert(9)></form>',
    b"{{7*7}} {% raw %} ${7*7} #{7*7} <%= 7*7 %>",
    b"&lt;script&gt;alert(10)&lt;/script&gt; &#60;b&#62; &amp;",
    b"\xbcscript\xbealert(11)\xbc/script\xbe",  # < and > in US-ASCII of seven bits
    b"+ADw-script+AD4-alert(12)+ADw-/script+AD4-",  # in UTF-7
    b'id: 1\ndata: x\n\nevent: parts\rdata: [["live_records","<b>"]]\r\r',
)
CONTROLS = (
    b"\x1b[2J\x1b[31mred\x1b]0;title\x07\x9b1m",
    b"a\x00b\x08\x7f\r\nc\tend",
    b"\xff\xfe\xc3\x28\xe2\x82 \xf0\x9f",
    b"\xed\xa0\x80\xed\xbf\xbf a surrogate",
    "user\u202egnp.exe \u2066isolated\u2069 \u200e\u200f\u061c".encode(),
    "zero\u200bwidth\u200cjoin\u200der\u2060\ufeff\u00ad".encode(),
    "line\u2028paragraph\u2029next\u0085".encode(),
    "blank\u3164\u115f\u2800\u034f\ufe0f\U000e0101".encode(),
    "tag\U000e0041\U000e007f private\ue000 none\U0010ffff".encode(),
    ("z" + "\u0301\u0489" * 60 + "algo").encode(),
    "שלום abc مرحبا 123".encode(),
)
TYPED = b"\\x1b \\u202e typed by hand"
SHAPES = (
    b'{"__proto__": {"polluted": true}, "constructor": {"prototype": {}}, "a": 1, "a": 2}',
    b'{"big": 123456789012345678901234567890, "long": 1.10, "odd": 1e999, "s": "\\u0000\\ud800<b>"}',
    b"[" * 4000 + b"]" * 4000,
    b'{"a":' * 30 + b"1" + b"}" * 30,
    b"NaN",
    b'"only text"',
    b"",
    b" ",
    TYPED,
)
LONG = b"<i>" * 350_000  # about a megabyte, in one line
HEADERS = {f"<b>{number}</b>": f"javascript:alert({number})" for number in range(10_000)}
ODD_HEADERS = (
    {"<script>alert(13)</script>": '"><img src=x onerror=alert(14)>', "{{7*7}}": "\u202e\u0000\x1b[1m"},
    {"__proto__": "x", "": "", "Set-Cookie": "a=b\r\nX: y", "Location": "//192.0.2.1/"},
)
EDGE_NAMES = ("a", "A" * 127, "0-._", "x..", "constructor", "proto", "javascript", "9" * 127)
"""The shortest and longest names of routes and groups."""


def records() -> list[dict[str, object]]:
    """Return all of them as records for ``wald append --jsonl``: as values, as keys, and some with such headers."""
    values = [*MARKUP, *CONTROLS, *SHAPES]
    found: list[dict[str, object]] = [{"value_hex": value.hex(), "key_hex": value[:200].hex()} for value in values]
    found += [{"value": "with headers", "headers": headers} for headers in ODD_HEADERS]
    return [*found, {"value": "many headers", "headers": HEADERS}, {"value_hex": LONG.hex(), "key_hex": LONG[:9].hex()}]


VALUES = [*MARKUP, *CONTROLS, *SHAPES]
ANY = st.one_of(st.sampled_from(VALUES), st.binary(max_size=300), st.text(max_size=200).map(lambda text: text.encode()))
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8})|([ntr]))")
_NAMED = {"n": "\n", "t": "\t", "r": "\r"}


class Parsed(HTMLParser):
    """HTML as parsed by a browser: its tags, its text, and the text with escapes decoded."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: set[str] = set()
        self.text = self.meant = ""
        self._marked = False
        self.feed(str(html))  # a plain str, as slices of Markup would be escaped again
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(" ".join([tag, *(f"{name}={value}" for name, value in attributes)]))
        self._marked = attributes == [("class", "escape")]

    def handle_endtag(self, tag: str) -> None:
        self._marked = False

    def handle_data(self, data: str) -> None:
        self.text += data
        self.meant += _ESCAPE.sub(_unescaped, data) if self._marked else data


def _unescaped(found: re.Match[str]) -> str:
    return _NAMED[found[4]] if found[4] else chr(int(found[1] or found[2] or found[3], 16))


def prints(character: str) -> bool:
    return character == " " or unicodedata.category(character)[0] not in "CZ"


@settings(max_examples=80)
@given(ANY)
def test_a_value_says_each_byte_and_no_more_than_prints(value: bytes) -> None:
    parsed = Parsed(shown(value, "text").html)
    assert parsed.tags <= {"span class=escape"}
    assert all(prints(each) or each == "\n" for each in parsed.text)
    # A byte that is not valid UTF-8 is shown as the character with its code.
    meant = value.decode(errors="surrogateescape")
    assert parsed.meant == "".join(chr(ord(each) - 0xDC00) if "\udc80" <= each <= "\udcff" else each for each in meant)

    in_table = Parsed(line(value))  # in one line, without markup
    assert in_table.tags <= {"span class=escape", "span class=quiet"}
    assert all(map(prints, in_table.text))

    rows = Parsed(shown(value, "hex").html).text.split("\n") if value else []
    assert b"".join(bytes.fromhex(row[8 : 8 + 47]) for row in rows) == value
    assert [int(row[:6], 16) for row in rows] == list(range(0, len(value), 16))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=20),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=9), inner),
        max_leaves=20,
    )
)
def test_json_that_is_set_out_is_the_same_json(value: object) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
        given_bytes = text.encode(errors="surrogatepass")
        found = shown(given_bytes, "json")
        if found.form == "json":
            assert json.loads(Parsed(found.html).meant) == value


def test_json_keeps_numbers_and_keys_as_they_were_sent() -> None:
    for value in SHAPES:
        found = shown(value, "json")
        if found.form == "json":
            assert re.sub(r"\s", "", Parsed(found.html).meant) == re.sub(r"\s", "", value.decode())
        else:
            assert found.note


def test_a_large_value_makes_a_bounded_page() -> None:
    for value in [LONG, b"\x01a" * 500_000, b"[" * 1_000_000, b"\xff" * 1_000_000, b'{"a":[' * 9_000]:
        for form in (None, "text", "json", "hex"):
            found = shown(value, form)
            assert found.size <= SHOWN_BYTES
            assert found.of == len(value)
            assert len(found.html) < 64 * SHOWN_BYTES
            assert found.html.count("<span") <= SHOWN_BYTES
    for cut in range(1, 4):  # no character is cut into bytes where a page ends
        value = b"x" * (SHOWN_BYTES - cut) + "\U0001f600 and more".encode()
        assert Parsed(shown(value, "text").html).text == "x" * (SHOWN_BYTES - cut)


def test_headers_are_some_of_many_and_what_is_no_object_of_strings_is_shown_as_it_is() -> None:
    found, count = headers(json.dumps(HEADERS).encode())
    assert count == 10_000
    assert len(found) < 100
    assert headers(b"[1, 2]") == ([("", "[1, 2]")], 1)
    assert headers(b"\xff") == ([("", "\udcff")], 1)
    assert headers(None) == ([], 0)


@given(st.text())
def test_plain_text_is_escaped_where_it_does_not_print(text: str) -> None:
    assert all(map(prints, visible(text)))
    assert Parsed(marked(text)).text == visible(text)


RECORDS = records()
_STATE = """() => ({
    elements: [...new Set([...document.querySelectorAll("main *")].map((each) => each.localName))],
    handlers: [...document.querySelectorAll("*")].flatMap((each) => [...each.attributes])
        .filter((each) => /^on|^style$|^srcdoc$/.test(each.name)).map((each) => each.name),
    links: [...document.querySelectorAll("[href], [src], [action]")]
        .map((each) => each.href || each.src || each.action).filter((each) => !each.startsWith(location.origin)),
    polluted: {}.polluted,
})"""
TAGS = (
    "a abbr b bdi button caption circle code datalist dd defs desc details div dl dt em figcaption figure form g "
    "h1 h2 h3 input kbd label li line nav ol option p path pattern polyline pre rect section select small span "
    "strong summary svg table tbody td text tfoot th thead time title tr ul use"
)
OURS = set(TAGS.split())


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """A gate on a log full of hostile content."""
    with serving(tmp_path_factory.mktemp("hostile") / "log", routes=("hostile", *EDGE_NAMES)) as gate:
        for name in ("hostile", *EDGE_NAMES):
            cursor = wald("cursor", "set", name, 0, "--group", name, "--root", gate.root)
            assert cursor.returncode == 0, cursor.stderr
            append(gate.root, name, {"value": "<script>alert(0)</script>", "key": "<b>"})
        append(gate.root, "hostile", *RECORDS)
        yield gate


def append(root: Path, route: str, *records: dict[str, object]) -> None:
    lines = b"".join(json.dumps(record).encode() + b"\n" for record in records)
    done = wald("append", route, "--root", root, "--jsonl", stdin=lines)
    assert done.returncode == 0, done.stderr


def first_of(gate: Gate) -> int:
    """Return the sequence of the first hostile record."""
    return int(gate.get("/v1/head").json()["sequence"]) - len(RECORDS) + 1


def require_harmless(visit: Visit) -> None:
    """Check that the page has only our elements, no handlers, and no links to elsewhere."""
    state = visit.page.evaluate(_STATE)
    assert set(state["elements"]) <= OURS, visit.page.url
    assert (state["handlers"], state["links"], state.get("polluted")) == ([], [], None), visit.page.url


@pytest.mark.parametrize("javascript", [True, False], ids=["with JavaScript", "without JavaScript"])
def test_no_record_in_a_table_is_carried_out(chromium: Chromium, gate: Gate, javascript: bool) -> None:
    with chromium.visit(gate.origin, javascript=javascript) as visit:
        for query in ["route=hostile", "route=hostile&from=20", "route=hostile&follow=1", "from=1"]:
            visit.page.goto(f"/records?{query}")
            require_harmless(visit)


def test_no_value_key_or_header_is_carried_out_in_any_form(chromium: Chromium, gate: Gate) -> None:
    first = first_of(gate)
    with chromium.visit(gate.origin) as visit:
        for sequence in range(first, first + len(RECORDS)):
            for form in ("", "?as=text", "?as=json", "?as=hex"):
                visit.page.goto(f"/records/{sequence}{form}")
                assert visit.page.title().startswith(f"Record {sequence}")
                require_harmless(visit)


def test_markup_is_seen_as_it_was_sent_and_what_does_not_print_is_written_out(chromium: Chromium, gate: Gate) -> None:
    at = {value: first_of(gate) + number for number, value in enumerate(VALUES)}
    seen = {value: value.decode() for value in MARKUP[:14]} | {
        CONTROLS[0]: r"\x1b[2J\x1b[31mred\x1b]0;title\x07\x9b1m",
        CONTROLS[4]: r"user\u202egnp.exe \u2066isolated\u2069 \u200e\u200f\u061c",
        CONTROLS[5]: r"zero\u200bwidth\u200cjoin\u200der\u2060\ufeff\xad",
        TYPED: TYPED.decode(),
    }
    with chromium.visit(gate.origin) as visit:
        for value, text in seen.items():
            visit.page.goto(f"/records/{at[value]}?as=text")
            assert visit.page.locator("pre.value").text_content() == text
            assert (visit.page.locator("pre.value .escape").count() > 0) == (value in CONTROLS), value
        visit.page.goto("/records?route=hostile&from=earliest")
        table = visit.page.locator("table.records").inner_text()
        assert all(value.decode() in table for value in MARKUP[:10] if len(value) < 100)


def test_a_reason_in_the_history_is_only_text(chromium: Chromium, gate: Gate) -> None:
    why = "</li></ol><script>alert(15)</script>{{7*7}}\u202e\x1b[2J"
    first = gate.get("/v1/routes/a/records?limit=1").lines()[0]["sequence"]
    done = wald("cursor", "skip", "a", first, "--group", "a", "--why", why, "--root", gate.root)
    assert done.returncode == 0, done.stderr
    with chromium.visit(gate.origin) as visit:
        visit.page.goto("/history")
        require_harmless(visit)
        assert r"</li></ol><script>alert(15)</script>{{7*7}}\u202e\x1b[2J" in visit.page.locator("main").inner_text()


def test_text_from_right_to_left_moves_nothing_around_it(chromium: Chromium, gate: Gate) -> None:
    at = first_of(gate) + VALUES.index(CONTROLS[10])
    with chromium.visit(gate.origin) as visit:
        visit.page.goto(f"/records?route=hostile&from={at}")
        row = visit.page.locator(f"#r{at}")
        left = [cell.bounding_box() for cell in row.locator("th, td").all()]
        places = [box["x"] for box in left if box]
        assert places == sorted(places)
        assert row.locator("bdi").last.evaluate("each => getComputedStyle(each).unicodeBidi") == "isolate"


def test_ten_thousand_headers_and_a_line_of_a_megabyte_make_small_pages(chromium: Chromium, gate: Gate) -> None:
    last = first_of(gate) + len(RECORDS) - 1
    with chromium.visit(gate.origin, size=PHONE) as visit:
        for sequence in (last - 1, last):
            answer = visit.page.goto(f"/records/{sequence}")
            assert answer
            assert len(answer.body()) < 300_000
            assert visit.page.evaluate("document.querySelectorAll('*').length") < 1500
            assert visit.page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
        with visit.page.expect_download() as download:
            visit.page.get_by_role("link", name="The bytes, as a file").click()
        assert download.value.path().read_bytes() == LONG
        with visit.page.expect_download() as download:
            visit.page.evaluate(f"location = '/records/{first_of(gate)}/value'")
        assert download.value.path().read_bytes() == MARKUP[0]


def test_names_at_the_ends_of_the_grammar_are_only_names(chromium: Chromium, gate: Gate) -> None:
    with chromium.visit(gate.origin, size=PHONE) as visit:
        paths = [place.path for place in PLACES] + [f"/history?route={name}" for name in EDGE_NAMES]
        for path in (*paths, *(f"/records?route={name}" for name in EDGE_NAMES)):
            visit.page.goto(path)
            assert visit.page.evaluate("document.documentElement.scrollWidth") == PHONE["width"], path
            if "/records?" not in path:
                continue
            name = path.partition("=")[2]
            assert visit.page.locator("select[name=route]").input_value() == name
            assert visit.page.locator("table.records td.value").inner_text() == "<script>alert(0)</script>", name


def test_hostile_records_that_arrive_while_a_page_follows_are_only_shown(chromium: Chromium, gate: Gate) -> None:
    with chromium.visit(gate.origin) as visit:
        visit.page.goto("/records?route=x..&follow=1")
        records: list[dict[str, object]] = [{"value_hex": value.hex()} for value in MARKUP]
        append(gate.root, "x..", *records)
        rows = visit.page.locator("table.records tbody tr")
        eventually(lambda: rows.count() == len(records) + 1)
        require_harmless(visit)
        texts = visit.page.locator("td.value").all_text_contents()
        assert texts[: len(MARKUP)][::-1][0] == MARKUP[0].decode()

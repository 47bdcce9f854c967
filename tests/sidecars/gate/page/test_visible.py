"""The HTML of any record contains only our markup and represents every byte by printable characters."""

from __future__ import annotations

import json
import re
import unicodedata
from html.parser import HTMLParser

import hostile
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wald_gate.page.frame import marked, visible
from wald_gate.page.records import SHOWN_BYTES, headers, line, shown

SAMPLES = [*hostile.MARKUP, *hostile.CONTROLS, *hostile.SHAPES]
ANY = st.one_of(
    st.sampled_from(SAMPLES), st.binary(max_size=300), st.text(max_size=200).map(lambda text: text.encode())
)
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


@given(ANY)
def test_a_value_as_text_says_each_byte_and_no_more_than_prints(value: bytes) -> None:
    parsed = Parsed(shown(value, "text").html)
    assert parsed.tags <= {"span class=escape"}
    assert all(prints(each) or each == "\n" for each in parsed.text)
    # A byte that is not valid UTF-8 is shown as the character with its code.
    meant = value.decode(errors="surrogateescape")
    assert parsed.meant == "".join(chr(ord(each) - 0xDC00) if "\udc80" <= each <= "\udcff" else each for each in meant)


@given(ANY)
def test_a_line_of_a_table_is_one_line_without_markup(value: bytes) -> None:
    parsed = Parsed(line(value))
    assert parsed.tags <= {"span class=escape", "span class=quiet"}
    assert all(map(prints, parsed.text))


@given(ANY)
def test_a_value_in_hexadecimal_is_its_bytes(value: bytes) -> None:
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


@pytest.mark.parametrize("value", hostile.SHAPES, ids=range(len(hostile.SHAPES)))
def test_json_keeps_numbers_and_keys_as_they_were_sent(value: bytes) -> None:
    found = shown(value, "json")
    if found.form == "json":
        assert re.sub(r"\s", "", Parsed(found.html).meant) == re.sub(r"\s", "", value.decode())
    else:
        assert found.note


@pytest.mark.parametrize("form", [None, "text", "json", "hex"])
@pytest.mark.parametrize(
    "value", [hostile.LONG, b"\x01a" * 500_000, b"[" * 1_000_000, b"\xff" * 1_000_000, b'{"a":[' * 9_000]
)
def test_a_large_value_makes_a_bounded_page(value: bytes, form: str | None) -> None:
    found = shown(value, form)  # type: ignore[arg-type]
    assert found.size <= SHOWN_BYTES
    assert found.of == len(value)
    assert len(found.html) < 64 * SHOWN_BYTES
    assert found.html.count("<span") <= SHOWN_BYTES


@pytest.mark.parametrize("cut", range(1, 4))
def test_a_character_is_not_cut_into_bytes_where_a_page_ends(cut: int) -> None:
    value = b"x" * (SHOWN_BYTES - cut) + "\U0001f600 and more".encode()
    assert Parsed(shown(value, "text").html).text == "x" * (SHOWN_BYTES - cut)


def test_headers_are_some_of_many_and_what_is_no_object_of_strings_is_shown_as_it_is() -> None:
    found, count = headers(json.dumps(hostile.HEADERS).encode())
    assert count == 10_000
    assert len(found) < 100
    assert headers(b"[1, 2]") == ([("", "[1, 2]")], 1)
    assert headers(b"\xff") == ([("", "\udcff")], 1)
    assert headers(None) == ([], 0)


@given(st.text())
def test_plain_text_is_escaped_where_it_does_not_print(text: str) -> None:
    assert all(map(prints, visible(text)))
    assert Parsed(marked(text)).text == visible(text)

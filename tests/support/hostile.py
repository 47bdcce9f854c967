"""Hostile keys, values and headers that attack a page, a terminal or a reader."""

from __future__ import annotations

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

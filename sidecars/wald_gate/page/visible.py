r"""Text that strangers have written, so that all of it can be seen: what does not print is written out as an escape.

Control characters could move the cursor of a terminal into which it is pasted; marks of direction and joiners of no
width make a text look like another one. A byte that is no UTF-8 comes as a lone surrogate (PEP 383), and goes as
``\xff``.
"""

from __future__ import annotations

from itertools import groupby

from markupsafe import Markup, escape

# Printable by their category, and yet nothing is to be seen of them (Unicode: Default_Ignorable_Code_Point, and two).
_BLANKS = ("\u034f", "\u115f", "\u1160", "\u17b4", "\u17b5", "\u2800", "\u3164", "\uffa0")
_BLANK_SPANS = (("\u180b", "\u180f"), ("\ufe00", "\ufe0f"), ("\U000e0100", "\U000e01ef"))


def visible(text: str, *, keep: str = "") -> str:
    r"""The text with an escape in the place of each character that does not print.

    Args:
        keep: characters that stay as they are, such as newlines where they are shown as such.

    >>> visible("a\x1b[1m\u202eb")
    'a\\x1b[1m\\u202eb'
    """
    return "".join(run if prints else _escapes(run) for prints, run in _runs(text, keep))


def marked(text: str, *, keep: str = "") -> Markup:
    r"""The same as HTML, in which an escape looks different from the same characters typed.

    >>> str(marked("<\n"))
    '&lt;<span class="escape">\\n</span>'
    """
    return Markup().join(
        escape(run) if prints else Markup('<span class="escape">{}</span>').format(_escapes(run))
        for prints, run in _runs(text, keep)
    )


def _runs(text: str, keep: str) -> list[tuple[bool, str]]:
    """The text in pieces, and of each whether it prints."""
    if text.isascii() and text.isprintable():
        return [(True, text)]
    return [(prints, "".join(run)) for prints, run in groupby(text, lambda each: each in keep or _prints(each))]


def _prints(character: str) -> bool:
    if character < "\u034f":
        return character.isprintable()
    is_blank = character in _BLANKS or any(first <= character <= last for first, last in _BLANK_SPANS)
    return character.isprintable() and not is_blank


def _escapes(run: str) -> str:
    return "".join(
        f"\\x{ord(each) - 0xDC00:02x}" if "\udc80" <= each <= "\udcff" else ascii(each).strip("'") for each in run
    )

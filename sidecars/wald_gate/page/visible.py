"""Text that strangers have written, so that all of it can be seen: what does not print is written out as an escape.

Control characters could move the cursor of a terminal into which it is pasted; marks of direction and joiners of no
width make a text look like another one.
"""

from __future__ import annotations

from markupsafe import Markup, escape


def visible(text: str, *, keep: str = "") -> str:
    r"""The text with an escape in the place of each character that does not print.

    Args:
        keep: characters that stay as they are, such as newlines where they are shown as such.

    >>> visible("a\x1b[1m\u202eb")
    'a\\x1b[1m\\u202eb'
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in keep else _escape(character) for character in text
    )


def marked(text: str, *, keep: str = "") -> Markup:
    r"""The same as HTML, in which an escape looks different from the same characters typed.

    >>> str(marked("<\n"))
    '&lt;<span class="escape">\\n</span>'
    """
    if text.isprintable():
        return escape(text)
    return Markup().join(
        escape(character)
        if character.isprintable() or character in keep
        else Markup('<span class="escape">{}</span>').format(_escape(character))
        for character in text
    )


def _escape(character: str) -> str:
    return ascii(character)[1:-1]

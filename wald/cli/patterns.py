"""A pattern as it was typed, and what to type instead of one that is not a regular expression."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from wald.errors import InvalidInput
from wald.hints import command_line

if TYPE_CHECKING:
    from wald.reading.pattern import Matcher


def matcher_of(
    root: Path, pattern: str, *, fixed: bool = False, ignore_case: bool = False, invert: bool = False
) -> Matcher:
    """
    Raises:
        InvalidInput: the pattern is not a regular expression.
    """
    from wald.reading.pattern import BadPattern, Matcher

    try:
        return Matcher(os.fsencode(pattern), fixed=fixed, ignore_case=ignore_case, invert=invert)
    except BadPattern as error:
        shown = os.fsencode(pattern).decode(errors="backslashreplace")
        raise InvalidInput(
            f"{shown!r} is not a regular expression: {error}",
            hint=f"{command_line(root, f'grep -F {operand(pattern)}')} finds it literally",
        ) from error


def operand(pattern: str) -> str:
    """The pattern as the first operand behind all options, quoted for a shell."""
    return "-- " * pattern.startswith("-") + shlex.quote(pattern)

"""Types of settings and options."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
_BINARY_UNITS = {"TiB": TIB, "GiB": GIB, "MiB": MIB, "KiB": KIB}
_SIZE_UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, **_BINARY_UNITS}
_DURATION_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001, "": 1.0}
_OS_GROUPS_END = (1 << 32) - 1
_quoted = '"{}"'.format


class SettingType(NamedTuple):
    """Type of a value: how to parse, check and show it."""

    bounds: str  # as text
    read: Callable[[object], Any]  # returns None for a malformed value; raises ValueError if out of bounds
    show: Callable[[Any], str] = _quoted  # as TOML
    unit: str = ""  # of a bare number
    example: str = ""  # of the form; if empty, messages show the bounds

    def parse(self, value: object) -> Any:
        """Return the value, or raise ValueError with a message that completes "SETTING must be …"."""
        if (parsed := self.read(value)) is None:
            raise ValueError(f"{self.example or self.bounds}, not {value!r}")
        return parsed


def size(minimum: int, maximum: int, *, zero: bool = False) -> SettingType:
    """Define a size in bytes; with ``zero``, 0 is valid and means "off"."""
    example, pattern = 'a size such as 65536, "64KiB" or "1GiB"', r"(\d{1,20}) ?([kMGT]?B|[KMGT]iB|)"
    return _number(example, pattern, _SIZE_UNITS, _show_size, "bytes", minimum, maximum, zero=zero)


def duration(minimum: float, maximum: float, *, zero: bool = False) -> SettingType:
    """Define a duration in seconds; with ``zero``, 0 is valid and means "off"."""
    example, pattern = 'a duration such as 30, "10s", "5m" or "1h"', r"(\d{1,12}(?:\.\d{1,9})?) ?(ms|s|m|h|d|)"
    return _number(example, pattern, _DURATION_UNITS, _show_duration, "seconds", minimum, maximum, zero=zero)


def count(minimum: int, maximum: int) -> SettingType:
    return _number("a whole number", r"(-?\d{1,18})()", {"": 1}, str, "", minimum, maximum)


def fraction(maximum: float) -> SettingType:
    """Define a number from 0 to ``maximum``, at most 1."""
    pattern = r"(\d(?:\.\d{1,9})?)()"
    return _number("a fraction such as 0.1", pattern, {"": 1.0}, "{:g}".format, "fraction", 0, maximum)


def choice(*choices: str) -> SettingType:
    *others, last = map(_quoted, choices)
    bounds = f"{', '.join(others)} or {last}"
    return SettingType(bounds, lambda value: value if isinstance(value, str) and value in choices else None)


def text(form: str, pattern: str = r"[^\0]+") -> SettingType:
    """Define text that matches ``pattern`` or is ""; ``form`` names it, as in "a path"."""

    def read(value: object) -> str | None:
        return value if isinstance(value, str) and (not value or re.fullmatch(pattern, value)) else None

    return SettingType(f'{form} or ""', read)


def names(form: str, accepts: Callable[[str], object]) -> SettingType:
    """Define a list of strings that satisfy ``accepts``; ``form`` names them, as in "host names"."""

    def read(value: object) -> tuple[str, ...] | None:
        if not isinstance(value, list | tuple):
            return None
        return tuple(value) if all(isinstance(each, str) and accepts(each) for each in value) else None

    return SettingType(f"a list of {form}", read, lambda value: f"[{', '.join(map(_quoted, value))}]")


def format_bytes(count: float) -> str:
    """Return a rounded size in a readable unit.

    >>> format_bytes(1_500_000), format_bytes(12)
    ('1.4 MiB', '12 B')
    """
    for suffix, unit in _BINARY_UNITS.items():
        if count >= unit:
            return f"{count / unit:.1f} {suffix}"
    return f"{count:.0f} B"


def format_seconds(seconds: float) -> str:
    """Return a rounded duration in readable units.

    >>> format_seconds(93_784), format_seconds(0.25)
    ('1 d 2 h', '0.2 s')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    units = [("d", 86400), ("h", 3600), ("min", 60), ("s", 1)]
    for (name, length), (smaller_name, smaller_length) in pairwise(units):
        if seconds >= length:
            remainder = int(seconds % length // smaller_length)
            return f"{int(seconds // length)} {name}" + (f" {remainder} {smaller_name}" if remainder else "")
    return f"{seconds:.0f} s"


def _number(
    example: str,
    pattern: str,
    units: Mapping[str, float],
    show: Callable[[Any], str],
    unit: str,
    minimum: float,
    maximum: float,
    *,
    zero: bool = False,
) -> SettingType:
    """Define a number with one of ``units``, whose factors have the number's type, int or float."""
    bounds = f"{'0 or ' if zero else ''}{show(minimum)} to {show(maximum)}"

    def read(value: object) -> float | None:
        is_number = isinstance(value, int | float | str) and not isinstance(value, bool)
        match = re.fullmatch(pattern, str(value).strip()) if is_number else None
        if match is None:
            return None
        factor = units[match[2]]
        number = type(factor)(match[1]) * factor
        if not (minimum <= number <= maximum or (zero and number == 0)):
            raise ValueError(f"{bounds}, not {value!r}")
        return number

    return SettingType(bounds, read, show, unit, example)


def _read_mode(value: object) -> int | None:
    bits = -1
    if isinstance(value, str) and re.fullmatch(r"(0o)?[0-7]{1,4}", value):
        bits = int(value, 8)
    elif isinstance(value, int) and not isinstance(value, bool):
        bits = value
    return bits if 0 <= bits <= 0o777 else None  # rejects decimal 620, which was meant to be octal


def _read_os_group(value: object) -> str | None:
    """Return an OS group's number as text; leave "" and "group" unchanged."""
    from grp import getgrnam

    name = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(name, str):
        return None
    if name in ("", "group") or (re.fullmatch("[0-9]{1,10}", name) and int(name) < _OS_GROUPS_END):
        return name
    try:
        return str(getgrnam(name).gr_gid)
    except KeyError:
        return None


def _read_users(value: object) -> frozenset[int] | None:
    from pwd import getpwnam

    if not isinstance(value, list) or not all(isinstance(user, int | str) for user in value):
        return None
    try:
        return frozenset(getpwnam(user).pw_uid if isinstance(user, str) else int(user) for user in value)
    except KeyError:
        return None


def _show_size(size: int) -> str:
    for suffix, unit in _BINARY_UNITS.items():
        if size and size % unit == 0:
            return f'"{size // unit}{suffix}"'
    return str(size)


def _show_duration(seconds: float) -> str:
    for suffix, unit in _DURATION_UNITS.items():
        if seconds and (seconds / unit).is_integer():
            return f'"{seconds / unit:.0f}{suffix}"'
    return f"{seconds:.6f}".rstrip("0").rstrip(".")


FLAG = SettingType(
    "true or false", lambda value: value if isinstance(value, bool) else None, lambda value: str(value).lower()
)
MODE = SettingType("0o0 to 0o777", _read_mode, "0o{:o}".format, "octal", 'permission bits such as 0o620 or "0620"')
OS_GROUP = SettingType(
    'an OS group by name or number, "group" for the OS group of the root, or "" for none', _read_os_group
)
USERS = SettingType("a list of existing users by name or number", _read_users, lambda users: str(sorted(users)))

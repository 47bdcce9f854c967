"""Kinds of values of settings and options: sizes, durations, numbers, choices, text, permissions, users."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
_BINARY_UNITS = {"TiB": TIB, "GiB": GIB, "MiB": MIB, "KiB": KIB}
_SIZE_UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, **_BINARY_UNITS}
_DURATION_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001, "": 1.0}
_OS_GROUPS_END = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class SettingType:
    """One kind of value."""

    bounds: str  # as text
    parse: Callable[[object], Any]  # or ValueError with a message that completes "SETTING must be …"
    show: Callable[[Any], str]  # as TOML
    unit: str = ""  # of a bare number


def size(minimum: int, maximum: int, *, zero: bool = False) -> SettingType:
    """Bytes; with ``zero`` also 0, which means "off"."""
    read = _reader(r"(\d{1,20}) ?([kMGT]?B|[KMGT]iB|)", int, _SIZE_UNITS)
    return _number('a size such as 65536, "64KiB" or "1GiB"', read, _show_size, "bytes", minimum, maximum, zero=zero)


def duration(minimum: float, maximum: float, *, zero: bool = False) -> SettingType:
    """Seconds; with ``zero`` also 0, which means "off"."""
    read = _reader(r"(\d{1,12}(?:\.\d{1,9})?) ?(ms|s|m|h|d|)", float, _DURATION_UNITS)
    example = 'a duration such as 30, "10s", "5m" or "1h"'
    return _number(example, read, _show_duration, "seconds", minimum, maximum, zero=zero)


def count(minimum: int, maximum: int) -> SettingType:
    return _number("a whole number", _reader(r"(-?\d{1,18})()", int, {"": 1}), str, "", minimum, maximum)


def fraction(maximum: float) -> SettingType:
    """A number from 0 to ``maximum``, which is at most 1."""
    read = _reader(r"(\d(?:\.\d{1,9})?)()", float, {"": 1})
    return _number("a fraction such as 0.1", read, "{:g}".format, "fraction", 0, maximum)


def choice(*choices: str) -> SettingType:
    *others, last = map(_quoted, choices)
    bounds = f"{', '.join(others)} or {last}"
    return _type(bounds, lambda value: value if isinstance(value, str) and value in choices else None)


def text(form: str, pattern: str = r"[^\0]+") -> SettingType:
    """Text that matches ``pattern``, or ""; ``form`` is as in "a path"."""

    def read(value: object) -> str | None:
        return value if isinstance(value, str) and (not value or re.fullmatch(pattern, value)) else None

    return _type(f'{form} or ""', read)


def names(form: str, accepts: Callable[[str], object]) -> SettingType:
    """A list of strings that ``accepts`` finds true; ``form`` is as in "host names"."""

    def read(value: object) -> tuple[str, ...] | None:
        if not isinstance(value, list | tuple):
            return None
        return tuple(value) if all(isinstance(each, str) and accepts(each) for each in value) else None

    return _type(f"a list of {form}", read, show=lambda value: f"[{', '.join(map(_quoted, value))}]")


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
    for (name, length), (smaller, part) in pairwise(units):
        if seconds >= length:
            rest = int(seconds % length // part)
            return f"{int(seconds // length)} {name}" + (f" {rest} {smaller}" if rest else "")
    return f"{seconds:.0f} s"


def _type(
    bounds: str,
    read: Callable[[object], Any],
    *,
    show: Callable[[Any], str] | None = None,
    unit: str = "",
    example: str = "",
) -> SettingType:
    """Return a type whose ``read`` returns None for an invalid value."""

    def parse(value: object) -> Any:
        if (parsed := read(value)) is None:
            raise ValueError(f"{example or bounds}, not {value!r}")
        return parsed

    return SettingType(bounds, parse, show or _quoted, unit)


def _number(
    example: str,
    read: Callable[[object], Any],
    show: Callable[[Any], str],
    unit: str,
    minimum: float,
    maximum: float,
    *,
    zero: bool = False,
) -> SettingType:
    bounds = f"{'0 or ' if zero else ''}{show(minimum)} to {show(maximum)}"

    def checked(value: object) -> Any:
        number = read(value)
        if number is not None and not (minimum <= number <= maximum or (zero and number == 0)):
            raise ValueError(f"{bounds}, not {value!r}")
        return number

    return _type(bounds, checked, show=show, unit=unit, example=example)


def _reader(
    pattern: str, convert: Callable[[str], float], units: Mapping[str, float]
) -> Callable[[object], float | None]:
    """Return a reader of numbers with a unit; None for another form."""

    def read(value: object) -> float | None:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            return None
        match = re.fullmatch(pattern, str(value).strip())
        return convert(match[1]) * units[match[2]] if match else None

    return read


def _read_mode(value: object) -> int | None:
    bits = -1
    if isinstance(value, str) and re.fullmatch(r"(0o)?[0-7]{1,4}", value):
        bits = int(value, 8)
    elif isinstance(value, int) and not isinstance(value, bool):
        bits = value
    return bits if 0 <= bits <= 0o777 else None  # decimal 620, meant as octal, is greater


def _read_os_group(value: object) -> str | None:
    """Return an OS group's number as text; "" and "group" are unchanged."""
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


def _quoted(value: str) -> str:
    return f'"{value}"'


FLAG = _type(
    "true or false", lambda value: value if isinstance(value, bool) else None, show=lambda value: str(value).lower()
)
MODE = _type(
    "0o0 to 0o777", _read_mode, show="0o{:o}".format, unit="octal", example='permission bits such as 0o620 or "0620"'
)
OS_GROUP = _type('an OS group by name or number, "group" for the OS group of the root, or "" for none', _read_os_group)
USERS = _type(
    "a list of existing users by name or number",
    _read_users,
    show=lambda users: str(sorted(users)),
)

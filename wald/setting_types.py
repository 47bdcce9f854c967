"""Types of settings and options: sizes, durations, numbers, choices, text; parsed from, and shown in, readable units.

``parse`` raises ValueError with a message that completes "SETTING must be …"; ``show`` gives the value in TOML.
"""

from __future__ import annotations

import grp
import re
from dataclasses import Field, dataclass, field
from ipaddress import ip_network
from itertools import pairwise
from typing import Any, ClassVar, Protocol

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
_SIZE = re.compile(r"(\d{1,20}) ?(|B|[kMGT]B|[KMGT]iB)")
_SIZE_UNITS: dict[str, int] = {"": 1, "B": 1} | {
    letter + suffix: base**power
    for letters, suffix, base in (("kMGT", "B", 1000), ("KMGT", "iB", 1024))
    for power, letter in enumerate(letters, start=1)
}
_GROUPS_END = (1 << 32) - 1
_DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,9})?) ?(|ms|s|m|h|d)")
_DURATION_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001, "": 1.0}


class SettingType(Protocol):
    """What a setting may be."""

    @property
    def unit(self) -> str:
        """In which a bare number is counted; "" if there is none."""

    def parse(self, value: object) -> Any:
        """The checked value."""

    def show(self, value: Any) -> str:
        """The value as it is written in TOML."""

    def bounds(self) -> str:
        """The values that are allowed, as text."""


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes, from ``minimum`` to ``maximum``; where ``zero`` is set, also 0, which means "off"."""

    minimum: int
    maximum: int
    zero: bool = False
    unit: ClassVar[str] = "bytes"

    def parse(self, value: object) -> int:
        match = _SIZE.fullmatch(str(value).strip()) if _is_one_of(value, int, str) else None
        if match is None:
            raise ValueError(f'a size such as 65536, "64KiB" or "1GiB", not {value!r}')
        size = int(match[1]) * _SIZE_UNITS[match[2]]
        if not (self.minimum <= size <= self.maximum or (self.zero and size == 0)):
            raise ValueError(f"{self.bounds()}, not {value!r}")
        return size

    def show(self, value: int) -> str:
        for unit, suffix in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
            if value and value % unit == 0:
                return f'"{value // unit}{suffix}"'
        return str(value)

    def bounds(self) -> str:
        return f"{'0 or ' if self.zero else ''}{self.show(self.minimum)} to {self.show(self.maximum)}"


@dataclass(frozen=True, slots=True)
class Duration:
    """Seconds, from ``minimum`` to ``maximum``; where ``zero`` is set, also 0, which means "off"."""

    minimum: float
    maximum: float
    zero: bool = False
    unit: ClassVar[str] = "seconds"

    def parse(self, value: object) -> float:
        match = _DURATION.fullmatch(str(value).strip()) if _is_one_of(value, int, float, str) else None
        if match is None:
            raise ValueError(f'a duration such as 30, "10s", "5m" or "1h", not {value!r}')
        seconds = float(match[1]) * _DURATION_UNITS[match[2]]
        if not (self.minimum <= seconds <= self.maximum or (self.zero and seconds == 0)):
            raise ValueError(f"{self.bounds()}, not {value!r}")
        return seconds

    def show(self, value: float) -> str:
        for suffix, unit in _DURATION_UNITS.items():
            if value and (value / unit).is_integer():
                return f'"{value / unit:.0f}{suffix}"'
        return f"{value:.6f}".rstrip("0").rstrip(".")

    def bounds(self) -> str:
        return f"{'0 or ' if self.zero else ''}{self.show(self.minimum)} to {self.show(self.maximum)}"


@dataclass(frozen=True, slots=True)
class Count:
    """A whole number."""

    minimum: int
    maximum: int
    unit: ClassVar[str] = ""

    def parse(self, value: object) -> int:
        if not _is_one_of(value, int, str) or re.fullmatch(r"-?\d{1,18}", str(value)) is None:
            raise ValueError(f"a whole number, not {value!r}")
        if not self.minimum <= int(str(value)) <= self.maximum:
            raise ValueError(f"{self.bounds()}, not {value!r}")
        return int(str(value))

    def show(self, value: int) -> str:
        return str(value)

    def bounds(self) -> str:
        return f"{self.minimum} to {self.maximum}"


@dataclass(frozen=True, slots=True)
class Fraction:
    """A part of one, from 0 to ``maximum``."""

    maximum: float
    unit: ClassVar[str] = "fraction"

    def parse(self, value: object) -> float:
        if not _is_one_of(value, int, float, str) or re.fullmatch(r"\d(\.\d{1,9})?", str(value)) is None:
            raise ValueError(f"a fraction such as 0.1, not {value!r}")
        if float(str(value)) > self.maximum:
            raise ValueError(f"{self.bounds()}, not {value!r}")
        return float(str(value))

    def show(self, value: float) -> str:
        return f"{value:g}"

    def bounds(self) -> str:
        return f"0 to {self.maximum:g}"


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few values."""

    choices: tuple[str, ...]
    unit: ClassVar[str] = ""

    def parse(self, value: object) -> str:
        if not isinstance(value, str) or value not in self.choices:
            raise ValueError(f"{self.bounds()}, not {value!r}")
        return value

    def show(self, value: str) -> str:
        return f'"{value}"'

    def bounds(self) -> str:
        return " or ".join(map(self.show, self.choices))


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false."""

    unit: ClassVar[str] = ""

    def parse(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise ValueError(f"{self.bounds()}, not {value!r}")
        return value

    def show(self, value: bool) -> str:
        return str(value).lower()

    def bounds(self) -> str:
        return "true or false"


@dataclass(frozen=True, slots=True)
class Text:
    """Text of a form, or none at all."""

    form: str
    pattern: str = r"[^\0]+"
    unit: ClassVar[str] = ""

    def parse(self, value: object) -> str:
        if not isinstance(value, str) or (value and re.fullmatch(self.pattern, value) is None):
            raise ValueError(f"{self.bounds()}, not {value!r}")
        return value

    def show(self, value: str) -> str:
        return f'"{value}"'

    def bounds(self) -> str:
        return f'{self.form} or ""'


@dataclass(frozen=True, slots=True)
class Names:
    """A list of names, in any number."""

    form: str
    pattern: str
    unit: ClassVar[str] = ""

    def parse(self, value: object) -> tuple[str, ...]:
        if not isinstance(value, list | tuple) or not all(
            isinstance(each, str) and re.fullmatch(self.pattern, each) for each in value
        ):
            raise ValueError(f"{self.bounds()}, not {value!r}")
        return tuple(value)

    def show(self, value: tuple[str, ...]) -> str:
        return f"[{', '.join(f'{chr(34)}{each}{chr(34)}' for each in value)}]"

    def bounds(self) -> str:
        return f"a list of {self.form}"


@dataclass(frozen=True, slots=True)
class Networks:
    """A list of IP addresses and networks."""

    unit: ClassVar[str] = ""

    def parse(self, value: object) -> tuple[str, ...]:
        try:
            if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
                raise ValueError
            for each in value:
                ip_network(each)
        except ValueError:
            raise ValueError(f"{self.bounds()}, not {value!r}") from None
        return tuple(value)

    def show(self, value: tuple[str, ...]) -> str:
        return f"[{', '.join(f'{chr(34)}{each}{chr(34)}' for each in value)}]"

    def bounds(self) -> str:
        return 'a list of addresses and networks, as "10.0.0.0/8"'


@dataclass(frozen=True, slots=True)
class Mode:
    """Permission bits."""

    unit: ClassVar[str] = "octal"

    def parse(self, value: object) -> int:
        bits = -1
        if isinstance(value, str) and re.fullmatch(r"(0o)?[0-7]{1,4}", value):
            bits = int(value, 8)
        elif isinstance(value, int) and not isinstance(value, bool):
            bits = value
        if not 0 <= bits <= 0o777:  # decimal 620, written for octal 620, is above it
            raise ValueError(f'permission bits such as 0o620 or "0620", not {value!r}')
        return bits

    def show(self, value: int) -> str:
        return f"0o{value:o}"

    def bounds(self) -> str:
        return "0o0 to 0o777"


@dataclass(frozen=True, slots=True)
class Group:
    """A group of users: its number as text; "group", which is the root's own; or "", which is none."""

    unit: ClassVar[str] = ""

    def parse(self, value: object) -> str:
        text = str(value) if _is_one_of(value, int) else value
        if not isinstance(text, str):
            raise ValueError(f"{self.bounds()}, not {value!r}")
        if text in ("", "group") or (re.fullmatch("[0-9]{1,10}", text) and int(text) < _GROUPS_END):
            return text
        try:
            return str(grp.getgrnam(text).gr_gid)
        except KeyError:
            raise ValueError(f"{self.bounds()}, not {value!r}") from None

    def show(self, value: str) -> str:
        return f'"{value}"'

    def bounds(self) -> str:
        return 'a group of users by name or number, "group" for the root\'s own, or "" for none'


def setting(type_: SettingType, default: object, meaning: str) -> Any:
    """The field of a dataclass of settings; the type of its value is the annotation's."""
    return field(default=type_.parse(default), metadata={"type": type_, "meaning": meaning})


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of a table of settings; default and bounds are as they are written in the file.

    Attributes:
        type: size, duration, count, fraction, choice, flag, text, names, mode, table, or tables.
        unit: in which a bare number is counted; "" if there is none.
    """

    name: str
    type: str
    unit: str
    default: str
    bounds: str
    meaning: str
    reloadable: bool


def row_of(described: Field[Any], *, reloadable: bool) -> Setting:
    """The row of a field that :func:`setting` has made."""
    meta = described.metadata
    type_: SettingType = meta["type"]
    name, default = type(type_).__name__.lower(), type_.show(meta.get("default", described.default))
    return Setting(described.name, name, type_.unit, default, type_.bounds(), meta["meaning"], reloadable)


def format_bytes(count: float) -> str:
    """About so many bytes, in a readable unit.

    >>> format_bytes(1_500_000), format_bytes(12)
    ('1.4 MiB', '12 B')
    """
    for unit, suffix in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {suffix}"
    return f"{count:.0f} B"


def format_seconds(seconds: float) -> str:
    """About so long, in readable units.

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


def _is_one_of(value: object, *types: type) -> bool:
    """As isinstance, but true and false are not numbers."""
    return isinstance(value, types) and not isinstance(value, bool)

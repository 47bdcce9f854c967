"""JSON objects of each command as docs/json.md describes them, and a check of an object."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pages import PAGES

_SECTION = re.compile(r"^## (wald.*)$", re.MULTILINE)
_TABLE = re.compile(
    r"(?:^With `\"(\w+)\": (.*):\n\n)?^\| key \| type \| meaning \|\n\|---\|---\|---\|\n((?:\|.*\n)+)", re.MULTILINE
)
_ROW = re.compile(r"^\| `([^`]+)` \| ([^|]+) \| [^|]*\|$")
_TYPES: dict[str, tuple[type, ...]] = {
    "text": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "any": (object,),
}


@dataclass(frozen=True)
class Table:
    """One kind of object of a command."""

    key: str
    values: tuple[str, ...]
    types: Mapping[str, str]

    def is_about(self, printed: Mapping[str, Any]) -> bool:
        return not self.key or printed.get(self.key) in self.values

    def differences(self, value: object, at: str = "") -> Iterator[str]:
        """Yield the differences of a value at path ``at`` from its documentation."""
        if at in self.types:
            if not _fits(value, self.types[at]):
                yield f"{at} is {value!r} instead of {self.types[at]}"
        elif isinstance(value, list):
            for inner in value:
                yield from self.differences(inner, f"{at}[]")
        elif isinstance(value, dict) and f"{at}.*" in self.types:
            for inner in value.values():
                yield from self.differences(inner, f"{at}.*")
        elif isinstance(value, dict):
            yield from self._of_object(value, f"{at}." if at else "")
        else:
            yield f"{at} is not documented"

    def _of_object(self, value: Mapping[str, object], prefix: str) -> Iterator[str]:
        kinds: dict[str, list[str]] = {}
        for path, kind in self.types.items():
            if path.startswith(prefix) and (name := re.match(r"\w+", path[len(prefix) :])):
                kinds.setdefault(name[0], []).append(kind)
        for key in kinds.keys() - value.keys():
            if not all("optional" in kind for kind in kinds[key]):
                yield f"{prefix}{key} is missing"
        for key in value.keys() & kinds.keys():
            yield from self.differences(value[key], f"{prefix}{key}")
        if "*" not in self.types:
            yield from (f"{prefix}{key} is not documented" for key in value.keys() - kinds.keys())


def sections() -> dict[str, list[Table]]:
    """Return the tables of each command."""
    _, *parts = _SECTION.split(PAGES["docs/json.md"])
    return {parts[i]: [_table(*found) for found in _TABLE.findall(parts[i + 1])] for i in range(0, len(parts), 2)}


def schema_of(command: str) -> str:
    """Return the schema of a command's objects, such as ``wald.archive.pack/1`` for ``wald-archive pack``."""
    return f"{re.sub(r'[ -]+', '.', command)}/1"


def require_documented(command: str, printed: Mapping[str, Any]) -> Table:
    """Return the table that matches an object of ``command``; fail if none does."""
    assert next(iter(printed)) == "schema", printed
    assert printed["schema"] == schema_of(command)
    (table,) = [table for table in sections()[command] if table.is_about(printed)]
    ignored = {"schema", table.key}
    assert list(table.differences({key: printed[key] for key in printed if key not in ignored})) == [], printed
    return table


def _table(key: str, values: str, rows: str) -> Table:
    types: dict[str, str] = {}
    for row in rows.splitlines():
        match = _ROW.match(row)
        assert match is not None, row
        path, kind = match[1], match[2].strip()
        if kind.startswith("time"):
            types |= {f"{path}_ns": kind.replace("time", "integer"), path: kind.replace("time", "text")}
        else:
            types[path] = kind
    return Table(key, tuple(re.findall(r"\"([\w-]+)\"", values)), types)


def _fits(value: object, kind: str) -> bool:
    names = set(re.split(r" or |, ", kind)) - {"optional"}
    if isinstance(value, bool):
        return not names.isdisjoint({"boolean", "any"})
    return (value is None and "null" in names) or any(isinstance(value, _TYPES[name]) for name in names - {"null"})

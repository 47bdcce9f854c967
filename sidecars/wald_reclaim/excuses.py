"""What a line of the ledger says of the routes in a segment: what it holds of each, and why that may go.

The text of a long list is made from the columns of the table, without a step for each route: consecutive segments have
the same routes, and while no cursor moves, only the numbers in their lines differ. Segments with many routes that every
group has read share one list, which says what all of them together held.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from wald.format.ledger_lines import Entry, RawJson
from wald.format.sealed_index import RouteEntry, RouteTable
from wald.retention.blockers import CursorSnapshot
from wald_reclaim.policy import Verdict

LISTED_MAX = 32  # routes that a segment's own line lists: about 3 KB, and one line says all that there is to know


@dataclass(frozen=True, slots=True)
class Excuse:
    """What a segment held, and the cursors that allow its deletion."""

    routes: RouteTable
    claims: CursorSnapshot


def excused(entry: RouteEntry, claims: CursorSnapshot) -> Entry:
    """The records of one route, and what allows their deletion."""
    held = {"route": entry.route, "count": entry.count, "first": entry.first, "last": entry.last}
    return held | _excuse(entry.route, claims)


class Excuses:
    """Makes the lists of one process; what only depends on the names and the cursors is kept for the next one."""

    def __init__(self) -> None:
        self._made_of: tuple[tuple[str, ...], CursorSnapshot, Mapping[str, Verdict]] | None = None
        self._template = ""

    def text(self, table: RouteTable, claims: CursorSnapshot, rules: Mapping[str, Verdict]) -> RawJson:
        """The list of a segment's routes, as JSON.

        Args:
            rules: the rule of each, if the line has not the same one for all of them; else empty.
        """
        made_of = self._made_of
        if made_of is None or made_of[0] != table.names or made_of[1] is not claims or made_of[2] != rules:
            self._template = f"[{','.join(_templates(table.names, claims, rules))}]"
            self._made_of = table.names, claims, rules
        numbers = chain.from_iterable(zip(table.counts, table.firsts, table.lasts, strict=True))
        return RawJson(self._template % tuple(numbers))


def joined(tables: Sequence[RouteTable]) -> RouteTable:
    """What consecutive segments hold together of each route; there is one at least, and the oldest is the first."""
    alike: dict[tuple[str, ...], list[RouteTable]] = {}
    for table in tables:
        alike.setdefault(table.names, []).append(table)
    added = [_added(each) for each in alike.values()]
    if len(added) == 1:
        return added[0]
    held: dict[str, RouteEntry] = {}
    for entry in chain.from_iterable(added):
        held[entry.route] = _both(held[entry.route], entry) if entry.route in held else entry
    return RouteTable.from_entries(list(held.values()))


def _added(tables: Sequence[RouteTable]) -> RouteTable:
    """The same, of tables with the same names: sequences only grow, so what is first is in the first of them."""
    counts = tuple(map(sum, zip(*(table.counts for table in tables), strict=True)))
    payload_bytes = tuple(map(sum, zip(*(table.payload_bytes for table in tables), strict=True)))
    return RouteTable(tables[0].names, counts, tables[0].firsts, tables[-1].lasts, payload_bytes)


def _both(one: RouteEntry, other: RouteEntry) -> RouteEntry:
    first, last = min(one.first, other.first), max(one.last, other.last)
    return RouteEntry(one.route, one.count + other.count, first, last, one.payload_bytes + other.payload_bytes)


def _templates(names: Sequence[str], claims: CursorSnapshot, rules: Mapping[str, Verdict]) -> Iterator[str]:
    """For each route its object with a place for each number."""
    for name in names:
        rule = {"rule": rules[name].value} if rules else {}
        held, excuse = _json({"route": name}), _json(rule | _excuse(name, claims))
        yield f'{held[:-1]},"count":%d,"first":%d,"last":%d,{excuse[1:]}'


def _json(entry: Entry) -> str:
    """As it stands in a template, where a percent sign is written twice."""
    return json.dumps(entry, separators=(",", ":"), ensure_ascii=False).replace("%", "%%")


def _excuse(route: str, claims: CursorSnapshot) -> Entry:
    """Where the cursors of a route are, or that it is retired."""
    return {"retired": True} if route in claims.retired else {"cursors": claims.positions(route)}

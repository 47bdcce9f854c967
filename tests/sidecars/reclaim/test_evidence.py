"""The list of routes in a line is the same as if it had been made route by route."""

from __future__ import annotations

import json
from pathlib import Path

from wald.format.sealed_index import RouteEntry, RouteTable
from wald.retention.blockers import CursorSnapshot
from wald.retention.cursors import Cursor, CursorState
from wald_reclaim.evidence import RouteLists, merge_tables, route_fields
from wald_reclaim.policy import Verdict


def claims(**at: int) -> CursorSnapshot:
    def cursor(route: str, group: str) -> Cursor:
        return Cursor(route, group, Path(group), CursorState.VALID, at[route])

    return CursorSnapshot(
        {route: (cursor(route, "processed"), cursor(route, "100%d")) for route in at}, frozenset({"c"})
    )


def segment(base: int, *routes: str) -> RouteTable:
    return RouteTable.from_entries(
        [RouteEntry(route, 2 + n, base + n, base + 9 + n, 1) for n, route in enumerate(routes)]
    )


def test_the_text_follows_the_routes_the_cursors_and_the_rules() -> None:
    early, late = claims(a=50, b=60, c=0), claims(a=51, b=60, c=0)
    by_a = {"a": Verdict.MAX_AGE, "b": Verdict.READ, "c": Verdict.READ}
    lists = RouteLists()
    for held, under, rules in (
        (segment(1, "a", "b", "c"), early, {}),
        (segment(11, "a", "b", "c"), early, {}),
        (segment(15, "a", "b", "c"), late, {}),
        (segment(21, "b", "a", "gone"), early, {}),
        (segment(21, "b", "a"), late, {}),
        (segment(31, "a", "b"), late, by_a),
        (segment(41, "a", "b"), late, by_a | {"a": Verdict.MAX_BYTES}),
        (segment(51, "a", "b"), late, {}),
        (segment(51), late, {}),
    ):
        text = lists.text(held, under, rules)
        own = {route: {"rule": verdict.value} for route, verdict in rules.items()}
        expected = [route_fields(entry, under) | own.get(entry.route, {}) for entry in held]

        assert json.loads(text) == expected
        assert text == json.dumps(json.loads(text), separators=(",", ":"))


def test_segments_together_hold_of_each_route_what_each_of_them_holds_whatever_routes_are_in_which() -> None:
    segments = [segment(1, "a", "b"), segment(20, "b", "c"), segment(40, "a", "b"), segment(60, "d"), segment(80, "c")]
    together = merge_tables(segments)

    by_route = {name: [entry for each in segments for entry in each if entry.route == name] for name in "abcd"}
    assert sorted(together) == [
        (
            name,
            sum(entry.count for entry in entries),
            entries[0].first,
            entries[-1].last,
            sum(entry.payload_bytes for entry in entries),
        )
        for name, entries in by_route.items()
    ]

"""Each record of interleaved routes is known to be there, to be dropped by a shrink, or to be deleted with the rest."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from logs import Built
from reclaiming import ledger, reclaim

from wald.checking.checker import Level
from wald.checking.verifier import verify
from wald.reading.lookup import Whereabouts
from wald.retention.audit import audit_shrink
from wald.retention.history import History
from wald.segments.view import State

BYTES = random.Random(0).randbytes(1 << 20).replace(b"\n", b"-")
SEEDS = [0, pytest.param(range(2, 30), marks=pytest.mark.slow)]


def interleaved(path: Path, seed: int) -> tuple[Built, dict[int, str]]:
    """A sealed segment of batches of a and b with one of c among them, and the route of each record in it."""
    built, rng = Built(path), random.Random(seed)
    routes: dict[int, str] = {}
    batches = rng.choices("ab", k=90 if seed % 2 else 20 if seed else 12)
    batches.insert(rng.randrange(len(batches)), "c")
    for route in batches:
        count = rng.randint(1, 3)
        at = rng.randrange(1 << 19)
        first = built.lines(route, [BYTES[at + 2000 * i : at + 2000 * (i + 1)] for i in range(count)])
        routes |= dict.fromkeys(range(first, first + count), route)
    built.cut()
    built.lines("a", [b"newest"])
    built.seal()
    for route in "abc":
        built.log.set_cursor(route, 0)
    return built, routes


def readable(built: Built, routes: dict[int, str]) -> set[int]:
    return {record.sequence for record in built.log.records()} & routes.keys()


def where(built: Built, sequence: int) -> Whereabouts:
    return built.log.where(sequence)


@pytest.mark.parametrize("seeds", SEEDS)
def test_each_record_has_one_answer(tmp_path: Path, seeds: int | range) -> None:
    """Compare two shrinks, and the deletion of the rest, with the records of a reader before and after."""
    for seed in [seeds] if isinstance(seeds, int) else seeds:
        built, routes = interleaved(tmp_path / str(seed), seed)
        rng, removed = random.Random(seed), dict[int, int]()
        for cursor in (rng.choice(list(routes)), max(routes)):
            for route in "ab":
                built.log.set_cursor(route, max(cursor, built.log.cursor(route).effective))
            before = readable(built, routes)
            reclaim(built, shrink_pinned=True)
            removed |= dict.fromkeys(before - readable(built, routes), len(ledger(built.root.path)) - 1)
            hold(built, routes, removed)
        for route in "abc":
            built.log.set_cursor(route, built.last)
        before = readable(built, routes)
        reclaim(built)
        removed |= dict.fromkeys(before, len(ledger(built.root.path)) - 1)
        hold(built, routes, removed)
        assert {line["event"] for line in ledger(built.root.path)} == {"shrunk", "reclaimed"}
        built.crash()


def hold(built: Built, routes: dict[int, str], removed: dict[int, int]) -> None:
    """Ask about every record."""
    lines = ledger(built.root.path)
    for sequence, route in routes.items():
        found = where(built, sequence)
        if sequence not in removed:
            assert (found.state, found.route) == (State.SEALED, route)
            continue
        line = lines[removed[sequence]]
        assert found.state is State.RECLAIMED
        assert found.reclaimed is not None
        assert (found.reclaimed["event"], found.reclaimed.get("sha256")) == (line["event"], line["sha256"])
        assert "; or" not in found.message
        if line["event"] == "shrunk":
            assert found.message.endswith(f"cursors: {route}/processed at {_cursor(line, route)}")
    history = History(built.root)
    rulings = [
        audit_shrink(line, history.line_for_digest(line["base"], line["was_sha256"])) for line in history.all_shrinks()
    ]
    assert [ruling.errors for ruling in rulings if ruling.errors] == []
    assert [found.message for found in verify(built.root) if found.level is Level.ERROR] == []


def _cursor(line: dict[str, object], route: str) -> object:
    dropped = line["dropped"]
    assert isinstance(dropped, list)
    return next(each["cursors"]["processed"] for each in dropped if each["route"] == route)


def test_runs_that_are_not_what_was_dropped_are_an_error() -> None:
    cases: list[dict[str, object]] = [{}, {"a": [0, 1]}, {"a": [0, 1, 1, 2]}, {"a": "x"}, {"a": [0]}, {"a": [0, 2]}]
    for runs in cases:
        line = {
            "base": 1,
            "last": 3,
            "routes": [["b", 1, 2, 2, 1]],
            "dropped": [{"route": "a", "count": 2, "first": 1, "last": 3, "cursors": {"processed": 3}}],
        }
        assert audit_shrink({**line, "runs": {"a": [0, 1, 1, 1]}}, None).errors == ()
        assert audit_shrink({**line, "runs": runs}, None).errors != ()

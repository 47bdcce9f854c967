"""The lost records of a damaged segment may be of any of its routes, so all of them must have passed it."""

from __future__ import annotations

from pathlib import Path

import pytest
from contents import errors
from logs import Built
from reclaiming import bases, ledger, reclaim

from wald.format.names import Kind
from wald.retention.backlog import Backlog


def damaged(path: Path, order: str, at: bytes) -> Built:
    """Segment 1 with a batch of one line for each route in ``order``, the line ``at`` spoilt; then one with both."""
    built = Built(path / "root")
    for number, route in enumerate(order, start=1):
        built.lines(route, [b"line %d" % number])
    built.cut()
    raw = built.path(1, Kind.RAW)
    data = raw.read_bytes()
    assert data.count(at) == 1
    raw.write_bytes(data.replace(at, b"spoilt"))
    built.seal()
    built.lines("a", [b"later"])
    built.lines("b", [b"later"])
    built.cut()
    built.seal()
    return built


def pins(built: Built) -> list[tuple[str, int]]:
    """Return the pins of the first segment: each group, and the record that it must reach."""
    status = next(each for each in Backlog(built.view).segments())
    return [(pin.route, pin.needs) for pin in status.pins]


@pytest.mark.parametrize(
    ("at", "needed"),
    [
        (b"line 1", {"a": 3, "b": 4}),
        (b"line 2", {"a": 3, "b": 4}),
        (b"line 3", {"a": 3, "b": 4}),
        (b"line 4", {"a": 4, "b": 4}),
    ],
)
def test_a_route_has_to_be_past_the_last_record_that_is_lost(tmp_path: Path, at: bytes, needed: dict[str, int]) -> None:
    built = damaged(tmp_path, "abab", at)
    assert dict(pins(built)) == needed
    for route, sequence in needed.items():
        for other in needed:
            built.log.set_cursor(other, 6 if other != route else sequence - 1, rewind=True)
        assert pins(built) == [(route, sequence)]
        reclaim(built)
        assert bases(built.root) == [1, 5]
    for route, sequence in needed.items():
        built.log.set_cursor(route, sequence, rewind=True)
    reclaim(built)

    assert bases(built.root) == [5]
    (line,) = ledger(built.root.path)
    assert (line["base"], line["rule"], line["damaged"]) == (1, "read", True)


def test_a_segment_of_which_no_record_is_left_never_goes(tmp_path: Path) -> None:
    built = damaged(tmp_path, "a", b"line 1")
    for route in "ab":
        built.log.set_cursor(route, 3)
    reclaim(built)

    assert bases(built.root)[0] == 1
    (status,) = [each for each in Backlog(built.view).segments() if each.segment.base_sequence == 1]
    assert "their routes are unknown" in status.problem
    assert errors(built.root.path)


def test_a_segment_without_an_index_goes_as_it_would_with_one(tmp_path: Path) -> None:
    built = damaged(tmp_path, "ab", b"line 1")
    path = built.path(1, Kind.SEALED)
    path.write_bytes(path.read_bytes()[:-9])
    for route in "ab":
        built.log.set_cursor(route, 4)
    built.log.set_cursor("b", 1, rewind=True)
    assert pins(built) == [("b", 2)]
    reclaim(built)
    assert bases(built.root) == [1, 3]
    built.log.set_cursor("b", 2)
    reclaim(built)

    assert bases(built.root) == [3]
    assert ledger(built.root.path)[0]["damaged"] is True

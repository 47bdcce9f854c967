"""Records of a route found in few segments are searched in limited steps, so that every page renders quickly."""

from __future__ import annotations

from pathlib import Path

import pytest
from effort import steps
from logs import Built
from reading import result_of

from wald.log import Log
from wald_gate.page import records
from wald_gate.page.records import Excerpt, Query, excerpt

SEGMENTS = 40


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Built:
    """Forty segments, of which the first, a middle one and the last have a record of the rare route."""
    monkeypatch.setattr(records, "_SEGMENTS", 5)
    return made(tmp_path / "log", SEGMENTS)


def made(path: Path, segments: int) -> Built:
    log = Built(path)
    for number in range(segments):
        log.lines("common", [b"%d" % number])
        if number in (0, segments // 2, segments - 1):
            log.lines("rare", [b"rare %d" % number])
        log.cut()
    log.seal()
    return log


def walked(log: Log, query: Query, *, back: bool) -> list[Excerpt]:
    found = []
    while True:
        found.append(result_of(excerpt(log, "rare", query)))
        following = found[-1].older if back else found[-1].newer
        if following is None:
            return found
        query = Query(before=following) if back else Query(from_=str(following))


@pytest.mark.parametrize("back", [True, False])
def test_links_lead_to_all_records_of_a_rare_route(built: Built, back: bool) -> None:
    found = walked(built.log, Query() if back else Query(from_="earliest"), back=back)
    sequences = [row.sequence for page in found for row in page.rows]
    assert sequences == sorted((record.sequence for record in built.log.records("rare")), reverse=back)
    assert len(found) == SEGMENTS // 6 + 1 if back else len(found) > 5
    assert all(page.searched for page in found[:-1])


def test_a_page_of_a_rare_route_costs_what_its_stretch_does(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    def cost(segments: int) -> int:
        monkeypatch.setattr(records, "_SEGMENTS", segments)
        result_of(excerpt(built.log, "rare", Query()))  # warm up imports, which do not count
        return steps(lambda: result_of(excerpt(built.log, "rare", Query())))

    assert 2 * cost(5) < cost(SEGMENTS)

"""The next run follows from the ledger and the destination."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from archives_manifest import manifest

from wald.errors import Damaged, Refused
from wald_archive.bundle import Origin
from wald_archive.codecs import Codec
from wald_archive.ledger import Past, Run, last_recorded, past
from wald_archive.manifest import Manifest, Previous
from wald_archive.pack import check_lineage
from wald_archive.parts import Bytes, Records

LOG = "ab" * 16
ORIGIN = Origin(LOG, "a", "processed", "wald 1", "2026-11-21T10:00:00Z")
RUN = Run(ORIGIN, "/dest", 0, 1, 250, Records(100), Codec.GZ, Previous("before", "d" * 64))
LATER = Run(ORIGIN, "/dest", 250, 251, 300, Bytes(1000), Codec.ZST, None)


def archived(run: Run, last: int, **changed: object) -> dict[str, Any]:
    line = {"event": "archived", "route": "a", "group": "processed", "dest": run.dest, "bag": str(run.bag)}
    return line | {"bundle": f"a-{last}", "last": last, "sha256": "e" * 64} | changed


def judged(*entries: dict[str, Any]) -> Past:
    return past(reversed(entries), log=LOG, route="a", group="processed", dest="/dest")


@pytest.mark.parametrize("run", [RUN, LATER])
def test_a_begun_run_is_done_again_as_it_was_begun(run: Run) -> None:
    """Whatever is asked for now."""
    assert judged(run.begun(at_ns=1)) == Past(run)


def test_a_finished_run_is_past() -> None:
    assert judged(RUN.begun(at_ns=1), archived(RUN, 250), RUN.ended("finished", at_ns=2)) == Past()
    assert judged(RUN.begun(at_ns=1), RUN.ended("finished", at_ns=2), LATER.begun(at_ns=3)).unfinished == LATER


@pytest.mark.parametrize(("lasts", "complete"), [((), False), ((100,), False), ((100, 200), False), ((100, 250), True)])
def test_a_run_is_complete_when_its_last_bundle_is_reported(lasts: tuple[int, ...], complete: bool) -> None:
    found = judged(RUN.begun(at_ns=1), *(archived(RUN, last) for last in lasts))

    assert found.recorded == {f"a-{last}" for last in lasts}
    assert found.complete == complete


@pytest.mark.parametrize(
    "other",
    [{"route": "b"}, {"group": "other"}, {"dest": "/elsewhere"}],
)
def test_what_others_have_begun_holds_up_nobody(other: dict[str, str]) -> None:
    """Another route, group or destination."""
    assert judged(RUN.begun(at_ns=1) | other) == Past()


def test_every_order_of_two_runs_leaves_the_one_that_is_open() -> None:
    """Lines of one run never touch the other."""
    for begun, finished in itertools.permutations([RUN, LATER]):
        lines = [begun.begun(at_ns=1), begun.ended("finished", at_ns=2), finished.begun(at_ns=3)]
        assert judged(*lines).unfinished == finished
        assert judged(*lines, finished.ended("finished", at_ns=4)) == Past()


@pytest.mark.parametrize(
    "changed",
    [{"codec": "rar"}, {"first": None}, {"previous": {}}, {"records_per_bundle": None}, {"after": "x"}],
)
def test_a_line_that_cannot_be_used_is_reported(changed: dict[str, Any]) -> None:
    """Never guessed: another range would make other bundles."""
    with pytest.raises(Damaged, match=r"archive\.jsonl: the line about bag a/0+1-0+250"):
        judged(RUN.begun(at_ns=1) | changed)


def test_a_run_follows_the_latest_bundle_behind_which_it_begins() -> None:
    entries = [
        archived(RUN, 100),
        archived(RUN, 250, sha256="1" * 64),
        archived(RUN, 250, sha256="2" * 64, dest="/elsewhere"),
        archived(RUN, 300),
        archived(RUN, 240, group="other"),
        archived(RUN, 245, route="b"),
    ]

    assert last_recorded(entries[::-1], route="a", group="processed", after=260) == Previous("a-250", "2" * 64)
    assert last_recorded(entries[::-1], route="a", group="processed", after=99) is None
    assert last_recorded(entries[::-1], route="a", group="other", after=250) == Previous("a-240", "e" * 64)


def test_the_line_about_a_run_says_all_that_decides_its_bytes() -> None:
    """The contract with readers of the ledger."""
    assert RUN.begun(at_ns=5) == {
        "event": "begun",
        "route": "a",
        "group": "processed",
        "dest": "/dest",
        "bag": "a/00000000000000000001-00000000000000000250",
        "after": 0,
        "first": 1,
        "last": 250,
        "records_per_bundle": 100,
        "bytes_per_bundle": None,
        "codec": "gz",
        "software": "wald 1",
        "archived_at": "2026-11-21T10:00:00Z",
        "previous": {"bundle": "before", "sha256": "d" * 64},
        "at": 5,
    }


class TestLineage:
    @pytest.fixture
    def bag(self) -> tuple[str, Manifest]:
        return "/dest/a/bag", manifest(log=LOG, group="processed", first=101, last=200)

    @pytest.mark.parametrize(("first", "last"), [(1, 100), (201, 300), (201, 201)])
    def test_beside_the_others_there_is_room(self, bag: tuple[str, Manifest], first: int, last: int) -> None:
        check_lineage([bag], log=LOG, root=Path("/log"), group="processed", first=first, last=last)

    @pytest.mark.parametrize(("first", "last"), [(1, 101), (150, 160), (200, 300), (1, 300)])
    def test_records_are_not_archived_twice_to_one_place(
        self, bag: tuple[str, Manifest], first: int, last: int
    ) -> None:
        with pytest.raises(Refused, match=r"/dest/a/bag: .*already has records 101 to 200"):
            check_lineage([bag], log=LOG, root=Path("/log"), group="processed", first=first, last=last)

    def test_another_group_may_archive_the_same_records(self, bag: tuple[str, Manifest]) -> None:
        check_lineage([bag], log=LOG, root=Path("/log"), group="other", first=1, last=150)

    def test_another_log_may_not_mix_in(self, bag: tuple[str, Manifest]) -> None:
        with pytest.raises(Refused, match=f"belongs to log {LOG}") as refused:
            check_lineage([bag], log="00" * 16, root=Path("/log"), group="processed", first=1, last=2)
        assert "--dest" in refused.value.hint

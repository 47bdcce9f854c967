"""``wald metrics``: the numbers of ``wald explain``, for Prometheus."""

import json
import os
from pathlib import Path

import pytest
from damage import flip_bit
from effort import steps
from endpoint import samples_of
from logs import Built, two_routes
from owning import Owning
from running import output_of, refusal_of, wald

from wald.files.routes import retire_route
from wald.format.head import CursorLines, encode_cursor
from wald.format.names import Kind
from wald.status.retention import work_counts


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return two_routes(tmp_path / "root", 2)


def samples(built: Built, *options: str) -> dict[tuple[str, ...], float]:
    """Map each sample's name and label values, the route's first, to its value."""
    return samples_of(output_of("metrics", *options, "--root", built.root.path).decode())


def test_samples_follow_groups_segments_and_ledgers(built: Built) -> None:
    # Every group has what explain says of it.
    built.log.set_cursor("a", 5)
    explained = output_of("explain", "--json", "--root", built.root.path).splitlines()
    groups = [line for line in map(json.loads, explained) if line["kind"] == "group"]
    found = samples(built)
    assert len(groups) == 2
    for group in groups:
        name = group["route"], group["group"]
        assert found["wald_group_lag_records", *name] == group["lag_records"] > 0
        assert found["wald_group_pinned_bytes", *name] == group["pinned_bytes"] > 0
        assert found["wald_group_lag_seconds", *name] >= group["lag_seconds"]
        assert found["wald_group_cursor_unusable", *name] == 0
        waits = found["wald_measured_timestamp_seconds",] - found["wald_group_oldest_unread_timestamp_seconds", *name]
        assert waits == pytest.approx(found["wald_group_lag_seconds", *name], abs=0.01)

    # Segments are counted by what keeps them.
    built.log.set_cursor("a", 12)
    built.log.set_cursor("b", 6)
    found = samples(built)
    states = {name[1]: value for name, value in found.items() if name[0] == "wald_segments"}
    assert states == {"released": 0, "free": 1, "pinned": 1, "unreadable": 0, "waiting": 0, "active": 1}
    assert found["wald_segment_bytes", "free"] == built.path(1, Kind.SEALED).stat().st_size

    # A group that has read everything has no oldest record.
    assert found["wald_group_lag_seconds", "a", "processed"] == 0
    assert ("wald_group_oldest_unread_timestamp_seconds", "a", "processed") not in found
    assert ("wald_group_oldest_unread_timestamp_seconds", "b", "processed") in found

    # What ran when is read off the ledgers: A program that has not run yet has no timestamp.
    built.log.set_cursor("b", 12)
    before = samples(built)
    assert before["wald_last_seal_timestamp_seconds",] > 0
    assert ("wald_last_reclaim_timestamp_seconds",) not in before
    built.reclaim(1)
    assert samples(built)["wald_last_reclaim_timestamp_seconds",] > 0


def test_the_cost_is_linear_in_the_groups(built: Built) -> None:
    """Any cursor owner can create thousands of groups, none of which is a work group."""

    def cost(groups: int) -> int:
        for number in range(groups):
            built.log.set_cursor("a", 5, f"g{number}")
        names = [("a", f"g{number}") for number in range(groups)]
        return steps(lambda: work_counts(built.log, names))

    assert cost(40) < 3 * cost(20)


def test_what_others_leave_is_counted_and_forges_nothing(built: Built) -> None:
    # A cursor that cannot be trusted is shown.
    built.root.cursor("a", "lost").write_text("not a number\n")
    other = CursorLines(3, bytes(16), 1, "other", "2026-11-22T00:00:00Z")
    built.root.cursor("b", "other").write_bytes(encode_cursor(other))
    built.root.cursor("b", "linked").write_text("3\n")
    os.link(built.root.cursor("b", "linked"), built.root.path / "another name")
    found = samples(built)
    assert found["wald_group_cursor_unusable", "a", "lost"] == 1
    assert found["wald_group_cursor_unusable", "b", "linked"] == 1
    assert found["wald_group_cursor_unusable", "b", "other"] == 1

    # The name of a file cannot forge a sample.
    name = 'x"} 1\nwald_forged 1\n#\udcff'
    (built.root.cursor_directory("a") / f"{name}.cursor").touch()
    found = samples(built)
    assert not [key for key in found if "forged" in key[0]]
    assert found["wald_group_cursor_unusable", "a", name.replace("\udcff", "\\udcff")] == 1

    # Room and quarantine are counted and a retired route is left out.
    (built.root.quarantine / "tail").write_bytes(bytes(100))
    retire_route(built.root, built.disk, "b", now="2026-11-22T00:00:00Z")
    found = samples(built)
    assert (found["wald_quarantine_files",], found["wald_quarantine_bytes",]) == (1, 100)
    assert {name[1] for name in found if name[0] == "wald_group_lag_records"} == {"a"}
    assert found["wald_until_full_bytes",] > 0
    assert samples(built, "--needed-bytes", "1024TiB")["wald_until_full_bytes",] == 0


def test_a_verification_leaves_a_trace_where_it_is_asked_to(built: Built) -> None:
    """Only --record writes to the ledger. A damaged log keeps the time of its last good verification."""
    output_of("verify", "--root", built.root.path)
    assert not (built.root.ledger / "verify.jsonl").exists()
    output_of("verify", "--record", "--root", built.root.path)
    good = samples(built)
    assert (good["wald_last_verify_errors",], good["wald_damaged_segments",]) == (0, 0)

    sealed = built.path(1, Kind.SEALED)
    flip_bit(sealed, sealed.stat().st_size - 3)
    assert wald("verify", "--record", "--root", built.root.path).returncode == 4
    bad = samples(built)

    assert bad["wald_last_verify_errors",] > 0
    assert bad["wald_last_verify_timestamp_seconds",] == good["wald_last_verify_timestamp_seconds",]
    assert bad["wald_damaged_segments",] == 1


def test_without_a_log_it_is_an_error(tmp_path: Path) -> None:
    code, message, _ = refusal_of("metrics", "--root", tmp_path)

    assert (code, message.endswith("there is no log here")) == (3, True)


def test_a_work_group_has_how_many_records_are_where(built: Built) -> None:
    """The counts exist with and without an owner; a group without workers has none of these samples."""
    built.log.set_cursor("b", 6, "plain")
    with Owning(built.root.path, "a", "g") as owner:
        first, second, *_ = owner.lease("worker-1", 6)
        owner.ask("nack", "worker-1", [second], 3600)
        found = samples(built)
        names = ("leased_records", "waiting_records", "giving_up_records", "journal_damaged")
        assert [found[f"wald_work_{name}", "a", "g"] for name in names] == [5, 1, 0, 0]
        owner.ask("give_up", "worker-1", [first], "no use")
        assert samples(built)["wald_work_giving_up_records", "a", "g"] == 1  # no daemon runs
        assert not [name for name in found if name[0].startswith("wald_work_") and name[2] != "g"]
    journal = built.root.cursor_directory("a") / "g.work"
    start, *lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([start, b"damaged\n", *lines]))
    found = samples(built)
    assert found["wald_work_journal_damaged", "a", "g"] == 1
    assert ("wald_work_leased_records", "a", "g") not in found

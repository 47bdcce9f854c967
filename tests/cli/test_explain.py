"""``wald explain`` reports in words and numbers why disk space cannot be freed."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from logs import Built, two_routes
from running import Daemon, output_of, wald

from wald.files.routes import retire_route
from wald.format.names import Kind


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return two_routes(tmp_path / "root", 3)


def explain(built: Built) -> str:
    return output_of("explain", "--root", built.root.path).decode()


def reported(built: Built) -> dict[str, list[dict[str, Any]]]:
    lines = [json.loads(line) for line in output_of("explain", "--json", "--root", built.root.path).splitlines()]
    kinds: dict[str, list[dict[str, Any]]] = {"segment": [], "group": [], "log": []}
    for line in lines:
        kinds[line["kind"]].append(line)
    return kinds


def test_cursors_decide_what_is_said_in_words_and_in_json(built: Built) -> None:
    # A route without a cursor is explained in words.
    built.log.set_cursor("a", 17)
    text = explain(built)
    assert "Without a cursor: b. No group has processed their records" in text
    assert f"wald --root {built.root.path} cursor set b SEQUENCE" in text
    assert f"wald --root {built.root.path} route retire b" in text

    # Equal segments share a line.
    built.log.set_cursor("b", 6)
    lines = explain(built).splitlines()
    assert lines[1].startswith("  records 1 to 6 (")
    assert lines[1].endswith(": every group has read it; wald-reclaim may delete it")
    assert lines[2].startswith("  records 7 to 18 (2 segments, ")
    assert lines[2].endswith(": pinned by b/processed (at 6, needs 18)")
    assert lines[3].startswith("  record 19 and later (")
    assert lines[3].endswith(f": being written; wald --root {built.root.path} cut completes it")

    # Json has every segment every group and the whole.
    kinds = reported(built)
    assert [(s["first"], s["last"], s["state"], s["free"]) for s in kinds["segment"]] == [
        (1, 6, "sealed", True),
        (7, 12, "sealed", False),
        (13, 18, "sealed", False),
        (19, 18, "active", False),
    ]
    (pin,) = kinds["segment"][1]["pins"]
    assert pin == {"route": "b", "group": "processed", "sequence": 6, "needs": 12, "message": ""}
    b = kinds["group"][1]
    assert (b["route"], b["lag_records"], b["pinned_segments"], b["state"]) == ("b", 2, 2, "valid")
    assert b["frees_bytes"] == b["pinned_bytes"] == kinds["segment"][1]["bytes"] + kinds["segment"][2]["bytes"]
    (log,) = kinds["log"]
    assert log["segments"] == {"free": 1, "pinned": 2, "active": 1}
    assert log["free_bytes"] > 0
    assert log["pinned_alone"] == {"b": b["frees_bytes"]}
    assert "\nWhat one route alone pins: b " in explain(built)


def test_the_active_segment_of_a_stopped_daemon_is_not_being_written(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with Daemon(root) as daemon:
        daemon.ask("ROUTE ADD a")
        assert "being written" in output_of("explain", "--root", root).decode()
    done = wald("explain", "--root", root)

    assert done.returncode == 0
    assert b"the active segment, which no daemon writes to now" in done.stdout
    assert b"being written" not in done.stdout


def test_each_group_is_reported_with_its_lag_and_what_it_costs(built: Built) -> None:
    built.log.set_cursor("a", 3)
    built.log.set_cursor("b", 18)
    row = next(line.split() for line in explain(built).splitlines() if line.startswith("a "))
    sealed = sum(built.path(base, Kind.SEALED).stat().st_size for base in (1, 7, 13))

    assert row[:4] == ["a", "processed", "3", "12"]
    assert f"{sealed / 1024:.1f} KiB" in " ".join(row)
    assert "1 more group has read everything and pins nothing." in explain(built)


def test_a_retired_route_and_a_cursor_that_cannot_be_trusted_are_reported(built: Built) -> None:
    # A cursor that cannot be trusted and a retired route are reported.
    built.root.cursor("a", "audit").write_text("999\n")
    built.log.set_cursor("a", 17)
    retire_route(built.root, built.disk, "b", now="")
    text = explain(built)
    assert "Retired: b. Nothing is pinned for them" in text
    assert "audit.cursor: 999 is beyond the last durable record, 18." in text
    assert "cursor set a SEQUENCE --group audit --rewind" in text

    # Unread records of a retired route are not called read.
    built.root.cursor("a", "audit").unlink()
    assert ": its unread records are of b, which is retired; wald-reclaim may delete it" in explain(built)
    built.log.set_cursor("b", 18)
    assert ": every group has read it; wald-reclaim may delete it" in explain(built)


def test_a_segment_names_a_limited_number_of_groups(built: Built) -> None:
    """Without a limit, thousands of groups that pin thousands of segments would produce millions of objects."""
    for number in range(105):
        built.root.cursor("a", f"g{number}").write_bytes(b"0\n")
    found = reported(built)
    assert {(len(each["pins"]), each["pins_left_out"]) for each in found["segment"] if each["pins"]} == {(100, 6)}
    assert len(found["group"]) == 106


def test_a_log_without_records_is_explained_too(tmp_path: Path) -> None:
    root = tmp_path / "empty"
    output_of("init", "--root", root)
    lines = wald("explain", "--root", root).stdout.decode().splitlines()

    assert lines[0] == "no segments: nothing has been written yet"
    assert "the growth rate of the log is not known before 10 min have passed" in lines[2]


def test_a_group_that_pins_an_unsealed_segment_is_reported(built: Built) -> None:
    built.lines("b", [b"y"])
    built.cut()
    built.log.set_cursor("a", 18)
    built.log.set_cursor("b", 18)
    held = explain(built).splitlines()
    built.log.set_cursor("b", 19)
    read = explain(built).splitlines()

    assert "1 pinned" in held[0]
    assert re.fullmatch(
        r"  records 19 to 19 \(.*, not sealed yet\): pinned by b/processed \(at 18, needs 19\)", held[2]
    )
    assert "4 free" in read[0]
    assert re.fullmatch(
        r"  records 19 to 19 \(.*, not sealed yet\): every group has read it; wald-reclaim may delete it", read[2]
    )

"""Cold storage from inside: the names, ledger lines, cursors and pins behind scripts/usecase-cold-storage.sh.

Archiving consumes the route: no other reader is needed, and RECLAIM deletes nothing before the ledger lists the
bundles.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import programs
import pytest
import reclaiming
from logs import Built

from wald.cli.command import run
from wald.files.ledger_read import read_ledger
from wald.files.listing import list_segments
from wald.format.names import Kind
from wald.retention.blockers import read_cursor_snapshot, sealed_index
from wald.retention.cursors import CursorState
from wald.segments.view import State
from wald_archive.command import command
from wald_reclaim.policy import Limits

SCRIPT = Path(__file__).parents[2] / "scripts" / "usecase-cold-storage.sh"
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
RECORDS = [b"record %04d of the year" % number for number in range(1, 1001)]
RANGES = [(1, 250), (251, 500), (501, 750), (751, 1000)]


@pytest.fixture
def year(tmp_path: Path) -> Built:
    """1000 sealed records on the route archive, which has no cursor."""
    built = Built(tmp_path / "log")
    for start in range(0, 1000, 400):  # batches and bundles end at different records
        built.lines("archive", RECORDS[start : start + 400])
    built.cut()
    built.seal()
    return built


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Working directory of the script; its path is short, because it contains a Unix socket."""
    programs.program("jq")
    programs.program("zstd")
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    return tmp_path / "cold"


def archive(year: Built, dest: Path) -> None:
    options = ["--records-per-bundle", "250", "--codec", "gz", "--dest", str(dest)]
    assert run(command, "wald-archive", ["archive", *options, "--root", str(year.root.path)]) == 0


def reclaim(year: Built) -> list[int]:
    """Run one pass without a grace period; return the bases of the deleted segments."""
    before = reclaiming.bases(year.root)
    reclaiming.reclaim(year, Limits(require_archived=True))
    return sorted(set(before) - set(reclaiming.bases(year.root)))


def reported(year: Built) -> list[dict[str, Any]]:
    """Return the entries of the archive's ledger; assert that its chain is intact."""
    decoded = read_ledger(year.root.ledger / "archive.jsonl")
    assert decoded.broken_lines == []
    return decoded.entries


def pinned(year: Built) -> list[bool]:
    """Return True for each sealed segment that a cursor pins."""
    claims = read_cursor_snapshot(year.root, log_id=year.log_id)
    sealed = [segment for segment in list_segments(year.root).segments if segment.kind is Kind.SEALED]
    return [any(claims.pins(sealed_index(segment, year.log_id).routes)) for segment in sealed]


def test_before_it_is_archived_everything_is_kept(year: Built) -> None:
    assert year.log.cursor("archive").state is CursorState.ABSENT
    assert pinned(year) == [True]
    assert reclaim(year) == []
    assert [record.value for record in year.log.records("archive")] == RECORDS


def test_a_run_is_begun_told_and_finished_in_the_ledger(year: Built, dest: Path) -> None:
    """The intent comes first, then a line for each bundle, chained by ``after``, then the end."""
    archive(year, dest)
    begun, *archived, finished = reported(year)

    assert (begun["event"], finished["event"]) == ("begun", "finished")
    assert (begun["after"], begun["first"], begun["last"]) == (0, 1, 1000)
    assert (begun["records_per_bundle"], begun["bytes_per_bundle"], begun["codec"]) == (250, None, "gz")
    assert {entry["event"] for entry in archived} == {"archived"}
    assert [(entry["first"], entry["last"]) for entry in archived] == RANGES
    assert [entry["after"] for entry in archived] == [0, 250, 500, 750]
    assert [entry["count"] for entry in archived] == [250] * 4
    assert {entry["bag"] for entry in archived} == {f"archive/{1:020d}-{1000:020d}"}


def test_the_manifest_and_the_ledger_tell_of_the_same_bundles(year: Built, dest: Path) -> None:
    archive(year, dest)
    archived = [entry for entry in reported(year) if entry["event"] == "archived"]
    manifest = json.loads((dest / archived[0]["bag"] / "manifest.json").read_bytes())
    fields = ("bundle", "first", "last", "after", "count", "sha256")

    assert [{name: entry[name] for name in fields} for entry in archived] == [
        {name: bundle[name] for name in fields} for bundle in manifest["bundles"]
    ]
    assert manifest["log"] == year.log_id.hex()


def test_the_cursor_moves_to_the_last_record(year: Built, dest: Path) -> None:
    archive(year, dest)
    cursor = year.log.cursor("archive")

    assert (cursor.state, cursor.effective) == (CursorState.VALID, 1000)
    assert pinned(year) == [False]


def test_to_acknowledge_is_not_to_archive(year: Built) -> None:
    """With ``require_archived``, a cursor alone does not free a segment."""
    year.log.set_cursor("archive", 1000)

    assert pinned(year) == [False]
    assert reclaim(year) == []


def test_once_archived_it_is_let_go_and_still_has_an_answer(year: Built, dest: Path) -> None:
    archive(year, dest)

    assert reclaim(year) == [1]
    assert [segment.kind for segment in list_segments(year.root).segments] == [Kind.RAW]
    assert list(year.log.records("archive")) == []
    assert {year.log.where(sequence).state for sequence in (1, 250, 251, 1000)} == {State.ARCHIVED}


def test_what_comes_later_goes_into_another_bag_that_follows_the_first(year: Built, dest: Path) -> None:
    archive(year, dest)
    reclaim(year)
    year.lines("archive", [b"next year"])
    archive(year, dest)
    last = [entry for entry in reported(year) if entry["event"] == "archived"][-2:]

    assert [(entry["first"], entry["last"], entry["after"]) for entry in last] == [(751, 1000, 750), (1001, 1001, 1000)]
    manifest = json.loads((dest / last[1]["bag"] / "manifest.json").read_bytes())
    assert manifest["bundles"][0]["previous"] == {"bundle": last[0]["bundle"], "sha256": last[0]["sha256"]}


def script(scratch: Path, path: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PATH": path, "TMPDIR": str(scratch)}
    done = subprocess.run([SCRIPT], env=env, capture_output=True, text=True, timeout=300, check=False)
    assert list(scratch.iterdir()) == []  # the script removes its files
    return done


def test_the_script_finds_the_same_from_outside(scratch: Path) -> None:
    done = script(scratch, PATH)

    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["ok"] * 17


def test_the_script_notices_a_record_that_comes_back_changed(scratch: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    (wrong / "wald-archive").write_text(
        f'#!/bin/sh\nPATH="{PATH}"\nwald-archive "$@" | if [ $1 = restore ]; then sed s/0500/0501/; else cat; fi\n'
    )
    (wrong / "wald-archive").chmod(0o755)
    done = script(scratch, os.pathsep.join([str(wrong), PATH]))

    assert done.returncode == 1
    assert [line for line in done.stdout.splitlines() if not line.startswith("ok ")] == [
        "FAILED  restored, byte for byte",
        "FAILED  and is restored when the log no longer has it",
    ]

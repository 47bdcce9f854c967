"""``wald show``: it returns a record from any place that holds it, and explains why a record is gone."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from archives import archive
from damage import flip_bit
from logs import Built
from running import output_of, refusal_of

from wald.files.ledger_write import Ledger
from wald.format.names import Kind

HEADERS = b'{"id":"7"}'
TIME_NS = 1_600_000_000_000_000_001


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """A complete segment with plain records 1 to 3, and 4 and 5 with keys, times and headers; the next one has 6."""
    built = Built(tmp_path / "root")
    built.lines("a", [b"one", b"two", b"\xff\x00"])
    built.columns("a", [b"four", b"f\nve"], keys=[b"k", None], times_ns=[TIME_NS, -1], headers=[HEADERS, None])
    built.cut()
    built.lines("b", [b"six"])
    return built


def shown(built: Built, sequence: int, *arguments: object) -> dict[str, Any]:
    found = json.loads(output_of("show", sequence, "--root", built.root.path, "--json", *arguments))
    assert found["schema"] == "wald.show/1"
    return dict(found)


def content(found: dict[str, Any]) -> tuple[object, ...]:
    """Return the fields that must be equal wherever the record is stored."""
    names = ("sequence", "route", "value", "value_hex", "key", "headers", "append_time_ns", "event_time_ns")
    return tuple(found.get(name) for name in names)


def reclaim(built: Built) -> None:
    """Delete the segment like wald-reclaim, with the ledger line that a deletion needs."""
    entry = {"event": "reclaimed", "base": 1, "last": 5, "rule": "read", "at": 1_700_000_100_000_000_000, "routes": []}
    ledger = Ledger(built.root.ledger / "reclaim.jsonl", built.disk)
    ledger.append(entry)
    ledger.close()
    built.path(1, Kind.SEALED).unlink()


def test_a_record_is_the_same_raw_sealed_and_in_its_bundle(built: Built, tmp_path: Path) -> None:
    # Text shows no byte that a terminal would act on.
    lines = output_of("show", 3, "--root", built.root.path).decode().splitlines()
    assert lines[-2:] == ["value            2 bytes", "ff00"]
    assert output_of("show", 5, "--root", built.root.path).decode().splitlines()[-1] == r"f\nve"

    # A record is the same raw sealed and in its bundle.
    raw = [shown(built, number) for number in range(1, 6)]
    assert [found["state"] for found in raw] == ["cut"] * 5
    built.seal()
    sealed = [shown(built, number) for number in range(1, 6)]
    assert [found["state"] for found in sealed] == ["sealed"] * 5
    archive(built, tmp_path / "archive", "a")
    reclaim(built)
    bundled = [shown(built, number) for number in range(1, 6)]
    assert [found["state"] for found in bundled] == ["archived"] * 5
    assert [*map(content, raw)] == [*map(content, sealed)] == [*map(content, bundled)]
    assert content(raw[2])[3] == "ff00"
    assert content(raw[3]) == (4, "a", "four", None, "k", {"id": "7"}, raw[3]["append_time_ns"], TIME_NS)
    assert raw[3]["event_time"] == "2020-09-13T12:26:40.000000001Z"


@pytest.fixture
def bag(built: Built, tmp_path: Path) -> Path:
    """An archive of route a, whose segment was reclaimed."""
    built.seal()
    archive(built, tmp_path / "archive", "a")
    reclaim(built)
    return tmp_path / "archive"


def test_a_record_of_an_archive_that_was_moved_is_found_where_it_is_now(
    built: Built, bag: Path, tmp_path: Path
) -> None:
    shutil.move(bag, tmp_path / "elsewhere")
    code, message, hint = refusal_of("show", 2, "--root", built.root.path)
    assert (code, "--archive" in hint) == (3, True)
    assert "that bundle is not there" in message
    assert shown(built, 2, "--archive", tmp_path / "elsewhere")["value"] == "two"
    code, message, hint = refusal_of("show", 2, "--archive", tmp_path / "typo", "--root", built.root.path)
    assert code == 3
    assert message.endswith(f"; it is not in {tmp_path}/typo, which is not a directory")
    assert f"; wald --root {built.root.path} show 2 --archive DIR looks in an archive" in hint
    (tmp_path / "empty").mkdir()
    message = refusal_of("show", 2, "--archive", tmp_path / "empty", "--root", built.root.path)[1]
    assert message.endswith(f"; it is not in {tmp_path}/empty")

    # Without a ledger every route of the archive is searched.
    (built.root.ledger / "archive.jsonl").unlink()
    assert refusal_of("show", 2, "--root", built.root.path)[0] == 3
    assert shown(built, 2, "--archive", tmp_path / "elsewhere")["value"] == "two"


def test_a_damaged_bundle_gives_no_record(built: Built, bag: Path) -> None:
    (bundle,) = bag.rglob("*.tar")
    flip_bit(bundle, b"two")
    code, message, _ = refusal_of("show", 2, "--root", built.root.path)
    assert (code, "sha256" in message) == (4, True)


def test_a_reclaimed_record_is_answered_with_when_and_why(built: Built) -> None:
    built.seal()
    reclaim(built)
    code, message, _ = refusal_of("show", 2, "--root", built.root.path)

    assert (code, message) == (3, "record 2: reclaimed at 2023-11-14T22:15:00Z by the rule 'read'")


def test_a_damaged_record_and_one_that_was_never_issued(built: Built) -> None:
    flip_bit(built.path(1, Kind.RAW), b"two")
    assert refusal_of("show", 2, "--root", built.root.path)[0] == 4
    assert refusal_of("show", 99, "--root", built.root.path)[0] == 3
    assert refusal_of("show", 0, "--root", built.root.path)[0] == 2

"""``wald inspect --content`` and ``wald verify``: intact files are shown unchanged, damaged ones with their damage."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from running import Daemon, eventually, output_of, refusal_of, wald


@pytest.fixture
def log(daemon: Daemon, root: Path) -> Path:
    """A log with three sealed and three active records and the cursor at 2; the daemon has stopped."""
    output_of("append", "a", "--root", root, stdin=b"one\ntwo\nthree\n")
    output_of("cut", "--root", root)
    eventually(lambda: list((root / "segments").glob("*.wal.zst")))
    output_of("append", "a", "--key-separator", "=", "--root", root, stdin=b"k=four\n\xff\nsix words\n")
    output_of("cursor", "set", "a", 2, "--root", root)
    daemon.stop()
    return root


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), bytes([os.pread(file.fileno(), 1, offset)[0] ^ 0xFF]), offset)


def dumped(path: Path, *options: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in output_of("inspect", "--content", path, "--json", *options).splitlines()]


def test_a_good_log_verifies(log: Path) -> None:
    text = output_of("verify", "--root", log).decode()

    assert "error  " not in text
    assert text.splitlines()[-1].startswith("OK: ")
    assert "segments/00000000000000000001.wal.zst: 1 batches, 3 records" in text


@pytest.mark.parametrize("name", ["*.wal.zst", "*.wal"])
def test_damage_is_found_and_nothing_is_changed(log: Path, name: str) -> None:
    path = next((log / "segments").glob(name))
    flip(path, 150)
    before = {str(path): path.read_bytes() for path in log.rglob("*") if path.is_file()}
    done = wald("verify", "--json", "--root", log)
    *findings, summary = [json.loads(line) for line in done.stdout.splitlines()]

    assert done.returncode == 4
    assert str(path) in {finding["path"] for finding in findings if finding["level"] == "error"}
    assert (summary["kind"], summary["good"], summary["segments"]) == ("summary", False, 2)
    assert summary["findings"]["error"] == len([found for found in findings if found["level"] == "error"])
    assert before == {str(path): path.read_bytes() for path in log.rglob("*") if path.is_file()}


def test_content_lists_batches_and_records(log: Path) -> None:
    sealed, raw = (next((log / "segments").glob(name)) for name in ("*.wal.zst", "*.wal"))
    kinds = [piece["kind"] for piece in dumped(sealed)]
    records = [piece for piece in dumped(raw, "--records") if piece["kind"] == "record"]

    assert kinds == ["frame", "header", "control", "peer", "batch", "index"]
    assert [(piece.get("key"), piece.get("value", piece.get("value_hex"))) for piece in records] == [
        ("k", "four"),
        (None, "ff"),
        (None, "six words"),
    ]


@pytest.mark.parametrize(
    "name",
    ["head", "log.json", "transfers", "ledger/segments.jsonl", "routes/a/cursors/processed.cursor", "segments/*.idx"],
)
def test_content_reads_every_kind_of_file(log: Path, name: str) -> None:
    for path in log.glob(name):
        assert all("damage" not in piece for piece in dumped(path))
        assert output_of("inspect", "--content", path).count(b"\n") == len(dumped(path))
    assert list(log.glob(name))


def test_content_shows_damage_at_its_place(log: Path) -> None:
    path = next((log / "segments").glob("*.wal"))
    flip(path, 150)
    done = wald("inspect", "--content", path)

    assert done.returncode == 4
    assert b"damage=" in done.stdout


def test_content_of_a_file_that_is_not_of_a_log(tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("hello")
    for name, code in (("letter", 2), ("absent", 3)):
        found, message, _ = refusal_of("inspect", "--content", tmp_path / name)
        assert (found, message.startswith(f"{tmp_path / name}: ")) == (code, True)


def test_content_of_a_sealed_segment_that_is_cut_short(log: Path) -> None:
    """A truncated segment is reported with its path instead of being shown as complete."""
    path = next((log / "segments").glob("*.wal.zst"))
    os.truncate(path, path.stat().st_size - 1)
    code, message, _ = refusal_of("inspect", "--content", path)

    assert code == 4
    assert message.startswith(f"{path}: ")


def test_a_directory_is_called_one(root: Path) -> None:
    output_of("init", "--root", root)
    for path in (root, root / "segments"):
        assert refusal_of("inspect", "--content", path)[:2] == (2, f"{path}: is a directory; --content takes a file")
    os.mkfifo(root / "head")
    assert refusal_of("inspect", "--content", root / "head")[:2] == (2, f"{root}/head: not a regular file")

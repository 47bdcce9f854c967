"""``wald inspect`` recognizes every file of a log, shows its content and damage, and says whether it may be deleted."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from archives import archive
from damage import flip_bit
from logs import Built, Unsynced
from repairing import snapshot
from running import Daemon, eventually, output_of, refusal_of, wald

from wald.checking.kinds import FileKind, kind_of
from wald.cli.inspect import may_delete
from wald.files.identity import create_root
from wald.files.layout import Root
from wald.format.names import LEDGERS, Kind

N = "00000000000000000001"
BAG = f"archive/a/{N}-{N}"
# The first words of each row of docs/files.md, with example files.
TABLE: list[tuple[str, FileKind, *tuple[str, ...]]] = [
    ("`log.json`", FileKind.IDENTITY, "log.json"),
    ("`lock`", FileKind.LOCK, "lock"),
    ("`head`", FileKind.HEAD, "head"),
    ("`transfers`", FileKind.TRANSFERS, "transfers"),
    ("`clock.jsonl`", FileKind.CLOCK, "clock.jsonl"),
    ("`wald.sock`", FileKind.SOCKET, "wald.sock"),
    ("`segments/N.wal`", FileKind.RAW, f"segments/{N}.wal"),
    ("`segments/N.wal.idx`", FileKind.SPARSE_INDEX, f"segments/{N}.wal.idx"),
    ("`segments/N.wal.zst`", FileKind.SEALED, f"segments/{N}.wal.zst"),
    ("`segments/N.wal.zst.released`", FileKind.RELEASED, *(f"segments/{N}.wal{end}.released" for end in ("", ".zst"))),
    ("`segments/N.wal.zst.deleting`", FileKind.DELETING, *(f"segments/{N}.wal{end}.deleting" for end in ("", ".zst"))),
    ("`segments/N.wal.zst.whole`", FileKind.WHOLE, f"segments/{N}.wal.zst.whole"),
    ("`segments/*.tmp`", FileKind.TEMPORARY, "segments/spare-1-00.tmp", f"segments/{N}.wal.zst.tmp"),
    ("`*.tmp`", FileKind.TEMPORARY, f"routes/a/cursors/g.cursor.{16 * '0'}.tmp"),
    ("`routes/R/`", FileKind.ROUTE, "routes/a"),
    ("`routes/R/in`", FileKind.FIFO, "routes/a/in"),
    ("`routes/R/in.found-N`", FileKind.FOUND, "routes/a/in.found-1"),
    (
        "`routes/R/cursors/G.cursor`",
        FileKind.CURSOR,
        "routes/a.b/cursors/processed.cursor",
        "routes/a/cursors/g.cursor",
    ),
    ("`routes/R/cursors/`", FileKind.CURSORS, "routes/a/cursors"),
    ("`routes/R/cursors/G.drain`", FileKind.HANDOVER, "routes/a/cursors/g.drain"),
    ("`routes/R/cursors/G.command`", FileKind.COMMAND, "routes/a/cursors/g.command"),
    ("`routes/R/cursors/G.command-K`", FileKind.COMMAND, "routes/a/cursors/g.command-3"),
    ("`routes/R/cursors/G.work`", FileKind.WORK, "routes/a/cursors/g.work"),
    ("`routes/R/cursors/G.ask`", FileKind.ASK, "routes/a/cursors/g.ask"),
    ("`routes/R/cursors/G.pin`", FileKind.PIN, "routes/a/cursors/g.pin"),
    ("`routes/R/retired`", FileKind.RETIRED, "routes/a/retired"),
    *((f"`ledger/{name}`", FileKind.LEDGER, f"ledger/{name}") for name in LEDGERS),
    ("`ledger/NAME-N.jsonl.zst`", FileKind.LEDGER_PART, f"ledger/reclaim-{N}.jsonl.zst"),
    ("`ledger/*.lock`", FileKind.LEDGER_LOCK, "ledger/reclaim.lock"),
    ("`archive/`", FileKind.DIRECTORY, "archive"),
    ("`archive/`", FileKind.ARCHIVED_ROUTE, "archive/a"),
    ("`archive/`", FileKind.BAG, BAG),
    ("`archive/`", FileKind.BAG_PART, f"{BAG}/manifest.json", f"{BAG}/data"),
    ("`archive/`", FileKind.BUNDLE, f"{BAG}/data/a-{N}.tar.zst", f"{BAG}/data/a-{N}.tar"),
    ("`archive/`", FileKind.DIGEST, f"{BAG}/data/a-{N}.tar.gz.sha256"),
    ("`gate/keys.log`", FileKind.DIRECTORY, "gate"),
    ("`gate/keys.log`", FileKind.KEYS, "gate/keys.log"),
    ("`gate/keys.lock`", FileKind.KEYS_LOCK, "gate/keys.lock"),
    ("`quarantine/*`", FileKind.QUARANTINE, f"quarantine/{N}.wal.7"),
    ("`recovery/*.json`", FileKind.RECOVERY, "recovery/0000000001.json"),
]
ROWS = {row for row, *_ in TABLE}
EXAMPLES = [(path, kind) for _, kind, *paths in TABLE for path in paths]
STRANGE = ["notes.txt", "segments/notes", f"segments/{N}.wal.bak", "routes/a/other", "ledger/notes", "recovery/1.json"]


def about(path: Path) -> dict[str, Any]:
    found = json.loads(wald("inspect", path, "--json").stdout)
    assert found["schema"] == "wald.inspect/1"
    return dict(found)


def test_every_file_that_the_documentation_lists_is_known() -> None:
    """A new row of docs/files.md needs an example here and a verdict in the command."""
    page = (Path(__file__).parents[2] / "docs/files.md").read_text().split("## ")[0]
    rows = re.findall(r"^\| (`[^`]+`)", page, re.MULTILINE)

    assert set(rows) == ROWS
    assert {kind for _, kind in EXAMPLES} == set(FileKind) - {FileKind.ROOT, FileKind.FOREIGN}


def test_a_path_has_its_kind_and_a_verdict(tmp_path: Path) -> None:
    for number, (path, kind) in enumerate(EXAMPLES):
        root = tmp_path / f"log-{number}"
        create_root(root, Unsynced(), now="2026-11-21T10:00:00Z")
        at = root / path
        at.parent.mkdir(parents=True, exist_ok=True)
        if not at.exists():
            at.touch()
        named = kind_of(path, in_root=True)

        assert named.kind is kind, path
        assert may_delete(Root(root), at, named).why, path
    assert {kind_of(path, in_root=True).kind for path in STRANGE} == {FileKind.FOREIGN}


def test_a_bundle_is_known_wherever_the_archive_is(tmp_path: Path) -> None:
    built = Built(tmp_path / "root")
    built.lines("a", [b"one"])
    archive(built, tmp_path / "tape/box", "a")
    (bundle,) = (tmp_path / "tape").rglob("*.tar")
    found = about(bundle)

    assert (found["kind"], found["whole"], found["may_delete"], found["root"]) == ("bundle", True, False, None)
    assert found["written_by"] == "wald-archive, wald test"
    flip_bit(bundle, 600)
    assert about(bundle)["whole"] is False
    assert wald("inspect", bundle).returncode == 4


def test_deletable_files_can_be_deleted_and_all_others_are_needed(root: Path, daemon: Daemon) -> None:
    """Every file gets a verdict; after the deletable ones are deleted, the log is as good as before."""
    output_of("route", "add", "f", "--fifo", "--root", root)
    output_of("append", "a", "--root", root, stdin=b"one\ntwo\n")
    output_of("cut", "--root", root)
    output_of("append", "a", "--root", root, stdin=b"three\n")
    daemon.kill()
    daemon.start_again()
    (root / "notes.txt").write_text("mine\n")
    before = output_of("read", "a", "--root", root)
    daemon.stop()
    files = [path for path in sorted(root.rglob("*")) if not path.is_dir()]
    answers = {path: about(path) for path in files}

    assert [path for path, found in answers.items() if found["kind"] == "foreign"] == [root / "notes.txt"]
    assert [path for path, found in answers.items() if found["whole"] is False] == []
    deletable = [path for path, found in answers.items() if found["may_delete"]]
    assert {path.suffix for path in deletable} >= {".txt", ".json"}
    for path in deletable:
        path.unlink()
    daemon.start_again()
    assert output_of("read", "a", "--root", root) == before
    assert wald("verify", "--root", root).returncode == 0


def test_a_segment_says_who_needs_it_and_which_version_wrote_it(root: Path, daemon: Daemon) -> None:
    output_of("append", "a", "--root", root, stdin=b"one\n")
    output_of("cut", "--root", root)
    output_of("append", "a", "--root", root, stdin=b"two\n")
    output_of("cursor", "set", "a", 0, "--root", root)
    first = root / f"segments/{N}.wal.zst"
    eventually(lambda: list(root.glob(f"segments/{N}.wal*")) == [first])  # sealed; the raw file is gone
    daemon.stop()
    found = about(first)
    assert (found["may_delete"], found["why"]) == (False, "a/processed is at 0 and needs it up to 1")
    assert found["written_by"].startswith("the daemon, epoch 1, wald ")

    output_of("cursor", "set", "a", 2, "--root", root, "--group", "processed")
    found = about(first)
    assert (found["may_delete"], found["instead"]) == (False, f"wald-reclaim --root {root}")


def test_damage_is_found_in_the_file_that_has_it(tmp_path: Path) -> None:
    built = Built(tmp_path / "root")
    built.lines("a", [b"x" * 100])
    built.cut()
    built.lines("a", [b"y"])
    path = built.path(1, Kind.RAW)
    flip_bit(path, b"xxx")
    assert (about(path)["whole"], wald("inspect", path).returncode) == (False, 4)
    assert about(built.root.head)["whole"] is True
    built.root.head.write_text("no head")
    assert about(built.root.head)["whole"] is False


def test_a_plain_file_in_the_place_of_a_fifo_has_to_be_sent_first(root: Path, daemon: Daemon) -> None:
    daemon.stop()
    (root / "routes/a/in").write_text("line\n")
    found = about(root / "routes/a/in")

    assert (found["whole"], found["may_delete"]) == (False, False)
    assert found["instead"].startswith(f"wald --root {root} append a {root}/routes/a/in && rm ")


def test_what_is_not_a_file_of_a_log_is_called_that(tmp_path: Path, root: Path) -> None:
    # A path without a file.
    assert refusal_of("inspect", tmp_path / "nothing")[0] == 3

    # A file outside every log is foreign and wald does not say that it may go.
    (tmp_path / "x").touch()
    found = about(tmp_path / "x")
    assert (found["kind"], found["may_delete"]) == ("foreign", False)
    answer = "no: it is not in a log, and wald does not know whether it is needed"
    assert re.search(rf"^delete it\? +{answer}$", output_of("inspect", tmp_path / "x").decode(), re.MULTILINE)

    # Content of a file that is not of a log.
    (tmp_path / "letter").write_text("hello")
    for name, code in (("letter", 2), ("absent", 3)):
        ended, message, _ = refusal_of("inspect", "--content", tmp_path / name)
        assert (ended, message.startswith(f"{tmp_path / name}: ")) == (code, True)

    # A directory is called one.
    output_of("init", "--root", root)
    for path in (root, root / "segments"):
        assert refusal_of("inspect", "--content", path)[:2] == (2, f"{path}: is a directory; --content takes a file")
    os.mkfifo(root / "head")
    assert refusal_of("inspect", "--content", root / "head")[:2] == (2, f"{root}/head: not a regular file")


@pytest.fixture
def log(daemon: Daemon, two_segments: Path) -> Path:
    """The log of a stopped daemon with the cursor at 2."""
    output_of("cursor", "set", "a", 2, "--root", two_segments)
    daemon.stop()
    return two_segments


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), bytes([os.pread(file.fileno(), 1, offset)[0] ^ 0xFF]), offset)


def dumped(path: Path, *options: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in output_of("inspect", "--content", path, "--json", *options).splitlines()]


def test_content_and_damage_of_a_log_are_shown_and_nothing_is_changed(log: Path) -> None:
    # A good log verifies.
    text = output_of("verify", "--root", log).decode()
    assert "error  " not in text
    assert text.splitlines()[-1].startswith("OK: ")
    assert "segments/00000000000000000001.wal.zst: 1 batches, 3 records" in text

    # Content lists batches and records.
    sealed, raw = (next((log / "segments").glob(name)) for name in ("*.wal.zst", "*.wal"))
    kinds = [piece["kind"] for piece in dumped(sealed)]
    records = [piece for piece in dumped(raw, "--records") if piece["kind"] == "record"]
    assert kinds == ["frame", "header", "control", "peer", "batch", "index"]
    assert [(piece.get("key"), piece.get("value", piece.get("value_hex"))) for piece in records] == [
        ("k", "four"),
        (None, "ff"),
        (None, "six words"),
    ]

    # Content reads every kind of file.
    for name in ("head", "log.json", "transfers", "ledger/*.jsonl", "routes/a/cursors/*.cursor", "segments/*.idx"):
        for path in log.glob(name):
            assert all("damage" not in piece for piece in dumped(path))
            assert output_of("inspect", "--content", path).count(b"\n") == len(dumped(path))
        assert list(log.glob(name))

    # Damage is found and nothing is changed.
    for path in (sealed, raw):
        flip(path, 150)
        before = snapshot(log)
        done = wald("verify", "--json", "--root", log)
        *findings, summary = [json.loads(line) for line in done.stdout.splitlines()]
        assert done.returncode == 4
        assert str(path) in {finding["path"] for finding in findings if finding["level"] == "error"}
        assert (summary["kind"], summary["good"], summary["segments"]) == ("summary", False, 2)
        assert summary["findings"]["error"] == len([found for found in findings if found["level"] == "error"])
        assert before == snapshot(log)
        shown = wald("inspect", "--content", path)
        assert (shown.returncode, b"damage=" in shown.stdout) == (4, True)
        flip(path, 150)

    # Content of a sealed segment that is cut short.
    os.truncate(sealed, sealed.stat().st_size - 1)
    code, message, _ = refusal_of("inspect", "--content", sealed)
    assert code == 4
    assert message.startswith(f"{sealed}: ")

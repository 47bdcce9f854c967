"""The doctor recognizes every file that wald's programs leave in a log, and never suggests moving a cursor file."""

import os
from pathlib import Path

import pytest
from examining import Examined, examine
from running import Daemon, eventually, output_of, run, sidecar

from wald.files.layout import Root, known_names

LEFT = (
    *("log.json", "lock", "head", "transfers", "segments/*.wal", "segments/*.wal.zst.released"),
    *("quarantine/*.torn", "recovery/*.json", "archive/a/*", "ledger/segments.jsonl"),
    *(f"ledger/{name}.{suffix}" for name in ("reclaim", "archive", "verify") for suffix in ("jsonl", "lock")),
    *("routes/a/in", "routes/a/in.found-1", "routes/a/cursors/archive.cursor", "routes/b/retired"),
    *(f"routes/{route}/cursors/processed.{suffix}" for route in "ab" for suffix in ("cursor", "drain")),
    "routes/wald.canary/cursors/processed.cursor",
)


def does(line: list[str]) -> None:
    done = run(line)
    assert done.returncode == 0, done.stderr.decode()


def first_life(root: Path) -> None:
    """Run every program that writes to a log, then kill the daemon."""
    with Daemon(root) as daemon:
        output_of("route", "add", "a", "--fifo", "--consumers", "group", "--root", root)
        output_of("route", "add", "b", "--root", root)
        for route in ("a", "b"):
            output_of("append", route, "--root", root, stdin=b"one\ntwo\n")
            does(sidecar("drain", "--root", root, route, "--exit-at-end", "--", "true"))
        output_of("doctor", "--canary", "--root", root)
        output_of("cut", "--root", root)
        eventually(lambda: list(root.glob("segments/*.wal.zst")))
        does(sidecar("archive", "a", "--group", "archive", "--root", root))
        output_of("verify", "--record", "--root", root)
        (root / "routes/a/in").unlink()
        (root / "routes/a/in").write_text("a line\n")
        output_of("route", "add", "a", "--fifo", "--root", root)
        output_of("route", "retire", "b", "--root", root)
        does(sidecar("reclaim", "--root", root))
        output_of("append", "a", "--root", root, stdin=b"three\n")
        daemon.kill()


@pytest.fixture
def lived(tmp_path: Path) -> Path:
    """A log that contains a file of every kind; no daemon runs."""
    root = tmp_path / "log"
    first_life(root)
    active = max(root.glob("segments/*.wal"))
    written = active.read_bytes().rstrip(b"\0")  # preallocated zeros follow
    with active.open("r+b") as file:
        file.seek(len(written))
        file.write(b"torn")
    with Daemon(root):
        pass
    return root


def files_of(root: Path) -> Examined:
    return examine(root, "--timeout", "60s")


def test_no_file_that_a_full_life_leaves_is_foreign(lived: Path) -> None:
    assert [pattern for pattern in LEFT if not list(lived.glob(pattern))] == []

    found = files_of(lived).measured("files")
    assert (found["strange"], found["unsafe"], found["unsafe_cursors"]) == ([], [], [])
    assert found["is_complete"]


def test_each_path_of_a_root_has_a_known_name(tmp_path: Path) -> None:
    """A path added to ``Root`` therefore cannot be forgotten."""
    root = Root(tmp_path)
    root.cursor_directory("a").mkdir(parents=True)
    known = dict(known_names(root))
    paths = {path for name in dir(Root) if isinstance(path := getattr(root, name), Path)} - {tmp_path}
    paths |= {make("a") for make in (root.route, root.fifo, root.retired, root.cursor_directory)}

    assert root.archive in paths
    assert [path for path in paths if not known[path.parent](path.name)] == []


def test_a_cursor_is_never_foreign_and_what_holds_it_is_to_be_repaired_in_place(tmp_path: Path) -> None:
    # A cursor is never foreign.
    root = tmp_path / "log"
    output_of("init", "--root", root)
    (root / "routes/a/cursors").mkdir(parents=True)
    places = [root / place for place in ("", "segments", "ledger", "routes", "routes/a", "routes/a/cursors")]
    for place in places:
        (place / "billing.cursor").touch()
        (place / ".notes").touch()
    assert set(files_of(root).measured("files")["strange"]) == {str(place / ".notes") for place in places}

    # What holds a cursor is to be repaired in place.
    for place in places[:-1]:
        (place / "billing.cursor").unlink()
    (root / "log.json").chmod(0o666)
    for name in ("routes", "routes/a", "routes/a/cursors", "routes/a/cursors/billing.cursor"):
        before = (root / name).stat().st_mode
        (root / name).chmod(0o777)
        found = files_of(root)
        (root / name).chmod(before)
        assert found.measured("files")["unsafe_cursors"] == [f"{root / name}: mode 0777: every user may change it"]
        assert "files" in found.failed
        assert str(root / name) in found.message("files")
        assert "leave it in place" in found.checks["files"]["advice"]
        assert "move" not in found.checks["files"]["advice"]


def test_a_cursor_that_is_a_link_is_replaced_as_the_hint_says(tmp_path: Path) -> None:
    root = tmp_path / "log"
    output_of("init", "--root", root)
    with Daemon(root):
        output_of("route", "add", "a", "--root", root)
        output_of("append", "a", "--root", root, stdin=b"one\n")
    os.symlink(tmp_path / "elsewhere", root / "routes/a/cursors/processed.cursor")
    assert "cursor set" in files_of(root).checks["files"]["advice"]

    output_of("cursor", "set", "a", 1, "--rewind", "--root", root)
    assert files_of(root).outcome("files") == "ok"

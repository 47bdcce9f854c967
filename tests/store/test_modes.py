"""Access rights: the modes of a root and its files, whatever the umask."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from stat import S_IFIFO

import pytest
from running import Daemon, command, run, sidecar
from sample_segments import LOG_ID, TIME_NS
from users import CONSUMERS, OWNER, needs_root

from wald.files.disk import Disk
from wald.files.identity import create_root
from wald.files.ledger_write import Ledger
from wald.files.routes import add_route
from wald.files.safe_open import InPlaceFile
from wald.format.segment import SegmentHeader
from wald.segments.index_builder import SparseIndexWriter
from wald.writing.daemon_lock import Lock

NOW = "2026-11-21T10:00:00Z"


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def modes(path: Path) -> dict[str, int]:
    return {str(found.relative_to(path)): mode(found) for found in (path, *path.rglob("*"))}


@pytest.mark.usefixtures("umask")
def test_a_root_is_made_with_the_same_modes_under_every_umask(tmp_path: Path) -> None:
    disk = Disk()
    root = create_root(tmp_path / "log", disk, now=NOW)
    Lock(root, disk, now=NOW).release()
    add_route(root, disk, "a", fifo=True)
    disk.replace(root.cursor("a", "processed"), b"1\n")
    Ledger(root.ledger / "reclaim.jsonl", disk, owner="wald-reclaim").close()
    InPlaceFile(root.transfers, 4096, disk).close()
    SparseIndexWriter(root.segments / "1.wal.idx", SegmentHeader(LOG_ID, 1, 1, TIME_NS, 1)).close()
    (root.path / "other").touch(mode=0o666)
    disk.close(disk.open_lock(root.path / "other"))  # who can open a lock file could hold the lock

    assert modes(root.path) == {
        ".": 0o750,
        "ledger": 0o750,
        "ledger/reclaim.jsonl": 0o640,
        "ledger/reclaim.lock": 0o600,
        "lock": 0o600,
        "log.json": 0o640,
        "other": 0o600,
        "quarantine": 0o750,
        "recovery": 0o750,
        "routes": 0o750,
        "routes/a": 0o750,
        "routes/a/cursors": 0o750,
        "routes/a/in": 0o620,
        "routes/a/cursors/processed.cursor": 0o640,
        "segments": 0o750,
        "segments/1.wal.idx": 0o640,
        "transfers": 0o640,
    }


def test_nobody_else_may_write_where_a_new_root_is(tmp_path: Path) -> None:
    """Directories above the root are created too; a user who can write there could replace the root."""
    before = os.umask(0)
    try:
        create_root(tmp_path / "deep" / "down" / "log", Disk(), now=NOW)
    finally:
        os.umask(before)

    assert mode(tmp_path / "deep") == mode(tmp_path / "deep" / "down") == 0o750


def test_what_an_operator_has_set_stays(tmp_path: Path) -> None:
    """A root that was there, and the group that new files in it are to have."""
    (tmp_path / "log").mkdir()
    (tmp_path / "log").chmod(0o2770)
    root = create_root(tmp_path / "log", Disk(), now=NOW)
    (root.path / "log.json").chmod(0o600)
    create_root(tmp_path / "log", Disk(), now=NOW)

    assert (mode(root.path), mode(root.segments), mode(root.identity)) == (0o2770, 0o2750, 0o600)


def under(umask: str) -> list[str]:
    """Return a prefix that runs a command as the owner, under a umask."""
    return ["sh", "-c", f'umask {umask}; exec "$@"', "sh", *OWNER.prefix]


@needs_root
def test_the_group_of_a_root_goes_on_though_its_owner_is_no_member(tmp_path: Path) -> None:
    """Otherwise the group could not read later files."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "log"
        root.mkdir()
        os.chown(root, OWNER.user_id, CONSUMERS)
        root.chmod(0o2750)
        Path(name).chmod(0o755)
        for umask in ("077", "000"):
            for line in ("init", f"route add u{umask} --fifo"):
                assert run([*under(umask), *command(*line.split(), "--root", root)]).returncode == 0
        found = [path.lstat() for path in (root, *root.rglob("*"))]
        assert {status.st_gid for status in found} == {CONSUMERS}
        assert {stat.S_IMODE(each.st_mode) for each in found if stat.S_ISDIR(each.st_mode)} == {0o2750}


@needs_root
@pytest.mark.slow
@pytest.mark.parametrize("umask", ["000", "022", "077"])
def test_the_roots_group_may_read_all_that_the_programs_make(umask: str) -> None:
    """The daemon, wald-reclaim, wald-drain and wald-archive; and no other user may write anything."""
    with tempfile.TemporaryDirectory() as name:
        parent = Path(name)
        os.chown(parent, OWNER.user_id, OWNER.group_id)
        parent.chmod(0o755)
        settings = parent / "wald.toml"
        settings.write_text('[routes.a]\nfifo = true\nconsumers = "group"\n')
        prefix = under(umask)
        with Daemon(parent / "log", "--config", settings, prefix=prefix, anew=True) as daemon:
            at = ("--root", daemon.root)
            lines = (
                command("append", "a", *at),
                command("cut", *at),
                command("append", "a", *at),
                command("cut", *at),
                sidecar("archive", "pack", "a", "--to", 3, *at),
                sidecar("drain", "a", "--group", "d", *at, "--exit-at-end", "--", "true"),
                sidecar("reclaim", *at),
                command("route", "retire", "a", *at),
            )
            for line in lines:
                done = run([*prefix, *line], stdin=b"x\n" * 3)
                assert done.returncode == 0, (line, done.stderr.decode())
            assert daemon.stop() == 0
        made = [path for path in (daemon.root, *daemon.root.rglob("*")) if stat.S_IFMT(path.lstat().st_mode) != S_IFIFO]
        closed = {path.name for path in made if path.stat().st_mode & stat.S_IRGRP == 0}
        assert closed == {"lock", "reclaim.lock", "archive.lock", "d.drain"}
        assert [path for path in made if path.stat().st_mode & stat.S_IWOTH] == []
        assert {path.name for path in made if path.stat().st_mode & stat.S_IWGRP} == {"cursors"}
        open_to_others = {path.suffix or path.name for path in made if path.stat().st_mode & stat.S_IROTH}
        assert open_to_others == {"cursors", ".cursor"}

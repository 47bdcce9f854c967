"""The directory of a root, its routes and access rights, and the construction of a log from given records."""

import json
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from stat import S_IFIFO

import pytest
from contents import errors
from faults import TracingDisk
from logs import START_NS, Unsynced
from running import Daemon, command, run, sidecar
from sample_segments import LOG_ID, TIME_NS
from users import CONSUMERS, OWNER, needs_root

import wald
from wald.errors import Damaged, InvalidInput, NotFound, UnsupportedFormat
from wald.files.disk import Disk
from wald.files.identity import create_root, read_identity
from wald.files.layout import Root
from wald.files.ledger_read import read_ledger
from wald.files.ledger_write import Ledger
from wald.files.listing import list_segments
from wald.files.routes import FIFO_MODE, add_route, displaced_files, has_fifo, retire_route
from wald.files.safe_open import InPlaceFile
from wald.files.uptime import read_steps
from wald.format.batch import Encoding
from wald.format.names import Kind
from wald.format.segment import SegmentHeader, pack_version
from wald.log import Log
from wald.repairing.restore import SEGMENT_BYTES, NewLog, RestoredBatch
from wald.segments.index_builder import SparseIndexWriter
from wald.segments.sealed_file import SealedFile
from wald.writing.daemon_lock import Lock

NOW = "2026-11-21T10:00:00Z"


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return create_root(tmp_path / "log", Disk(), now=NOW)


def tree(path: Path) -> list[str]:
    return sorted(str(found.relative_to(path)) for found in path.rglob("*"))


def test_a_root_is_a_log_of_its_own_and_making_it_again_or_finishing_it_keeps_it(root: Root, tmp_path: Path) -> None:
    other = create_root(tmp_path / "deep" / "other", Disk(), now=NOW)
    made = read_identity(root)
    assert tree(root.path) == ["ledger", "log.json", "quarantine", "recovery", "routes", "segments"]
    assert (made.created, len(made.log_id)) == (NOW, 16)
    assert made.log_id != read_identity(other).log_id
    (root.segments / "00000000000000000001.wal").touch()
    create_root(root.path, Disk(), now="later")
    assert read_identity(root) == made

    for number, left in enumerate([[], ["segments", "routes"], ["lost+found"], ["log.json.17.tmp"]]):
        for name in ["", *left]:
            (tmp_path / str(number) / name).mkdir(exist_ok=True)
        assert read_identity(create_root(tmp_path / str(number), Disk(), now=NOW)).created == NOW


def test_what_is_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(InvalidInput, match="not empty"):
        create_root(tmp_path, Disk(), now=NOW)
    with pytest.raises(InvalidInput, match="not a directory"):
        create_root(tmp_path / "thesis.tex", Disk(), now=NOW)
    assert tree(tmp_path) == ["thesis.tex"]
    with pytest.raises(NotFound):
        read_identity(Root(tmp_path / "thesis.tex"))
    with pytest.raises(NotFound, match="no log here") as caught:
        read_identity(Root(tmp_path / "nowhere"))
    assert caught.value.hint.startswith("to create a log: wald ")


@pytest.mark.parametrize("kind", [Kind.RAW, Kind.SEALED])
def test_segments_without_an_identity_do_not_get_a_new_one(root: Root, kind: Kind) -> None:
    """They belong to a log: with a new id, no reader would find them, and their sequences would be reused."""
    root.segment(1, kind).touch()
    root.identity.unlink()
    before = tree(root.path)
    with pytest.raises(Damaged, match="is missing, but") as caught:
        create_root(root.path, Disk(), now=NOW)
    assert caught.value.hint
    assert tree(root.path) == before


def test_an_unreadable_identity_is_damage_and_is_kept_and_a_newer_one_refused(root: Root) -> None:
    reported = json.loads(root.identity.read_text())
    log = b'{"log": "0cf9d7b4-0000-4000-8000-000000000000", '
    for text in [
        *(b"", b"\0" * 100, b"\xff", b"{", b"[]", b"5", b"[" * 100_000, b"{}"),
        *(b'{"log": %b, "format": 1, "created": ""}' % value for value in (b"5", b'"x"', b"null")),
        *(log + rest for rest in (b'"format": Infinity, "created": ""}', b'"format": "one", "created": ""}')),
        log + b'"format": 1}',
    ]:
        root.identity.write_bytes(text)
        for call in (lambda: read_identity(root), lambda: create_root(root.path, Disk(), now=NOW)):
            with pytest.raises(Damaged, match=r"log\.json"):
                call()
        assert root.identity.read_bytes() == text
    root.identity.write_text(json.dumps(reported | {"format": 2}))
    with pytest.raises(UnsupportedFormat, match="format 2"):
        read_identity(root)


def test_segments_are_listed_once_each_oldest_first(root: Root) -> None:
    """A raw file with a sealed twin has been replaced and only waits to be unlinked."""
    for name in (
        "00000000000000000300.wal",
        "00000000000000000300.wal.idx",
        "00000000000000000020.wal",
        "00000000000000000020.wal.zst",
        "00000000000000000001.wal.zst",
        "00000000000000000000.wal.zst.released",
        "00000000000000000020.wal.zst.tmp",
        "next.tmp",
        "notes.txt",
    ):
        (root.segments / name).touch()

    listing = list_segments(root)

    found = [(segment.base_sequence, segment.kind) for segment in listing.segments]
    assert found == [(1, Kind.SEALED), (20, Kind.SEALED), (300, Kind.RAW)]
    assert [(segment.base_sequence, segment.kind) for segment in listing.released] == [(0, Kind.RELEASED)]
    assert all(segment.path.exists() for segment in listing.segments)
    covering = {sequence: listing.index_covering(sequence) for sequence in (0, 1, 19, 20, 299, 300, 10**9)}
    assert covering == {0: 0, 1: 0, 19: 0, 20: 1, 299: 1, 300: 2, 10**9: 2}


def test_a_listing_has_each_segment_that_existed_all_along(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two readings of the directory, segments are added, deleted and renamed; one reading may miss a file."""
    for base in range(1, 9):
        root.segment(base, Kind.RAW).touch()
    scandir = os.scandir
    missed = [{3, 4}, {4}, set[int](), set[int]()]
    changes = [(7, Kind.DELETING), (8, Kind.SEALED), (9, Kind.RAW), (10, Kind.RAW)]

    def scan(path: Path) -> list[os.DirEntry[str]]:
        seen = [entry for entry in scandir(path) if int(entry.name[:20]) not in missed[0]]
        base, kind = changes[0]
        root.segment(base, Kind.RAW).unlink(missing_ok=True)
        if kind is not Kind.DELETING:
            root.segment(base, kind).touch()
        del missed[0], changes[0]
        return seen

    monkeypatch.setattr(os, "scandir", scan)

    found = list_segments(root).segments
    assert missed == []
    assert [(each.base_sequence, each.kind) for each in found if each.kind is Kind.SEALED] == [(8, Kind.SEALED)]
    assert [each.base_sequence for each in found] == [1, 2, 3, 4, 5, 6, 8, 9]


def test_a_route_is_a_directory_with_a_legal_name_and_no_path_is_made_of_another(root: Root) -> None:
    for name in ("web", "db.1", ".git", "a b", "caf\u00e9", "x" * 200):
        (root.routes / name).mkdir()
    os.mkdir(os.fsencode(root.routes) + b"/\xff")
    (root.routes / "file").touch()

    assert root.route_names() == ["db.1", "web"]
    root.require_route("web")
    with pytest.raises(NotFound, match="no route 'file'"):
        root.require_route("file")

    before = tree(root.path)
    for name in ("../x", "", "a\0b", ".."):
        for make in (root.route, root.fifo, root.retired, root.require_route, root.groups):
            with pytest.raises(InvalidInput):
                make(name)
        for fifo in (False, True):
            with pytest.raises(InvalidInput):
                add_route(root, Disk(), name, fifo=fifo)
        with pytest.raises(InvalidInput):
            retire_route(root, Disk(), name, now=NOW)
    assert tree(root.path) == before


def test_a_fifo_has_the_mode_that_was_asked_for_whatever_the_umask(root: Root) -> None:
    old = os.umask(0o077)
    try:
        for mode in (FIFO_MODE, 0o666, 0o600, 0o600):
            add_route(root, Disk(), "web", fifo=True, mode=mode)
            assert stat.S_IMODE(root.fifo("web").stat().st_mode) == mode
    finally:
        os.umask(old)
    assert has_fifo(root, "web")


def test_a_route_can_be_added_again_and_given_a_fifo_later_which_it_keeps(root: Root) -> None:
    for _ in range(2):
        add_route(root, Disk(), "web")
        assert root.route_names() == ["web"]
        assert os.listdir(root.route("web")) == ["cursors"]
        assert not has_fifo(root, "web")
    add_route(root, Disk(), "web", fifo=True)
    number = root.fifo("web").stat().st_ino
    add_route(root, Disk(), "web", fifo=True)
    add_route(root, Disk(), "web")
    assert root.fifo("web").stat().st_ino == number


def test_what_stands_where_the_fifo_belongs_is_kept_beside_it(root: Root) -> None:
    add_route(root, Disk(), "web")
    for content in (b"somebody's", b"another's"):
        root.fifo("web").unlink(missing_ok=True)
        root.fifo("web").write_bytes(content)
        add_route(root, Disk(), "web", fifo=True)
        assert has_fifo(root, "web")
    root.fifo("web").unlink()
    root.fifo("web").symlink_to("nowhere")
    add_route(root, Disk(), "web", fifo=True)

    found = displaced_files(root, "web")
    assert [path.name for path in found] == ["in.found-1", "in.found-2", "in.found-3"]
    assert [path.read_bytes() for path in found[:2]] == [b"somebody's", b"another's"]
    assert found[2].is_symlink()


@pytest.mark.parametrize("fifo", [False, True])
def test_a_retired_route_stays_and_is_taken_back_by_adding_it(root: Root, fifo: bool) -> None:
    add_route(root, Disk(), "web", fifo=fifo)
    retire_route(root, Disk(), "web", now=NOW)
    assert root.retired("web").read_text() == f"{NOW}\n"
    retire_route(root, Disk(), "web", now="later")
    assert root.retired("web").read_text() == f"{NOW}\n"
    assert root.route_names() == ["web"]
    assert has_fifo(root, "web") == fifo
    add_route(root, Disk(), "web")
    assert not root.retired("web").exists()
    assert has_fifo(root, "web") == fifo


def test_the_name_is_on_disk_before_anything_can_be_written_to_it(root: Root) -> None:
    disk = TracingDisk()
    add_route(root, disk, "web", fifo=True)
    assert [name for call, name in disk.steps if call == "sync_directory"] == ["routes", "web"]


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
    """Directories above it are created too; a user who can write there could replace the root."""
    disk = Disk()
    root = create_root(tmp_path / "deep" / "down" / "log", disk, now=NOW)
    assert mode(tmp_path / "deep") == mode(tmp_path / "deep" / "down") == 0o750
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


def begun(path: Path, *, disk: Disk | None = None, segment_max_bytes: int = SEGMENT_BYTES) -> NewLog:
    return NewLog(
        path,
        disk or Unsynced(),
        describe=lambda first, last: {"why": f"{first} to {last}"},
        now=lambda: START_NS,
        moment="",
        version=pack_version(wald.__version__),
        segment_max_bytes=segment_max_bytes,
    )


def batch(first: int, value: bytes = b"x") -> RestoredBatch:
    return RestoredBatch("a", first, 1, START_NS + first, value + b"\n", Encoding.LINES)


def made(path: Path, sequences: list[int], *, segment_max_bytes: int = SEGMENT_BYTES) -> Iterator[int]:
    """The bases of the segments of a log of these records, each a batch; it has no error, and its holes are counted."""
    with begun(path, segment_max_bytes=segment_max_bytes) as log:
        for sequence in sequences:
            log.add(batch(sequence))
        log.finish()
        assert log.missing == sequences[-1] - len(sequences)
    assert [record.sequence for record in Log(path).records()] == sequences
    assert errors(path) == []
    return (segment.base_sequence for segment in list_segments(Root(path)).segments)


def test_a_segment_is_cut_before_it_gets_too_long_and_sealed_at_once(tmp_path: Path) -> None:
    """A restore of many segments takes the room of one that is not sealed."""
    path = tmp_path / "log"
    with begun(path, segment_max_bytes=64 << 10) as log:
        for sequence in range(1, 101):
            log.add(batch(sequence, b"x" * 2000))
            there = list_segments(log.root).segments
            assert [segment.kind for segment in there[:-1]] == [Kind.SEALED] * (len(there) - 1)
        log.finish()
    segments = list_segments(Root(path)).segments
    assert len(segments) == 4
    for segment in segments:
        with SealedFile(segment.path) as sealed:
            assert sealed.index.raw_bytes <= 64 << 10


@pytest.mark.parametrize(("missing", "bases"), [(1, [1]), (65_536, [1]), (65_537, [1, 65_539])])
def test_a_hole_of_up_to_65536_records_does_not_end_a_segment(tmp_path: Path, missing: int, bases: list[int]) -> None:
    assert list(made(tmp_path / "log", [1, missing + 2])) == bases


def test_each_hole_has_one_line(tmp_path: Path) -> None:
    """They are written in groups; the first hole is before the first record."""
    list(made(tmp_path / "log", list(range(2, 2010, 2))))
    lines = [line for line in read_ledger(tmp_path / "log/ledger/segments.jsonl").entries if line["event"] == "lost"]
    assert [(line["base"], line["last"]) for line in lines] == [(n, n) for n in range(1, 2009, 2)]


def test_it_becomes_a_log_when_all_else_is_durable(tmp_path: Path) -> None:
    disk = TracingDisk()
    with begun(tmp_path / "log", disk=disk) as log:
        log.add(batch(1))
        log.finish()
        assert not log.root.lock.exists()
    at = disk.steps.index(("rename", "log.json"))
    assert disk.steps[at - 1 : at + 3] == [
        ("sync_directory", "log"),
        ("rename", "log.json"),
        ("sync_directory", "log"),
        ("sync_directory", tmp_path.name),
    ]


def test_append_times_that_go_back_are_a_clock_step(tmp_path: Path) -> None:
    """The log of the records had such a step."""
    path = tmp_path / "log"
    times_ns = [START_NS, START_NS + 9, START_NS + 3, START_NS + 3, START_NS + 1]
    with begun(path) as log:
        for first, time_ns in enumerate(times_ns, start=1):
            log.add(RestoredBatch("a", first, 1, time_ns, b"x\n", Encoding.LINES))
        log.finish()
    assert [record.append_time_ns for record in Log(path).records()] == times_ns
    assert [step.base for step in read_steps(Root(path))] == [3, 5]
    assert errors(path) == []

"""Every program reads a long line whole if its pieces surround a deleted segment; RECLAIM keeps unread pieces."""

import sys
from pathlib import Path

import pytest
from contents import errors
from logs import Built
from reclaiming import bases, reclaim
from running import run
from shrinking import shrink

import wald
from wald.files.layout import Root
from wald.format.names import Kind

WHOLE = b"begins and ends"


def laid(path: Path, *, between: bytes = b"") -> Built:
    """Record 1 of route a begins in the first segment and ends in the third; ``between`` adds a piece in the second."""
    built = Built(path)
    built.piece("a", b"begins ", begins=True, ends=False)
    built.cut()
    built.lines("b", [b"of another route" * 200] * 3)
    if between:
        built.piece("a", between, begins=False, ends=False)
    built.cut()
    built.piece("a", b"and ends\nnext\n", begins=False, ends=True)
    built.cut()
    built.lines("b", [b"last"])
    built.seal()
    built.log.set_cursor("a", 0, group="g")
    built.log.set_cursor("b", 4, group="g")
    built.crash()
    return built


@pytest.fixture(scope="module")
def deleted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Log whose second segment RECLAIM has deleted."""
    built = laid(tmp_path_factory.mktemp("deleted") / "root")
    reclaim(built)
    assert bases(built.root) == [1, 5]
    return built.root.path


@pytest.fixture(scope="module")
def shrunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Log whose second segment contains only a piece of the long line and has a damaged index."""
    built = laid(tmp_path_factory.mktemp("shrunk") / "root", between=b"and goes on ")
    shrink(built, 2, b=4)
    path = built.path(2, Kind.SEALED)
    data = bytearray(path.read_bytes())
    data[data.rfind(b"WALDSIX1") + 20] ^= 1
    path.write_bytes(data)
    return built.root.path


def output(module: str, *arguments: object) -> bytes:
    done = run([sys.executable, "-m", module, *map(str, arguments)])
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(params=["deleted", "shrunk"])
def root(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


def whole(root: Path) -> bytes:
    return WHOLE if root.parent.name.startswith("deleted") else b"begins and goes on and ends"


@pytest.mark.parametrize(
    "command",
    [
        ("read", "a"),
        ("read", "a", "--from", "cursor", "--group", "g"),
        ("read", "a", "--from", 1, "--to", 1),
        ("read", "a", "--prefix", "--grep", "begins"),
        ("show", 1),
    ],
    ids=lambda command: " ".join(map(str, command)),
)
def test_what_reads_gives_it_whole(root: Path, command: tuple[object, ...]) -> None:
    assert whole(root) in output("wald", "--root", root, *command)


def test_arrow_gives_it_whole(root: Path) -> None:
    with wald.open(root).to_arrow_reader("a", start="cursor", group="g") as reader:
        assert reader.read_all()["value"].to_pylist() == [whole(root), b"next"]


def test_a_worker_is_leased_it_whole(root: Path) -> None:
    with wald.WorkGroup(root, "a", "w") as work:
        values = [each.record.value for each in work.lease("worker", 2)]
    assert values == [whole(root), b"next"]


def test_drain_feeds_it_whole_and_moves_its_cursor(root: Path, tmp_path: Path) -> None:
    got = tmp_path / "got"
    command = ("--group", "d", "--exit-at-end", "--", "sh", "-c", f"cat >>{got}")
    output("wald_drain", "feed", "a", "--root", root, *command)
    assert got.read_bytes() == whole(root) + b"\nnext\n"
    assert wald.open(root).cursor("a", "d").sequence == 5


def test_the_archive_has_it_whole(root: Path, tmp_path: Path) -> None:
    output("wald_archive", "a", "--root", root, "--group", "archive", "--dest", tmp_path)
    assert output("wald_archive", "restore", tmp_path, "a") == whole(root) + b"\nnext\n"


def test_verify_has_nothing_to_say_about_the_deletion(deleted: Path) -> None:
    assert errors(deleted) == []
    assert b"in 00000000000000000001.wal.zst" in output("wald", "--root", deleted, "where", 1)


def test_reclaim_keeps_its_pieces_until_every_group_has_read_it(tmp_path: Path) -> None:
    built = laid(tmp_path / "root", between=b"and goes on ")
    reclaim(built, shrink_pinned=True)
    assert bases(built.root) == [1, 2, 5]
    assert [record.value for record in built.log.records("a", start=1)] == [b"begins and goes on and ends", b"next"]
    built.log.set_cursor("a", 1, group="g")
    reclaim(built)
    assert bases(Root(built.root.path)) == [5]
    assert [record.value for record in built.log.records("a")] == [b"next"]

"""Executors make the same bundles as a single process, even if a process is killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from archives import archive, command, copied, errors, files, ledger_lines
from damage import flip_bit
from logs import Built
from running import eventually

import wald
from wald.errors import Damaged, Unavailable
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.format.names import Kind
from wald.retention.cursors import CursorState
from wald_archive.bundle import Bytes, Records, Size
from wald_archive.codecs import Codec
from wald_archive.objects import open_destination
from wald_archive.pack import Packed
from wald_spark import engine
from wald_spark.engine import spark_bundles

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Pack = Callable[..., list[Packed]]


@pytest.fixture
def pack(spark: SparkSession) -> Pack:
    """Return a Spark version of :func:`archives.archive`."""

    def packed(root: Path, dest: Path | str, **options: object) -> list[Packed]:
        engine = partial(spark_bundles, wald.open(root), open_destination(str(dest), Disk()), lambda: spark)
        return archive(root, dest, engine=engine, **options)  # type: ignore[arg-type]

    return packed


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    return tmp_path / "dest"


def varied(path: Path) -> Built:
    """Four segments, two of them sealed: lines, columns, other routes, and records in pieces across segments."""
    built = Built(path, segment_max_bytes=4 << 20)
    for number in range(12):
        built.lines("a", [b"line %d of batch %d" % (each, number) for each in range(number * 40)] or [b""])
        built.columns("a", [b"v" * number, b"\n\x00"], keys=[b"k%d" % number, None], headers=[None, b'{"h":"1"}'])
        built.piece("a", b"a long record that ", begins=True, ends=False)
        built.lines("b", [b"between"] * number)
        if number % 3 == 2:
            built.cut()
        built.piece("a", b"goes on " * 100 * number, begins=False, ends=False)
        built.piece("a", b"and ends\nwhere the next one begins\n", begins=False, ends=True)
    built.seal(keep=1)
    built.piece("a", b"without a newline", begins=True, ends=True)
    return built


@pytest.mark.parametrize(
    ("size", "codec"),
    [(Records(250), Codec.ZST), (Bytes(20_000), Codec.GZ), (Bytes(1), Codec.NONE), (Records(100_000), Codec.NONE)],
)
def test_the_tree_is_that_of_one_process(tmp_path: Path, pack: Pack, size: Size, codec: Codec) -> None:
    """Limits in records and in bytes, every codec, a bundle per record, one bundle for all; same ledger and cursor."""
    built = varied(tmp_path / "root")
    if size == Bytes(1):
        built.log.set_cursor("a", built.last - 12)
    built.crash()
    other = copied(built.root.path, tmp_path / "other")

    archive(other, tmp_path / "local", size=size, codec=codec)
    (run,) = pack(built.root.path, tmp_path / "spark", size=size, codec=codec)

    assert files(tmp_path / "spark") == files(tmp_path / "local")
    assert run.manifest is not None
    content = [entry.bundle.contents.last for entry in run.manifest.entries]
    assert content == sorted(content)
    lines = [[line | {"dest": ""} for line in ledger_lines(Root(root))] for root in (built.root.path, other)]
    assert lines[0] == lines[1]
    assert wald.open(built.root.path).cursor("a").sequence == wald.open(other).cursor("a").sequence == built.last
    assert errors(tmp_path / "spark", root=built.root) == []


def test_parts_of_a_bundle_end_where_they_do_in_one_process(
    tmp_path: Path, pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each bundle has several parts and is read from several pieces."""
    monkeypatch.setattr(engine, "PIECE_BYTES", 1 << 20)
    built = Built(tmp_path / "root", segment_max_bytes=8 << 20)
    for number in range(24):
        built.append("a", b"record %06d of a log that is not too small\n" % number * 20_000, 20_000)
        if number % 7 == 6:
            built.cut()
            built.seal()
    built.crash()
    other = copied(built.root.path, tmp_path / "other")
    size = Bytes(9_000_001)

    archive(other, tmp_path / "local", size=size, codec=Codec.ZST)
    (run,) = pack(built.root.path, tmp_path / "spark", size=size, codec=Codec.ZST)

    assert run.manifest is not None
    assert len(run.manifest.entries[0].bundle.contents.parts) == 3
    assert files(tmp_path / "spark") == files(tmp_path / "local")


def test_nothing_to_archive_starts_no_spark(built: Built, dest: Path) -> None:
    def never() -> SparkSession:
        raise AssertionError("nobody needs it")

    built.lines("b", [b"x"])
    (built.root.routes / "a").mkdir()
    engine = partial(spark_bundles, built.log, open_destination(str(dest), Disk()), never)
    assert archive(built, dest, engine=engine) == []


def test_progress_is_reported_up_to_the_last_record(built: Built, dest: Path, spark: SparkSession) -> None:
    """Progress also advances while finished bundles wait for earlier ones."""
    for _ in range(4):
        built.lines("b", [b"y"])
        built.lines("a", [b"x"] * 10)
    engine = partial(spark_bundles, built.log, open_destination(str(dest), Disk()), lambda: spark)
    (run,) = archive(built, dest, size=Records(10), engine=engine)
    content: list[int] = []
    assert [bundle.contents.first for bundle in engine(run.run, content.append)] == [2, 13, 24, 35]
    assert (content, content[-1]) == (sorted(content), built.last)


class TestErrors:
    """Errors on an executor are reported like those of a single process."""

    def test_damage_abandons_the_run(self, built: Built, dest: Path, pack: Pack) -> None:
        for line in (b"one", b"two", b"three"):
            built.lines("a", [line * 40])
        flip_bit(built.path(1, Kind.RAW), b"two")

        with pytest.raises(Damaged, match=r"record 2 cannot be read; nothing was acknowledged") as caught:
            pack(built.root.path, dest)

        assert caught.value.hint.endswith(" --to 1 packs the records before it")
        assert built.log.cursor("a").state is CursorState.ABSENT
        assert [line["event"] for line in ledger_lines(built.root)] == ["begun", "abandoned"]
        assert pack(built.root.path, dest, to=1)[0].run.last == 1

    def test_a_destination_that_is_another_one_on_each_machine(self, built: Built, pack: Pack) -> None:
        """Each process has its own ``memory://``: the driver cannot see the files that executors write."""
        built.lines("a", [b"x"])

        with pytest.raises(Unavailable, match="an executor has written it, but it is not here"):
            pack(built.root.path, "memory://bags")

        assert [line["event"] for line in ledger_lines(built.root)] == ["begun"]
        assert built.log.cursor("a").state is CursorState.ABSENT

    def test_a_log_that_is_not_on_the_executors(
        self, built: Built, dest: Path, spark: SparkSession, tmp_path: Path
    ) -> None:
        """The log does not count as damaged, and the run is not abandoned."""
        built.lines("a", [b"x"])

        def gone_once_planned() -> SparkSession:
            built.root.path.rename(tmp_path / "away")
            return spark

        engine = partial(spark_bundles, built.log, open_destination(str(dest), Disk()), gone_once_planned)
        with pytest.raises(Unavailable, match="not a log on"):
            archive(built, dest, engine=engine)

        assert [line["event"] for line in ledger_lines(Root(tmp_path / "away"))] == ["begun"]


def recorded_at(pid: int, name: str) -> bytes:
    """Return a file of /proc for a process; empty if the process has ended."""
    try:
        return Path("/proc", str(pid), name).read_bytes()
    except OSError:
        return b""


def descendants(pid: int) -> Iterator[int]:
    """Yield every process that ``pid`` has started, directly or indirectly."""
    for task in Path(f"/proc/{pid}/task").glob("*"):
        for child in map(int, recorded_at(pid, f"task/{task.name}/children").split()):
            yield child
            yield from descendants(child)


def executors() -> list[int]:
    """Return the executors of the cluster that this process has started."""
    return [pid for pid in descendants(os.getpid()) if b"CoarseGrainedExecutorBackend" in recorded_at(pid, "cmdline")]


def workers() -> list[int]:
    """Return the Python worker processes of the executors; each is forked by a daemon that only forks."""
    return [
        pid
        for executor in executors()
        for daemon in descendants(executor)
        for pid in descendants(daemon)
        if b"pyspark.daemon" in recorded_at(pid, "cmdline")
    ]


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Two million records: enough time to kill a run halfway."""
    built = Built(tmp_path / "large", segment_max_bytes=1 << 30)
    for number in range(100):
        built.append("a", b"line %03d of a log that is not too small\n" % number * 20_000, 20_000)
    built.crash()
    return built.root.path


def made(dest: Path) -> list[Path]:
    return list(dest.rglob("*.sha256"))


def test_another_engine_goes_on_where_one_was_killed(
    large: Path, dest: Path, pack: Pack, cluster: str, tmp_path: Path
) -> None:
    """SIGKILL hits a worker, whose bundle is retried, and then ``wald-archive`` itself between two bundles."""
    pristine = copied(large, tmp_path / "pristine")
    arguments = ["a", "--root", large, "--dest", dest, "--records-per-bundle", 40_000, "--master", cluster]
    quick = "extraJavaOptions -XX:TieredStopAtLevel=1 -XX:+UseSerialGC\n"
    (tmp_path / "spark-defaults.conf").write_text(f"spark.driver.{quick}spark.executor.{quick}")
    env = os.environ | {"SPARK_CONF_DIR": str(tmp_path)}
    process = subprocess.Popen(command(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    eventually(lambda: len(made(dest)) >= 2 or process.poll() is not None, timeout=90)
    os.kill(workers()[0], signal.SIGKILL)
    begun = list(dest.rglob("*.zst"))  # includes the unfinished one
    eventually(lambda: all(Path(f"{path}.sha256").exists() for path in begun) or process.poll() is not None)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    eventually(lambda: not executors())
    assert 2 <= len(made(dest)) < 50
    half, other = copied(dest, tmp_path / "half"), copied(large, tmp_path / "other")
    (content,) = ledger_lines(Root(large))

    assert [run.resumed for run in pack(large, dest)] == [True]
    assert errors(dest, root=Root(large)) == []
    assert wald.open(large).cursor("a").sequence == 2_000_000
    by_spark = files(dest)

    shutil.rmtree(dest)
    half.rename(dest)
    assert [run.resumed for run in archive(other, dest)] == [True]

    moment, software = str(content["archived_at"]), str(content["software"])
    undisturbed = tmp_path / "undisturbed"
    archive(pristine, undisturbed, size=Records(40_000), codec=Codec.ZST, moment=moment, software=software)
    assert files(undisturbed) == by_spark == files(dest)

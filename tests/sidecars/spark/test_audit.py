"""Audits of many logs, and bundles that executors make, which are those of a single process."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from archives import archive, command, copied, errors, files, ledger_lines
from damage import flip_bit, flipped
from json_page import require_documented
from logs import Built
from reclaiming import EXPIRE, reclaim
from repairing import repair
from running import eventually

import wald
from wald.checking.checker import Level
from wald.checking.verifier import verify
from wald.errors import Damaged, NotFound, Unavailable
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.files.ledger_read import read_ledger
from wald.files.ledger_write import Ledger
from wald.format.names import WORK_SUFFIX, Kind
from wald.retention.cursors import CursorState
from wald.work.group import WorkGroup
from wald_archive.bundle import Bytes, Records, Size
from wald_archive.codecs import Codec
from wald_archive.objects import open_destination
from wald_archive.pack import Packed
from wald_reclaim.policy import Limits
from wald_spark import engine
from wald_spark.audit.audits import Audit, BagWork, Outcomes, audit, audit_lines, pickled_outcome, plan, reports
from wald_spark.engine import spark_bundles

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def filled(path: Path) -> Built:
    """Six sealed segments and an active one, with two routes; the first two are reclaimed, and bundles hold route a."""
    built = Built(path)
    for number in range(6):
        built.lines("a", [b"one", b"two"])
        built.columns("b", [b"x", b"y"], keys=[b"k", None])
        built.piece("a", b"long", begins=True, ends=False)
        built.cut()
        built.piece("a", b" line\n", begins=False, ends=True)
        if number == 1:
            built.log.set_cursor("a", built.last)
            built.log.set_cursor("b", built.last)
    built.seal()
    reclaim(built)
    archive(built, path / "archive", size=Records(4))
    return built


def audited(spark: SparkSession, *paths: Path, destinations: Iterable[str] = ()) -> Audit:
    return audit(spark, plan(paths, list(destinations)), on_bytes=lambda _: None)


def errors_of(done: Audit) -> list[tuple[str, str]]:
    """Return the file name and the message of each error."""
    return [(Path(found.where).name, found.message) for found in done.found if found.kind == "error"]


def verified(path: Path) -> list[tuple[str, int, str]]:
    findings = verify(Root(path))
    return [(str(each.path), each.offset, each.message) for each in findings if each.level is not Level.OK]


def rewrite(path: Path, built: Built, change: dict[str, Any]) -> None:
    """Change the last line of a ledger, with a valid chain."""
    entries = read_ledger(path).entries
    path.unlink()
    ledger = Ledger(path, built.disk)
    ledger.append(*entries[:-1], entries[-1] | change)
    ledger.close()


def test_good_logs_have_no_errors(spark: SparkSession, tmp_path: Path) -> None:
    logs = [filled(tmp_path / name) for name in ("one", "two", "three")]
    spent: list[int] = []
    planned = plan([built.root.path for built in logs], [])
    done = audit(spark, planned, on_bytes=spent.append)
    assert errors_of(done) == []
    for report in done.logs:
        assert (report.counts["segments"], report.counts["reclaimed"], report.counts["expired"]) == (5, 2, 0)
        assert report.errors == 0
        assert report.counts["records"] > 0
        assert report.counts["raw_bytes"] > 0
    assert [(each.counts["bags"], each.counts["bundles"]) for each in done.archives] == [
        (1, report.counts["bundles"]) for report in done.logs
    ]
    assert sum(spent) == sum(work.stored_bytes for work in planned.work)


def test_one_log_of_three_is_damaged_in_every_way(spark: SparkSession, tmp_path: Path) -> None:
    """The findings in segments equal those of ``wald verify``; the other two logs have no errors."""
    one, two, three = (filled(tmp_path / name) for name in ("one", "two", "three"))
    sealed = sorted(two.root.segments.glob("*.zst"))
    sealed[1].write_bytes(flipped(sealed[1].read_bytes(), 8 * 100))
    sealed[2].unlink()
    cursors = [{"route": "a", "count": 3, "first": 6, "last": 8, "cursors": {"processed": 7}}]
    rewrite(two.root.ledger / "reclaim.jsonl", two, {"routes": cursors})
    bundle = next((two.root.path / "archive").glob("a/*/data/*.tar"))
    bundle.write_bytes(flipped(bundle.read_bytes(), 8 * 700))

    done = audited(spark, one.root.path, two.root.path, three.root.path)
    content = errors_of(done)
    expected = verified(two.root.path)
    assert sealed[1].name in [name for name, _ in content]
    assert any("no ledger explains why" in words for name, words in content if name == "segments")
    assert [(f.where, f.offset, f.message) for f in done.logs[1].found if "reclaim.jsonl" not in f.where] == expected
    assert any("record 8 of route a was deleted before it was read by processed at 7" in words for _, words in content)
    assert any("the line omits route b" in words for _, words in content)
    assert any(name == bundle.name and "its sha256 is" in words for name, words in content)
    assert [report.errors > 0 for report in done.logs] == [False, True, False]
    assert [report.errors > 0 for report in done.archives] == [False, True, False]


def test_a_damaged_journal_of_a_work_group_is_an_error(spark: SparkSession, tmp_path: Path) -> None:
    built = filled(tmp_path / "one")
    with WorkGroup(built.root.path, "a", "g"):
        pass
    assert errors_of(audited(spark, built.root.path)) == []
    journal = built.root.cursor_directory("a") / f"g{WORK_SUFFIX}"
    journal.write_bytes(b"{}\n" + journal.read_bytes())
    found = errors_of(audited(spark, built.root.path))
    assert [name for name, _ in found] == [journal.name]
    assert "the group does not start with this journal" in found[0][1]


def test_what_was_given_up_by_a_repair_is_listed_and_no_error(spark: SparkSession, tmp_path: Path) -> None:
    built = filled(tmp_path / "one")
    built.crash()
    segment = sorted(built.root.segments.glob(f"*{Kind.SEALED.value}"))[1]
    segment.write_bytes(flipped(segment.read_bytes(), 8 * 60))
    assert errors_of(audited(spark, built.root.path)) != []
    assert repair(built.root.path).loses_data
    done = audited(spark, built.root.path)
    assert errors_of(done) == []
    assert [each.message for each in done.found if "are lost: " in each.message] != []


def test_what_expired_is_counted_and_no_error(spark: SparkSession, tmp_path: Path) -> None:
    built = filled(tmp_path / "root")
    reclaim(built, Limits(max_records=1, others=EXPIRE))
    done = audited(spark, built.root.path)
    assert errors_of(done) == []
    assert done.logs[0].counts["reclaimed"] == 6
    assert done.logs[0].counts["expired"] > 0


def here(*paths: Path, destinations: Iterable[str] = (), unreachable: bool = False, first: int = 1) -> Audit:
    """Run an audit without Spark; work and outcomes are pickled, as for executors, and archives may be unreachable."""
    planned, outcomes = plan(paths, list(destinations), first=first), Outcomes()
    for work in planned.work:
        there = replace(work, place="nosuch://bucket") if unreachable and isinstance(work, BagWork) else work
        outcomes[work.key] = pickled_outcome(pickle.loads(pickle.dumps(there)))
    archives = tuple(reports(planned.archives, outcomes, first=planned.first))
    return Audit(tuple(log.report(outcomes) for log in planned.logs), archives, 1)


@pytest.mark.parametrize("address", ["nosuch://bucket/archive", "http://127.0.0.1:1/archive"])
def test_an_archive_out_of_reach_is_neither_good_nor_damaged(tmp_path: Path, address: str) -> None:
    """A package for the store is missing, or nothing answers there; the other archives are still verified."""
    built = filled(tmp_path / "root")
    done = here(built.root.path, destinations=[address])
    assert [(each.counts["dest"], each.errors, each.counts["bundles"] > 0) for each in done.archives] == [
        (str(tmp_path / "root" / "archive"), 0, True),
        (address, 0, False),
    ]
    assert (errors_of(done), done.unread, done.exit_code) == ([], 1, 6)
    *lines, judged = audit_lines(done, as_json=False)
    assert judged.startswith("not all could be read: ")
    assert [line for line in lines if line.startswith("unread")] == [line for line in lines if f" {address}: " in line]
    (content,) = map(json.loads, audit_lines(done, as_json=True))
    require_documented("wald-audit", content)
    assert [each["path"] for each in content["found"] if each["level"] == "unread"] == [address]

    (tmp_path / "root" / "archive").rename(tmp_path / "moved")
    done = here(built.root.path, destinations=[address])
    assert (done.archives[0].errors, done.exit_code) == (1, 4)


def test_a_bag_that_cannot_be_read_makes_no_other_suspicious(tmp_path: Path) -> None:
    """The driver may reach a store that an executor cannot, for example because a package is missing there."""
    built = filled(tmp_path / "root")
    done = here(built.root.path, unreachable=True)
    assert (errors_of(done), done.unread, done.exit_code) == ([], 1, 6)


def test_a_partial_copy_is_good_from_the_record_that_is_named(tmp_path: Path) -> None:
    built = Built(tmp_path / "root")
    for number in range(4):
        built.lines("a", [b"one", b"two"])
        archive(built, tmp_path / "archive", to=2 * number + 2)
        built.cut()
    built.seal()
    assert not errors_of(here(built.root.path, first=1))
    built.path(1, Kind.SEALED).unlink()
    built.path(3, Kind.SEALED).unlink()
    for gone in sorted((tmp_path / "archive" / "a").iterdir())[:2]:
        gone.rename(tmp_path / gone.name)
    for first in (1, 4):
        words = " ".join(message for _, message in errors_of(here(built.root.path, first=first)))
        assert f"records {first} to 4 are in no segment" in words
        assert "follows" in words
        assert "missing; the ledger says that it is here" in words
    for first in (5, 6):
        assert errors_of(here(built.root.path, first=first)) == []

    built.path(5, Kind.SEALED).unlink()
    max((tmp_path / "archive" / "a").iterdir()).rename(tmp_path / "last")
    assert "records 5 to 6 are in no segment" in str(errors_of(here(built.root.path, first=5)))
    assert "missing; the ledger says that it is here" in str(errors_of(here(built.root.path, first=5)))


def test_a_segment_sealed_between_plan_and_check_is_read_in_its_new_form(spark: SparkSession, tmp_path: Path) -> None:
    built = Built(tmp_path / "root")
    built.lines("a", [b"one"])
    built.cut()
    built.lines("a", [b"two"])
    planned = plan([built.root.path], [])
    built.seal()
    done = audit(spark, planned, on_bytes=lambda _: None)
    assert errors_of(done) == []
    assert done.logs[0].counts["segments"] == 2
    assert not built.path(1, Kind.RAW).exists()


def test_a_log_that_is_not_where_an_executor_is_ends_the_audit(spark: SparkSession, tmp_path: Path) -> None:
    """The log moves away after planning; it does not count as damaged."""
    built = Built(tmp_path / "root")
    planned = plan([built.root.path], [])
    (tmp_path / "root").rename(tmp_path / "elsewhere")
    with pytest.raises(Unavailable, match="does not exist on"):
        audit(spark, planned, on_bytes=lambda _: None)


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no log here"):
        plan([tmp_path], [])


@pytest.mark.spark
def test_the_command_reports_and_exits_with_4(cluster: str, tmp_path: Path) -> None:
    """One of the roots that match a pattern is damaged; the audit runs on a cluster."""
    good, bad = filled(tmp_path / "good"), filled(tmp_path / "bad")
    next(bad.root.segments.glob("*.zst")).unlink()
    line = [sys.executable, "-m", "wald_spark.audit", "--root", f"{tmp_path}/*", "--master", cluster, "--json"]
    done = subprocess.run(line, capture_output=True, timeout=300, check=False)
    assert done.stderr == b""
    content = json.loads(done.stdout)
    require_documented("wald-audit", content)
    assert done.returncode == 4
    assert [(log["root"], log["errors"]) for log in content["logs"]] == [
        (str(bad.root.path), 1),
        (str(good.root.path), 0),
    ]
    assert content["errors"] == len([found for found in content["found"] if found["level"] == "error"]) == 1
    assert content["raw_bytes"] == sum(log["raw_bytes"] for log in content["logs"])


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

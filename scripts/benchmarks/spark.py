"""The data source and the jobs on Spark, compared with Spark's own readers; one session, two threads.

count, export     compared with spark.read.text on the same lines in .zst files
JSON              parsed in the worker, compared with from_json on the values; and with many bad values
latest per key    wald-compact, compared with the same through the data source
audit             without a peer
narrow queries    a thousand sequences, a second, a quiet route of 100: compared with a whole log, and with 1 % of one
memory            peak of a worker, over a log and over a tenth of it
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

import wald
from benchmarks.report import Goal, Row, Samples
from benchmarks.stage import ROUTE, Daemon, Stage, in_python
from wald.files.disk import Disk
from wald.format.records import encode_columns
from wald.log import Log
from wald_spark.audit.audits import audit, plan
from wald_spark.compact.job import Generations, next_generation
from wald_spark.export.job import Output, Shape, export_new, private
from wald_spark.locations import LogLocation
from wald_spark.options import STRICT
from wald_spark.progress import Run, locked_by
from wald_spark.rows import BATCH_BYTES, JsonValues
from wald_spark.session import session
from wald_spark.source import WaldDataSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from wald.log import Log


MASTER = "local[2]"
JSON_DDL = "host STRING, status INT, amount DOUBLE"
EXPORT_BYTES = 128 << 20  # the command's default
_GROUP = "On Spark"
_NARROW_RECORDS = 1000
_SAMPLE_SECONDS = 0.02
_NARROW_REPEAT = 5  # they take a fraction of a second


def measure(stage: Stage, whole_bytes: int, large_bytes: int) -> list[Row]:
    """Measure everything.

    Args:
        whole_bytes: size of the logs that are read whole; ``large_bytes``: of the one that is searched.
    """
    data = stage.disk / "lines"
    lines = write_lines(data, whole_bytes)
    log = log_of_lines(stage.disk / "log", data, lines)
    text = text_of_lines(stage.disk / "text", data)
    data.unlink()
    with session("wald bench", master=MASTER, settings={"spark.driver.memory": "4g"}) as spark:
        spark.dataSource.register(WaldDataSource)
        bench = _Bench(spark, stage)
        rows = bench.whole(log, text, whole_bytes / 1e6)
        rows.append(_bad_json(stage.repeat))
        rows += bench.tasks(log)
        rows += bench.memory(log)
        keyed = log_of_keys(stage.disk / "keyed", whole_bytes)
        rows += bench.latest(keyed, whole_bytes / 1e6)
        shutil.rmtree(keyed.root.path)
        large = log_of_routes(stage.disk / "large", large_bytes)
        hundredth = log_of_routes(stage.disk / "hundredth", large_bytes // 100)
        rows += bench.narrow(large, hundredth)
    return rows


class _Bench:
    def __init__(self, spark: SparkSession, stage: Stage) -> None:
        self._spark = spark
        self._stage = stage

    def whole(self, log: Log, text: Path, megabytes: float) -> list[Row]:
        """Measure readers of a whole log."""
        from pyspark.sql.functions import from_json

        parsed = self._load(log, schema=f"json STRUCT<{JSON_DDL}>")
        values = self._load(log, schema="value STRING").select(from_json("value", JSON_DDL).alias("json"))
        contenders: dict[str, Callable[[], object]] = {
            "count": self._load(log).count,
            "one column": self._load(log, schema="seq BIGINT").count,
            "text count": self._spark.read.text(str(text)).count,
            "export": lambda: self._export(log),
            "text export": lambda: self._write(self._spark.read.text(str(text))),
            "source export": lambda: self._write(self._load(log)),
            # A new frame each time: a collected one caches its shuffle.
            "json": lambda: _grouped(parsed).collect(),
            "from_json": lambda: _grouped(values).collect(),
            "audit": lambda: self._audit(log),
        }
        samples = self._rates(contenders, megabytes)
        ours = ("count", "count, every column")
        rows = samples.rows(_GROUP, "MB/s", ours, {"text count": Goal(0.5)})
        rows += samples.rows(_GROUP, "MB/s", ("one column", 'count, .schema("seq BIGINT")'), {"text count": Goal(0.5)})
        goals = {"text export": Goal(1.5), "source export": None}
        rows += samples.rows(_GROUP, "MB/s", ("export", "wald-export to Parquet"), goals)
        rows += samples.rows(_GROUP, "MB/s", ("json", "JSON parsed in the worker"), {"from_json": Goal(2)})
        rows.append(Row(_GROUP, "wald-audit", "MB/s", samples.median("audit"), goal=Goal(500)))
        return rows

    def tasks(self, log: Log) -> list[Row]:
        """Count the tasks that share a segment."""
        count = self._load(log, maxBytesPerPartition="8MiB").rdd.getNumPartitions()
        segments = len(list(log.root.segments.glob("*.zst")))
        return [Row(_GROUP, "tasks for a segment, 8 MiB each", "tasks", count / segments, goal=Goal(2))]

    def memory(self, log: Log) -> list[Row]:
        """Measure workers over a whole log, and over a tenth of it."""
        head = log.head()
        assert head is not None
        peaks = []
        for last in (head.sequence // 10, head.sequence):
            with _largest_worker() as peak:
                self._load(log, endingSequence=last).count()
            peaks.append(peak() / 1e6)
        return [
            Row(_GROUP, "a worker at its largest", "MB", peaks[1], "over a tenth of the log", peaks[0], Goal(1.3, True))
        ]

    def latest(self, log: Log, megabytes: float) -> list[Row]:
        """Measure the latest value of each key."""
        from pyspark.sql.functions import max_by

        source = self._load(log, schema="key BINARY, seq BIGINT, value BINARY")
        contenders = {
            "compact": lambda: self._compact(log),
            "source": lambda: self._write(source.groupBy("key").agg(max_by("value", "seq"))),
        }
        samples = self._rates(contenders, megabytes)
        return samples.rows(_GROUP, "MB/s", ("compact", "wald-compact, 200,000 keys"), {"source": Goal(1.5)})

    def narrow(self, large: Log, hundredth: Log) -> list[Row]:
        """Measure queries of a few records out of many, in seconds."""
        rows = []
        logs = {"large": large, "hundredth": hundredth}
        scan = _seconds(self._load(large).count)
        for what, options in (
            ("1,000 sequences", _middle),
            ("the records of one moment", _moment),
            ("a quiet route of 100", lambda _: {"route": QUIET}),
        ):
            queries = {name: self._load(log, **options(log)) for name, log in logs.items()}
            contenders = {name: lambda query=query: _seconds(query.count) for name, query in queries.items()}
            samples = Samples.alternate(contenders, _NARROW_REPEAT)
            median = samples.median("large")
            rows.append(
                Row(_GROUP, f"{what}, out of the large log", "s", median, "all of it", scan, Goal(1 / 20, True))
            )
            rows += samples.rows(_GROUP, "s", ("large", what), {"hundredth": Goal(1.3, at_most=True)})
        return rows

    def _load(self, log: Log, *, schema: str = "", **options: object) -> DataFrame:
        reader = self._spark.read.format("wald").options(**{name: str(value) for name, value in options.items()})
        return (reader.schema(schema) if schema else reader).load(str(log.root.path))

    def _rates(self, contenders: dict[str, Callable[[], object]], megabytes: float) -> Samples:
        """Return the MB/s of each; the first round, in which the JVM compiles, does not count."""
        for run in contenders.values():
            run()
        measured = {name: lambda run=run: megabytes / _seconds(run) for name, run in contenders.items()}
        return Samples.alternate(measured, self._stage.repeat)

    def _write(self, frame: DataFrame) -> None:
        place = self._stage.fresh(self._stage.disk)
        frame.write.mode("overwrite").parquet(str(place))
        shutil.rmtree(place)

    def _export(self, log: Log) -> None:
        with self._output("export") as out:
            export_new(Output(out, Disk()), Shape(), EXPORT_BYTES, self._run(), print, [_place(log)])

    def _compact(self, log: Log) -> None:
        with self._output("compact") as out:
            next_generation(Generations(out, Disk()), None, self._run(), [_place(log)])

    def _run(self) -> Run:
        return Run(STRICT, "", partial(nullcontext, self._spark))

    @contextmanager
    def _output(self, job: str) -> Iterator[Path]:
        """Yield a new directory for the output of a job, locked."""
        out = self._stage.fresh(self._stage.disk)
        with locked_by(job, private(out), Disk()):
            yield out
        shutil.rmtree(out)

    def _audit(self, log: Log) -> None:
        found = audit(self._spark, plan([log.root.path], []), on_bytes=lambda _: None)
        if found.errors:
            raise SystemExit("the audit has found errors")


def _bad_json(repeat: int) -> Row:
    """Measure the parser of JSON on one core, in this process, with a field of another type in every tenth value."""
    values = [
        line.replace(b'"status":', b'"status":"bad","code":') if number % 10 == 0 else line
        for number, line in enumerate(json_lines(BATCH_BYTES).splitlines())
    ]
    batch = pa.array(values, pa.binary())
    fields = [("host", pa.string()), ("status", pa.int32()), ("amount", pa.float64())]
    parser = JsonValues(pa.schema(fields))
    samples = Samples.alternate({"json": lambda: batch.nbytes / 1e6 / _seconds(lambda: parser.parse(batch))}, repeat)
    return Row(_GROUP, "JSON, a tenth of another type, one core", "MB/s", samples.median("json"), goal=Goal(20))


def _place(log: Log) -> LogLocation:
    return LogLocation(log.root, log.identity.log_id)


def _grouped(frame: DataFrame) -> DataFrame:
    return frame.groupBy("json.host").agg({"json.amount": "sum", "json.status": "max"})


def _middle(log: Log) -> dict[str, object]:
    head = log.head()
    assert head is not None
    first = head.sequence // 2
    return {"startingSequence": first, "endingSequence": first + _NARROW_RECORDS - 1}


def _moment(log: Log) -> dict[str, object]:
    """Return a millisecond that contains one or more batches."""
    head = log.head()
    assert head is not None
    at = next(iter(log.batches(start=head.sequence // 2))).append_time_ns // 1_000_000
    return {"startingTimestamp": at, "endingTimestamp": at + 1}


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


@contextmanager
def _largest_worker() -> Iterator[Callable[[], int]]:
    """Track the peak memory of the Python workers below this process."""
    stop, largest = threading.Event(), 0

    def watch() -> None:
        nonlocal largest
        while not stop.wait(_SAMPLE_SECONDS):
            largest = max([largest, *(_status(worker, "VmRSS:") << 10 for worker in _workers())])

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: largest
    finally:
        stop.set()
        thread.join()


def _workers() -> Iterator[Path]:
    """Yield the Python processes that Spark has started below this one."""
    status = {int(path.parent.name): path for path in Path("/proc").glob("[0-9]*/status")}
    parents = {pid: _status(path, "PPid:") for pid, path in status.items()}
    for pid, path in status.items():
        above = pid
        while above in parents and above != os.getpid():
            above = parents[above]
        if above == os.getpid() and pid != above and b"pyspark.daemon" in _command_line(pid):
            yield path


def _status(path: Path, field: str) -> int:
    """Return a number of /proc/PID/status; 0 if the process has ended."""
    try:
        return next((int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith(field)), 0)
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


SEGMENT_BYTES = 64 << 20
ROUTES = 100
QUIET = "quiet"
_BLOCK_BYTES = 32 << 20  # generated once and repeated; tasks and frames are smaller, so repetition does not help
_KEYS = 200_000
_REQUEST_BYTES = 96 << 10
_QUIET_TIMES = 10
_PART_LINES = "64m"


def json_lines(length: int = _BLOCK_BYTES) -> bytes:
    """Return about this number of bytes of JSON objects, 160 bytes each."""
    chance = random.Random(4)
    hosts = [f"host{number:03d}.example.org" for number in range(200)]
    lines: list[str] = []
    written = 0
    while written < length:
        at = f"10:{chance.randrange(60):02d}:{chance.randrange(60):02d}"
        status, amount = chance.choice((200, 200, 200, 304, 404, 500)), chance.uniform(0, 1000)
        line = (
            f'{{"time":"2026-11-21T{at}Z","host":"{chance.choice(hosts)}","status":{status},"amount":{amount:.3f},'
            f'"user":{chance.randrange(10**6)},"path":"/api/v1/{chance.getrandbits(32):x}"}}\n'
        )
        lines.append(line)
        written += len(line)
    return "".join(lines).encode()


def write_lines(path: Path, length: int) -> int:
    """Write about ``length`` bytes of JSON lines to a file; return the number of lines."""
    block, written, lines = json_lines(min(length, _BLOCK_BYTES)), 0, 0
    with path.open("wb") as file:
        while written < length:
            written += file.write(block)
            lines += block.count(b"\n")
    return lines


def log_of_lines(root: Path, data: Path, lines: int) -> Log:
    """Append every line of ``data`` to one route, through its FIFO."""
    with Daemon(root, segment_max_bytes=SEGMENT_BYTES) as daemon:
        daemon.feed(data, lines)
    return sealed(root)


def text_of_lines(place: Path, data: Path) -> Path:
    """Write the same lines as Spark's own reader expects them: ``.zst`` files of 64 MiB each."""
    place.mkdir()
    command = ["split", "-C", _PART_LINES, "--filter", 'zstd -3 -q > "$FILE.zst"', data, place / "part-"]
    subprocess.run(command, check=True)
    return place


def log_of_keys(root: Path, length: int) -> Log:
    """Append about this number of bytes of keyed records: 200,000 keys in turn."""
    values = json_lines().splitlines()
    chance = random.Random(5)
    requests: list[bytes] = []
    for start in range(0, len(values) - 1000, 1000):
        part = values[start : start + 1000]
        keys = [b"user-%06d" % chance.randrange(_KEYS) for _ in part]
        requests.append(encode_columns(part, keys=keys))
    with Daemon(root, segment_max_bytes=SEGMENT_BYTES) as daemon, daemon.connect() as producer:
        sent = 0
        for payload in cycle(requests):
            producer.publish(ROUTE, payload, columns=True)
            sent += len(payload)
            if sent >= length:
                break
        producer.flush()
    return sealed(root)


def log_of_routes(root: Path, length: int) -> Log:
    """Append about this number of bytes to 100 routes in turn; one of them has ten short bursts."""
    block = json_lines()
    starts = range(0, len(block) - _REQUEST_BYTES, _REQUEST_BYTES)
    requests = [
        block[block.find(b"\n", start) + 1 : block.rfind(b"\n", 0, start + _REQUEST_BYTES) + 1] for start in starts
    ]
    with Daemon(root, segment_max_bytes=SEGMENT_BYTES) as daemon, daemon.connect() as producer:
        names = [f"busy-{number:02d}" for number in range(ROUTES - 1)]
        for name in (*names, QUIET):
            producer.command("ROUTE", "ADD", name)
        sent = bursts = 0
        for request, name in zip(cycle(requests), cycle([name for name in names for _ in range(10)]), strict=False):
            producer.publish(name, request)
            sent += len(request)
            if sent * _QUIET_TIMES >= length * bursts:
                producer.publish(QUIET, requests[bursts])
                bursts += 1
            if sent >= length:
                break
        producer.flush()
    return sealed(root)


def sealed(root: Path) -> Log:
    """Return the log with every segment sealed."""
    in_python("scan", root, "seal")
    return wald.open(root)

"""Data source ``wald``: logs, shipped segments and archives as batch or streaming DataFrames.

    spark.read.format("wald").load("/var/spool/wald")
    spark.readStream.format("wald").load("/var/spool/*")

Options and columns are those of :mod:`wald_spark.options` and :mod:`wald_spark.rows`. If ``pyspark_wald`` is installed
next to PySpark, Spark finds the source automatically; otherwise call ``spark.dataSource.register(WaldDataSource)``.
Spark imports this module for every format that it does not know, so other imports wait until it is used.

Spark writes the end of a trigger into ``offsets/N`` of the checkpoint before it reads anything, and ``commits/N`` once
the sink has it. After a crash it repeats a trigger that has only the former, and never one that has both. So a stream
needs no ``commit()``, which Spark calls one trigger late, and for the last one never. A cursor follows a stream with
``wald cursor from-checkpoint``.

Readers are pickled and sent to executors, which read with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from wald.errors import Damaged, WaldError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from wald_spark.checkpoint import Offsets
    from wald_spark.options import Limits, Options
    from wald_spark.query import Piece
    from wald_spark.rows import Rows


class WaldDataSource(DataSource):
    """The data source ``wald`` of Spark."""

    @classmethod
    def name(cls) -> str:
        return "wald"

    def schema(self) -> str:
        from wald_spark.options import STREAM_OPTIONS, parse_options
        from wald_spark.rows import schema_ddl

        with with_hint():
            return schema_ddl(parse_options(self.options, also=STREAM_OPTIONS).json_ddl)

    def reader(self, schema: StructType) -> DataSourceReader:
        with with_hint():
            return QueryReader(*self._parsed(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        from wald_spark.options import STREAM_OPTIONS

        try:
            with with_hint():
                return StreamReader(*self._parsed(schema, STREAM_OPTIONS))
        except WaldError as error:
            return RefusedStream(error)

    def _parsed(self, schema: StructType, also: tuple[str, ...] = ()) -> tuple[Options, Rows]:
        from wald_spark.options import parse_options
        from wald_spark.rows import Rows

        options = parse_options(self.options, also=also)
        return options, Rows.of(schema, value_bytes=options.value_bytes, tolerance=options.tolerance)


class Task(InputPartition):
    """Pieces that one task reads."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__(pieces)
        self.pieces = pieces


@dataclass(frozen=True)
class QueryReader(DataSourceReader):
    """Reader of the records that exist when the query is planned."""

    options: Options
    rows: Rows

    def partitions(self) -> list[InputPartition]:
        from wald_spark.query import plan_query

        with with_hint():
            return _tasks(plan_query(self.options), self.options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self.rows, partition)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reader of a stream: one process plans the triggers, and copies of the reader run on executors."""

    def __init__(self, options: Options, rows: Rows) -> None:
        from wald_spark.options import parse_stream_options
        from wald_spark.stream import Triggers

        self._options = options
        self._rows = rows
        stream = parse_stream_options(options.given)
        self._limits = stream.limits
        self._triggers = Triggers(options, stream)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's names
        if self._limits.records is not None:
            return ReadMaxRows(self._limits.records)
        return ReadAllAvailable() if self._limits.raw_bytes is None else ReadMaxBytes(self._limits.raw_bytes)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        with with_hint():
            self._triggers.close()

    def initialOffset(self) -> dict[str, object]:  # noqa: N802
        return _encoded(self._triggers.start())

    def latestOffset(self, start: Mapping[str, object], limit: ReadLimit) -> dict[str, object]:  # noqa: N802
        with with_hint():
            return _encoded(self._triggers.end(_decoded(start), self._limits_within(limit)))

    def reportLatestOffset(self) -> dict[str, object] | None:  # noqa: N802
        latest = self._triggers.latest
        return None if latest is None else _encoded(latest)

    def partitions(self, start: Mapping[str, object], end: Mapping[str, object]) -> list[InputPartition]:
        with with_hint():
            return _tasks(self._triggers.pieces(_decoded(start), _decoded(end)), self._options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._rows, partition)

    def _limits_within(self, limit: ReadLimit) -> Limits:
        """Return the limits combined with Spark's, which is a single one; the limit of bytes is kept."""
        from wald_spark.options import Limits

        if isinstance(limit, ReadMaxRows):
            return replace(self._limits, records=limit.max_rows)
        return Limits(raw_bytes=limit.max_bytes) if isinstance(limit, ReadMaxBytes) else Limits()


class RefusedStream(DataSourceStreamReader):
    """Placeholder for an unreadable stream: PySpark loses the reason of errors raised before a reader exists."""

    def __init__(self, error: WaldError) -> None:
        self._error = error

    def initialOffset(self) -> dict[str, object]:  # noqa: N802 - Spark's name
        raise self._error

    def read(self, _: InputPartition) -> Iterator[pa.RecordBatch]:
        raise self._error


@contextmanager
def with_hint() -> Iterator[None]:
    """Add the hint of an error to its message, because Spark shows only the message."""
    try:
        yield
    except WaldError as error:
        message = f"{error.message}\n  hint: {error.hint}" if error.hint else error.message
        explained = type(error)(message, hint=error.hint)
        if error.hint:
            explained.__notes__.clear()  # the message contains the hint
        raise explained from error


def _tasks(pieces: Sequence[Piece], options: Options) -> list[InputPartition]:
    from wald_spark.plan import fair_share, packed

    limit_bytes = fair_share(sum(piece.raw_bytes for piece in pieces), options.partition_bytes)
    return [Task(task) for task in packed(pieces, limit_bytes=limit_bytes)]


def _read(rows: Rows, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one task; if there is nothing to read, Spark makes a task without pieces."""
    with with_hint():
        for piece in partition.pieces if isinstance(partition, Task) else ():
            yield from rows.read(piece)


def _encoded(offsets: Offsets) -> dict[str, object]:
    from wald_spark.checkpoint import encode_offsets

    return encode_offsets(offsets)


def _decoded(decoded: Mapping[str, object]) -> Offsets:
    from wald_spark.checkpoint import BadOffsets, decode_offsets

    try:
        return decode_offsets(decoded)
    except BadOffsets as error:
        raise Damaged(f"the checkpoint has other offsets: {error}", hint="use a separate checkpointLocation") from error

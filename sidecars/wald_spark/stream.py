"""The streaming side of the data source: what Spark asks of a stream, answered by its triggers.

Spark writes the end of a trigger into ``offsets/N`` of the checkpoint before it reads anything, and ``commits/N`` once
the sink has it all. After a crash it plans a trigger again that has the one and not the other, and never one that has
both. That is all it takes: there is nothing to do in ``commit()``, which Spark calls one trigger late, and for the last
one never. Whoever wants a cursor to follow the stream takes it from the checkpoint: ``wald cursor from-checkpoint``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from wald.errors import Damaged, WaldError
from wald_spark.admission import Limits
from wald_spark.offsets import BadOffsets, Offsets, decode_offsets, encode_offsets
from wald_spark.options import Options
from wald_spark.plan import shared
from wald_spark.source import Task, hints, read_task
from wald_spark.stream_options import parse_stream_options
from wald_spark.triggers import Triggers

if TYPE_CHECKING:
    import pyarrow as pa

    from wald_spark.rows import Rows


class Refusing(DataSourceStreamReader):
    """A stream that cannot be. PySpark would lose the reason of what fails before there is a reader."""

    def __init__(self, error: WaldError) -> None:
        self._error = error

    def initialOffset(self) -> dict[str, object]:  # noqa: N802 - Spark's name
        raise self._error

    def read(self, _: InputPartition) -> Iterator[pa.RecordBatch]:
        raise self._error


class WaldStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream. One lives in the process that plans, as long as the query; executors have others, to read with.

    Raises:
        InvalidInput: an option that streams do not have, or a value that cannot be.
    """

    def __init__(self, options: Options, rows: Rows) -> None:
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
        with hints():
            self._triggers.close()

    def initialOffset(self) -> dict[str, object]:  # noqa: N802
        return encode_offsets(self._triggers.start())

    def latestOffset(self, start: Mapping[str, object], limit: ReadLimit) -> dict[str, object]:  # noqa: N802
        with hints():
            return encode_offsets(self._triggers.end(_decoded(start), self._within(limit)))

    def reportLatestOffset(self) -> dict[str, object] | None:  # noqa: N802
        latest = self._triggers.latest
        return None if latest is None else encode_offsets(latest)

    def partitions(self, start: Mapping[str, object], end: Mapping[str, object]) -> list[InputPartition]:
        with hints():
            pieces = self._triggers.pieces(_decoded(start), _decoded(end))
            return [Task(task) for task in shared(pieces, most_bytes=self._options.partition_bytes)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_task(self._rows, partition)

    def _within(self, limit: ReadLimit) -> Limits:
        """Spark knows one limit at a time, of rows if there is one; that of bytes is then ours to keep."""
        if isinstance(limit, ReadMaxRows):
            return replace(self._limits, records=limit.max_rows)
        return Limits(raw_bytes=limit.max_bytes) if isinstance(limit, ReadMaxBytes) else Limits()


def _decoded(told: Mapping[str, object]) -> Offsets:
    try:
        return decode_offsets(told)
    except BadOffsets as error:
        raise Damaged(f"the checkpoint holds other offsets: {error}", hint="a checkpointLocation of its own") from error

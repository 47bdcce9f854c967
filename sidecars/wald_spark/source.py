"""The data source ``wald``: logs, shipped segments and archives as a DataFrame, once or as they grow.

    spark.read.format("wald").load("/var/spool/wald")
    spark.readStream.format("wald").load("/var/spool/*")

Options and columns are those of :mod:`wald_spark.options` and :mod:`wald_spark.rows`. Where ``pyspark_wald`` is
installed beside PySpark, Spark finds the source by itself; elsewhere ``spark.dataSource.register(WaldDataSource)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from wald.errors import WaldError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import DataSourceStreamReader
    from pyspark.sql.types import StructType

    from wald_spark.options import Options
    from wald_spark.query import Piece
    from wald_spark.rows import Rows


class WaldDataSource(DataSource):
    """What Spark calls ``wald``. Light: Spark imports this module for every format it does not know."""

    @classmethod
    def name(cls) -> str:
        return "wald"

    def schema(self) -> str:
        from wald_spark.options import parse_options
        from wald_spark.rows import schema_ddl
        from wald_spark.stream_options import OPTIONS

        with hints():
            return schema_ddl(parse_options(self.options, also=OPTIONS).json_ddl)

    def reader(self, schema: StructType) -> DataSourceReader:
        from wald_spark.options import parse_options

        with hints():
            options = parse_options(self.options)
            return WaldReader(options, _rows(schema, options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        from wald_spark.options import parse_options
        from wald_spark.stream import Refusing, WaldStreamReader
        from wald_spark.stream_options import OPTIONS

        try:
            with hints():
                options = parse_options(self.options, also=OPTIONS)
                return WaldStreamReader(options, _rows(schema, options))
        except WaldError as error:
            return Refusing(error)


class Task(InputPartition):
    """What one task reads."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__(pieces)
        self.pieces = pieces


@dataclass(frozen=True)
class WaldReader(DataSourceReader):
    """A query. What it reads is settled when it is planned: what comes later is not in it."""

    options: Options
    rows: Rows

    def partitions(self) -> list[InputPartition]:
        from wald_spark.plan import shared
        from wald_spark.query import plan_query

        with hints():
            pieces = plan_query(self.options)
            return [Task(task) for task in shared(pieces, most_bytes=self.options.partition_bytes)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_task(self.rows, partition)


def read_task(rows: Rows, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """The rows of one task; one without pieces stands for no task at all, which Spark does not know."""
    with hints():
        for piece in partition.pieces if isinstance(partition, Task) else ():
            yield from rows.read(piece)


@contextmanager
def hints() -> Iterator[None]:
    """Spark shows an error's message only, so the hint goes into it."""
    try:
        yield
    except WaldError as error:
        words = f"{error.message}\n  hint: {error.hint}" if error.hint else error.message
        raise type(error)(words, hint=error.hint) from error


def _rows(schema: StructType, options: Options) -> Rows:
    from wald_spark.rows import Rows

    return Rows.of(schema, value_bytes=options.value_bytes, tolerance=options.tolerance)

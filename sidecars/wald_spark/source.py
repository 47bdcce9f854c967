"""Data source ``wald``: logs, shipped segments and archives as a DataFrame, once or as a stream.

    spark.read.format("wald").load("/var/spool/wald")
    spark.readStream.format("wald").load("/var/spool/*")

Options and columns are those of :mod:`wald_spark.options` and :mod:`wald_spark.rows`. If ``pyspark_wald`` is installed
next to PySpark, Spark finds the source automatically; otherwise call ``spark.dataSource.register(WaldDataSource)``.

Spark imports this module for every format that it does not know, so other imports wait until it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader

from wald.errors import WaldError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from wald_spark.options import Options
    from wald_spark.rows import Rows


class WaldDataSource(DataSource):
    """Data source that Spark calls ``wald``."""

    @classmethod
    def name(cls) -> str:
        return "wald"

    def schema(self) -> str:
        from wald_spark.options import STREAM_OPTIONS, parse_options
        from wald_spark.readers import with_hint
        from wald_spark.rows import schema_ddl

        with with_hint():
            return schema_ddl(parse_options(self.options, also=STREAM_OPTIONS).json_ddl)

    def reader(self, schema: StructType) -> DataSourceReader:
        from wald_spark.options import parse_options
        from wald_spark.readers import QueryReader, with_hint

        with with_hint():
            options = parse_options(self.options)
            return QueryReader(options, _rows(schema, options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        from wald_spark.options import STREAM_OPTIONS, parse_options
        from wald_spark.readers import RefusedStream, StreamReader, with_hint

        try:
            with with_hint():
                options = parse_options(self.options, also=STREAM_OPTIONS)
                return StreamReader(options, _rows(schema, options))
        except WaldError as error:
            return RefusedStream(error)


def _rows(schema: StructType, options: Options) -> Rows:
    from wald_spark.rows import Rows

    return Rows.of(schema, value_bytes=options.value_bytes, tolerance=options.tolerance)

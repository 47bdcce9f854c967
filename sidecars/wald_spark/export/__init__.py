"""Export: each record is written once to Parquet, in a directory that Spark, DuckDB and pandas read as one table.

    OUT/route=access/date=2026-11-21/<log>-<first>-<last>.parquet   date: UTC, of the append time
    OUT/_wald/<log>.json                                            position in a log, and options
    OUT/_wald/lock                                                  held by the run
    OUT/_staging/<run>/                                             files that are being written

Spark and pyarrow ignore names that begin with ``_``, and no file below such a name ends in ``.parquet``. The columns
are those of the data source (:mod:`wald_spark.rows`); ``route`` is in the names of directories only.

Executors write and sync files below ``_staging``. When all are complete, the file of each log is replaced in one step:
it records the new position in the log, and the files to move. Then they are moved. A run that dies before that step
leaves only files that the next run removes; after it, the next run moves the rest. So a record is never in two files,
and a file has its name only when it is complete. At the end of a run, readers may see some of its files before others.

A run exports the records before the first incomplete one, and the next run continues there.
"""

"""EXPORT: records become Parquet, each once, in a directory that Spark, DuckDB and pandas read as one table.

    OUT/route=access/date=2026-11-21/<log>-<first>-<last>.parquet   date: UTC, of the append time
    OUT/_wald/<log>.json                                            up to where a log is exported, and how
    OUT/_wald/lock                                                  held by the run
    OUT/_staging/<run>/                                             files that are being made

Spark and pyarrow pass over names with ``_``, and nothing below them is called ``.parquet``. The columns are those of
the data source (:mod:`wald_spark.rows`); ``route`` is in the names of directories only.

Executors write files below ``_staging``, synced. Once all are there, what is to be told of each log is replaced in one
step: how far it is exported now, and which files have to be moved for that. Then they are moved. A run that dies before
the first step leaves nothing but rubbish; after it, the next run moves what is left. So a record is never in two files,
and a file has its name only when it is whole. While a run ends, readers may see some of its files and not yet others.

A run goes up to the last sequence up to which all records are complete, and the next one goes on behind it.
"""

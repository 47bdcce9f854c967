"""Compaction: the latest value of each key, updated by each run.

    OUT/latest -> gen-000007           the current generation; replaced in one step
    OUT/gen-000007/*.parquet           a row for each route and key
    OUT/gen-000007/_wald.json          position in each log
    OUT/gen-000006/                    the previous generation, for readers that have opened it
    OUT/_wald/lock                     held by the run
    OUT/_partial/                      files that executors hand to Spark during a run

    route       STRING
    key         BINARY
    value       BINARY     null: the key was deleted, by a record with an empty value
    log         STRING     id of the log
    seq         BIGINT     sequence of the record in its log
    timestamp   TIMESTAMP  time at which the daemon received it
    event_time  TIMESTAMP
    headers     STRING

Records without a key are counted and left out. Within one log, the latest record is the one with the highest sequence;
across logs, it is the last by timestamp (to the microsecond), log and sequence. Deleted keys stay, because a log that
is read later may still have an older value of them. ``WHERE value IS NOT NULL`` leaves them out.

Executors find the last record of each key in a part of a log. Only those records reach the JVM, where Spark keeps the
last of them and of the rows of the current generation. A run that dies before replacing the link leaves only files
that the next run removes.

``OUT/latest`` is for programs that open and read it immediately. A program that reads for longer than a run takes
must read the directory that the link points to (``readlink -f``), which stays for one more run.
"""

"""COMPACT: the latest value of each key, kept up to date from run to run.

    OUT/latest -> gen-000007           what the last run has made; replaced in one step
    OUT/gen-000007/*.parquet           a row for each route and key
    OUT/gen-000007/_wald.json          up to where each log is in it
    OUT/gen-000006/                    the one before, for those who still read it
    OUT/_wald/lock                     held by the run
    OUT/_partial/                      what executors hand to Spark during a run

    route       STRING
    key         BINARY
    value       BINARY     null: the key was deleted, by a record with an empty value
    log         STRING     id of the log
    seq         BIGINT     number of the record in its log
    timestamp   TIMESTAMP  when the daemon took it
    event_time  TIMESTAMP
    headers     STRING

Records without a key are counted and left out. The latest of one log is the one with the highest number; of several
logs the last by timestamp (to the microsecond), log and number. Deleted keys stay: a log that is read later may still
bring an older value of theirs. ``WHERE value IS NOT NULL`` leaves them out.

Executors find the last record of each key in a part of a log; only those get into the JVM, where Spark takes the last
of them and of the rows that the last run has made. A run that dies before the link is replaced leaves nothing but
rubbish, which the next one removes.

``OUT/latest`` is for whoever opens it and reads it at once. Whoever reads for longer than a run takes reads the
directory that it points to (``readlink -f``), which stays for one more run.
"""

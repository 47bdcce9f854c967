"""What is asked of a log, as fields of JSON: the commands print them with ``--json``, and the gate serves them.

docs/json.md says what is in each. ::

    positions    how far the log is durable; what became of a record
    routes       a route and how far its groups have come
    cursors      how far one group has processed a route
    groups       who works for each work group, and how far it is
    pending      what of a work group is with workers, or waits
    explain      what pins which bytes
    history      what happened to the log
    liveness     whether the daemon is alive
    latency      where the time of an acknowledgement goes
    status       what is wrong with a log and its daemon
    samples      what a log does, sampled again and again
    work         how many records of work groups are where
    snapshot     rates and rows, of the last two samples
    fields       times, segments and lines of ledgers, alike in every answer
"""

"""Feeder of a route to a command: the group's cursor moves once the command has succeeded.

    lease      up to N records after the cursor; drain never waits for more records to fill a batch
    try        the command gets them on its stdin; exit 0 is success, and any other exit code leads to another try
    halve      a batch that has failed a few times, until the record that fails is alone
    done       the records are acknowledged; after a crash before that, the command gets them again
    give up    with --tries, after the last try of a single record: it becomes a dead letter; redrive puts it back

The records come from a work group. Without --workers its order is "strict": one command at a time, in order, and a
record that fails blocks later ones. With workers, each leases records and acknowledges them individually.

The modules::

    command      options of both commands, feed and redrive
    run          a drain from start to end: full disks, signals, and commands that earlier drains left running
    worker       try, halve, acknowledge and give up the records of a lease; metrics
    process      processes that run the command, and outlive drain; their state files; the step after a try
    redrive      dead letters back to their routes, each once
"""

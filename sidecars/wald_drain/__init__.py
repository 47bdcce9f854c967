"""Drain: feeds a route to a command, and moves the group's cursor after the command has succeeded.

    read        up to N records after the cursor; drain never waits for more records to fill a batch
    tried       the command gets them on its stdin; exit 0 is success, any other exit code leads to another try
    halved      a batch that has failed a few times, until the record that fails is alone
    processed   the cursor moves; after a crash before that, the command gets these records again
    given up    with --tries, after the last try of a single record: it is made durable on the dead-letter route, and
                then the cursor moves; redrive puts it back

So the command gets every record at least once and in order, and a record given up is on the dead-letter route once.

With several workers the group is a work group: each leases records, and acknowledges them by themselves.

The modules::

    command        the options of both commands, feed and redrive
    job            what a drain is asked to do, and what it does in the same way with workers and without
    consumer       the group on its route: records after the cursor, and moving that
    portions       the records of one run, as bytes for its stdin
    retries        what follows a try
    counts         what was done, as metrics
    feed           without workers: one command at a time
    attempt        one run of that
    workers        with workers: several commands, each with a thread
    worker         what becomes of the records of a lease
    runner         the process that starts the commands of one worker
    worker_file    which records its command has
    keeper         the process that waits for one run
    command_file   the lock that a command holds
    leftovers      what an earlier drain has left running
    handover       to the dead-letter route, or back, each record exactly once
    redrive        puts dead letters back
    stopping       what a signal does
    full_disk      goes on once there is room
"""

"""Work groups: many workers share a route, and each record is acknowledged by itself.

A module knows nothing of those below it. ::

    window       what has become of each record above the ack floor
    keys         the order of the records of each key
    claims       what consumers name, put together
    leases       who has which lease, and until when
    deliveries   who has which record, how often it was delivered, which comes next
    journal      the file in which that outlives a crash
    replay       its lines carried out again, and written anew
    picture      what a group looks like from outside: by its journal and its cursor
    processed    whether a group has processed records, looked at again and again
    commands     the commands of wald-drain that run for a group
    checking     whether the journals of a log are whole
    kept         records that were taken in before, by their numbers
    source       the records themselves
    terms        what a group goes by, and what it gives out
    sharing      what each of those who wait gets of what comes next
    arguments    what a program may ask, checked
    owner        leases and acknowledgements, as they are carried out in a turn
    asks         what a thread asks for, and how it waits
    turns        the threads that ask for them: one write and one sync for all
    tasks        those of an event loop that do
    calls        what threads and tasks may ask
    deadletters  records that were given up, and back
    giving_up    making one, exactly once
    ownership    one process at a time works for a group
    removal      removing one
    upkeep       the cursor and the dead letters, in a thread of their own
    requests     commands ask the owner for something, by a file
    group        all of it, for the threads of one process
    standing     how far the workers have come, while none is at work
    succession   a reader without workers takes the place of the workers
"""

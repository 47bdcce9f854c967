"""Work groups: many workers share a route, and each record is acknowledged by itself.

A module knows nothing of those below it. ::

    window       what has become of each record above the ack floor
    keys         the order of the records of each key
    deliveries   who has which record, how often it was delivered, which comes next
    journal      the file in which that outlives a crash
    commits      one sync of it for all threads that wait
    replay       its lines carried out again, and written anew
    source       the records themselves
    deadletters  records that were given up, and back
    burial       giving one up, exactly once
    ownership    one process at a time works for a group
    group        all of it, for the threads of one process
"""

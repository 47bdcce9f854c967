"""Work groups: many workers share a route, and each record is acknowledged individually.

A module imports only modules above it::

    window        state of each record above the ack floor
    deliveries    leases, tries, due times, order by key
    journal       file that preserves all of this across a crash, and the state recovered from it
    source        records of the route, read ahead or again
    owner         requests applied to the window and turned into journal lines
    commit_loop   one thread, one queue: a write and a sync for each round of requests
    dead_letters  copies of records that were given up, and the thread that writes them and moves the cursor
    snapshot      view of a group for other processes
    ownership     one owner at a time; commands left by wald-drain; requests of other processes to the owner
    strict        groups whose only progress is the cursor
    group         public API
"""

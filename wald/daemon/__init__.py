"""The process: one loop that takes what has arrived, makes it durable, and only then says so.

    pipes, connections ──drafts──▶ turn ──▶ store.writer ──▶ segment, head
            ▲                       │
            └── take, reply ◀───────┘        the only backward step, one hop, after the sync

    arena       the memory of one turn          background  sealing, next to the turn
    pipes       FIFOs and stdin                 intake      all pipes, in turn
    listening   the socket's path               sizing      settings that the disk can hold
    connections the socket                      connection  one producer's
    transfers   what leaves a pipe          unfinished  what the last life did not take
    admission   who finds a place               gate        what keeps a request waiting
    publishing  payloads, checked               spooling    payloads too large for memory
    turn        drafts and tickets              committer   write, sync, head; and when the disk fails
    routes      who may be written to           endpoint    metrics and health
    commands    what can be asked
    lifecycle   signals, systemd                journal     what the daemon says of itself

The service wires them, runs the loop, and is the only one that knows everybody.
"""

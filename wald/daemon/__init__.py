"""The process: one loop that takes what has arrived, makes it durable, and only then says so.

    pipes, connections ──drafts──▶ turn ──▶ store.writer ──▶ segment, head
            ▲                       │
            └─ consume, reply ◀─────┘        the only backward step, one hop, after the sync

    start       the order of a start            service     the loop
    turn        drafts, tickets, their memory   committer   write, sync, head; and when the disk fails
    intake      all pipes, in turn              pipes       how bytes leave one of them
    fifos       the paths of FIFOs              pipe_calls  system calls on pipes
    transfers   what is leaving a pipe          listening   the socket, and which connections have a place
    connections all that are open               connection  one of them
    requests    what becomes of a request       gate        what keeps a request waiting
    spooling    payloads too large for memory   routes      which routes exist, and who may write to them
    commands    all requests but PUB            background  sealing, next to the turn
    lifecycle   signals, the journal            metrics     /metrics and /healthz
    quotas      routes that are over theirs     unread      what a group has not read of a route
    fairness    who is served, and who stays

The start wires them, and the service runs the loop; only these two know all the others. The text of a request is parsed
in ``wald/format/protocol.py``, and what a start repairs is decided in ``wald/store/writing/recovery.py``.
"""

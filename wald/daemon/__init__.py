"""The process: one loop that takes what has arrived, makes it durable, and only then says so.

pipes, connections ──drafts──▶ turn ──▶ store.writer ──▶ segment, head
▲                       │
└── take, reply ◀───────┘        the only backward step, one hop, after the sync

arena       the memory of one turn          background  sealing, next to the turn
pipes       FIFOs and stdin                 lifecycle   signals, systemd
connections the socket                      endpoint    metrics and health
turn        drafts, commit, tickets         service     wires everything and runs the loop
"""

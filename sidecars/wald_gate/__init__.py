"""Gate: serves a log over HTTP, as a process of its own beside the daemon.

    in     the body of a request goes to the daemon as it comes; 200 means that its records are on disk
    out    positions as ``wald read`` takes them; lines, JSON, Server-Sent Events, Arrow; with an end or without
    facts  routes, cursors, the head, what became of a record, what holds back which bytes

The gate writes nothing into the log itself but cursors: records, routes and CUT go through the daemon's socket, so one
process writes, and parsers, TLS and strangers stay out of it. One table has all verbs; the application and the OpenAPI
document are made from it.

    command ─▶ serving ─▶ server ─▶ connection ─▶ application ─▶ table ─▶ records_in   ─▶ daemon
                                                                          records_out  ─▶ reading
                                                                          cursors, facts

The modules::

    command      the options; it imports nothing that the extra ``gate`` brings
    serving      a gate from its start to its end
    server       listens, on TCP and on a unix socket, with TLS or without
    connection   one connection, with bounds on what it may take
    application  finds the verb, asks for the right, makes errors problems
    table        which verbs there are
    verbs        what a verb is
    openapi      the document that describes them
    call         one request: its route, query, body
    state        what all requests share
    shapes       what is sent and answered in JSON
    problems     errors, as application/problem+json
    rights       who asks, and what they may
    records_in   POST of records
    bodies       a body as payloads: decompressed, cut into records
    daemon       requests to the daemon, sent again when its connection is lost
    records_out  GET of records
    reading      records in chunks, read by threads
    forms        lines, JSON, events, Arrow
    following    waits for the head to move
    cursors      GET and PUT of cursors
    facts        the verbs that say what the log is, and ROUTE ADD and CUT
"""

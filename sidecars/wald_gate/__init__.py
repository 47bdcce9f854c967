"""Gate: serves a log over HTTP, as a process of its own beside the daemon.

    in     the body of a request goes to the daemon as it comes; 200 means that its records are on disk
    out    positions as ``wald read`` takes them; lines, JSON, Server-Sent Events, Arrow; with an end or without
    groups leases and acknowledgements of work groups, which the gate owns
    info   routes, cursors, the head, the fate of a record, the pins of segments

The gate writes nothing into the log itself but cursors: records, routes and CUT go through the daemon's socket, so one
process writes, and parsers, TLS and strangers stay out of it. One table has all verbs; the application and the OpenAPI
document are made from it. Those of the page have a table of their own, which the document leaves out.

    command ─▶ serving ─▶ http      ─▶ application ─▶ table ─▶ records_in  ─▶ the daemon's socket
                                                               records_out ─▶ the files of the log
                                                               info

The rooms, each with its modules in the docstring of its package::

    http         connections: TCP, unix socket, TLS, and limits on what a connection may use
    rights       who asks, and what they may
    records_in   records in: bodies, and the connection to the daemon
    records_out  records out: positions, forms, following
    groups       work groups: lease, ack, nack, extend, release, pending
    info         routes, cursors, where, explain; health, readiness, metrics, request log
    page         pages for a browser

and what they share::

    command      the options; it imports nothing that the extra ``gate`` brings
    serving      a gate from its start to its end
    application  finds the verb, asks for the right, makes errors problems
    table        which verbs there are
    verbs        what a verb is
    openapi      the document that describes them
    call         one request: its route, query, body
    compression  answers in gzip
    presence     clients that leave before they have their answer
    state        what all requests share
    settings     what the command line and the file say
    limits       what a client may take
    guarded      reads files that other users may not write
    shapes       requests and answers that only HTTP has
    problems     errors, as application/problem+json
    words        says what a parameter or a field may be
"""

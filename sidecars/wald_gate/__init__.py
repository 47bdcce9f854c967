"""Gate: a process next to the daemon that serves a log over HTTP.

The gate writes only cursors into the log. Records, routes and CUT go through the daemon's socket, so that one process
writes, and it has no part in TLS or in parsing data of strangers. All verbs are in one table, from which the
application and the OpenAPI document are made. The page has a separate table, which the document omits.

    command ─▶ serving ─▶ http ─▶ app ─▶ records_in  ─▶ the daemon's socket
                                         records_out ─▶ the files of the log
                                         groups, info, page

    command      options and subcommands; imports nothing that the extra ``gate`` installs
    settings     options and the configuration file
    serving      start, reload and stop
    http         the server: TCP, unix socket, TLS, and limits on connections
    app          the table of verbs, and the routing of requests to them
    call         the parts of a gate, which all requests share, a request, and the type of a verb
    auth         authentication and authorization
    limits       limits on clients: connections, rates, bodies, memory
    records_in   records in: bodies, idempotency keys, and the connection to the daemon
    records_out  records out: positions, formats, following
    groups       work groups: lease, ack, nack, extend, release, pending
    info         routes, cursors, where, explain; health, readiness, metrics, the request log
    page         the page for browsers
    openapi      the OpenAPI document
    shapes       types of JSON bodies and responses
    responses    streams, late and compressed responses
    problems     errors as application/problem+json
"""

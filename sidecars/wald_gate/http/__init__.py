"""HTTP: the server of the gate, on asyncio and the parser httptools.

server      listens on TCP, on a unix socket and on systemd's sockets, and stops
connection  one connection: parses its requests, and enforces the limits
exchange    one request and its response, and the flow of their data
tls         certificates: read, checked, renewed, and refused with an alert

Neither uvicorn nor granian can enforce the limits of docs/http.md, which all depend on the state of the parser. With
the hostile requests of tests/sidecars/gate/test_hostile.py, in November 2026: uvicorn 0.54 accepts no Host, several
Hosts, HTTP/0.9 and heads of any size, and has no timeout for a head. Granian 2.8 accepts a length together with chunks
and several Hosts; it has no peer credentials, optional client certificates, inherited sockets or connection limits.

An exchange is a request of Starlette and sends its responses, but only those in parts as messages of ASGI.
"""

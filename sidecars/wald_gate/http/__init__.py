"""HTTP: the server of the gate, on asyncio and the parser httptools.

server      listens on TCP, on a unix socket and on systemd's sockets, and stops
pool        the connections, with limits on their number
connection  one connection: parses its requests, and enforces the limits
tls         certificates: read, checked, renewed, and refused with an alert

Neither uvicorn nor granian can enforce the limits of docs/http.md, which all depend on the state of the parser. With
the hostile requests of tests/sidecars/gate/test_hostile.py, in November 2026: uvicorn 0.54 accepts no Host, several
Hosts, HTTP/0.9 and heads of any size, and has no timeout for a head. Granian 2.8 accepts a length together with chunks
and several Hosts; it has no peer credentials, optional client certificates, inherited sockets or connection limits. The
application is plain ASGI nevertheless.
"""

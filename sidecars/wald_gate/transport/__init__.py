"""Connections: where the gate listens, and what a connection may take.

server       listens, on TCP and on a unix socket, with TLS or without
unix         the unix socket at its path
certificates the files of TLS
handshakes   accepts TLS connections
expiry       which certificates a file has, and when they expire
alerts       tells clients, and the log, that a certificate is refused
connection   one connection, with bounds on what it may take
joined       one write for all that is sent in a round of the event loop
"""

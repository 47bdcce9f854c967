"""Clients of the socket: producer, session, payloads.

connection  connections to the daemon's socket, and the daemon's status
payloads    payloads of requests, from lines and from JSON
producer    public producer: sends records exactly once and reports their sequences
session     requests in flight on one connection, and their retries
"""

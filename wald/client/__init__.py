"""Clients of the socket: producer, session, payloads.

connection  a connection to the daemon's socket: connect, send whole requests, read answers line by line
payloads    payloads of requests, from lines and from JSON
producer    a producer: sends records over the daemon's socket and reports which sequences they got, each exactly once
session     requests in flight on one connection, and their retries
"""

"""Clients of the daemon's socket.

asynchronous  producer for asyncio, and its connection over sans-IO state
connection    connections to the socket, and the daemon's status
payloads      request payloads, from Python values and JSON lines
producer      public producer: sends records exactly once
session       a producer's requests, and their retries
"""

"""Clients of the daemon's socket.

asynchronous  producer for asyncio, and its connection
payloads      request payloads, from Python values and JSON lines
producer      public producer: sends records exactly once
session       sans-IO state of requests, their errors, and the session of a blocking producer
"""

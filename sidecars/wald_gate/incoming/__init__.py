"""Records in: from the body of a request to the disk.

append      POST of records
shapes      what is sent, for the OpenAPI document
bodies      a body as payloads: decompressed, cut into records
daemon      requests to the daemon, and what is tried for how long
keys        Idempotency-Key: the name of a request
lane        one connection to the daemon
marks       what a key leaves in the log
remembered  the table of keys, made from the log
repeats     requests with a key, stored once
"""

"""Records in: from the body of a request to the disk.

append     POST of records: decompression of a body, and its division into records
daemon     client of the daemon, with retries
keys       Idempotency-Key, and the table of stored keys
publisher  requests with a key, stored once
"""

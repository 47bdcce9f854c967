"""System calls and small files: everything in a root except the segments.

cursor_directory  a route's cursors
disk              durable writes
identity          log.json
layout            paths
ledger_read       ledger lines, sealed parts
ledger_write      ledger appends, rotation
listing           listing of segments
locks             processes, lock holders, temporary files
modes             modes and owners of new files
routes            route directories, FIFOs
safe_open         opening without blocking, small files written in place
uptime            time across boots, clock steps
"""

"""System calls and small files: everything in a root except the segments.

cursor_directory  a route's cursors, shared with cursor owners
disk              system calls that make bytes durable
identity          log.json, and the creation of a log
layout            every path in a root
ledger_read       ledger lines in order, sealed parts
ledger_write      ledger appends and rotation
listing           stable listing of the segments
locks             processes, lock holders, abandoned temporary files
modes             modes and owners of new files
routes            route directories and their FIFOs
safe_open         opening without blocking, small files written in place
uptime            time across boots, clock steps

Time and the disk are arguments, so that tests can control them.
"""

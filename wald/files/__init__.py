"""System calls and small files: everything in a root except the segments.

cursor_directory  directory of a route's cursors, shared with cursor owners
disk              system calls that make bytes durable
identity          identity of a log, stored in ``log.json``
layout            path of every file in a root, and the names that wald creates there
ledger_files      sealed parts of a ledger, and the end of its current file
ledger_read       ledger lines in order, across sealed parts and the current file
ledger_write      ledger appends and rotation into sealed parts
listing           stable listing of the segments in a directory
locks             processes in ``/proc``, lock holders, temporary files of dead processes
modes             modes and owners of files, directories and FIFOs that wald creates
routes            route directories and their FIFOs: creation, retirement, checks
safe_open         opening of regular files without blocking, and small files written in place
uptime            monotonic time across boots, and recorded steps of the wall clock

Time is an argument. The disk is an argument as well, so that tests can make it fail.
"""

"""The system calls, the small files, and where each file of a root lies.

consumers   the directory of a route in which other users leave cursors
directory   where each file lies, and one listing
disk        the system calls that make bytes durable
fifos       made, checked, put back
inodes      which file it is, asked without its times
inplace     the head and transfers files, never waited for
known       which names the directories of a log may hold
ledger      chained JSON lines, appended
lines       the lines of a ledger, looked up block by block
making      files, directories, FIFOs: their mode, and whose they are
regular     opens a regular file and nothing else
routes      routes as directories
uptime      time that cannot be set
"""

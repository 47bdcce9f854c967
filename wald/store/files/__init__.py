"""The system calls, the small files, and where each file of a root lies.

chain         lines of a ledger that must follow one another
consumers     the directory of a route in which other users leave cursors
cutting       seals the lines of an active ledger into parts
directory     where each file lies
disk          the system calls that make bytes durable
fifos         made, checked, put back
group_file    a file of a consumer group, with a lock
identity      log.json: whether a directory is a log
inodes        which file it is, asked without its times
inplace       the head and transfers files, never waited for
known         which names the directories of a log may hold
ledger        chained JSON lines, appended
ledger_blocks blocks of lines, in sealed parts and the active file
ledger_parts  the sealed parts of a ledger: found and read
ledger_tail   the end of an active ledger: what was synced
lines         the lines of a ledger, looked up block by block
moved         marks of renamed or merged routes
leftovers     temporary files of killed programs
listing       which segments there are
locks         which processes hold the lock of a file
making        files, directories, FIFOs: their mode, and whose they are
part_index    makes the index of a sealed part
processes     what Linux says of a process
regular       opens a regular file and nothing else
routes        routes as directories
clock         clock steps, after which append times restart
uptime        time that cannot be set
"""

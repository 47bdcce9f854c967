"""The system calls, the small files, and where each file of a root lies.

cursor_directory  who may leave cursors, and whose each file is
directory     where each file lies
disk          the system calls that make bytes durable
fifos         made, checked, put back
identity      log.json: whether a directory is a log
inodes        which file it is, asked without its times
inplace       the head and transfers files, never waited for
known         which names the directories of a log may hold
ledger_read   a ledger: its parts in order, then the current file
ledger_write  appends to a ledger, and cuts it into parts
moved         marks of renamed or merged routes
leftovers     temporary files of killed programs
listing       which segments there are
locks         which processes hold the lock of a file
making        files, directories, FIFOs: their mode, and whose they are
processes     what Linux says of a process
regular       opens a regular file and nothing else
routes        routes as directories
clock         clock steps, after which append times restart
uptime        time that cannot be set
"""

"""The active segment: appends, cut, sealing, recovery.

daemon_lock     lock of the single writer, and its epoch
disk_budget     disk space that a daemon may use
recovery        the newest segment at a start: facts, fate and repair
run_reports     runs of the daemon and their ends
sealing         compression of cut segments
sequence_floor  lower bound for new sequences
writer          appends, cuts, and preallocated files
"""

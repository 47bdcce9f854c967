"""The active segment: appends, cut, sealing, recovery.

daemon_lock     lock of the single writer, and its epoch
disk_budget     disk space that a daemon may use
recovery        facts about the newest segment at a start, its fate and repair
run_reports     reports about runs of the daemon and their ends
sealing         compression of cut segments
sequence_floor  lower bound for new sequences
writer          append-only writer of the active segment, its cut, and preallocated files for new ones
"""

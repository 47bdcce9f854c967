"""The active segment: appends, cut, sealing, and recovery at a start.

daemon_lock     lock of the single writer, and its epoch
disk_budget     space that a daemon may use on its disk
preallocate     preallocated files for new segments
recovery        recovery of the newest segment at a start: facts, decision, repair
run_reports     reports about runs of the daemon, and how they ended
sealing         compression of cut segments in repeatable steps
sequence_floor  lower bound for new sequences
writer          append-only writer of the active segment, and its cut
"""

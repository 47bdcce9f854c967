"""The active segment: appends, cut, sealing, recovery.

daemon_lock     lock of the single writer
disk_budget     limits on disk space
recovery        repair of the newest segment at a start
run_reports     runs of the daemon and their ends
sealing         compression of cut segments
sequence_floor  lower bound for new sequences
writer          appends and cuts
"""

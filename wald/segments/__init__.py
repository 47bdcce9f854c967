"""One segment in any form, and a snapshot of all segments.

continuity     replaced or rolled-back logs
durable_end    durable head
index_builder  indexes, and sparse index files
raw_scan       raw segments, and resynchronisation
reader         batches in order
salvage        sealed segments with a damaged index
sealed_file    sealed segments, frame by frame
seek           end of the log, points in time
shrinking      rewriting without unneeded records
view           snapshot of a log
"""

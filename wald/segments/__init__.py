"""One segment in any form, and a snapshot of all of them.

continuity     detection of a replaced or rolled-back log
durable_end    durable head, the limit of every read
index_builder  index of a segment, and sparse index files
raw_scan       scan of a raw segment, and resynchronisation after damage
reader         batches of a segment in order
salvage        batches of a sealed segment with a damaged index
sealed_file    sealed segments, frame by frame
seek           sequences for the end of the log and for times
shrinking      sealed segments without records that no group needs
view           snapshot of a log: head and segments
"""

"""One segment in any form, and a snapshot of all of them.

continuity     detection of a replaced or rolled-back log at a path
durable_end    durable head, the limit of every read
index_builder  index of a segment, built from its batches, and sparse index files
raw_scan       scan of a raw segment in constant memory, and resynchronisation after damage
reader         batches of one segment in order, in raw or sealed form
salvage        batches of a sealed segment whose index is damaged
sealed_file    writing and reading of sealed segments, frame by frame
seek           sequences for the end of the log and for points in time
shrinking      rewriting of a sealed segment without records that no group needs
view           snapshot of a log: its head and its segments
"""

"""Which groups still need what, and what is known of what is gone.

backlog    what there is, and which groups need it
beginning  where a new group begins
conditions what keeps a segment
cursors    where consumers stand
dropped    records that a relief dropped, by its line
handovers  pins of unfinished handovers
excused    what a deletion's line leaves to others
history    what the ledgers say of missing segments
legality   whether a deletion was legal, by its line
missing    records asked for that are reclaimed
pins       which group holds back which segment
progress   what routes got, how far groups are
taken      moving a cursor; what it needs and is gone

Nothing is deleted here: that is done in ``sidecars/wald_reclaim`` (``plan`` finds what may go, ``policy`` decides,
``apply`` does it), which asks ``pins`` whether a group still needs a segment.
"""

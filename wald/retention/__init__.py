"""Consumer groups, the segments they pin, and the history of deleted segments.

audit         audit of a deletion against the evidence in its ledger line
backlog       segments of a log and the groups that need them
blockers      consumer groups that pin a segment
cursor_moves  cursor moves by an operator, and the start position of a new group
cursors       cursor files of consumer groups
handovers     pins of unfinished handovers between routes
history       history of missing segments, read from the ledgers
missing       records that a reader asked for and that were reclaimed
progress      progress and lag of consumer groups

Nothing is deleted here: ``sidecars/wald_reclaim`` does that, and asks ``blockers`` which groups need a segment.
"""

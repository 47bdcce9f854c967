"""Consumer groups, the segments they pin, and the history of deleted segments.

audit         audit of deletions
backlog       segments and the groups that need them
blockers      groups that pin a segment
cursor_moves  moves by an operator, and new groups
cursors       cursor files
handovers     pins of unfinished handovers
history       look-ups in the ledgers
missing       requested records that no longer exist
progress      progress and lag of groups

Nothing is deleted here: ``sidecars/wald_reclaim`` does that.
"""

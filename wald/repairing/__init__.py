"""Repair of a damaged log, with a record of every loss.

apply    application of a repair plan, in repeatable steps
plan     repair plan: actions, and the records that are lost
rescue   intact batches of a damaged segment, and the records they contain
restore  new log written from records that already have sequences
rewrite  new segments written from intact batches
survey   survey of a damaged log, without changes
"""

"""Repair of a damaged log, with a record of every loss.

apply    application of a plan
plan     actions, and lost records
rescue   intact batches of a damaged segment
restore  new log from given sequences
rewrite  new segments from intact batches
survey   facts about a damaged log
"""

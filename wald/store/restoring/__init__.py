"""A new log made of records that have their sequences and append times already.

new_log    batches, in the order of their sequences → a log
"""

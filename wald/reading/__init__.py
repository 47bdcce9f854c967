"""Reads from a position: batches, records, Arrow, lookups, search.

arrow      batches as Arrow tables
assembler  assembly of whole records from the pieces in stored batches
latest     start of the last N records of a route
lookup     lookup of one record: where it is, or what happened to it
pattern    records that match a pattern
reader     reader of batches and records, with following
scanner    scan of stored batches across segments
search     parallel search in a log
selection  selection of records: start, end, routes
"""

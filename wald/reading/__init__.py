"""Reading of batches, records and Arrow tables; lookup and search.

arrow      batches as Arrow tables
assembler  whole records from pieces
latest     start of a route's last N records
lookup     location or fate of a record
pattern    records that match a pattern
reader     batches and records, with following
scanner    stored batches across segments
search     parallel search
selection  start, end and routes
"""

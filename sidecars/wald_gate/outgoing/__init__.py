"""Records out: from the files of the log to a response.

records     GET of records: positions, forms
reading     records in chunks, read by threads
forms       lines, JSON, events, Arrow
shapes      a record in JSON, for the OpenAPI document
turns       threads that read, given to clients in turn
following   wakes clients when their route has new records
"""

"""Records out: from the files of the log to a response.

records     GET of records: positions, forms
reading     records in chunks, read by threads
forms       lines, JSON, events, Arrow
shapes      a record in JSON, for the OpenAPI document
turns       reader threads that clients use in turn
following   wakes clients when their route has new records
"""

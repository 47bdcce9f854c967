"""The client of the daemon's socket: what a program that writes imports, in layers.

producer    sends records, and reports the sequences that they got
session     the requests under way: numbered, repeated after a lost connection, answered in order
json_records  records as JSON objects, cut into requests
payloads    values, with keys and times, cut into requests
refusals    which error a refusal is, and what to type next
connection  connects, sends whole requests, reads answers
"""

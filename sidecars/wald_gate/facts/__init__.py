"""What the log is, as the commands of these names say it, and the verbs that change it beside records.

log         routes, head, where, explain, ROUTE ADD, CUT
cursors     GET and PUT of cursors
shapes      what they answer, for the OpenAPI document
"""

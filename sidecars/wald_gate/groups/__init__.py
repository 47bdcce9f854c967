"""Work groups: this gate owns each group that is used through it.

verbs     list and remove groups; lease, ack, nack, extend, release, pending
hosting   opens a group at its first request, and closes an idle one
waits     leases that wait for a record, and producers that wait until a group has processed their records
"""

"""Work groups: this gate owns each group that is used through it.

verbs       lease, ack, nack, extend, release, pending
listing     which groups there are; removing one
shapes      what they take and answer
leased      leased records as JSON
making      what makes a group
hosting     opens a group at its first request, and closes it when it is not used
waiting     leases that wait for a record, until their client has gone
processed   producers that wait until a group has processed their records
"""

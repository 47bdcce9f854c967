"""Pure functions that encode and decode every format of wald.

batch         the unit of the log
checksum      CRC-32C
head          head line and cursor files
ledger_lines  ledgers and their sealed parts
log_state     control batches: log states and peers
names         names of routes, groups and files
protocol      socket protocol
records       records, JSON and the columns payload
sealed_index  sealed segments
segment       raw segments
spans         sets of sequences
times         times as text
transfers     transfers from pipes
work          journal of a work group

docs/format.md describes the bytes.
"""

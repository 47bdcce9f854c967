"""Every format that wald writes, encoded and decoded by pure functions: no files, no clock, no log.

batch         the unit of the log
checksum      CRC-32C
head          head line and cursor files
ledger_lines  ledgers and their sealed parts
log_state     control batches: routes, producers, peers
names         names of routes, groups and files
protocol      text protocol of the socket
records       records, JSON and the columns payload
sealed_index  sealed segments
segment       raw segments: header and sparse index
spans         sets of sequences, and their run lengths
times         times and positions as text
transfers     bytes on their way from a pipe to the log
work          journal of a work group

docs/format.md describes the bytes. Checksums are CRC-32C (Castagnoli, RFC 3720 appendix B.4).
"""

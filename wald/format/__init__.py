"""Every format that wald writes, encoded and decoded by pure functions: no files, no clock, no log.

batch         batches, the unit of the log
checksum      CRC-32C
head          head line and cursor files
ledger_lines  ledger lines, their hash chain, and the parts of a rotated ledger
log_state     log state in control batches: routes, producers, peers
names         names of routes, groups, segments, ledgers and other files
protocol      text protocol of the socket
records       records, JSON and the columns payload
sealed_index  sealed segments: index, zstd frames and seek table
segment       raw segments: header and sparse index
spans         sets of sequences, and their run lengths in JSON
times         times as text and as nanoseconds, and the positions that people type
transfers     slots for bytes on their way from a pipe to the log
work          journal of a work group

Integers are little-endian; checksums are CRC-32C (Castagnoli, RFC 3720 appendix B.4).
"""

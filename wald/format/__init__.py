"""Bytes: every format wald writes, as pure functions that encode and decode it.

batch         encoding and parsing of batches, the unit of the log
checksum      cRC-32C from the package ``crc32c``, loaded in a fraction of the time that ``import crc32c`` takes
cursor        a cursor file: the last sequence a consumer group has processed on a route; everything up to it is done
head          the head line: the durable end of the log, 160 bytes of text that stay in place
ledger_lines  ledger lines with checksums, their chain, and the parts of a rotated ledger
log_state     state of the log as control batches record it: routes, producers, peers
names         names of routes, consumer groups and producers, and the positions that operators type
protocol      the text protocol of the socket, as bytes: requests and replies are lines, payloads are raw
records       records of a batch, their headers and columns
sealed_index  index of a sealed segment: batch table, routes, and what was dropped
segment       header and sparse index of a raw segment
spans         sets of sequences as spans, and their run lengths in JSON
times         times as text in UTC and as nanoseconds since 1970, and the times that people type
transfers     the transfers file: the bytes that are being moved from pipes to the log
work          the journal of a work group, ``routes/R/cursors/G.work``: lines of JSON, each with a checksum
zstd_frames   zstandard frame boundaries and the seek table at the end of a sealed segment

Nothing here opens a file, reads a clock or logs. Integers are little-endian. Checksums ("crc32c") are CRC-32C
(Castagnoli, RFC 3720, appendix B.4). Each struct asserts its size beside its definition.
"""

"""Bytes: every format wald writes, as pure functions that encode and decode it.

Nothing here opens a file, reads a clock or logs. Integers are little-endian. Checksums ("crc32c") are CRC-32C
(Castagnoli, RFC 3720, appendix B.4). Each struct asserts its size beside its definition.

    names     file and route names            segment   segment header          sealed   index of a .zst
    batch     the unit of writing             columns   keyed and timed records  index   sparse index of a raw segment
    state     what batches build up           record    what a reader gets       head    the durable head line
    cursor    a consumer's position           ledger_lines  chained JSON lines      transfers  what leaves a pipe
    parsing   batches in a buffer             protocol  the text protocol of the socket
    spans     sets of sequences                  run_lengths  the same in a line of a ledger
    zframes   where each Zstandard frame ends    times   times as text               tables   those of sealed
    relieved  what relief has dropped of a segment
    peers     who sent a batch                seek_table  where the frames of a .zst are
    work      the journal of a work group        checked_line  a line of JSON with a checksum
    not_before  when a record is due             producer_ids  whose a batch is
    positions  what people type for a place in the log    checksum  CRC-32C
"""

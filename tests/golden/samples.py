"""The golden files: the value of each, and how the current code encodes and decodes it."""

import json
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import zstandard
from sample_segments import LOG_ID, SALT, TIME_NS, batch, control_batch, peer_batch, segment

from wald.format import records, sealed_index
from wald.format.batch import BatchHeader, Encoding, Flag, ParseOutcome, parse_batch, seed
from wald.format.head import CursorLines, Head, decode_cursor, decode_head, encode_cursor, encode_head
from wald.format.ledger_lines import (
    FOOTER_BYTES,
    GENESIS,
    PartIndex,
    decode_ledger,
    decode_part_index,
    digest,
    encode_entry,
    encode_part_index,
    part_index_bytes,
)
from wald.format.log_state import PRODUCER_WINDOW, DedupEntry, LogState, Peer, Producers, decode_peer, decode_state
from wald.format.sealed_index import BatchTable, Frame, FrameTable, RouteEntry, RouteTable
from wald.format.segment import (
    SPARSE_MAGIC,
    SegmentHeader,
    decode_segment_header,
    decode_sparse_index,
    encode_segment_header,
    encode_sparse_entry,
    pack_version,
)
from wald.format.transfers import Transfer, decode_transfer, encode_transfer
from wald.format.work import (
    Commit,
    DeadRecord,
    FailureReason,
    JournalLine,
    JournalPage,
    JournalStart,
    WorkerLease,
    decode_work,
    encode_work,
)
from wald_spark.checkpoint import Offsets, Position, decode_offsets, encode_offsets

VERSION = 1
FOLDER = Path(__file__).parent / f"v{VERSION}"


@dataclass(frozen=True, slots=True)
class Sample:
    """One golden file.

    Attributes:
        exact: False if parts are compressed: the output of zstd depends on its version.
    """

    name: str
    value: object
    encode: Callable[[], bytes]
    decode: Callable[[bytes], object]
    exact: bool = True

    @property
    def path(self) -> Path:
        return FOLDER / self.name


WRITER = pack_version("0.1.0")
SEGMENT_HEADER = SegmentHeader(LOG_ID, base_sequence=250, epoch=3, created_at_ns=TIME_NS, salt=SALT, writer=WRITER)
PEER = Peer(1000, 4711, "caf\u00e9")
HEAD = Head(sequence=260, segment=250, position=4096, epoch=3, at_ns=TIME_NS)
CURSOR = CursorLines(250, LOG_ID, 3, "processed", "2026-11-21T10:00:00Z")
OFFSETS = Offsets({LOG_ID.hex(): Position(began=250, last=260), "ff" * 16: Position(0, 0)}, frozenset(["web", "db"]))
TAKE = Transfer("web", 4711, 4096, 250, 128, 0x41)
LINES = b"plain\ncarriage\r\n\n\x00\xff\n"
VALUES = [b"first", b"", b"\x00\xff\n"]
KEYS = [b"key", None, b""]
HEADERS = [None, b'{"a":"b"}', None]
TIMES = [TIME_NS, -1, 0]
STATE = LogState(
    next_sequence=250,
    append_time_ns=TIME_NS,
    routes={"web": 249, "empty": 0},
    open_records={"web": 249},
    producers=Producers(
        {
            0xFFFFFFFFFFFFFFFF: deque([DedupEntry(7, 100, 10, 0x1234), DedupEntry(8, 110, 0, 0)], PRODUCER_WINDOW),
            1: deque([DedupEntry(0, 1, 1, 0xFFFFFFFF)], PRODUCER_WINDOW),
        }
    ),
)
LEDGER: list[dict[str, Any]] = [
    {"event": "cut", "at": "2026-11-21T10:00:00Z", "base": 1, "last": 249},
    {"event": "sealed", "at": "2026-11-21T10:00:01Z", "base": 1, "last": 249, "routes": {"web": [249, 1, 249]}},
    {"event": "damaged", "at": "2026-11-21T10:00:02Z", "path": "caf\u00e9 \udcff"},
]
_HELD = [["db", 2, 256, 257, 40], ["web", 8, 250, 259, 700]]
SEALED_LINES: list[dict[str, Any]] = [
    {"event": "sealed", "base": base, "last": base + 9, "sha256": "00" * 32, "routes": _HELD, "at": TIME_NS}
    for base in (250, 260)
]
RECLAIM: list[dict[str, Any]] = [
    {
        "event": "reclaimed",
        "base": 250,
        "last": 259,
        "at": TIME_NS,
        "rule": "read",
        "bytes": 700,
        "sha256": "00" * 32,
        "routes": [
            {"route": "db", "count": 2, "first": 256, "last": 257, "cursors": {"processed": 257}},
            {"route": "web", "count": 8, "first": 250, "last": 259, "retired": True},
        ],
        "boot": "00ad4aa5-eeab-42a0-9c91-ab6bc4b1f1ea",
        "boottime": 1,
    },
    {
        "event": "evidence",
        "base": 260,
        "last": 289,
        "at": TIME_NS + 1,
        "routes": [
            {"route": "db", "count": 4, "first": 256, "last": 280, "cursors": {"audit": 300, "processed": 280}},
            {"route": "web", "count": 9, "first": 250, "last": 289, "retired": True},
        ],
    },
    {
        "event": "reclaimed",
        "base": 260,
        "last": 269,
        "at": TIME_NS + 1,
        "rule": "read",
        "bytes": 700,
        "sha256": "00" * 32,
        "boot": "00ad4aa5-eeab-42a0-9c91-ab6bc4b1f1ea",
        "boottime": 2,
        "evidence": 260,
    },
]
INDEX = sealed_index.SealedIndex(
    log_id=LOG_ID,
    base_sequence=250,
    next_sequence=260,
    raw_bytes=1500,
    epoch=3,
    salt=SALT,
    frames=FrameTable.from_frames(
        [
            Frame(0, 400, 0, 1000, 250, 255, TIME_NS, TIME_NS + 1, (0,)),
            Frame(400, 300, 1000, 500, 255, 260, TIME_NS + 1, TIME_NS + 2, (0, 1)),
        ]
    ),
    routes=RouteTable.from_entries([RouteEntry("web", 8, 250, 259, 700), RouteEntry("db", 2, 256, 257, 40)]),
    sha256=bytes(range(32)),
    damage=[(900, 40)],
    writer=WRITER,
)
BATCHES = BatchTable(
    positions=array("Q", [64, 1000, 1100]),
    bases=array("Q", [250, 255, 256]),
    counts=array("I", [5, 1, 2]),
    routes=array("I", [0, 0, 1]),
    times_ns=array("q", [TIME_NS, TIME_NS + 1, TIME_NS + 2]),
)
SEEK_TABLE = [(400, 1000), (300, 500), (250, 0)]
ENTRIES = [(250, 64, TIME_NS), (255, 70_000, TIME_NS), (256, 140_000, TIME_NS + 5)]
SEGMENT_PAYLOADS = [b"one\ntwo\n", b"\n", b"three\r\n" * 20]


def _sparse_index() -> bytes:
    return encode_segment_header(SEGMENT_HEADER, SPARSE_MAGIC) + b"".join(
        encode_sparse_entry(*entry) for entry in ENTRIES
    )


def _sparse_index_value(data: bytes) -> object:
    index = decode_sparse_index(data, log_id=LOG_ID, base_sequence=250)
    return index and index.entries


def _batch_value(data: bytes) -> tuple[BatchHeader, str, bytes]:
    found = parse_batch(data, 0, seed(SALT, 0))
    assert found.outcome is ParseOutcome.WHOLE
    assert found.header is not None
    header = found.header
    route = data[64 : 64 + header.route_bytes].decode()
    return header, route, data[header.payload_offset : header.payload_offset + header.payload_bytes]


def _columns_value(data: bytes) -> object:
    decoded = records.decode_columns(_batch_value(data)[2])
    assert decoded.times is not None
    assert decoded.keys is not None
    assert decoded.headers is not None
    return decoded.values.to_list(), decoded.keys.to_list(), decoded.headers.to_list(), list(decoded.times.cast("q"))


def ledger_of(entries: list[dict[str, Any]]) -> bytes:
    data, prev = b"", GENESIS
    for entry in entries:
        line = encode_entry(entry, prev)
        data, prev = data + line, digest(line)
    return data


def _ledger_value(data: bytes) -> object:
    decoded = decode_ledger(data)
    return decoded.entries, decoded.broken_lines, decoded.complete_bytes == len(data)


def _ledger_part() -> bytes:
    lines = ledger_of(LEDGER)
    frame = zstandard.ZstdCompressor(write_checksum=True).compress(lines)
    return frame + encode_part_index(_ledger_part_index(len(frame)))


def _ledger_part_value(data: bytes) -> object:
    """Return the lines, and the index without the frame length, which depends on the version of zstd."""
    index = decode_part_index(data[-part_index_bytes(data[-FOOTER_BYTES:]) :])
    (frame,) = index.frames
    lines = zstandard.ZstdDecompressor().decompress(data[: frame.stored_bytes])
    return _ledger_value(lines), replace(index, frames=[frame._replace(stored_bytes=0)])


def _ledger_part_index(stored_bytes: int = 0) -> PartIndex:
    lines = ledger_of(LEDGER)
    index = PartIndex(1, 0, GENESIS, GENESIS, before=(1, 250))
    index.add(stored_bytes, len(lines), LEDGER, decode_ledger(lines).tip)
    return index


def _sealed_value(frame: bytes) -> object:
    index = sealed_index.decode_sealed_index(frame)
    return index, index.batch_table(), index.peers()


def _header(
    checksum: int,
    payload: int,
    count: int,
    *,
    encoding: int = 1,
    flags: int = 0,
    producer: tuple[int, int] = (0, 0),
    peer: int = 0,
) -> BatchHeader:
    return BatchHeader(checksum, payload, 250, TIME_NS + 250, *producer, count, 3, encoding, flags, 3, peer)


SEGMENT = segment(SEGMENT_PAYLOADS, peer=PEER, writer=WRITER)[0]

WORK: list[tuple[JournalLine, int]] = [
    (JournalStart(LOG_ID, "orders", "billing", 250, 450), 0),
    (JournalPage(256, bytes([255] * 2 + [0, 1, 70] + [255] * 123), [(258, TIME_NS)]), 0),
    (
        Commit(
            read=[(400, 449)],
            due=[(449, TIME_NS)],
            leased=[
                WorkerLease("worker-1", TIME_NS, [(300, 309), (320, 320)]),
                WorkerLease("worker-2", TIME_NS + 1, [(400, 400)]),
            ],
        ),
        300,
    ),
    (
        Commit(
            done=[(300, 301), (303, 309)],
            returned=[(302, 302)],
            due=[(302, TIME_NS)],
            reasons=[FailureReason("exit code 1", 2, [(302, 302)])],
        ),
        300,
    ),
    (Commit(extended=[WorkerLease("worker-2", TIME_NS + 2, [(400, 400)])]), 600),
    (Commit(dead=[DeadRecord(320, 5, "exit code 1, try 5", TIME_NS, "dead_letter", 499)]), 600),
]


def _work_value(data: bytes) -> object:
    return [decode_work(line) for line in data.splitlines(keepends=True)]


SAMPLES = [
    Sample("segment-header.bin", SEGMENT_HEADER, lambda: encode_segment_header(SEGMENT_HEADER), decode_segment_header),
    Sample(
        "batch-lines.bin",
        (_header(0x5092E0F6, 20, 4, producer=(0xABCDEF, 7), peer=40), "web", LINES),
        lambda: batch(LINES, base=250, producer_id=0xABCDEF, producer_sequence=7, peer=40),
        _batch_value,
    ),
    Sample(
        "batch-peer.bin",
        PEER,
        lambda: peer_batch(PEER, number=40, base=250),
        lambda data: decode_peer(_batch_value(data)[2]),
    ),
    Sample(
        "batch-piece.bin",
        (_header(0x53F75412, 6, 0, flags=Flag.CONTINUES | Flag.CONTINUED, producer=(0, 249)), "web", b"middle"),
        lambda: batch(b"middle", base=250, count=0, flags=Flag.CONTINUES | Flag.CONTINUED, producer_sequence=249),
        _batch_value,
    ),
    Sample(
        "batch-columns.bin",
        (VALUES, KEYS, HEADERS, TIMES),
        lambda: batch(
            records.encode_columns(VALUES, keys=KEYS, headers=HEADERS, times_ns=TIMES),
            base=250,
            count=len(VALUES),
            encoding=Encoding.COLUMNS,
        ),
        _columns_value,
    ),
    Sample("batch-control.bin", STATE, lambda: control_batch(STATE), lambda data: decode_state(_batch_value(data)[2])),
    Sample("sparse-index.bin", ENTRIES, _sparse_index, _sparse_index_value),
    Sample(
        "sealed-index.bin",
        (INDEX, BATCHES, {40: PEER}),
        lambda: sealed_index.encode_sealed_index(INDEX, BATCHES, {40: PEER}),
        _sealed_value,
        exact=False,
    ),
    Sample(
        "seek-table.bin",
        SEEK_TABLE,
        lambda: sealed_index.encode_seek_table(SEEK_TABLE),
        lambda data: sealed_index.decode_seek_table(data, file_bytes=950 + len(data)),
    ),
    Sample("segment.wal", SEGMENT, lambda: SEGMENT, lambda data: data),
    Sample("head.txt", HEAD, lambda: encode_head(HEAD), decode_head),
    Sample("cursor.txt", CURSOR, lambda: encode_cursor(CURSOR), decode_cursor),
    Sample(
        "offsets.json",
        OFFSETS,
        lambda: json.dumps(encode_offsets(OFFSETS)).encode(),
        lambda data: decode_offsets(json.loads(data)),
    ),
    Sample("ledger.jsonl", (LEDGER, [], True), lambda: ledger_of(LEDGER), _ledger_value),
    Sample("reclaim.jsonl", (RECLAIM, [], True), lambda: ledger_of(RECLAIM), _ledger_value),
    Sample(
        "ledger-00000000000000000001.jsonl.zst",
        ((LEDGER, [], True), _ledger_part_index()),
        _ledger_part,
        _ledger_part_value,
        exact=False,
    ),
    Sample("transfer.bin", (TAKE, False), lambda: encode_transfer(TAKE), decode_transfer),
    Sample("group.work", WORK, lambda: b"".join(encode_work(*line) for line in WORK), _work_value),
]
SEALED_SEGMENT = FOLDER / "segment.wal.zst"  # sealed form of segment.wal
SHRUNK_SEGMENT = FOLDER / "shrunk.wal.zst"  # shrunk form of the sealed segment


def keeps(header: BatchHeader, _route: str) -> bool:
    """Return True for the batches of the sealed segment that the shrunk one keeps: all but the first two."""
    return header.last_sequence > 3

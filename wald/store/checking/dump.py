"""Dumping: any file of a root, told piece by piece as it lies on disk, with what does not fit in its place.

Each piece is a dict that JSON can carry; the key ``kind`` says what it is, ``damage`` is there where something is
wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from wald.errors import Damaged, InvalidInput, NotFound
from wald.format import columns
from wald.format.batch import BatchHeader, Encoding, Flag
from wald.format.cursor import BadCursor, decode_cursor
from wald.format.head import decode_head
from wald.format.index import ENTRY, decode_entries
from wald.format.names import Kind, parse_cursor_name, parse_segment_name
from wald.format.parsing import Batches
from wald.format.record import split_lines, text_or_hex
from wald.format.segment import HEADER as FILE_HEADER
from wald.format.segment import INDEX_MAGIC, SEGMENT_MAGIC, BadHeader, decode_header
from wald.format.state import BadControl, decode_state
from wald.format.transfers import SLOT_BYTES, decode_transfer
from wald.store.files.ledger import read_ledger
from wald.store.files.regular import open_file, read_regular
from wald.store.segments.compression import SealedFile
from wald.store.segments.raw import FIRST_BATCH, DamagedBytes, RawFile, ScannedBatch, SegmentEnd

Piece = dict[str, Any]  # JSON objects


def dump(path: Path, *, records: bool = False) -> Iterator[Piece]:
    """What the file at ``path`` holds.

    Args:
        records: whether to tell of each record in a batch.

    Raises:
        NotFound: no such file.
        InvalidInput: a directory, say, or by its name none of a log's.
        Damaged: it cannot be read at all.
    """
    if not path.exists():
        raise NotFound(f"{path}: no such file", hint=f"ls {path.parent}")
    if path.is_dir():
        raise InvalidInput(f"{path}: a directory, and dump takes one file", hint=f"ls {path}; wald dump {path}/FILE")
    if not path.is_file():
        raise InvalidInput(f"{path}: not a regular file", hint=f"ls -l {path}")
    name = parse_segment_name(path.name)
    if name is not None:
        match name.kind:
            case Kind.RAW | Kind.RAW_RELEASED | Kind.RAW_DELETING:
                return _raw(path, records=records)
            case Kind.INDEX:
                return _sparse_index(path)
            case Kind.SEALED | Kind.RELEASED | Kind.DELETING:
                return _sealed(path, records=records)
    if parse_cursor_name(path.name) is not None:
        return _cursor(path)
    if path.suffix == ".jsonl":
        return _ledger(path)
    if path.name in ("head", "transfers", "log.json"):
        return {"head": _head, "transfers": _transfers, "log.json": _identity}[path.name](path)
    if path.suffix == ".json" and path.stem.isdecimal():
        return _recovery(path)
    raise InvalidInput(
        f"{path}: not a file of a log by its name",
        hint="dump reads segments, their indexes, head, transfers, log.json, cursors, ledgers and recovery reports",
    )


def _raw(path: Path, *, records: bool) -> Iterator[Piece]:
    with open_file(path) as file:
        raw = RawFile(file.fileno())
        yield _segment_header(raw.read(0, FIRST_BATCH), SEGMENT_MAGIC)
        for found in raw.scan():
            if isinstance(found, ScannedBatch):
                payload = memoryview(raw.payload(found))
                yield from _batch(found.offset, found.header, found.route, payload, records=records)
            elif isinstance(found, DamagedBytes):
                yield _gap(found)
            else:
                yield _end(found, raw.limit)


def _sealed(path: Path, *, records: bool) -> Iterator[Piece]:
    with SealedFile(path) as file:
        index = file.index
        for number, frame in enumerate(index.frames):
            routes = [index.routes[i].route for i in frame.routes if i < len(index.routes)]
            piece = {"kind": "frame", "number": number} | asdict(frame) | {"routes": routes}
            try:
                data = file.frame(number)
            except Damaged as error:
                yield piece | {"damage": error.message.removeprefix(f"{path}: offset {frame.offset}: ")}
                continue
            yield piece
            if index.is_damage(frame):
                yield _gap(DamagedBytes(frame.raw_offset, len(data), "damaged before it was sealed"))
            else:
                yield from _frame(data, frame.raw_offset, index.salt, records=records)
        yield {
            "kind": "index",
            "log": index.log_id.hex(),
            "base_sequence": index.base_sequence,
            "next_sequence": index.next_sequence,
            "raw_bytes": index.raw_bytes,
            "epoch": index.epoch,
            "sha256": index.sha256.hex(),
            "routes": [entry._asdict() for entry in index.routes],
            "damaged": [list(span) for span in index.damage],
        }


def _frame(data: bytes, raw_offset: int, salt: int, *, records: bool) -> Iterator[Piece]:
    """The batches of one frame."""
    at = 0
    if raw_offset == 0:
        yield _segment_header(data[:FIRST_BATCH], SEGMENT_MAGIC)
        at = FIRST_BATCH
    batches = Batches(data, at, position=raw_offset, salt=salt)
    for batch in batches:
        yield from _batch(batch.position, batch.header, batch.route, batch.payload, records=records)
    if batches.end < len(data):
        yield _gap(DamagedBytes(raw_offset + batches.end, len(data) - batches.end, batches.rest.reason))


def _batch(offset: int, header: BatchHeader, route: str, payload: memoryview, *, records: bool) -> Iterator[Piece]:
    piece: Piece = {
        "kind": "batch",
        "offset": offset,
        "route": route,
        "base_sequence": header.base_sequence,
        "count": header.count,
        "append_time_ns": header.append_time_ns,
        "encoding": Encoding(header.encoding).name.lower(),
        "flags": [flag.name for flag in Flag if flag and flag & header.flags],
        "payload_bytes": header.payload_bytes,
        "epoch": header.epoch,
    }
    if header.continues_sequence:
        piece["continues_sequence"] = header.continues_sequence
    elif header.producer_id:
        piece |= {"producer_id": f"{header.producer_id:x}", "producer_sequence": header.producer_sequence}
    try:
        state = decode_state(payload) if header.is_control else None
        shown = list(_records(header, payload)) if records and state is None else []
    except (BadControl, columns.BadColumns) as error:
        yield piece | {"damage": str(error)}
        return
    if state is not None:
        piece |= {"kind": "control", "next_sequence": state.next_sequence, "routes": state.routes}
        piece |= {"open_records": state.open_records, "producers": len(state.producers.table)}
    yield piece
    yield from shown


def _records(header: BatchHeader, payload: memoryview) -> Iterator[Piece]:
    """Each record, or the piece of one that the batch holds."""
    if header.encoding == Encoding.COLUMNS:
        stored = columns.decode(payload)
        keys = stored.keys.to_list() if stored.keys else [None] * stored.count
        for i, (value, key) in enumerate(zip(stored.values.to_list(), keys, strict=True)):
            piece = {"kind": "record", "sequence": header.base_sequence + i} | text_or_hex("value", value or b"")
            yield piece | (text_or_hex("key", key) if key is not None else {})
        return
    pieces = split_lines(payload)
    if not header.flags & (Flag.CONTINUED | Flag.UNTERMINATED):
        pieces.pop()  # what follows the last newline: nothing
    number = header.base_sequence - bool(header.continues_sequence)
    for i, value in enumerate(pieces):
        sequence = header.continues_sequence if number + i < header.base_sequence else number + i
        yield {"kind": "record", "sequence": sequence} | text_or_hex("value", value)


def _segment_header(data: bytes, magic: bytes) -> Piece:
    try:
        header = decode_header(data, magic)
    except BadHeader as error:
        return {"kind": "header", "offset": 0, "damage": str(error)}
    return {"kind": "header", "offset": 0} | asdict(header) | {"log_id": header.log_id.hex()}


def _gap(gap: DamagedBytes) -> Piece:
    return {"kind": "gap", "offset": gap.offset, "bytes": gap.length, "damage": gap.reason or "zeros between batches"}


def _end(tail: SegmentEnd, file_bytes: int) -> Piece:
    piece: Piece = {"kind": "end", "offset": tail.offset, "file_bytes": file_bytes}
    return piece | ({"damage": tail.reason, "garbage_bytes": tail.garbage_bytes} if tail.garbage_bytes else {})


def _sparse_index(path: Path) -> Iterator[Piece]:
    data = read_regular(path)
    yield _segment_header(data, INDEX_MAGIC)
    offset = FILE_HEADER.size
    for entry in decode_entries(data):
        told: Piece = {"damage": "its checksum is wrong"}
        if entry is not None:
            told = dict(zip(("sequence", "position", "append_time_ns"), entry, strict=True))
        yield {"kind": "entry", "offset": offset} | told
        offset += ENTRY.size
    if offset < len(data):
        yield {"kind": "end", "offset": offset, "damage": f"{len(data) - offset} bytes of an entry"}


def _cursor(path: Path) -> Iterator[Piece]:
    try:
        lines = decode_cursor(read_regular(path))
    except BadCursor as error:
        yield {"kind": "cursor", "damage": str(error)}
        return
    log_id = lines.log_id.hex() if lines.log_id is not None else None
    yield {"kind": "cursor", "sequence": lines.sequence, "log": log_id, "epoch": lines.epoch} | {
        "group": lines.group,
        "at": lines.at,
    }


def _head(path: Path) -> Iterator[Piece]:
    head = decode_head(read_regular(path))
    yield {"kind": "head"} | (asdict(head) if head is not None else {"damage": "not a head line"})


def _transfers(path: Path) -> Iterator[Piece]:
    data = read_regular(path)
    for number in range(len(data) // SLOT_BYTES):
        found = decode_transfer(data[number * SLOT_BYTES : (number + 1) * SLOT_BYTES])
        if found is not None:
            yield {"kind": "transfer", "slot": number} | asdict(found[0]) | {"taken": found[1]}


def _identity(path: Path) -> Iterator[Piece]:
    try:
        told = json.loads(read_regular(path))
    except ValueError as error:
        yield {"kind": "identity", "damage": str(error)}
        return
    yield {"kind": "identity", "content": told}


def _recovery(path: Path) -> Iterator[Piece]:
    try:
        told = json.loads(read_regular(path))
    except (ValueError, RecursionError) as error:
        yield {"kind": "recovery", "damage": str(error)}
        return
    if isinstance(told, dict):
        yield {"kind": "recovery"} | told | ({} if told.get("ended") else {"ended": "not told: it runs, or was killed"})
    else:
        yield {"kind": "recovery", "damage": "not a report"}


def _ledger(path: Path) -> Iterator[Piece]:
    decoded = read_ledger(path)
    for entry in decoded.entries:
        yield {"kind": "line"} | entry
    for number, reason in decoded.broken:
        yield {"kind": "broken", "line": number, "damage": reason}
    if decoded.whole_bytes < path.stat().st_size:
        yield {"kind": "end", "offset": decoded.whole_bytes, "damage": "an unfinished line"}

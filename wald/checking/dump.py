"""Contents of one file of a root: its items in the order in which they are stored, damage included.

An item is a dict that JSON can represent, with the key ``kind``, and ``damage`` if it is damaged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from wald.errors import Damaged, InvalidInput, NotFound
from wald.files.ledger_read import PartName, decode_part, read_ledger, stored_index
from wald.files.safe_open import open_file, read_regular
from wald.format import records as columns
from wald.format.batch import Batches, BatchHeader, Encoding, Flag
from wald.format.head import BadCursor, decode_cursor, decode_head
from wald.format.ledger_lines import BadPart, DecodedLedger
from wald.format.log_state import BadControl, decode_peer, decode_state
from wald.format.names import Kind, parse_cursor_name, parse_ledger_part_name, parse_segment_name
from wald.format.records import text_or_bytes
from wald.format.sealed_index import SealedIndex, Shrunk
from wald.format.segment import SEGMENT_HEADER as FILE_HEADER
from wald.format.segment import (
    SEGMENT_MAGIC,
    SPARSE_ENTRY,
    SPARSE_MAGIC,
    BadHeader,
    decode_segment_header,
    decode_sparse_entries,
    version_text,
)
from wald.format.transfers import SLOT_BYTES, decode_transfer
from wald.segments.index_builder import find_index
from wald.segments.raw_scan import FIRST_BATCH, DamagedBytes, RawFile, ScannedBatch, SegmentEnd
from wald.segments.sealed_file import SealedFile

Item = dict[str, Any]  # JSON objects


def dump(path: Path, *, records: bool = False) -> Iterator[Item]:
    """Yield the items of a file.

    Args:
        records: yield each record of a batch, too.

    Raises:
        NotFound: there is no such file.
        InvalidInput: it is not a regular file, or its name is not that of a file of a log.
        Damaged: nothing in it can be read.
    """
    _require_file(path)
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
    if (part := parse_ledger_part_name(path.name)) is not None:
        return _ledger_part(PartName(part[1], path))
    if path.name in ("head", "transfers", "log.json"):
        return {"head": _head, "transfers": _transfers, "log.json": _identity}[path.name](path)
    if path.suffix == ".json" and path.stem.isdecimal():
        return _recovery(path)
    raise InvalidInput(
        f"{path}: not a file of a log by its name",
        case="not-a-file-of-a-log",
    )


def _require_file(path: Path) -> None:
    if not path.exists():
        raise NotFound(f"{path}: no such file", case="no-such-file", directory=path.parent)
    if path.is_dir():
        raise InvalidInput(f"{path}: a directory; --content takes one file", case="directory-to-dump", path=path)
    if not path.is_file():
        raise InvalidInput(f"{path}: not a regular file", case="file-unreadable", path=path)


def _raw(path: Path, *, records: bool) -> Iterator[Item]:
    name = parse_segment_name(path.name)
    index = None if name is None else find_index(path.parent, None, name.base_sequence)
    with open_file(path) as file:
        raw = RawFile(file.fileno(), index=lambda: index)
        yield _segment_header(raw.read(0, FIRST_BATCH), SEGMENT_MAGIC)
        for found in raw.scan():
            if isinstance(found, ScannedBatch):
                payload = memoryview(raw.payload(found))
                yield from _batch(found.offset, found.header, found.route, payload, records=records)
            elif isinstance(found, DamagedBytes):
                yield _damage(found)
            else:
                yield _end(found, raw.limit)


def _sealed(path: Path, *, records: bool) -> Iterator[Item]:
    with SealedFile(path) as file:
        index = file.index
        for number, frame in enumerate(index.frames):
            routes = [index.routes[i].route for i in frame.routes if i < len(index.routes)]
            item = {"kind": "frame", "number": number} | frame._asdict() | {"routes": routes}
            try:
                data = file.frame(number)
            except Damaged as error:
                yield item | {"damage": error.message.removeprefix(f"{path}: offset {frame.offset}: ")}
                continue
            yield item
            if index.is_damage(frame):
                yield _damage(DamagedBytes(frame.raw_offset, len(data), "damaged before it was sealed"))
            else:
                yield from _frame(file.batches(number, data), records=records)
        yield _sealed_index(index)


def _sealed_index(index: SealedIndex) -> Item:
    return {
        "kind": "index",
        "log": index.log_id.hex(),
        "base_sequence": index.base_sequence,
        "next_sequence": index.next_sequence,
        "raw_bytes": index.raw_bytes,
        "epoch": index.epoch,
        "sha256": index.sha256.hex(),
        "routes": [entry._asdict() for entry in index.routes],
        "damaged": [list(span) for span in index.damage],
        "writer": version_text(index.writer),
        "shrunk": None if index.shrunk is None else _shrunk(index.shrunk),
    }


def _shrunk(shrunk: Shrunk) -> Item:
    return {
        "sha256": shrunk.sha256.hex(),
        "bytes": shrunk.stored_bytes,
        "dropped": [list(span) for span in shrunk.ranges],
        "routes": [entry._asdict() for entry in shrunk.routes],
    }


def _frame(batches: Batches, *, records: bool) -> Iterator[Item]:
    data, raw_offset = batches.data, batches.position
    if raw_offset == 0:
        yield _segment_header(data[:FIRST_BATCH], SEGMENT_MAGIC)
    for batch in batches:
        yield from _batch(batch.position, batch.header, batch.route, batch.payload, records=records)
    if batches.end < len(data):
        yield _damage(DamagedBytes(raw_offset + batches.end, len(data) - batches.end, batches.rest.reason))


def _batch(offset: int, header: BatchHeader, route: str, payload: memoryview, *, records: bool) -> Iterator[Item]:
    item = _header(offset, header, route)
    try:
        state = decode_state(payload) if header.is_state else None
        peer = decode_peer(payload) if header.is_control and header.peer else None
        shown = list(_records(header, payload)) if records and not header.is_control else []
    except (BadControl, columns.BadColumns) as error:
        yield item | {"damage": str(error)}
        return
    if peer is not None:
        item |= {"kind": "peer"} | peer._asdict()
    if state is not None:
        item |= {"kind": "control", "next_sequence": state.next_sequence, "routes": state.routes}
        item |= {"open_records": state.open_records, "producers": len(state.producers.table)}
        if state.previous is not None:
            item["previous_end"] = state.previous.position
    if header.is_dropped:
        item |= {"kind": "dropped"}
    yield item
    yield from shown


def _header(offset: int, header: BatchHeader, route: str) -> Item:
    item: Item = {
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
        "peer": header.peer,
    }
    if header.continues_sequence:
        item["continues_sequence"] = header.continues_sequence
    elif header.producer_id:
        item |= {"producer_id": f"{header.producer_id:x}", "producer_sequence": header.producer_sequence}
    return item


def _records(header: BatchHeader, payload: memoryview) -> Iterator[Item]:
    if header.encoding == Encoding.COLUMNS:
        stored = columns.decode_columns(payload)
        keys = stored.keys.to_list() if stored.keys else [None] * stored.count
        for i, (value, key) in enumerate(zip(stored.values.to_list(), keys, strict=True)):
            item = {"kind": "record", "sequence": header.base_sequence + i} | text_or_bytes("value", value or b"")
            yield item | (text_or_bytes("key", key) if key is not None else {})
        return
    lines = bytes(payload).split(b"\n")
    if not header.flags & (Flag.CONTINUED | Flag.UNTERMINATED):
        lines.pop()  # nothing follows the last newline
    number = header.base_sequence - bool(header.continues_sequence)
    for i, value in enumerate(lines):
        sequence = header.continues_sequence if number + i < header.base_sequence else number + i
        yield {"kind": "record", "sequence": sequence} | text_or_bytes("value", value)


def _segment_header(data: bytes, magic: bytes) -> Item:
    try:
        header = decode_segment_header(data, magic)
    except BadHeader as error:
        return {"kind": "header", "offset": 0, "damage": str(error)}
    shown = asdict(header) | {"log_id": header.log_id.hex(), "writer": version_text(header.writer)}
    return {"kind": "header", "offset": 0} | shown


def _damage(damaged: DamagedBytes) -> Item:
    return {
        "kind": "gap",
        "offset": damaged.offset,
        "bytes": damaged.length,
        "damage": damaged.reason or "zeros between batches",
    }


def _end(end: SegmentEnd, file_bytes: int) -> Item:
    item: Item = {"kind": "end", "offset": end.offset, "file_bytes": file_bytes}
    return item | ({"damage": end.reason, "garbage_bytes": end.garbage_bytes} if end.garbage_bytes else {})


def _sparse_index(path: Path) -> Iterator[Item]:
    data = read_regular(path)
    yield _segment_header(data, SPARSE_MAGIC)
    offset = FILE_HEADER.size
    for entry in decode_sparse_entries(data):
        content: Item = {"damage": "checksum mismatch"}
        if entry is not None:
            content = dict(zip(("sequence", "position", "append_time_ns"), entry, strict=True))
        yield {"kind": "entry", "offset": offset} | content
        offset += SPARSE_ENTRY.size
    if offset < len(data):
        yield {"kind": "end", "offset": offset, "damage": f"{len(data) - offset} bytes of an entry"}


def _cursor(path: Path) -> Iterator[Item]:
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


def _head(path: Path) -> Iterator[Item]:
    head = decode_head(read_regular(path))
    yield {"kind": "head"} | (head._asdict() if head is not None else {"damage": "not a head line"})


def _transfers(path: Path) -> Iterator[Item]:
    data = read_regular(path)
    for number in range(len(data) // SLOT_BYTES):
        found = decode_transfer(data[number * SLOT_BYTES : (number + 1) * SLOT_BYTES])
        if found is not None:
            yield {"kind": "transfer", "slot": number} | asdict(found[0]) | {"taken": found[1]}


def _identity(path: Path) -> Iterator[Item]:
    try:
        content = json.loads(read_regular(path))
    except ValueError as error:
        yield {"kind": "identity", "damage": str(error)}
        return
    yield {"kind": "identity", "content": content}


def _recovery(path: Path) -> Iterator[Item]:
    try:
        content = json.loads(read_regular(path))
    except (ValueError, RecursionError) as error:
        yield {"kind": "recovery", "damage": str(error)}
        return
    if isinstance(content, dict):
        ended = {} if content.get("ended") else {"ended": "unknown: it runs, or was killed"}
        yield {"kind": "recovery"} | content | ended
    else:
        yield {"kind": "recovery", "damage": "not a report"}


def _ledger_part(part: PartName) -> Iterator[Item]:
    yield from _lines(decode_part(part, None))
    try:
        yield {"kind": "index"} | asdict(stored_index(part))
    except BadPart as error:
        yield {"kind": "index", "damage": str(error)}


def _lines(decoded: DecodedLedger) -> Iterator[Item]:
    for entry in decoded.entries:
        yield {"kind": "line"} | entry
    for number, reason in decoded.broken:
        yield {"kind": "broken", "line": number, "damage": reason}


def _ledger(path: Path) -> Iterator[Item]:
    decoded = read_ledger(path)
    yield from _lines(decoded)
    if decoded.whole_bytes < path.stat().st_size:
        yield {"kind": "end", "offset": decoded.whole_bytes, "damage": "an unfinished line"}

"""Dump of one file of a root: its items in stored order, including damaged items.

An item is a JSON object with the key ``kind``. A damaged item also has ``damage``.
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
from wald.format.batch import BatchHeader, Encoding, Flag
from wald.format.head import BadCursor, decode_cursor, decode_head
from wald.format.ledger_lines import BadPart, DecodedLedger
from wald.format.log_state import BadControl, decode_peer, decode_state
from wald.format.names import Kind, parse_cursor_name, parse_ledger_part_name, parse_segment_name
from wald.format.records import text_or_bytes
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
from wald.segments.raw_scan import FIRST_BATCH, DamagedBytes, RawFile, ScannedBatch
from wald.segments.sealed_file import SealedFile

Item = dict[str, Any]  # JSON objects


def dump(path: Path, *, records: bool = False) -> Iterator[Item]:
    """Return the items of a file, including records on request. Raise Damaged if nothing is readable."""
    if not path.exists():
        raise NotFound(f"{path}: no such file", case="no-such-file", directory=path.parent)
    if path.is_dir():
        raise InvalidInput(f"{path}: is a directory; --content takes a file", case="directory-to-dump", path=path)
    if not path.is_file():
        raise InvalidInput(f"{path}: not a regular file", case="file-unreadable", path=path)
    name = parse_segment_name(path.name)
    if name is not None and name.kind is Kind.INDEX:
        return _dump_sparse_index(path)
    if name is not None:
        is_raw = name.kind.form is Kind.RAW
        return _dump_raw(path, name.base_sequence, records) if is_raw else _dump_sealed(path, records)
    if path.suffix == ".jsonl":
        return _dump_ledger(path)
    if (part := parse_ledger_part_name(path.name)) is not None:
        return _dump_ledger_part(PartName(part[1], path))
    if path.name == "transfers":
        return _dump_transfers(read_regular(path))
    if path.name == "head":
        return iter([_head_item(read_regular(path))])
    if parse_cursor_name(path.name) is not None:
        return iter([_cursor_item(read_regular(path))])
    if path.name == "log.json" or (path.suffix == ".json" and path.stem.isdecimal()):
        return iter([_json_item("identity" if path.name == "log.json" else "recovery", read_regular(path))])
    raise InvalidInput(f"{path}: is not named like a file of a log", case="not-a-file-of-a-log")


def _dump_raw(path: Path, base: int, records: bool) -> Iterator[Item]:
    index = find_index(path.parent, None, base)
    with open_file(path) as file:
        raw = RawFile(file.fileno(), index=lambda: index)
        yield _header_item(raw.read(0, FIRST_BATCH), SEGMENT_MAGIC)
        for part in raw.scan():
            if isinstance(part, ScannedBatch):
                yield from _dump_batch(part.offset, part.header, part.route, memoryview(raw.payload(part)), records)
            elif isinstance(part, DamagedBytes):
                yield _gap_item(part.offset, part.length, part.reason)
            else:
                garbage = {"damage": part.reason, "garbage_bytes": part.garbage_bytes} if part.garbage_bytes else {}
                yield {"kind": "end", "offset": part.offset, "file_bytes": raw.limit} | garbage


def _dump_sealed(path: Path, records: bool) -> Iterator[Item]:
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
            if index.was_damaged(frame):
                yield _gap_item(frame.raw_offset, len(data), "damaged before the segment was sealed")
                continue
            if frame.raw_offset == 0:
                yield _header_item(data[:FIRST_BATCH], SEGMENT_MAGIC)
            batches = file.batches(number, data)
            for batch in batches:
                yield from _dump_batch(batch.position, batch.header, batch.route, batch.payload, records)
            if batches.end < len(data):
                yield _gap_item(frame.raw_offset + batches.end, len(data) - batches.end, batches.rest.reason)
        shrunk = index.shrunk
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
            "writer": version_text(index.writer),
            "shrunk": None
            if shrunk is None
            else {
                "sha256": shrunk.sha256.hex(),
                "bytes": shrunk.stored_bytes,
                "dropped": [list(span) for span in shrunk.ranges],
                "routes": [entry._asdict() for entry in shrunk.routes],
            },
        }


def _dump_batch(offset: int, header: BatchHeader, route: str, payload: memoryview, records: bool) -> Iterator[Item]:
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
    record_items: list[Item] = []
    try:
        if header.is_state:
            state = decode_state(payload)
            item |= {"kind": "control", "next_sequence": state.next_sequence, "routes": state.routes}
            item |= {"open_records": state.open_records, "producers": len(state.producers.table)}
            if state.previous is not None:
                item["previous_end"] = state.previous.position
        elif header.is_control and header.peer:
            item |= {"kind": "peer"} | decode_peer(payload)._asdict()
        elif records and not header.is_control:
            record_items = list(_dump_records(header, payload))
    except (BadControl, columns.BadColumns) as error:
        yield item | {"damage": str(error)}
        return
    yield item | ({"kind": "dropped"} if header.is_dropped else {})
    yield from record_items


def _dump_records(header: BatchHeader, payload: memoryview) -> Iterator[Item]:
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
    first = header.base_sequence - bool(header.continues_sequence)
    for number, value in enumerate(lines, start=first):
        sequence = header.continues_sequence if number < header.base_sequence else number
        yield {"kind": "record", "sequence": sequence} | text_or_bytes("value", value)


def _header_item(data: bytes, magic: bytes) -> Item:
    try:
        header = decode_segment_header(data, magic)
    except BadHeader as error:
        return {"kind": "header", "offset": 0, "damage": str(error)}
    fields = asdict(header) | {"log_id": header.log_id.hex(), "writer": version_text(header.writer)}
    return {"kind": "header", "offset": 0} | fields


def _gap_item(offset: int, length: int, reason: str) -> Item:
    return {"kind": "gap", "offset": offset, "bytes": length, "damage": reason or "zeros between batches"}


def _dump_sparse_index(path: Path) -> Iterator[Item]:
    data = read_regular(path)
    yield _header_item(data, SPARSE_MAGIC)
    offset = FILE_HEADER.size
    for entry in decode_sparse_entries(data):
        content: Item = {"damage": "checksum mismatch"}
        if entry is not None:
            content = dict(zip(("sequence", "position", "append_time_ns"), entry, strict=True))
        yield {"kind": "entry", "offset": offset} | content
        offset += SPARSE_ENTRY.size
    if offset < len(data):
        yield {"kind": "end", "offset": offset, "damage": f"the last entry has only {len(data) - offset} bytes"}


def _cursor_item(data: bytes) -> Item:
    try:
        cursor = decode_cursor(data)
    except BadCursor as error:
        return {"kind": "cursor", "damage": str(error)}
    log_id = cursor.log_id.hex() if cursor.log_id is not None else None
    position = {"sequence": cursor.sequence, "log": log_id, "epoch": cursor.epoch}
    return {"kind": "cursor"} | position | {"group": cursor.group, "at": cursor.at}


def _head_item(data: bytes) -> Item:
    head = decode_head(data)
    return {"kind": "head"} | (head._asdict() if head is not None else {"damage": "not a head line"})


def _dump_transfers(data: bytes) -> Iterator[Item]:
    for number in range(len(data) // SLOT_BYTES):
        slot = decode_transfer(data[number * SLOT_BYTES : (number + 1) * SLOT_BYTES])
        if slot is not None:
            yield {"kind": "transfer", "slot": number} | asdict(slot[0]) | {"taken": slot[1]}


def _json_item(kind: str, data: bytes) -> Item:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        return {"kind": kind, "damage": str(error)}
    if kind == "identity":
        return {"kind": kind, "content": content}
    if not isinstance(content, dict):
        return {"kind": kind, "damage": "not a report"}
    end = {} if content.get("ended") else {"ended": "unknown: the daemon is running, or was killed"}
    return {"kind": kind} | content | end


def _dump_ledger_part(part: PartName) -> Iterator[Item]:
    yield from _dump_lines(decode_part(part, None))
    try:
        yield {"kind": "index"} | asdict(stored_index(part))
    except BadPart as error:
        yield {"kind": "index", "damage": str(error)}


def _dump_lines(decoded: DecodedLedger) -> Iterator[Item]:
    for entry in decoded.entries:
        yield {"kind": "line"} | entry
    for number, reason in decoded.broken_lines:
        yield {"kind": "broken", "line": number, "damage": reason}


def _dump_ledger(path: Path) -> Iterator[Item]:
    decoded = read_ledger(path)
    yield from _dump_lines(decoded)
    if decoded.complete_bytes < path.stat().st_size:
        yield {"kind": "end", "offset": decoded.complete_bytes, "damage": "unfinished line"}

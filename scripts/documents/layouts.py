"""The bytes of the golden files, field by field."""

from __future__ import annotations

import struct
from pathlib import Path

from documents.tables import table

GOLDEN = Path(__file__).resolve().parents[2] / "tests/golden/v1"

# name of a part → the golden file, and its fields in order: format of struct, name, meaning
LAYOUTS: dict[str, tuple[str, list[tuple[str, str, str]]]] = {
    "segment header": (
        "segment-header.bin",
        [
            ("8s", "magic", ""),
            ("#I", "checksum", "crc32c of bytes 12 to 63"),
            ("H", "version", ""),
            ("H", "header size", ""),
            ("16h", "log id", "the `log` of `log.json`, which has dashes there"),
            ("Q", "base sequence", "the first record that can be in the file"),
            ("Q", "epoch", "the life of the daemon that made the file"),
            ("q", "created at", "ns since 1970"),
            ("#I", "salt", "random, one for each segment"),
            ("#I", "writer", "the wald that made the file: 0.1.0; 8 bits, 8 and 16"),
        ],
    ),
    "batch of lines": (
        "batch-lines.bin",
        [
            ("4s", "magic", ""),
            ("#I", "header checksum", "crc32c of bytes 8 to 63, starting with the seed"),
            ("#I", "body checksum", "crc32c of the body: bytes 64 to 95"),
            ("I", "payload length", "in bytes"),
            ("Q", "base sequence", "of the first record that begins here"),
            ("q", "append time", "ns since 1970, never decreasing within a log"),
            ("#Q", "producer id", "0: none"),
            ("Q", "producer sequence", "the `pseq` of the request"),
            ("I", "count", "records that begin here: 250 to 253"),
            ("I", "epoch", "low 32 bits"),
            ("B", "encoding", "0 control, 1 lines, 2 columns"),
            ("B", "flags", "see below"),
            ("H", "route length", "in bytes"),
            ("I", "peer", "the process that sent it, see below; 0: not known"),
            ("3s", "route", ""),
            ("5h", "padding", "zeros up to a multiple of 8"),
            ("20s", "payload", "four records, each with its newline"),
            ("4h", "padding", "zeros up to a multiple of 8"),
            ("I", "length", "of the whole batch, from its first byte to the next batch"),
            ("#I", "trailer checksum", "crc32c of these 4 bytes, starting with the seed"),
        ],
    ),
    "batch of a peer": (
        "batch-peer.bin+56",
        [
            ("B", "encoding", "of a control batch"),
            ("B", "flags", "control"),
            ("H", "route length", "it has none"),
            ("I", "peer", "the number that it gives"),
            ("47s", "payload", "a line of JSON"),
            ("1h", "padding", "zeros up to a multiple of 8"),
            ("I", "length", "of the whole batch"),
            ("#I", "trailer checksum", ""),
        ],
    ),
    "columns payload": (
        "batch-columns.bin+72",
        [
            ("I", "count", ""),
            ("I", "columns present", "1 times, 2 keys, 4 headers"),
            ("3q", "event times", "ns since 1970, one for each record"),
            ("b", "validity of the keys", "bit n is set: record n has a key; the second has none"),
            ("7h", "padding", ""),
            ("4i", "offsets of the keys", "key n is from offset n to offset n + 1"),
            ("3s", "bytes of the keys", "`key`, none, and an empty one"),
            ("5h", "padding", ""),
            ("b", "validity of the headers", "only the second record has headers"),
            ("7h", "padding", ""),
            ("4i", "offsets of the headers", ""),
            ("9s", "bytes of the headers", "a JSON object of strings"),
            ("7h", "padding", ""),
            ("4i", "offsets of the values", "no validity bitmap: every record has a value"),
            ("8s", "bytes of the values", ""),
        ],
    ),
    "sparse index entry": (
        "sparse-index.bin+64",
        [
            ("Q", "sequence", "base sequence of a batch"),
            ("Q", "position", "its offset in the raw segment"),
            ("q", "append time", "ns since 1970"),
            ("#I", "checksum", "crc32c of the 24 bytes before it"),
            ("I", "reserved", "zero"),
        ],
    ),
    "sealed index": (
        "sealed-index.bin",
        [
            ("#I", "frame magic", "a skippable frame of zstd"),
            ("I", "content length", "in bytes"),
            ("8s", "magic", ""),
            ("#I", "checksum", "crc32c of the rest of the header and of the directory"),
            ("H", "version", ""),
            ("H", "sections", "entries of the directory"),
            ("16h", "log id", ""),
            ("Q", "base sequence", ""),
            ("Q", "next sequence", "of the segment that follows"),
            ("Q", "raw bytes", "of the segment before it was compressed"),
            ("Q", "epoch", ""),
            ("#I", "salt", ""),
            ("#I", "writer", "as in the segment header"),
            ("16s", "section name", "the first entry of the directory"),
            ("I", "offset", "in the content"),
            ("I", "stored length", "of the section, as a zstd frame"),
            ("I", "raw length", "of the section"),
            ("#I", "checksum", "crc32c of the raw section"),
        ],
    ),
    "seek table": (
        "seek-table.bin",
        [
            ("#I", "frame magic", "a skippable frame of zstd"),
            ("I", "content length", "in bytes"),
            ("I", "compressed length", "of the first frame"),
            ("I", "raw length", "of the first frame"),
            ("I", "compressed length", "of the second frame"),
            ("I", "raw length", "of the second frame"),
            ("I", "compressed length", "of the frame with the index"),
            ("I", "raw length", "0: other readers pass over it"),
            ("I", "frames", ""),
            ("B", "descriptor", "no checksums"),
            ("#I", "footer magic", "of the seekable format"),
        ],
    ),
    "transfer": (
        "transfer.bin",
        [
            ("#I", "checksum", "crc32c of bytes 4 to 191"),
            ("I", "bytes", "how many are on their way out of the pipe"),
            ("Q", "segment", "base sequence of the segment that they go to"),
            ("Q", "position", "of their batch in it"),
            ("#B", "first byte", "of those in the pipe"),
            ("1h", "zero", ""),
            ("H", "route length", "in bytes"),
            ("128s", "route", ""),
            ("4h", "zeros", ""),
            ("Q", "inode", "of the pipe"),
            ("24h", "zeros", ""),
            ("#B", "mark", "differs from the first byte: the bytes have not left the pipe"),
        ],
    ),
}


def layout(name: str) -> str:
    """The bytes of a golden file, field by field."""
    file, _, start = LAYOUTS[name][0].partition("+")
    data, offset, rows = (GOLDEN / file).read_bytes(), int(start or 0), []
    for form, field, meaning in LAYOUTS[name][1]:
        code = form.strip("#")
        size = struct.calcsize("<" + code.replace("h", "s") if len(code) > 1 else "<" + code)
        taken = data[offset : offset + size]
        rows.append([str(offset - int(start or 0)), hexadecimal(taken), field, value(taken, form), meaning])
        offset += size
    return table(["offset", "bytes", "field", "value", "meaning"], rows)


def text(name: str) -> str:
    """Return a golden text file verbatim."""
    return f"```text\n{(GOLDEN / name).read_text().rstrip()}\n```\n"


def hexadecimal(data: bytes) -> str:
    """Format bytes for people; of a long run of zeros only the length."""
    if len(data) > 16 and not any(data):
        return f"{len(data)} × `00`"
    shown = data.rstrip(b"\0") if len(data) > 32 else data
    rest = f" and {len(data) - len(shown)} × `00`" if shown != data else ""
    return f"`{shown.hex(' ')}`{rest}"


def value(data: bytes, form: str) -> str:
    """Format the value of a field; in hexadecimal if its format begins with #."""
    code = form.strip("#")
    if code[-1] == "s":
        return f"`{data.rstrip(bytes(1)).decode('latin-1').encode('unicode_escape').decode()}`"
    if len(code) > 1 and code[-1] == "h":
        return "" if not any(data) else f"`{data.hex()}`"
    numbers = struct.unpack("<" + code.replace("b", "B"), data)
    if code == "b":
        return f"`{numbers[0]:03b}`"
    return ", ".join(f"{number:#0{2 * len(data) + 2}x}" if form[0] == "#" else str(number) for number in numbers)

"""Input: real lines, split over three routes."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from demonstration.showing import Failed, megabytes, title

ROUTES = ("by-fifo", "by-pipe", "by-socket")
_WAYS = (
    "cat file > routes/by-fifo/in",
    "cat file | wald append by-pipe",
    "wald.Producer, on the socket",
)
_TEXT_MAX_BYTES = 60_000_000
_FILE_MAX_BYTES = 2_000_000  # so that no single file is the demo


@dataclass(frozen=True)
class Text:
    """Input of one route: a file, and its length and digest."""

    path: Path
    length: int
    lines: int
    sha256: str


def collect_text(place: Path) -> list[Text]:
    title("The text", "real lines, split over three routes, with CRLF and invalid UTF-8")
    chosen = os.environ.get("INPUT")
    paths = [place / name for name in ROUTES]
    files = 1
    if chosen:
        data = Path(chosen).read_bytes()
        ends = [0, *(data.find(b"\n", len(data) * part // 3) + 1 or len(data) for part in (1, 2)), len(data)]
        for path, start, end in zip(paths, ends, ends[1:], strict=False):
            path.write_bytes(data[start:end])
    else:
        files = gather(paths)
    texts = [measure(path) for path in paths]
    source = chosen or f"{files} files below {sysconfig.get_path('stdlib')}, /usr/share/doc, …"
    print(f"  {source}")
    for route, way, text in zip(ROUTES, _WAYS, texts, strict=True):
        print(f"  {route:10} {megabytes(text.length):>8}  {text.lines:>9,} lines   {way}")
    if any(text.lines < 1000 for text in texts):
        raise Failed("too little text for a demo: give more with INPUT=file")
    return texts


def gather(paths: list[Path]) -> int:
    """Deal out text files to ``paths`` in turn; returns how many."""
    written = files = 0
    outputs = [path.open("wb") for path in paths]
    for file in candidates():
        try:
            data = file.read_bytes()
        except OSError:
            continue
        if not data or len(data) > _FILE_MAX_BYTES or b"\0" in data[:1024]:
            continue
        outputs[files % len(outputs)].write(data)
        files += 1
        written += len(data)
        if written > _TEXT_MAX_BYTES:
            break
    for output in outputs:
        output.close()
    return files


def candidates() -> Iterator[Path]:
    """Sources, documentation, installed packages: one of each in turn."""
    python = sysconfig.get_paths()
    trees = [python["stdlib"], "/usr/share/doc", python["purelib"], "/usr/include", "/usr/share/perl"]
    for found in zip_longest(*(text_files(Path(tree)) for tree in dict.fromkeys(trees))):
        yield from (file for file in found if file is not None)


def text_files(tree: Path) -> Iterator[Path]:
    suffixes = {".py", ".pyi", ".txt", ".rst", ".md", ".html", ".h", ".c", ".hpp", ".pm", ".pl", ".json", ""}
    for folder, folders, names in os.walk(tree):
        folders.sort()
        for name in sorted(names):
            path = Path(folder, name)
            if path.suffix in suffixes and path.is_file():
                yield path


def measure(path: Path) -> Text:
    """Return the properties of a file, and end its last line with a newline, as reading does."""
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        data += b"\n"
        path.write_bytes(data)
    return Text(path, len(data), data.count(b"\n"), hashlib.sha256(data).hexdigest())

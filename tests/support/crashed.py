"""A small crashed log for tests that damage and restart it.

Records 1 and 2 are in a cut segment, 3 to 6 in the active one, in batches of 2, 1 and 1.
"""

from pathlib import Path

from logs import Built

import wald
from wald.errors import Damaged
from wald.files.layout import Root
from wald.files.listing import list_segments
from wald.segments.raw_scan import RawFile, ScannedBatch

SEGMENT_BYTES = 4096
NOISE = bytes(range(1, 251)) * 2
BASE = 3
ALL = [b"%d" % number for number in range(1, 7)]


def story(path: Path, *, last_is_durable: bool = True, sealed: bool = False) -> Built:
    built = Built(path, segment_max_bytes=SEGMENT_BYTES)
    built.lines("web", ALL[:2], cut=True)
    if sealed:
        built.seal()
    built.lines("web", ALL[2:4])
    built.lines("web", ALL[4:5])
    built.lines("web", ALL[5:], publish=last_is_durable)
    built.crash()
    return built


def newest(path: Path) -> Path:
    return list_segments(Root(path)).segments[-1].path


def offsets(path: Path) -> list[int]:
    """Return the start of each batch of the newest segment, and the end of the last one."""
    with newest(path).open("rb") as file:
        found = [batch for batch in RawFile(file.fileno()).scan() if isinstance(batch, ScannedBatch)]
    return [batch.offset for batch in found] + [found[-1].end]


def readable(path: Path, route: str | None = None) -> list[bytes]:
    """Return every readable record, despite damage."""
    reported: list[Damaged] = []
    return [record.value for record in wald.open(path).records(route, on_damage=reported.append)]


def tree(path: Path) -> dict[str, bytes]:
    """Return the files of a log and their contents, except the reports, whose times differ."""
    files = (file for file in path.rglob("*") if file.is_file() and file.parent.name != "recovery")
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def quarantined(path: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted((path / "quarantine").iterdir())]


def start_again(path: Path, *, epoch: int = 2) -> Built:
    return Built(path, segment_max_bytes=SEGMENT_BYTES, epoch=epoch)


def goes_on(built: Built, kept: list[bytes], next_sequence: int) -> None:
    """Check that new records follow the old ones, now and after another start."""
    path, epoch = built.root.path, built.writer.epoch
    assert readable(path) == kept
    assert built.lines("web", [b"new"]) == next_sequence
    assert readable(path) == [*kept, b"new"]
    built.crash()
    built = start_again(path, epoch=epoch + 1)
    assert built.report.errors == []
    assert built.lines("web", [b"newer"]) == next_sequence + 1
    assert readable(path) == [*kept, b"new", b"newer"]
    built.crash()

"""A log during a write: an open record, a producer that will retry, and the next batches."""

import copy
from dataclasses import replace
from pathlib import Path

from contents import assert_sound, values
from logs import Built, commit, draft

from wald.files.disk import Disk
from wald.format.log_state import LogState, Peer
from wald.segments.raw_scan import RawFile, ScannedBatch
from wald.writing.writer import Writer

NEVER = 1 << 30  # steps a disk survives


def in_memory(writer: Writer) -> tuple[LogState, int, int]:
    """Return the state that must not change before the disk agrees."""
    return copy.deepcopy(writer.state), writer.base_sequence, writer.position


def batches(path: Path) -> list[ScannedBatch]:
    """Return the batches of a raw segment, which must contain nothing else."""
    with path.open("rb") as file:
        *found, _tail = RawFile(file.fileno()).scan()
    assert all(isinstance(batch, ScannedBatch) for batch in found)
    return [batch for batch in found if isinstance(batch, ScannedBatch)]


def with_some_records(path: Path, disk: Disk) -> Built:
    """Build two segments; an open record, and a producer that will retry."""
    built = Built(path, disk=disk)
    built.lines("web", [b"1", b"2"], cut=True)
    built.piece("long", b"begin ", begins=True, ends=False)
    commit(built, [draft(b"4\n", producer=(7, 1))])
    return built


MORE = [b"5\n6\n", b"7\n"]


def commit_more(built: Built) -> None:
    commit(built, [draft(MORE[0], producer=(7, 2)), replace(draft(MORE[1]), peer=Peer(1000, built.writer.epoch, "sh"))])


def assert_whole(built: Built) -> None:
    """End the open record, whose sequence is not yet visible; then check that the log has no damage and no gaps."""
    if built.writer.state.open_records:
        built.piece("long", b"end\n", begins=False, ends=True)
    assert values(built.root.path, "long") in ([b"begin end"], [b"begin and on end"])
    assert_sound(built.root.path)

"""How far the workers of a group have come, by its journal, while none is at work."""

from __future__ import annotations

from dataclasses import dataclass

from wald.files.cursor_directory import is_companion
from wald.format.names import WORK_SUFFIX
from wald.log import Log
from wald.retention.missing import skip_lost
from wald.work.journal import read_whole
from wald.work.replay import Replayed


@dataclass(frozen=True, slots=True)
class Standing:
    """What a journal says.

    Attributes:
        floor: the ack floor; at least the cursor.
        done: how many records above it are done.
        dead: how many are being given up.
    """

    floor: int
    done: int
    dead: int


def standing(log: Log, route: str, group: str) -> Standing:
    """How far the workers have come; without a journal, up to the cursor.

    Raises:
        Damaged: the journal, or a record above the floor, cannot be read.
        OSError: as of open(2).
    """
    floor = log.cursor(route, group).effective
    path = log.root.cursor_directory(route) / f"{group}{WORK_SUFFIX}"
    if not is_companion(path, log.root.cursor(route, group)):
        return Standing(floor, 0, 0)
    found = Replayed(by_key=False)
    read_whole(path, log.root, found.carry_out)
    found.end(floor)
    window = found.deliveries.window
    done = 0
    if window.open:  # what is not open may be of other routes; the log says which
        for batch in log.batches(route, window.floor + 1, window.end - 1, on_missing=skip_lost):
            sequences = range(batch.first_sequence, batch.last_sequence + 1)
            done += sum(window.floor < each < window.end and not window.is_open(each) for each in sequences)
    return Standing(window.floor, done, len(found.dead))

"""Work groups: who works for each, how far it is, and what of it is where."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from wald.answers.fields import time_fields
from wald.answers.work import count_of
from wald.log import Log
from wald.retention.cursors import Cursor, CursorState
from wald.retention.progress import Lag, measure_lags
from wald.work.ownership import RunningCommand, commands_of
from wald.work.snapshot import GroupStatus, read_status, work_files


@dataclass(frozen=True, slots=True)
class FoundGroup:
    """A work group, and what the log has for it.

    Attributes:
        unfinished: from the first record on that is not done; behind: what was not taken in yet.
        commands: of wald-drain, that run for it.
    """

    seen: GroupStatus
    unfinished: Lag
    behind: Lag
    commands: list[RunningCommand]

    @property
    def left(self) -> list[RunningCommand]:
        """The commands that an earlier wald-drain has left running."""
        return [each for each in self.commands if each.left]


def found_groups(log: Log, routes: Iterable[str], now_ns: int) -> list[FoundGroup]:
    """The work groups of routes."""
    seen = []
    for route in routes:
        for file in work_files(log.root, route):
            try:
                seen.append(read_status(log, file, now_ns))
            except FileNotFoundError:  # removed meanwhile
                continue
    return with_lags(log, seen)


def with_lags(log: Log, seen: list[GroupStatus]) -> list[FoundGroup]:
    """What the log has for each, counted in one pass."""
    begins = []
    for number, each in enumerate(seen):
        at, picture = each.cursor, each.snapshot
        for name, sequence in (("unfinished", picture.floor), ("behind", picture.end - 1)):
            begins.append(Cursor(at.route, f"{number} {name}", at.path, CursorState.VALID, sequence))
    counted = measure_lags(log.view(), begins)
    commands = commands_of(seen)
    return [
        FoundGroup(
            each,
            counted[each.cursor.route, f"{number} unfinished"],
            counted[each.cursor.route, f"{number} behind"],
            commands.get(each.file.path, []),
        )
        for number, each in enumerate(seen)
    ]


def group_fields(found: FoundGroup) -> dict[str, object]:
    """One as ``wald group list --json`` has it."""
    seen, picture = found.seen, found.seen.snapshot
    return {
        "route": seen.file.route,
        "group": seen.file.group,
        "path": str(seen.file.path),
        "owner": seen.owner and {"process": seen.owner.pid, "command": seen.owner.command},
        "damage": seen.damage,
        "cursor": seen.cursor.sequence,
        "floor": picture.floor,
        "taken_in": picture.end - 1,
        "open_records": picture.open,
        "out_records": count_of(picture.out()),
        "waiting_records": count_of(picture.waiting()),
        "giving_up_records": len(picture.dead),
        "behind_records": found.behind.records,
        **time_fields("oldest_append_time", found.unfinished.oldest_ns),
        "tries_max": picture.tries_max,
        "commands": [_command_fields(each) for each in found.commands],
    }


def _command_fields(command: RunningCommand) -> dict[str, object]:
    return {
        "worker": command.worker,
        "process": command.process,
        "process_group": command.process_group,
        "command": command.words,
        **time_fields("started", command.started_ns),
        "left": command.left,
    }

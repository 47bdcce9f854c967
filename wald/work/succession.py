"""A reader that moves a group's cursor alone takes the place of its workers: only if nothing would come again."""

from __future__ import annotations

from wald.errors import Refused
from wald.files.disk import Disk
from wald.hints import command_line
from wald.log import Log
from wald.retention.cursors import CursorState
from wald.retention.handovers import PinWriter
from wald.work.commands import require_none
from wald.work.journal import discard
from wald.work.ownership import Ownership
from wald.work.standing import standing


def succeed_workers(log: Log, route: str, group: str) -> None:
    """Take care that a reader that goes by the cursor gets nothing again that workers have acknowledged.

    The cursor is moved to their ack floor. A group without workers is left alone, and no lock is taken.

    Raises:
        Refused: records above the ack floor are done, or are being given up.
        Locked: a process works for the group, or a command that a killed ``wald-drain`` has left running.
        Damaged: the journal of the group, or a record above the ack floor, cannot be read.
        NotPermitted: this user may not work for the group.
    """
    if not log.cursor(route, group).of_work_group:
        return
    disk = Disk()
    with Ownership(log.root, route, group, disk):
        require_none(log.root, route, group)
        cursor = log.cursor(route, group)
        if cursor.state is CursorState.ABSENT:
            discard(log.root, disk, route, group)  # of a group of this name that was removed
        elif cursor.state is CursorState.VALID:
            stands = standing(log, route, group)
            if stands.done or stands.dead:
                raise done_above(log, route, group, stands.floor)
            if stands.floor > cursor.sequence:
                log.set_cursor(route, stands.floor, group)
            # The workers were killed, or the power failed, after the last dead letter was recorded.
            PinWriter(log.root, disk, route, group, log.identity.log_id, "work").unpin()


def done_above(log: Log, route: str, group: str, floor: int, command: str = "COMMAND") -> Refused:
    """The refusal of a reader without workers.

    Args:
        floor: up to where all is done.
        command: what processes the rest.
    """
    words = f"feed {route} --group {group} --workers 1 --exit-at-end -- {command}"
    return Refused(
        f"route {route}: workers of group {group} have processed records above the cursor, "
        f"{floor}, which would be processed again",
        hint=f"{command_line(log.root.path, words, program='wald-drain')} processes the rest",
    )

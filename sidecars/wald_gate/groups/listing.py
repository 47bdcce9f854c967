"""The groups of a route: which there are, and removing one."""

from __future__ import annotations

import asyncio
import time

from starlette.responses import Response

from wald.errors import Locked, NotFound
from wald.files.disk import Disk
from wald.retention.cursors import CursorState, remove_cursor
from wald.retention.progress import read_progress
from wald.status.retention import found_groups
from wald.status.schema import Group, GroupOfRoute, GroupsOfRoute, fields_of
from wald.work.ownership import remove_group
from wald.work.snapshot import work_file
from wald_gate.call import Call
from wald_gate.groups.hosting import locked
from wald_gate.groups.making import require_group
from wald_gate.groups.shapes import Removed
from wald_gate.shapes import encoded
from wald_gate.verbs import JSON


async def groups(call: Call) -> Response:
    """The groups of a route, how far they are, and of a work group what of it is where."""

    def read() -> GroupsOfRoute:
        log, route = call.state.log, call.route
        log.root.require_route(route)
        found = {
            cursor.path: GroupOfRoute.of(cursor, lag)
            for each in read_progress(log.view())
            if each.route == route
            for cursor, lag in zip(each.cursors, each.lags, strict=True)
            if cursor.state is not CursorState.ABSENT
        }
        for each in found_groups(log, [route], time.time_ns()):
            at = each.seen.cursor
            known = found.get(at.path) or GroupOfRoute.of(at, each.unfinished.records)
            found[at.path] = Group(**fields_of(known), work=each.work())
        every = sorted(found.values(), key=lambda each: each.group)
        return GroupsOfRoute(every)  # type: ignore[arg-type]  # only work groups have ``work``

    return Response(encoded(call.seen(await call.read(read))), media_type=JSON)


async def remove(call: Call) -> Response:
    """Remove a group; it is refused while workers have records of it, or another process works for it."""
    log, route, group = call.state.log, call.route, call.group

    def remove() -> None:
        try:
            file = work_file(log.root, route, group)
        except NotFound:
            require_group(log, route, group)
            remove_cursor(log.root, route, group, disk=Disk())
        else:
            remove_group(file)

    await call.state.groups.let_go(route, group)
    try:
        await call.state.in_thread(remove)
    except Locked as error:
        raise await asyncio.to_thread(locked, log, route, group, error) from None
    return Response(encoded(Removed(route, group)), media_type=JSON)

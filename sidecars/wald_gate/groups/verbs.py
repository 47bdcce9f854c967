"""Verbs of work groups: list and remove groups; lease, ack, nack, extend, release and pending."""

from __future__ import annotations

import asyncio
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TypeVar

import msgspec
from starlette.responses import Response

from wald import aio
from wald.errors import Damaged, Locked, NotFound
from wald.files.disk import Disk
from wald.format.records import Record
from wald.hints import command_line
from wald.retention.cursors import CursorState, remove_cursor
from wald.retention.progress import read_progress
from wald.status.retention import found_groups
from wald.status.schema import Group, GroupOfRoute, GroupsOfRoute, fields_of, pending_objects
from wald.work.deliveries import Refusal
from wald.work.owner import Share
from wald.work.ownership import remove_group
from wald.work.snapshot import read_status, work_file
from wald_gate import shapes
from wald_gate.call import JSON, Call, Handle, listing, wait_seconds
from wald_gate.groups.hosting import locked, require_group
from wald_gate.groups.waits import Got
from wald_gate.limits import MemoryReservation
from wald_gate.responses import SILENT_SECONDS, FlushedResponse, Json, Late
from wald_gate.shapes import Leased, LeasedRecord, Removed, encoded

T = TypeVar("T")
_headers = msgspec.json.Decoder(dict[str, str])


def _record(record: Record, tries: int) -> LeasedRecord:
    route, sequence, value, append_time_ns, key, event_time_ns, headers, terminated = record
    text, base64 = _text(value)
    found = LeasedRecord(sequence, route, append_time_ns, tries, text, base64)
    if key is not None:
        found.key, found.key_base64 = _text(key)
    if headers is not None:
        try:
            found.headers = _headers.decode(headers)
        except (msgspec.DecodeError, UnicodeDecodeError):  # not the options of producers
            found.headers, found.headers_base64 = _text(headers)
    if event_time_ns is not None:
        found.event_time_ns = event_time_ns
    if not terminated:
        found.terminated = False
    return found


def _text(value: bytes) -> tuple[str | None, str | None]:
    """Return bytes as text, or in base64."""
    try:
        return value.decode(), None
    except UnicodeDecodeError:
        return None, b64encode(value).decode()


async def lease(call: Call) -> Response:
    """Lease records to a worker; without any, wait as long as the client asks, while it stays connected."""
    wanted = await call.body(shapes.Lease)
    wait = wait_seconds(wanted.wait) if isinstance(wanted.wait, str) else wanted.wait
    kept = MemoryReservation(call.state.limits)
    call.request.at_end = kept.give_back
    if wait <= SILENT_SECONDS:
        return FlushedResponse(await _lease(call, wanted, wait, kept), media_type=JSON)
    leasing = asyncio.create_task(_lease(call, wanted, wait, kept))
    try:
        await asyncio.wait((leasing,), timeout=SILENT_SECONDS)
        if leasing.done():
            return FlushedResponse(leasing.result(), media_type=JSON)
    except BaseException:
        leasing.cancel()
        raise
    return Late(leasing, JSON)


async def _lease(call: Call, wanted: shapes.Lease, wait: float, kept: MemoryReservation) -> bytes:
    refused: list[shapes.Refusal] = []  # of ``done``

    def made(shares: Iterable[Share], refused_now: Iterable[Refusal]) -> Got:
        refused.extend(shapes.refusals(refused_now))
        found = Leased([_record(*each) for share in shares for each in zip(*share, strict=True)], refused)
        return Got(found, encoded(found))

    async with call.state.groups.use(call.route, call.group) as work:
        lease = partial(work.lease_as, made, wanted.worker, wanted.max_records, wanted.max_bytes, wanted.lease_for)
        await kept.reserve(wanted.max_bytes)
        got = await lease(0.0, done=wanted.done)
        if not got.leased.records and wait:
            kept.give_back()  # records that arrive later are few, and counted then
            call.reauthorize()  # the file of tokens may have changed while the group was opened
            waiting = call.state.groups.waiting
            got = await waiting.leased(call.request, call.reauthorize, work, wanted.worker, lease(wait)) or got
        kept.count(len(got.body))
        return got.body


def _settling(shape: type[T], settle: Callable[[aio.WorkGroup, T], Awaitable[Iterable[Refusal]]]) -> Handle:
    """Return a verb that settles records of a worker. The answer lists refused records; the rest is on disk."""

    async def handle(call: Call) -> Response:
        given = await call.body(shape)
        async with call.state.groups.use(call.route, call.group) as work:
            return Json(shapes.Settled(shapes.refusals(await settle(work, given))))

    return handle


ack = _settling(shapes.Ack, lambda work, given: work.ack(given.worker, given.sequences))
nack = _settling(shapes.Nack, lambda work, given: work.nack(given.worker, given.sequences, given.delay, given.reason))
extend = _settling(shapes.Extend, lambda work, given: work.extend(given.worker, given.sequences, given.lease_for))


async def release(call: Call) -> Response:
    """Release all or some records of a worker without asking it."""
    given = await call.body(shapes.Release)
    async with call.state.groups.use(call.route, call.group) as work:
        if given.sequences is None:
            return Json(shapes.Released(await work.release(given.worker)))
        refused = await work.nack(given.worker, given.sequences)
        return Json(shapes.Released(len(set(given.sequences)) - len(refused)))


async def pending(call: Call) -> Response:
    """Return records that are leased, delayed or given up, whichever process owns the group."""
    media_type, listed = listing(call)
    query = call.query(shapes.PendingQuery)

    def read() -> bytes:
        log = call.state.log
        file = work_file(log.root, call.route, call.group)
        seen = read_status(log, file, time.time_ns())
        if seen.damage:
            showing = command_line(log.root.path, f"group show {file.route} {file.group}")
            raise Damaged(f"{file.path}: {seen.damage}", hint=showing)
        picture = seen.snapshot
        found = pending_objects(picture.out(), picture.waiting(), picture.dead, query.limit)
        return listed(found)

    return Response(await call.read(read), media_type=media_type)


async def groups(call: Call) -> Response:
    """Return the groups of a route, with the states of the records of work groups."""

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

    return Json(call.seen(await call.read(read)))


async def remove(call: Call) -> Response:
    """Remove a group, unless workers have records of it, or another process owns it."""
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
    return Json(Removed(route, group))

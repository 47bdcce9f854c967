"""Verbs of work groups: lease, ack, nack, extend, release, pending."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Sequence

from starlette.responses import Response

from wald import aio
from wald.errors import Damaged
from wald.hints import command_line
from wald.status.schema import pending_objects
from wald.work.deliveries import Refusal
from wald.work.owner import Share
from wald.work.snapshot import read_status, work_file
from wald_gate.call import Call, wait_seconds
from wald_gate.groups import shapes
from wald_gate.groups.leased import leased
from wald_gate.groups.waiting import Got
from wald_gate.limits import Kept
from wald_gate.presence import SILENT_SECONDS, Late, Taken
from wald_gate.shapes import encoded
from wald_gate.verbs import JSON, listing


async def lease(call: Call) -> Response:
    """Lease records to a worker; without any, wait as long as the client asks, while it stays connected."""
    wanted = await call.body(shapes.Lease)
    wait = wait_seconds(wanted.wait) if isinstance(wanted.wait, str) else wanted.wait
    kept = Kept(call.state.limits)
    try:
        if wait <= SILENT_SECONDS:
            return Taken(await _lease(call, wanted, wait, kept), JSON, kept.give_back)
        leasing = asyncio.create_task(_lease(call, wanted, wait, kept))
        try:
            await asyncio.wait((leasing,), timeout=SILENT_SECONDS)
            if leasing.done():
                return Taken(leasing.result(), JSON, kept.give_back)
        except BaseException:
            leasing.cancel()
            raise
        return Late(leasing, JSON, kept.give_back)
    except BaseException:
        kept.give_back()
        raise


async def _lease(call: Call, wanted: shapes.Lease, wait: float, kept: Kept) -> bytes:
    async with call.state.groups.use(call.route, call.group) as work:
        await kept.reserve(wanted.max_bytes)
        got = await _leased(work, wanted, wait=0.0, done=wanted.done)
        if not got.leased.records and wait:
            kept.give_back()  # records that arrive later are few, and counted then
            call.judge()  # the file of tokens may have changed while the group was opened
            leasing = _leased(work, wanted, wait=wait, refused=got.leased.refused)
            waiting = call.state.groups.waiting
            got = await waiting.leased(call.request, call.judge, work, wanted.consumer, leasing) or got
        kept.count(len(got.body))
        return got.body


async def ack(call: Call) -> Response:
    """Take in what a consumer has processed; on disk when it is answered."""
    given = await call.body(shapes.Ack)
    async with call.state.groups.use(call.route, call.group) as work:
        return _settled(await work.ack(given.consumer, given.sequences))


async def nack(call: Call) -> Response:
    """Take records back from a consumer that has not processed them; a delay is on disk when it is answered."""
    given = await call.body(shapes.Nack)
    async with call.state.groups.use(call.route, call.group) as work:
        return _settled(await work.nack(given.consumer, given.sequences, given.delay, given.reason))


async def extend(call: Call) -> Response:
    """Let a consumer have records for longer."""
    given = await call.body(shapes.Extend)
    async with call.state.groups.use(call.route, call.group) as work:
        return _settled(await work.extend(given.consumer, given.sequences, given.lease_for))


async def release(call: Call) -> Response:
    """Take back all that a consumer has, or some of it, without the consumer being asked."""
    given = await call.body(shapes.Release)
    async with call.state.groups.use(call.route, call.group) as work:
        if given.sequences is None:
            return _answer(shapes.Released(await work.release(given.consumer)))
        refused = await work.nack(given.consumer, given.sequences)
        return _answer(shapes.Released(len(set(given.sequences)) - len(refused)))


async def pending(call: Call) -> Response:
    """Return records that consumers have, that wait, or that are given up, of any owner."""
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


async def _leased(
    work: aio.WorkGroup,
    wanted: shapes.Lease,
    *,
    wait: float,
    done: Collection[int] = (),
    refused: Sequence[shapes.Refusal] = (),
) -> Got:
    """
    Args:
        refused: of what it has said to be done before.
    """

    def made(shares: Iterable[Share], refused_now: Iterable[Refusal]) -> Got:
        found = leased(shares, [*refused, *shapes.refusals(refused_now)])
        return Got(found, encoded(found))

    return await work.lease_as(
        made, wanted.consumer, wanted.max_records, wanted.max_bytes, wanted.lease_for, wait, done=done
    )


def _settled(refused: Iterable[Refusal]) -> Response:
    return _answer(shapes.Settled(shapes.refusals(refused)))


def _answer(found: object) -> Response:
    return Response(encoded(found), media_type=JSON)

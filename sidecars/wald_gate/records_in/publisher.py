"""Requests with an Idempotency-Key: each part of a body is stored once, however often the request is repeated.

How a body is cut into parts depends only on its content, so a repeated request has the same parts. A part in the table
is compared with the log and answered. Any other part is sent to the daemon under the producer id of the key's slot and
that slot's next number, which the daemon stores once. If the number is taken, for example by another gate or one that
was killed, the daemon refuses it, and the log is read to its end before the part is looked up again. The same happens
if the daemon has forgotten the id and may have stored something under it since, and if the fate of the previous number
is unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Event
from typing import ParamSpec, TypeVar

from wald.client.payloads import column_payloads
from wald.client.session import Durable
from wald.errors import Unavailable, WaldError
from wald.log import Log
from wald_gate.problems import HttpError
from wald_gate.records_in.daemon import DaemonClient, Overtaken, Producer
from wald_gate.records_in.keys import KeyStore, Part, digest_of, marked, slot_ids
from wald_gate.records_out.threads import SharedRead

P = ParamSpec("P")
T = TypeVar("T")
_READING_SECONDS = 10.0  # how long a request waits until the log is read
_SAVING_SECONDS = 10.0  # between two readings of the log, so that little is left to read at a start
_PAUSE_SECONDS = 0.005


OnStored = Callable[[Durable, int, bool], None]
"""Called with the sequences of a part, its bytes, and True unless an earlier request stored it."""


@dataclass(slots=True, eq=False)
class _Slot:
    """Producer id, the number of its last batch, and the sequence up to which all its batches are known.

    After an unanswered request, the last number may or may not be stored. ``readings`` counts how often the number
    was read from the log: parts that were looked up before that may be out of date.
    """

    id: int
    number: int = 0
    seen: int = 0
    is_unsure: bool = False
    readings: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class IdempotentPublisher:
    """Stores requests with a key; reads the log only when the first one arrives."""

    store: KeyStore  # once the log is read
    _saves: SharedRead[None]

    def __init__(self, log: Log, daemon: DaemonClient) -> None:
        self._log = log
        self.daemon = daemon
        self._slots = [_Slot(producer_id) for producer_id in slot_ids(log.identity.log_id)]
        self._stopping = Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="wald-gate-keys")
        self._opening: asyncio.Task[None] | None = None
        self._upkeep: asyncio.Task[None] | None = None
        self._is_unsynced = False
        self._in_flight: set[bytes] = set()

    @asynccontextmanager
    async def request(self, key: bytes, route: str, on_stored: OnStored) -> AsyncIterator[KeyedRequest]:
        """Start a request; ``on_stored`` is called for each part of its body."""
        if key in self._in_flight:
            message = "the first request with this Idempotency-Key has not been answered yet"
            raise HttpError(409, "under-way", message, hint="send it again", headers={"Retry-After": "1"})
        self._in_flight.add(key)
        try:
            until = self.daemon.deadline()
            await self._open()
            patience = until - asyncio.get_running_loop().time()
            request = KeyedRequest(self, key, self._slots[key[0]], route, on_stored, patience)
            try:
                yield request
            finally:
                if request.stored:
                    self.store.add(key, request.stored)
                    try:
                        await self._saves.result()  # requests that end during a save share the next one
                    finally:  # a request that is cancelled is saved too
                        self._is_unsynced = True
                        if (self._upkeep is None or self._upkeep.done()) and not self._stopping.is_set():
                            self._upkeep = asyncio.create_task(self._maintain())
        finally:
            self._in_flight.discard(key)

    async def in_thread(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call that waits for the disk in a thread; calls run in order."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(call, *args, **kwargs))

    async def close(self) -> None:
        """Release the table to the next gate. No request may be in flight."""
        self._stopping.set()
        if self._upkeep is not None:
            self._upkeep.cancel()
        if self._opening is not None:
            await asyncio.wait([self._opening])
            if not self._opening.exception():
                for step in (self.store.save, self.store.sync, self.store.close):
                    await self.in_thread(step)
        self._thread.shutdown(wait=True)

    async def read_slot(self, slot: _Slot) -> None:
        """Read the log to its end, and update the slot's last number from it."""
        await self.in_thread(self.store.follow)
        while await self.in_thread(self.store.read_portion):  # other requests run between two portions
            pass
        slot.number, slot.seen = self.store.slot(self._slots.index(slot))
        slot.readings += 1
        slot.is_unsure = False

    async def _open(self) -> None:
        """Wait until the log has been read."""
        if self._opening is None or (self._opening.done() and self._opening.exception()):
            self._opening = asyncio.create_task(self._read_log())
        if self._opening.done():
            return
        try:
            await asyncio.wait_for(asyncio.shield(self._opening), _READING_SECONDS)
        except TimeoutError:
            raise Unavailable("the keys of the last day are being read from the log", hint="send it again") from None

    async def _read_log(self) -> None:
        """Read the log to its end, so that the slots have current numbers before a key is looked up."""
        self.store = await self.in_thread(KeyStore, self._log, self._stopping)
        self._saves = SharedRead(self.store.save, self._thread)
        for index, slot in enumerate(self._slots):
            slot.number, slot.seen = self.store.slot(index)

    async def _maintain(self) -> None:
        with suppress(WaldError, OSError):  # the next request with a key reports it
            while self._is_unsynced:
                await asyncio.sleep(_SAVING_SECONDS)
                while await self.in_thread(self.store.read_portion):
                    pass
                self._is_unsynced = False  # a save during the sync sets it again
                await self.in_thread(self.store.sync)


@asynccontextmanager
async def _until(end: float, reason: str) -> AsyncIterator[None]:
    """Limit a block to this loop time; ``reason`` explains a timeout."""
    try:
        async with asyncio.timeout_at(end):
            yield
    except TimeoutError:
        raise Unavailable(reason, hint="send it again") from None


class KeyedRequest:
    """Request with a key. Its first part is stored within ``patience`` seconds, later ones within the client's."""

    def __init__(
        self, publisher: IdempotentPublisher, key: bytes, slot: _Slot, route: str, on_stored: OnStored, patience: float
    ) -> None:
        self._publisher = publisher
        self._key = key
        self._slot = slot
        self._route = route
        self._on_stored = on_stored
        self._patience = patience
        self._number = 0
        self._pending = b""
        self.stored: dict[int, Part] = {}  # by this request
        self._look_up()

    @property
    def is_replay(self) -> bool:
        return not self.stored

    async def add(self, payload: bytes, *, columns: bool) -> None:
        """Add the next payload of the body; lines are converted to columns.

        A part is stored once the next one has arrived, so that an invalid line never ends a part early: the corrected
        body has the same earlier parts.
        """
        for part in [payload] if columns else column_payloads(payload.split(b"\n")[:-1]):
            if self._pending:
                await self._publish(self._pending, is_last=False)
            self._pending = part

    async def finish(self) -> None:
        if self._pending:
            await self._publish(self._pending, is_last=True)

    async def _publish(self, payload: bytes, *, is_last: bool) -> None:
        """Store the next part, unless it is already stored."""
        self._number += 1
        until = asyncio.get_running_loop().time() + self._patience
        self._patience = self._publisher.daemon.patience
        payload = marked(payload, self._key, self._number, is_last=is_last)
        digest = digest_of(payload)
        found = await self._known_part() or await self._store(payload, until)
        if is_new := isinstance(found, Durable):
            found = self.stored[self._number] = Part(*found, digest)
        if found.digest != digest:
            message = f"part {self._number} of the body differs from what is stored under this Idempotency-Key"
            raise HttpError(422, "other-body", message, hint="use a new key for each new body")
        self._on_stored(Durable(found.first, found.last), len(payload), is_new)

    async def _store(self, payload: bytes, until: float) -> Durable | Part:
        """Store a part by the loop time ``until``, or return it if the log has it by now."""
        slot, publisher = self._slot, self._publisher
        async with _until(until, "earlier requests are not answered yet"):
            await slot.lock.acquire()
        try:
            while True:
                async with _until(until, "reading the log takes longer"):
                    if slot.is_unsure:
                        await publisher.read_slot(slot)
                    if self._readings != slot.readings:
                        self._look_up()
                        if self._number in self._parts:
                            return self._parts[self._number]
                slot.is_unsure = True
                producer = Producer(slot.id, slot.number + 1)
                try:
                    durable = await publisher.daemon.publish_as(
                        producer, self._route, payload, seen=slot.seen, until=until
                    )
                except Overtaken:
                    await asyncio.sleep(_PAUSE_SECONDS)  # the batch that has the number may not be durable yet
                else:
                    slot.number, slot.seen, slot.is_unsure = producer.number, durable.last, False
                    return durable
        finally:
            slot.lock.release()

    def _look_up(self) -> None:
        self._readings = self._slot.readings
        self._parts = self._publisher.store.parts(self._key)

    async def _known_part(self) -> Part | None:
        """Return the next part if the table and the log have it; raise HttpError 409 if it is forgotten."""
        publisher, part = self._publisher, self._parts.get(self._number)
        if part is not None and not await publisher.in_thread(publisher.store.has_part, self._key, self._number, part):
            await publisher.in_thread(publisher.store.rebuild)
            self._look_up()
            part = self._parts.get(self._number)
        if part is None and any(number > self._number for number in self._parts):
            message = f"part {self._number} of the first request is forgotten, but later parts are not"
            hint = "GET the records to see what is stored; send missing records under a new key"
            raise HttpError(409, "forgotten", message, hint=hint)
        return part

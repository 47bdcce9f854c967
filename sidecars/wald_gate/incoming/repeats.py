"""Requests with a key: what of one is stored already is answered with the sequences that it got, and not stored again.

A body is cut into parts by its content alone, so a request that is repeated has the same parts. A part that is
remembered is compared with the log and answered; any other is sent to the daemon under the id of its slot and the
next number of that. The daemon stores a number once. So if something else was stored in the slot that is not
remembered, such as the same part by another gate or by one that was killed, the number is refused. Then the log is
read to its end and the part is looked for again. So it is, too, when the daemon has forgotten the id and something may
be stored under it behind what was read, and when it is not known whether the last number was stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Event
from typing import Any, ParamSpec, TypeVar

from wald.client.payloads import column_payloads
from wald.client.session import Durable
from wald.errors import Unavailable, WaldError
from wald.log import Log
from wald_gate.incoming.bodies import Payload
from wald_gate.incoming.daemon import Daemon, Overtaken, Producer
from wald_gate.incoming.marks import Part, Slots, digest_of, marked
from wald_gate.incoming.remembered import Remembered
from wald_gate.problems import HttpError

P = ParamSpec("P")
T = TypeVar("T")
_READING_SECONDS = 10.0  # for which a request waits until the log is read
_SAVING_SECONDS = 10.0  # between two times that the log is read on, so that little is left to read at a start
_PAUSE_SECONDS = 0.005


@dataclass(slots=True)
class _Slot:
    """An id, the number of its last batch, and whose turn it is.

    Attributes:
        seen: the sequence up to which all is known that is stored under the id.
        is_unsure: whether a batch was sent of which it is not known whether it is stored.
        readings: how often the number was taken from the log. What was looked up before that may lack a part that is
            stored under a number up to this one.
    """

    id: int
    number: int = 0
    seen: int = 0
    is_unsure: bool = False
    readings: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Repeats:
    """The requests with a key. The log is not read before there is one."""

    def __init__(self, log: Log, daemon: Daemon) -> None:
        self._log = log
        self._daemon = daemon
        self._ids = Slots(log.identity.log_id)
        self._slots = [_Slot(producer_id) for producer_id in self._ids.ids]
        self._ends = Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="wald-gate-keys")
        self._opening: asyncio.Task[Remembered] | None = None
        self._saving: asyncio.Task[None] | None = None
        self._under_way: set[bytes] = set()
        self._asked: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []
        self._answering: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def request(self, key: bytes) -> AsyncIterator[Request]:
        """A request with this key.

        Raises:
            HttpError: 409, another one with the same key is under way.
            Unavailable: what is remembered is being read, which takes longer.
        """
        if key in self._under_way:
            raise HttpError(
                409,
                "under-way",
                "the first request with this Idempotency-Key is not answered yet",
                hint="send it again",
                headers={"Retry-After": "1"},
            )
        self._under_way.add(key)
        try:
            loop = asyncio.get_running_loop()
            until = loop.time() + self._daemon.patience
            remembered = await self._remembered()
            request = Request(self, key, *await self.look_up(key), patience=until - loop.time())
            try:
                yield request
            finally:
                if request.stored:
                    await self.in_thread(remembered.add, key, request.stored)
                    self._save_soon(remembered)
        finally:
            self._under_way.discard(key)

    async def is_true(self, key: bytes, number: int, part: Part) -> bool:
        """Whether the log still has a part where it is remembered."""
        return await self.in_thread((await self._remembered()).is_true, key, number, part)

    async def look_up(self, key: bytes) -> tuple[dict[int, Part], int]:
        """The parts of a key, and the readings of its slot before they were looked up."""
        readings = self._slots[self._ids.of_key(key)].readings
        return await self.in_thread((await self._remembered()).parts, key), readings

    async def begin_again(self) -> None:
        """Read the log from its beginning: it is not the one that is remembered."""
        await self.in_thread((await self._remembered()).begin_again)

    def deadline(self, patience: float | None) -> float:
        """The time of the loop at which a part is given up that comes now; None: with the patience of the daemon."""
        return asyncio.get_running_loop().time() + (self._daemon.patience if patience is None else patience)

    async def store(
        self, key: bytes, number: int, route: str, payload: bytes, readings: int, until: float
    ) -> Durable | Part:
        """Store a part; one that is found in the log meanwhile is returned as it is there.

        Args:
            readings: those at which it was looked up.
            until: the time of the loop at which it is given up.

        Raises:
            Unavailable: the daemon, those who store in the same slot, and the log have together taken too long.
        """
        slot = self._slots[self._ids.of_key(key)]
        async with _in_turn(slot, until):
            while True:
                async with _until(until, "the log is read on, which takes longer"):
                    if slot.is_unsure:
                        await self._take_number(slot, self._ids.of_key(key))
                    if readings != slot.readings:
                        parts, readings = await self.look_up(key)
                        if number in parts:
                            return parts[number]
                slot.is_unsure = True
                producer = Producer(slot.id, slot.number + 1)
                try:
                    durable = await self._daemon.publish_as(producer, route, payload, seen=slot.seen, until=until)
                except Overtaken:
                    await asyncio.sleep(_PAUSE_SECONDS)  # what has taken the number may not be durable yet
                else:
                    slot.number, slot.seen, slot.is_unsure = producer.number, durable.last, False
                    return durable

    async def _take_number(self, slot: _Slot, number: int) -> None:
        """Take the number of a slot, and all that is stored under those before it, from the log."""
        remembered = await self._remembered()
        await self.in_thread(remembered.follow)
        while await self.in_thread(remembered.read_portion):  # others are answered between two portions
            pass
        slot.number, slot.seen = await self.in_thread(remembered.slot, number)
        slot.readings += 1
        slot.is_unsure = False

    async def in_thread(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Carry out what waits for the disk, in the order of the calls; what they remember is then saved.

        What is asked for while the thread is at work is carried out at once, with one commit: a change of threads and
        a commit take longer than most of the calls.
        """
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._asked.append((partial(call, *args, **kwargs), answer))
        if self._answering is None or self._answering.done():
            self._answering = asyncio.create_task(self._answer(), name="wald-gate-keys")
        return await answer

    async def _answer(self) -> None:
        loop = asyncio.get_running_loop()
        while self._asked:
            asked, self._asked = self._asked, []
            results = await loop.run_in_executor(self._thread, self._carry_out, [call for call, _ in asked])
            for (_, answer), (result, error) in zip(asked, results, strict=True):
                if answer.done():  # the request has been cancelled
                    continue
                if error is None:
                    answer.set_result(result)
                else:
                    answer.set_exception(error)

    def _carry_out(self, calls: list[Callable[[], Any]]) -> list[tuple[Any, Exception | None]]:
        results: list[tuple[Any, Exception | None]] = []
        for call in calls:
            try:
                results.append((call(), None))
            except Exception as error:  # noqa: BLE001 - it is raised where it was asked for
                results.append((None, error))
        if self._opening is not None and self._opening.done() and not self._opening.exception():
            self._opening.result().save()
        return results

    async def close(self) -> None:
        """Give the table to the next gate; the requests have ended."""
        self._ends.set()
        if self._saving is not None:
            self._saving.cancel()
        if self._opening is not None:
            await asyncio.wait([self._opening])
            if not self._opening.exception():
                await self.in_thread(self._opening.result().close)
        self._thread.shutdown(wait=True)

    async def _remembered(self) -> Remembered:
        if self._opening is None or (self._opening.done() and self._opening.exception()):
            self._opening = asyncio.create_task(self._open())
        try:
            return await asyncio.wait_for(asyncio.shield(self._opening), _READING_SECONDS)
        except TimeoutError:
            raise Unavailable("the keys of the last day are being read from the log", hint="send it again") from None

    async def _open(self) -> Remembered:
        """Read the log; the numbers of the slots are those at its end, before any key is looked up."""
        remembered = await self.in_thread(Remembered, self._log, self._ids, self._ends)
        for number, slot in enumerate(self._slots):
            slot.number, slot.seen = remembered.slot(number)
        return remembered

    def _save_soon(self, remembered: Remembered) -> None:
        if self._saving is None or self._saving.done():
            self._saving = asyncio.create_task(self._save_later(remembered))

    async def _save_later(self, remembered: Remembered) -> None:
        await asyncio.sleep(_SAVING_SECONDS)
        with suppress(WaldError, OSError):  # the next request with a key reports it
            while await self.in_thread(remembered.read_portion):
                pass


@asynccontextmanager
async def _until(end: float, reason: str) -> AsyncIterator[None]:
    """Do something up to this time of the loop, and say why it takes longer."""
    try:
        async with asyncio.timeout_at(end):
            yield
    except TimeoutError:
        raise Unavailable(reason, hint="send it again") from None


@asynccontextmanager
async def _in_turn(slot: _Slot, end: float) -> AsyncIterator[None]:
    """Have a slot, once those who came before have had it."""
    async with _until(end, "what was sent before it is not answered yet"):
        await slot.lock.acquire()
    try:
        yield
    finally:
        slot.lock.release()


class Request:
    """One request with a key.

    Attributes:
        stored: the parts that are in the log since this request, by their numbers.
        is_replay: whether all of it was in the log before.

    Args:
        patience: the seconds that are left for the first part, once what is remembered has been read.
    """

    def __init__(self, repeats: Repeats, key: bytes, parts: dict[int, Part], readings: int, *, patience: float) -> None:
        self._patience: float | None = patience
        self._repeats = repeats
        self._key = key
        self._parts = parts
        self._readings = readings
        self._number = 0
        self.stored: dict[int, Part] = {}

    @property
    def is_replay(self) -> bool:
        return not self.stored

    async def publish(self, route: str, payload: bytes, *, is_last: bool) -> tuple[Durable, bool]:
        """Store the next part, or find it stored; returns where it is, and whether it was stored now.

        Raises:
            HttpError: 422, under this key something else is stored; 409, the beginning of it is forgotten.
            WaldError: as of :meth:`wald_gate.incoming.daemon.Daemon.publish`.
        """
        self._number += 1
        until, self._patience = self._repeats.deadline(self._patience), None
        payload = marked(payload, self._key, self._number, is_last=is_last)
        digest = digest_of(payload)
        part = await self._remembered()
        if part is None:
            found = await self._repeats.store(self._key, self._number, route, payload, self._readings, until)
            if isinstance(found, Durable):
                self.stored[self._number] = Part(found.first, found.last, digest)
                return found, True
            part = found
        if part.digest != digest:
            raise HttpError(
                422,
                "other-body",
                f"part {self._number} of the body is not what is stored under this Idempotency-Key",
                hint="a new key for each new body",
            )
        return Durable(part.first, part.last), False

    async def _remembered(self) -> Part | None:
        part = self._parts.get(self._number)
        if part is not None and not await self._repeats.is_true(self._key, self._number, part):
            await self._repeats.begin_again()
            self._parts, self._readings = await self._repeats.look_up(self._key)
            part = self._parts.get(self._number)
        if part is None and any(number > self._number for number in self._parts):
            raise HttpError(
                409,
                "forgotten",
                f"part {self._number} of the first request is forgotten, and later parts of it are not",
                hint="GET the records to see what is stored; a new key for what is to be stored again",
            )
        return part


async def parts_of(payloads: AsyncIterator[Payload]) -> AsyncIterator[tuple[bytes, bool]]:
    """The parts of a body, as columns, and whether each is the last one.

    A part is held back until the next has come. So what comes before a line that is wrong is not stored in a part that
    a body without the mistake would not have.
    """
    held: bytes | None = None
    async for payload in payloads:
        for part in [payload.data] if payload.columns else column_payloads(payload.data.split(b"\n")[:-1]):
            if held is not None:
                yield held, False
            held = part
    if held is not None:
        yield held, True

"""What a client may take: of a body, its size and the time in which it comes; of memory, what is kept for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.requests import Request

from wald.format.protocol import FRAME_MAX_BYTES
from wald_gate.problems import RETRY_SECONDS, HttpError
from wald_gate.settings import LimitSettings

COMPLETE = "wald.complete"
"""In the scope once the whole body has come, so that no timer has to run for it."""
ALLOWANCE = "wald.allowance"
"""In the scope of a request: what its client may take over time."""
_STEP_BYTES = 64 << 10
_ROOM_SECONDS = 0.5


class Kept:
    """What a request keeps in memory, of what all may keep together, beyond the 128 KiB that each may keep."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._counted = 0

    def keep(self, size: int) -> None:
        """Keep so many bytes now.

        Raises:
            HttpError: 503, all requests together would keep too much.
        """
        if not self._fits(size):
            raise self._refused()
        self.count(size)

    async def reserve(self, size: int) -> None:
        """As :meth:`keep`, once there is room, for which it waits for half a second.

        So many bytes may be more than all may keep together; it has that alone then.
        """
        size = min(size, self._limits.settings.kept_max_bytes)
        if not self._fits(size):
            try:
                async with asyncio.timeout(_ROOM_SECONDS):
                    await self._room(size)
            except TimeoutError:
                raise self._refused() from None
        self.count(size)

    async def _room(self, size: int) -> None:
        """Return once there is room for so many bytes."""
        while not self._fits(size):
            if self._limits.given_back is None:
                self._limits.given_back = asyncio.Event()
            await self._limits.given_back.wait()

    def count(self, size: int) -> None:
        """Take in that so many bytes are kept, whether there is room or not."""
        more = max(0, size - FRAME_MAX_BYTES) - self._counted
        self._counted += more
        self._limits.kept_bytes += more
        if more < 0 and self._limits.given_back is not None:
            self._limits.given_back.set()
            self._limits.given_back = None

    def give_back(self) -> None:
        """Keep nothing any more."""
        self.count(0)

    def _fits(self, size: int) -> bool:
        more = max(0, size - FRAME_MAX_BYTES) - self._counted
        return more <= 0 or self._limits.kept_bytes + more <= self._limits.settings.kept_max_bytes

    def _refused(self) -> HttpError:
        kept, most = self._limits.kept_bytes, self._limits.settings.kept_max_bytes
        return HttpError(
            503,
            "memory",
            f"the gate keeps {kept} bytes of records for its clients, and may keep {most}",
            hint="kept_max_bytes in [limits] of the gate's file of settings",
            headers={"Retry-After": str(RETRY_SECONDS)},
        )


@dataclass
class Limits:
    """What a client may take.

    Attributes:
        settings, hosts: as they are now; SIGHUP may change them.
        kept_bytes: what all requests keep, beyond the 128 KiB that each may keep: unfinished records, and leased ones
            until their client has taken them.
        given_back: is set when some of that is given back; None: this is not waited for.
    """

    settings: LimitSettings
    hosts: tuple[str, ...] = ()
    kept_bytes: int = 0
    given_back: asyncio.Event | None = None

    @contextmanager
    def keeping(self) -> Iterator[Kept]:
        """What a request keeps; all is given back at the end."""
        kept = Kept(self)
        try:
            yield kept
        finally:
            kept.give_back()

    async def chunks(self, request: Request, *, counted: bool = True) -> AsyncIterator[bytes]:
        """The body as it comes.

        Args:
            counted: whether its bytes count against the client; a compressed body counts after decompression.

        Raises:
            HttpError: 408, the next 64 KiB of it do not come in time.
            ClientDisconnect: the client has gone.
        """
        chunks, allowance = request.stream(), request.scope.get(ALLOWANCE)
        loop = asyncio.get_running_loop()
        deadline, came = loop.time() + self.settings.body_timeout, 0
        while True:
            chunk = await (anext(chunks, None) if COMPLETE in request.scope else self._in_time(chunks, deadline))
            if chunk is None:
                return
            came += len(chunk)
            if came >= _STEP_BYTES:
                deadline, came = loop.time() + self.settings.body_timeout, 0
            if allowance is not None and counted:
                allowance.take_bytes(len(chunk))
            yield chunk

    async def _in_time(self, chunks: AsyncIterator[bytes], deadline: float) -> bytes | None:
        try:
            async with asyncio.timeout_at(deadline):
                return await anext(chunks, None)
        except TimeoutError:
            message = f"in {self.settings.body_timeout:g} s less than {_STEP_BYTES} bytes of the body came"
            raise HttpError(408, "timeout", message, headers={"Connection": "close"}) from None

    async def read(self, request: Request, what: str = "a body of JSON", most: int | None = None) -> bytes:
        """A body that is small.

        Args:
            most: bytes; None: as many as one of JSON may have.

        Raises:
            HttpError: 413, it is too large; and as :meth:`chunks`.
        """
        most = self.settings.json_max_bytes if most is None else most
        parts: list[bytes] = []
        size = 0
        async for chunk in self.chunks(request):
            parts.append(chunk)
            size += len(chunk)
            if size > most:
                raise HttpError(413, "too-large", f"{what} has at most {most} bytes")
        return b"".join(parts)

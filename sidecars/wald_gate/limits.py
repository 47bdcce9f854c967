"""What a client may take: of a body, its size and the time in which it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.requests import Request

from wald.client.payloads import FRAME_MAX_BYTES
from wald_gate.problems import RETRY_SECONDS, HttpError
from wald_gate.settings import LimitSettings

COMPLETE = "wald.complete"
"""In the scope once the whole body has come, so that no timer has to run for it."""
ALLOWANCE = "wald.allowance"
"""In the scope of a request: what its client may take over time."""
_STEP_BYTES = 64 << 10


@dataclass
class Limits:
    """What a client may take.

    Attributes:
        settings, hosts: as they are now; SIGHUP may change them.
        kept_bytes: of unfinished records, of all requests, beyond the 128 KiB that each may keep.
    """

    settings: LimitSettings
    hosts: tuple[str, ...] = ()
    kept_bytes: int = 0

    @contextmanager
    def keeping(self) -> Iterator[Callable[[int], None]]:
        """What a request calls with how many bytes it keeps now; all is given back at the end.

        Raises:
            HttpError: 503, by that call: all requests together would keep too much.
        """
        kept = 0

        def keep(size: int) -> None:
            nonlocal kept
            more = max(0, size - FRAME_MAX_BYTES) - kept
            most = self.settings.kept_max_bytes
            if more > 0 and self.kept_bytes + more > most:
                raise HttpError(
                    503,
                    "memory",
                    f"the gate keeps {self.kept_bytes} bytes of unfinished records, and may keep {most}",
                    hint="kept_max_bytes in [limits] of the gate's file of settings",
                    headers={"Retry-After": str(RETRY_SECONDS)},
                )
            kept += more
            self.kept_bytes += more

        try:
            yield keep
        finally:
            self.kept_bytes -= kept

    async def chunks(self, request: Request) -> AsyncIterator[bytes]:
        """The body as it comes.

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
            if allowance is not None:
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

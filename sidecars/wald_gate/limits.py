"""What a client may take: of a body, its size and the time in which it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from starlette.requests import Request

from wald_gate.problems import HttpError
from wald_gate.settings import LimitSettings

COMPLETE = "wald.complete"
"""In the scope once the whole body has come, so that no timer has to run for it."""


@dataclass
class Limits:
    """What a client may take.

    Attributes:
        settings: as they are now; SIGHUP may change them.
    """

    settings: LimitSettings

    async def chunks(self, request: Request) -> AsyncIterator[bytes]:
        """The body as it comes.

        Raises:
            HttpError: 408, nothing of it comes.
            ClientDisconnect: the client has gone.
        """
        chunks = request.stream()
        while True:
            chunk = await (anext(chunks, None) if COMPLETE in request.scope else self._in_time(chunks))
            if chunk is None:
                return
            yield chunk

    async def _in_time(self, chunks: AsyncIterator[bytes]) -> bytes | None:
        try:
            async with asyncio.timeout(self.settings.body_timeout):
                return await anext(chunks, None)
        except TimeoutError:
            message = f"nothing of the body came for {self.settings.body_timeout:g} s"
            raise HttpError(408, "timeout", message, headers={"Connection": "close"}) from None

    async def read(self, request: Request) -> bytes:
        """A body of JSON.

        Raises:
            HttpError: 413, it is too large; and as :meth:`chunks`.
        """
        parts: list[bytes] = []
        size = 0
        async for chunk in self.chunks(request):
            parts.append(chunk)
            size += len(chunk)
            if size > self.settings.json_max_bytes:
                raise HttpError(413, "too-large", f"a body of JSON has at most {self.settings.json_max_bytes} bytes")
        return b"".join(parts)

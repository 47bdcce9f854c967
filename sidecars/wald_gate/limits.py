"""What a client may take: of a body, its size and the time in which it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from starlette.requests import Request

from wald_gate.problems import HttpError


@dataclass(frozen=True)
class Limits:
    """What a client may take.

    Attributes:
        json_bytes: of a body of JSON.
        body_bytes: of a body of records, decompressed.
        record_bytes: of one record.
        body_seconds: how long the client may send nothing of a body that it has begun.
    """

    json_bytes: int = 4 << 20
    body_bytes: int = 1 << 30
    record_bytes: int = 16 << 20
    body_seconds: float = 20.0

    async def chunks(self, request: Request) -> AsyncIterator[bytes]:
        """The body as it comes.

        Raises:
            HttpError: 408, nothing of it comes.
            ClientDisconnect: the client has gone.
        """
        chunks = request.stream()
        while True:
            try:
                async with asyncio.timeout(self.body_seconds):
                    chunk = await anext(chunks, None)
            except TimeoutError:
                message = f"nothing of the body came for {self.body_seconds:g} s"
                raise HttpError(408, "timeout", message, headers={"Connection": "close"}) from None
            if chunk is None:
                return
            yield chunk

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
            if size > self.json_bytes:
                raise HttpError(413, "too-large", f"a body of JSON has at most {self.json_bytes} bytes")
        return b"".join(parts)

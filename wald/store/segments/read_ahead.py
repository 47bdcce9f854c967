"""Frames of a sealed segment, each decompressed while the one before it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor


class ReadAhead:
    """
    Args:
        frame: the raw bytes of a frame by its number. From the second one on it is called in one other thread only.
    """

    def __init__(self, frame: Callable[[int], bytes]) -> None:
        self._frame = frame
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: tuple[int, Future[bytes]] | None = None

    def load(self, number: int, following: int | None) -> bytes:
        """One frame; from the second on, ``following``, which will be wanted next, is decompressed meanwhile."""
        if self._pool is None:
            data = self._frame(number)
            if following is not None:
                from concurrent.futures import ThreadPoolExecutor  # 10 ms, which reading one record need not take

                self._pool = ThreadPoolExecutor(1, "wald-read-ahead")
            return data
        ahead, self._ahead = self._ahead, None
        known = ahead is not None and ahead[0] == number
        loading = ahead[1] if ahead is not None and known else self._pool.submit(self._frame, number)
        if following is not None:
            self._ahead = (following, self._pool.submit(self._frame, following))
        return loading.result()

    def close(self) -> None:
        """Return when the thread has ended."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

"""Host of the work groups that the gate owns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from wald import aio
from wald.errors import Locked, NotFound, WaldError
from wald.files.locks import process_name
from wald.log import Log
from wald.retention.cursors import CursorState
from wald.work.snapshot import WorkFile, owner_of
from wald_gate.groups.waits import WaitingLeases
from wald_gate.problems import RETRY_SECONDS, HttpError
from wald_gate.settings import GroupSettings


def require_group(log: Log, route: str, group: str, *, more: str = "") -> None:
    """Raise NotFound if a group has no cursor on its route; ``more`` is added to the hint."""
    cursor = log.cursor(route, group)
    if cursor.state is CursorState.ABSENT:
        making = f'PUT {{"sequence": "earliest"}} to /v1/routes/{route}/cursors/{group} creates it'
        raise NotFound(f"there is no group {group!r} on route {route}", hint=f"{making}{more}")


_IDLE_SECONDS = 30.0
_GROUPS_MAX = 64  # each has some threads, and up to 12 MiB of records
_RETRY = {"Retry-After": str(RETRY_SECONDS)}
_log = logging.getLogger("wald_gate")


@dataclass(eq=False)
class _Hosted:
    """A group from opening to close; it accepts no requests once ``closing`` is set."""

    work: aio.WorkGroup
    opening: asyncio.Task[aio.WorkGroup]
    users: int = 0
    used_at: float = 0.0
    closing: asyncio.Task[None] | None = None

    @property
    def has_ended(self) -> bool:
        """True if the group could not be opened, or has failed."""
        return self.opening.done() and (self.opening.exception() is not None or self.work.has_failed)

    async def is_free(self) -> bool:
        """Return True if no request uses the group and no worker has one of its records."""
        if self.users or not self.opening.done() or self.closing is not None:
            return False
        if self.has_ended:
            return True
        try:
            pending = await self.work.pending()
        except (WaldError, OSError, RuntimeError, ValueError):  # it has failed in this moment, or was closed
            return True
        return not (pending or self.users)


class Groups:
    """Work groups that the gate owns: the first request opens a group, and an idle one is closed.

    No request creates a group, as a name may be misspelt, and a group pins its unprocessed records; only a group in the
    settings is created. A group whose journal could not be written is closed and opened again by the next request.
    Groups that are not in the settings are limited; those of one route may be half of them.
    """

    def __init__(
        self,
        log: Log,
        settings: Mapping[str, GroupSettings],
        *,
        groups_max: int = _GROUPS_MAX,
        idle_seconds: float = _IDLE_SECONDS,
    ) -> None:
        self._log = log
        self._settings = settings
        self._groups_max = groups_max
        self._idle_seconds = idle_seconds
        self._hosted: dict[tuple[str, str], _Hosted] = {}
        self._looks: asyncio.Task[None] | None = None
        self.waiting = WaitingLeases()

    @property
    def count(self) -> int:
        return len(self._hosted)

    def dead_letter(self, route: str, group: str) -> str:
        """Return the dead-letter route of a group while this gate hosts it."""
        return self._settings_of(route, group).dead_letter

    @asynccontextmanager
    async def use(self, route: str, group: str) -> AsyncIterator[aio.WorkGroup]:
        """Yield a group, which stays open until the block ends."""
        hosted = await self._found(route, group)
        hosted.users += 1
        try:
            yield await asyncio.shield(hosted.opening)
        finally:
            hosted.users -= 1
            hosted.used_at = asyncio.get_running_loop().time()
            if hosted.has_ended:
                self._close((route, group), hosted)

    async def let_go(self, route: str, group: str) -> None:
        """Close a group if it is open; raise HttpError 409 if it is in use."""
        hosted = self._hosted.get((route, group))
        if hosted is None:
            return
        if hosted.closing is None and not await hosted.is_free():
            hint = f"stop them; GET /v1/routes/{route}/groups/{group}/pending shows the leases; POST …/release"
            raise HttpError(409, "in-use", f"workers have records of group {group}, or wait for some", hint=hint)
        await asyncio.shield(self._close((route, group), hosted))

    async def close(self) -> None:
        """Close all groups; a failure does not prevent the others from being closed."""
        if self._looks is not None:
            self._looks.cancel()
        closing = [self._close(*each) for each in self._hosted.items()]
        for failed in await asyncio.gather(*closing, return_exceptions=True):
            if failed is not None:
                _log.error("a work group could not be closed", exc_info=failed)

    async def _found(self, route: str, group: str) -> _Hosted:
        while True:
            hosted = self._hosted.get((route, group))
            if hosted is not None:
                if hosted.closing is None:
                    return hosted
                await asyncio.shield(hosted.closing)
            elif not (rivals := self._rivals(route, group)):
                return self._open(route, group)
            elif not await self._make_room(rivals):
                share = f"those of route {route} may be half of {self._groups_max}"
                message = f"this gate already hosts {len(rivals)} groups; {share}"
                hint = "try again once one of them is no longer used"
                raise HttpError(503, "too-many-groups", message, hint=hint, headers=_RETRY)

    def _rivals(self, route: str, group: str) -> list[tuple[str, str]]:
        """Return the groups one of which must be closed before this one is opened; none if there is room."""
        if f"{route}/{group}" in self._settings:
            return []
        others = [key for key in self._hosted if "/".join(key) not in self._settings]
        same = [key for key in others if key[0] == route]
        if len(same) >= max(1, self._groups_max // 2):
            return same
        return others if len(others) >= self._groups_max else []

    def _open(self, route: str, group: str) -> _Hosted:
        settings = self._settings_of(route, group)
        work = aio.WorkGroup(
            self._log,
            route,
            group,
            order="key" if settings.order == "key" else "log",
            window=settings.window,
            max_tries=settings.max_tries or None,
            dead_letter=settings.dead_letter,
            report=_log.warning,
        )
        hosted = _Hosted(work, asyncio.create_task(self._opened(work, route, group), name=f"wald-gate-open-{route}"))
        self._hosted[route, group] = hosted
        if self._looks is None or self._looks.done():
            self._looks = asyncio.create_task(self._look(), name="wald-gate-groups")
        return hosted

    async def _opened(self, work: aio.WorkGroup, route: str, group: str) -> aio.WorkGroup:
        if f"{route}/{group}" not in self._settings:
            await asyncio.to_thread(require_group, self._log, route, group)
        try:
            return await work.__aenter__()
        except Locked as error:
            raise await asyncio.to_thread(locked, self._log, route, group, error) from None

    def _settings_of(self, route: str, group: str) -> GroupSettings:
        return self._settings.get(f"{route}/{group}", GroupSettings())

    def _close(self, key: tuple[str, str], hosted: _Hosted) -> asyncio.Task[None]:
        """Close a group once; a later group of the same name stays open."""
        if hosted.closing is None:
            hosted.closing = asyncio.create_task(self._closed(*key, hosted), name=f"wald-gate-close-{key[0]}")
        return hosted.closing

    async def _closed(self, route: str, group: str, hosted: _Hosted) -> None:
        try:
            await asyncio.wait([hosted.opening])
            if hosted.opening.exception() is None:  # otherwise its requests report the reason
                await hosted.work.__aexit__(None, None, None)
        except (WaldError, OSError) as error:
            _log.warning("%s: group %s: %s", route, group, error)
        finally:
            del self._hosted[route, group]

    async def _make_room(self, keys: Sequence[tuple[str, str]]) -> bool:
        """Close the group that has been unused for longest, if one is free."""
        for key, hosted in sorted(((each, self._hosted[each]) for each in keys), key=lambda each: each[1].used_at):
            if hosted.closing is not None or await hosted.is_free():
                await asyncio.shield(self._close(key, hosted))
                return True
        return False

    async def _look(self) -> None:
        """Close idle groups while there are any."""
        loop = asyncio.get_running_loop()
        while self._hosted:
            await asyncio.sleep(self._idle_seconds / 4)
            for key, hosted in list(self._hosted.items()):
                if hosted.used_at < loop.time() - self._idle_seconds and await hosted.is_free():
                    self._close(key, hosted)
        self._looks = None


def locked(log: Log, route: str, group: str, error: Locked) -> HttpError:
    """Return 423 with the process that owns a group."""
    message, owner = error.message, owner_of(WorkFile(log.root, route, group))
    if owner is not None:
        name = "" if owner.pid is None else process_name(owner.pid)
        process = f"process {owner.pid} ({name})" if name else "another process"
        message = f"{process} works on route {route} for group {group}"
    ends = f"a gate {_IDLE_SECONDS:g} s after the last request, once no worker has a record"
    return HttpError(
        423, "locked", message, hint=f"retry: it releases the group when it ends, and {ends}", headers=_RETRY
    )

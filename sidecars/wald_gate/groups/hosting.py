"""The work groups that the gate owns: each is opened by the first request for it, and closed when it is not used.

A request makes no group, as a name may be misspelt, and a group pins what it has not processed. A group is there
once it has a cursor; one that the settings name is made by the first request.

Requests that come meanwhile share the opening. A group without requests for some time, of which no consumer
has a record, is closed, so that another process may own it. One whose journal could not be written is closed too, and
opened again by the next request: then its journal says what is on disk.

Of groups that the settings do not name there is a bound, and on one route half of it: who may work on that route alone
takes no place of the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from wald import aio
from wald.errors import Locked, WaldError
from wald.files.locks import process_name
from wald.log import Log
from wald.work.snapshot import OwnerProcess, WorkFile, owner_of
from wald_gate.groups.making import require_group
from wald_gate.groups.waiting import Waiting
from wald_gate.problems import RETRY_SECONDS, HttpError
from wald_gate.settings import GroupSettings

_IDLE_SECONDS = 30.0
_GROUPS_MAX = 64  # each has some threads, and up to 12 MiB of records
_log = logging.getLogger("wald_gate")


@dataclass(eq=False)
class _Hosted:
    """A group from its opening to its end.

    Attributes:
        opening: done once it is open.
        users: how many requests use it; used_at: when the last one has ended, by the clock of the loop.
        closing: set once it is being closed; then it takes no more requests.
    """

    work: aio.WorkGroup
    opening: asyncio.Task[aio.WorkGroup]
    users: int = 0
    used_at: float = 0.0
    closing: asyncio.Task[None] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether it could not be opened, or cannot go on."""
        if not self.opening.done():
            return False
        return self.opening.exception() is not None or self.work.has_failed

    async def is_free(self) -> bool:
        """Whether it is not used, and no consumer has a record of it."""
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
    """The work groups of a log that go through this gate.

    Args:
        settings: of each group that the settings name, as ``ROUTE/GROUP``: how it gives out records.
        groups_max: how many are open at a time of those that ``settings`` does not name.
        idle_seconds: after so long without a request a group is closed.

    Attributes:
        waiting: the leases that wait.
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
        self.waiting = Waiting()

    @property
    def count(self) -> int:
        """How many are open."""
        return len(self._hosted)

    def dead_letter(self, route: str, group: str) -> str:
        """The route that gets what a group gives up while this gate is its host."""
        return self._settings_of(route, group).dead_letter

    @asynccontextmanager
    async def use(self, route: str, group: str) -> AsyncIterator[aio.WorkGroup]:
        """A group, which stays open until the block ends.

        Raises:
            HttpError: 503, too many groups are in use; 423, another process owns it.
            NotFound: it is not there.
            WaldError, OSError: as of :class:`wald.WorkGroup`; the next request tries again.
        """
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
        """Close a group, if it is open.

        Raises:
            HttpError: 409, it is used, or a consumer has a record of it.
        """
        hosted = self._hosted.get((route, group))
        if hosted is None:
            return
        if hosted.closing is None and not await hosted.is_free():
            raise HttpError(
                409,
                "in-use",
                f"workers have records of group {group}, or wait for some",
                hint=f"stop them; GET /v1/routes/{route}/groups/{group}/pending shows who has what; POST …/release",
            )
        await asyncio.shield(self._close((route, group), hosted))

    async def close(self) -> None:
        """Close all groups; one that fails at it keeps no other, nor what is closed behind them, from being closed."""
        if self._looks is not None:
            self._looks.cancel()
        for failed in await asyncio.gather(
            *[self._close(*each) for each in self._hosted.items()], return_exceptions=True
        ):
            if failed is not None:
                _log.error("a work group could not be closed", exc_info=failed)

    async def _found(self, route: str, group: str) -> _Hosted:
        """The group, which is open or about to be."""
        while True:
            hosted = self._hosted.get((route, group))
            if hosted is not None:
                if hosted.closing is None:
                    return hosted
                await asyncio.shield(hosted.closing)
            elif not (rivals := self._rivals(route, group)):
                return self._open(route, group)
            elif not await self._make_room(rivals):
                raise HttpError(
                    503,
                    "too-many-groups",
                    f"this gate works for {len(rivals)} groups already; for route {route} it may be half of "
                    f"{self._groups_max}",
                    hint="try again when one of them is not used any more",
                    headers={"Retry-After": str(RETRY_SECONDS)},
                )

    def _rivals(self, route: str, group: str) -> list[tuple[str, str]]:
        """The groups of which one has to be closed before this one is opened; none, if there is a place for it."""
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
        """
        Raises:
            HttpError: 423, another process owns the group.
            WaldError, OSError: as of :meth:`use`.
        """
        if f"{route}/{group}" not in self._settings:
            await asyncio.to_thread(require_group, self._log, route, group)
        try:
            return await work.__aenter__()
        except Locked as error:
            raise await asyncio.to_thread(locked, self._log, route, group, error) from None

    def _settings_of(self, route: str, group: str) -> GroupSettings:
        return self._settings.get(f"{route}/{group}", GroupSettings())

    def _close(self, key: tuple[str, str], hosted: _Hosted) -> asyncio.Task[None]:
        """Close a group, once; another one of this name that was opened since then stays open."""
        if hosted.closing is None:
            hosted.closing = asyncio.create_task(self._closed(*key, hosted), name=f"wald-gate-close-{key[0]}")
        return hosted.closing

    async def _closed(self, route: str, group: str, hosted: _Hosted) -> None:
        try:
            if await _is_open(hosted):
                await hosted.work.__aexit__(None, None, None)
        except (WaldError, OSError) as error:
            _log.warning("%s: group %s: %s", route, group, error)
        finally:
            del self._hosted[route, group]

    async def _make_room(self, keys: Sequence[tuple[str, str]]) -> bool:
        """Close the one of these that was not used for longest, of those that can be; False if there is none."""
        for key, hosted in sorted(((each, self._hosted[each]) for each in keys), key=lambda each: each[1].used_at):
            if hosted.closing is not None or await hosted.is_free():
                await asyncio.shield(self._close(key, hosted))
                return True
        return False

    async def _look(self) -> None:
        """Close what is idle, as long as there is something."""
        loop = asyncio.get_running_loop()
        while self._hosted:
            await asyncio.sleep(self._idle_seconds / 4)
            for key, hosted in list(self._hosted.items()):
                if hosted.used_at < loop.time() - self._idle_seconds and await hosted.is_free():
                    self._close(key, hosted)
        self._looks = None


def locked(log: Log, route: str, group: str, error: Locked) -> HttpError:
    """423: another process works for a group; which one is looked up."""
    owner = owner_of(WorkFile(log.root, route, group))
    return HttpError(
        423,
        "locked",
        error.message if owner is None else _owned(owner, route, group),
        hint=f"ask again: it lets go when it ends, and a gate {_IDLE_SECONDS:g} s after the last request, once no "
        "consumer has a record",
        headers={"Retry-After": str(RETRY_SECONDS)},
    )


def _owned(owner: OwnerProcess, route: str, group: str) -> str:
    name = "" if owner.pid is None else process_name(owner.pid)
    process = f"process {owner.pid} ({name})" if name else "another process"
    return f"{process} works on route {route} for group {group}"


async def _is_open(hosted: _Hosted) -> bool:
    """Whether it could be opened; if not, those who have asked for it know why."""
    await asyncio.wait([hosted.opening])
    return hosted.opening.exception() is None

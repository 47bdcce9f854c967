"""What the gate has while it runs: the log, the connection to its daemon, limits, counts, and threads that read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, TypeVar

from wald.log import Log
from wald_gate.groups.hosting import Groups
from wald_gate.groups.processed import Processed
from wald_gate.incoming.daemon import Daemon
from wald_gate.incoming.repeats import Repeats
from wald_gate.limits import Limits
from wald_gate.monitoring.counts import Counts
from wald_gate.monitoring.readiness import Readiness
from wald_gate.monitoring.requests import RequestLog
from wald_gate.outgoing.following import Following
from wald_gate.outgoing.turns import ReadThreads
from wald_gate.page.watching import Watching
from wald_gate.rights.admission import Admission
from wald_gate.rights.allowances import Allowances
from wald_gate.rights.clients import Rights
from wald_gate.rights.sessions import Sessions
from wald_gate.transport.connection import Bounds

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class State:
    """Of a gate; one of each, shared by all requests.

    Attributes:
        readers: threads that read the log for clients; threads: those for all other disk access.
    """

    log: Log
    daemon: Daemon
    rights: Rights
    limits: Limits
    allowances: Allowances
    threads: ThreadPoolExecutor
    readers: ReadThreads
    following: Following
    bounds: Bounds
    counts: Counts
    readiness: Readiness
    request_log: RequestLog
    sessions: Sessions
    admission: Admission
    watching: Watching
    groups: Groups
    repeats: Repeats
    processed: Processed

    async def in_thread(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a disk access that is short, or part of a write, without blocking the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.threads, partial(call, *args, **kwargs))

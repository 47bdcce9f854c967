"""The life cycle of a gate: start, reload on SIGHUP, and stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import uvloop

from wald.errors import NotFound, WaldError
from wald.files.layout import Root
from wald.log import Log
from wald.loop import SIGNALS
from wald.systemd import Systemd
from wald.work.group import DEAD_LETTER
from wald_gate.app import VERBS, Application
from wald_gate.auth.clients import Rights
from wald_gate.call import State
from wald_gate.http.server import Listening, Server, check_path
from wald_gate.page.views import PAGES
from wald_gate.records_out.threads import ReadThreads
from wald_gate.settings import Settings

_THREADS, _READERS = 8, 2  # they wait for the disk; readers share the interpreter with the event loop
_SWITCH_SECONDS = 0.0005  # for which a thread keeps the interpreter while another waits for it
_GC_OBJECTS = 10_000  # between two collections; Python's 700 are those of 10 requests
_log = logging.getLogger("wald_gate")


def serve(root: Path, load: Callable[[], Settings]) -> None:
    """Serve the log in ``root`` until SIGTERM or SIGINT; ``load`` reads the settings, now and on SIGHUP."""
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each connection needs one; many systems begin with 1024
    uvloop.run(_serve(Log(root), load, Systemd(os.environ)))


def check(root: Path, settings: Settings) -> list[str]:
    """Read all files named in the settings; return warnings about likely mistakes, and raise errors."""
    listening = Listening(settings)
    listening.tls()
    if listening.path is not None:
        check_path(listening.path)
    rights = Rights(Path(settings.tokens) if settings.tokens else None)
    try:
        Log(root)
    except NotFound as error:
        missing = [f"{error.message}, which the gate needs to start; hint: {error.hint}"]
    else:
        missing = []
    return [*missing, *listening.warnings(), *rights.warnings(), *_group_warnings(Root(root), settings)]


async def _serve(log: Log, load: Callable[[], Settings], systemd: Systemd) -> None:
    settings = load()
    listening = Listening(settings, systemd.take_sockets())
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stop.set)
    with (
        ThreadPoolExecutor(_THREADS, thread_name_prefix="wald-gate") as threads,
        ReadThreads(_READERS) as readers,
    ):
        state = State(log, settings, threads, readers)
        server = Server(Application(state, (*VERBS, *PAGES)), listening, state.pool, state.request_log.note)
        state.counts.expiries = listening.expiries()

        def reload() -> None:
            """Reload certificates, tokens and settings; if that fails, report it and keep the previous ones."""
            systemd.reloading()
            failed = False
            for read in (read_certificates, state.rights.read, read_settings):
                try:
                    read()
                except (WaldError, OSError) as error:
                    failed = True
                    _log.warning("wald-gate: SIGHUP: %s; the previous settings remain effective", error)
                    if isinstance(error, WaldError) and error.hint:
                        _log.warning("  hint: %s", error.hint)
            state.groups.waiting.judge()
            if not failed:
                _log.info("wald-gate: SIGHUP: certificates, tokens, limits and hosts were reloaded")
            systemd.ready()

        def read_certificates() -> None:
            if server.read_certificates():
                state.rights.edition += 1
            state.counts.expiries = listening.expiries()

        def read_settings() -> None:
            fresh = load()
            state.limits.settings = state.pool.limits = fresh.limits
            state.limits.hosts = fresh.hosts
            if waiting := settings.waiting(fresh):
                _log.warning("wald-gate: changes of %s take effect after a restart", ", ".join(waiting))
            warn(fresh)

        def warn(now: Settings) -> None:
            for each in (*listening.warnings(), *state.rights.warnings(), *_group_warnings(log.root, now)):
                _log.warning("wald-gate: %s", each)

        try:
            await server.start()
            sys.setswitchinterval(_SWITCH_SECONDS)
            gc.set_threshold(_GC_OBJECTS)
            gc.collect()
            gc.freeze()  # exempt the gate's long-lived objects from collection
            loop.add_signal_handler(signal.SIGHUP, reload)
            warn(settings)
            _log.info("wald-gate serves %s on %s", log.root.path, " and ".join(server.addresses))
            systemd.ready()
            _keep_alive(systemd)
            await stop.wait()
            systemd.stopping()
            state.following.end()
            state.watching.end()
            state.groups.waiting.end()
            state.processed.end()
            await server.stop()
        finally:
            await state.groups.close()
            await state.idempotent.close()
            await state.daemon.close()


def _group_warnings(root: Root, settings: Settings) -> Iterator[str]:
    """Yield warnings about tables of groups whose routes do not exist; none without a log."""
    if not root.routes.is_dir():
        return
    for name, group in settings.groups.items():
        route = name.partition("/")[0]
        if not root.has_route(route):
            yield f'[groups."{name}"] has no effect: there is no route {route!r}'
        if group.dead_letter != DEAD_LETTER and not root.has_route(group.dead_letter):
            what = f"there is no route {group.dead_letter!r} yet"
            yield f'[groups."{name}"]: dead_letter: {what}; the first dead letter creates it'


def _keep_alive(systemd: Systemd) -> None:
    """Notify the watchdog while the event loop runs, even if the disk hangs."""
    if systemd.watchdog_seconds:
        systemd.alive()
        asyncio.get_running_loop().call_later(systemd.watchdog_seconds, _keep_alive, systemd)

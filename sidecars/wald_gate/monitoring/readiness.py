"""Whether the log can be read and its daemon answers, looked at when it is asked for, once a second at most."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from wald.errors import Gone, Replaced, RolledBack, WaldError
from wald.hints import command_line
from wald.log import Log
from wald.status.findings import Life, Liveness, liveness

_FRESH_SECONDS = 1.0
_SAME_SECONDS = 0.5
_PATIENCE_SECONDS = 5.0
_DAEMON_SECONDS = 4.0  # a sync of a slow disk is no failure
_STALLED_SECONDS = 30.0
_SENTENCES = {
    Life.STARTS: "the daemon starts",
    Life.FROZEN: "the daemon is frozen",
    Life.SILENT: "the daemon does not answer",
    Life.UNKNOWN: "the gate may not ask the daemon",
    Life.DEAD: "no daemon runs",
    Life.NEVER: "no daemon has run yet",
}
_OTHER = "the log was replaced by another log"
_OLDER = "the log was replaced by an older copy"
_GONE = "the log is no longer at its path"
_RESTART = "restart wald-gate to use the log that is there now"
_log = logging.getLogger("wald_gate")


class Word(StrEnum):
    """How ready the gate is."""

    READY = "ready"
    DEGRADED = "degraded"
    """Records can be read, and the daemon runs but takes none now."""
    NOT_READY = "not ready"


@dataclass(frozen=True)
class Ready:
    """What was found.

    Attributes:
        why: without any path or name of the log, as everyone may ask.
        detail: what is written to stderr: the same with paths, and a hint.
    """

    word: Word
    why: str = ""
    detail: str = ""


class Readiness:
    """Of a gate; the answer is that of the last second.

    Args:
        socket: of the daemon.
    """

    def __init__(self, log: Log, socket: Path) -> None:
        self._log = log
        self._socket = socket
        self._found = Ready(Word.READY)
        self._found_at = float("-inf")
        self._look: asyncio.Task[Ready] | None = None
        self._same: asyncio.Task[None] | None = None
        self._same_at = float("-inf")

    async def require_same_log(self) -> None:
        """Admit a request only if the log is still the one that this gate serves; the check may be half a second old.

        Raises:
            Replaced: the path has another log or an older copy (final until the gate is restarted), or no log.
        """
        if time.monotonic() - self._same_at < _SAME_SECONDS:
            return
        if self._same is None or self._same.done():
            self._same = asyncio.create_task(asyncio.to_thread(self._require), name="wald-gate-same-log")
        with suppress(TimeoutError):  # the disk hangs: requests that need it wait
            await asyncio.wait_for(asyncio.shield(self._same), _PATIENCE_SECONDS)
        self._same_at = time.monotonic()

    def _require(self) -> None:
        try:
            self._log.require_continuity()
        except Gone:
            raise
        except Replaced as error:
            raise type(error)(error.message, hint=_RESTART) from None
        except OSError:  # no descriptor, or the disk fails: requests that need it report that
            return

    async def now(self) -> Ready:
        """Whether the gate is ready; a disk or a daemon that hangs is no answer, so it is not."""
        if time.monotonic() - self._found_at < _FRESH_SECONDS:
            return self._found
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(asyncio.to_thread(self._read), name="wald-gate-readiness")
        try:
            found = await asyncio.wait_for(asyncio.shield(self._look), _PATIENCE_SECONDS)
        except TimeoutError:
            why = f"the log could not be read within {_PATIENCE_SECONDS:g} s"
            found = Ready(Word.NOT_READY, why, f"{self._log.root.path}: {why}; hint: dmesg | tail")
        if (found.word, found.why) != (self._found.word, self._found.why):
            _log.warning("%s%s", found.word, f": {found.detail}" if found.detail else "")
        self._found, self._found_at = found, time.monotonic()
        return found

    def _read(self) -> Ready:
        log = self._log
        try:
            log.head()
        except Replaced as error:
            if isinstance(error, Gone):
                return Ready(Word.NOT_READY, _GONE, f"{error.message}; hint: {error.hint}")
            why = _OLDER if isinstance(error, RolledBack) else _OTHER
            return Ready(Word.NOT_READY, why, f"{error.message}; hint: {_RESTART}")
        except (WaldError, OSError) as error:
            hint = getattr(error, "hint", "")
            return Ready(Word.NOT_READY, "the log cannot be read", f"{error}{f'; hint: {hint}' if hint else ''}")
        return _of_daemon(liveness(log.root, log.identity, self._socket, seconds=_DAEMON_SECONDS), log.root.path)


def _of_daemon(found: Liveness, root: Path) -> Ready:
    detail = f"{found.message}; hint: {found.hint}"
    if found.life is not Life.RUNS:
        return Ready(Word.NOT_READY, _SENTENCES[found.life], detail)
    if not found.is_asked:
        return Ready(Word.NOT_READY, _SENTENCES[Life.UNKNOWN], detail)
    if found.answer.get("degraded"):
        why = f"the disk is full, so records wait ({found.answer.get('degraded_by')})"
        return Ready(Word.DEGRADED, why, f"{why}; hint: {command_line(root, 'status')}")
    if found.answer.get("stalled_seconds", 0) > _STALLED_SECONDS:
        why = "records have waited for long while none became durable"
        return Ready(Word.DEGRADED, why, f"{why}; hint: {command_line(root, 'latency')}")
    return Ready(Word.READY)

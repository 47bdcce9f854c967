"""Readiness, counters, metrics and the request log of a gate."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import msgspec
from starlette.responses import Response
from starlette.types import Scope

import wald
from wald.errors import Gone, Replaced, RolledBack, WaldError
from wald.exposition import Histogram, Metric, Samples, counter, gauge, histogram
from wald.hints import command_line
from wald.log import Log
from wald.status.findings import Life, Liveness, liveness
from wald_gate.limits import ConnectionPool, Ended
from wald_gate.problems import MEDIA_TYPE


def seconds() -> Histogram:
    """Return histogram buckets that range from an in-memory answer to a long poll."""
    return Histogram(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


@dataclass(slots=True)
class Answered:
    """Answers of one verb: counts by status, and seconds until the answer began."""

    statuses: Counter[int] = field(default_factory=Counter)
    seconds: Histogram = field(default_factory=seconds)

    def count(self, status: int, duration: float) -> None:
        """Count an answer; takes about 0.4 µs."""
        self.statuses[status] += 1
        self.seconds.observe(duration)


@dataclass(slots=True)
class Published:
    """Statistics of requests to the daemon: seconds until records were durable, and number of retries."""

    seconds: Histogram = field(default_factory=seconds)
    repeated: int = 0

    def count_repeated(self, requests: int) -> None:
        self.repeated += requests


@dataclass(slots=True)
class Counts:
    """Counters of one run of the gate, changed only by its event loop."""

    answered: dict[str, Answered] = field(default_factory=dict)  # by verb; "none" is an unknown path or method
    broken_answers: int = 0  # aborted by an error after they had started
    stored_records: int = 0
    stored_bytes: int = 0
    sent_records: int = 0
    sent_bytes: int = 0
    expiries: dict[str, float] = field(default_factory=dict)  # of the first certificate by file, in s since 1970
    streams: int = 0  # open answers that follow the log

    def count_stored(self, records: int, size: int) -> None:
        self.stored_records += records
        self.stored_bytes += size

    def of_verb(self, name: str) -> Answered:
        return self.answered.setdefault(name, Answered())


_FRESH_SECONDS = 1.0
_SAME_SECONDS = 0.5
_PATIENCE_SECONDS = 5.0
_DAEMON_SECONDS = 4.0  # a slow sync is not a failure
_STALLED_SECONDS = 30.0
_SENTENCES = {
    Life.STARTS: "the daemon is starting",
    Life.FROZEN: "the daemon is frozen",
    Life.SILENT: "the daemon does not answer",
    Life.UNKNOWN: "the gate is not permitted to query the daemon",
    Life.DEAD: "no daemon runs",
    Life.NEVER: "no daemon has run yet",
}
_RESTART = "restart wald-gate to use the log that is there now"
_log = logging.getLogger("wald_gate")


class Word(StrEnum):
    """Readiness of the gate; a degraded gate serves records, but the daemon accepts none."""

    READY = "ready"
    DEGRADED = "degraded"
    """Records can be read, and the daemon runs but currently accepts none."""
    NOT_READY = "not ready"


class Ready(NamedTuple):
    """Readiness and its reason: ``why`` contains no path, because anyone may request it; ``detail`` is for stderr."""

    word: Word
    why: str = ""
    detail: str = ""


class Readiness:
    """Readiness of a gate, checked on request and at most once a second."""

    def __init__(self, log: Log, socket: Path) -> None:
        self._log = log
        self._socket = socket
        self._found = Ready(Word.READY)
        self._found_at = float("-inf")
        self._look: asyncio.Task[Ready] | None = None
        self._same: asyncio.Task[None] | None = None
        self._same_at = float("-inf")

    async def require_same_log(self) -> None:
        """Raise an error unless the gate still serves the same log; the check may be half a second old."""
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
        """Return the readiness; the gate is not ready if the disk or the daemon hangs."""
        if time.monotonic() - self._found_at < _FRESH_SECONDS:
            return self._found
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(asyncio.to_thread(self._read), name="wald-gate-readiness")
        try:
            found = await asyncio.wait_for(asyncio.shield(self._look), _PATIENCE_SECONDS)
        except TimeoutError:
            why = f"the log could not be read within {_PATIENCE_SECONDS:g} s"
            found = Ready(Word.NOT_READY, why, f"{self._log.root.path}: {why}; hint: dmesg | tail")
        if found[:2] != self._found[:2]:
            _log.warning("%s%s", found.word, f": {found.detail}" if found.detail else "")
        self._found, self._found_at = found, time.monotonic()
        return found

    def _read(self) -> Ready:
        log = self._log
        try:
            log.head()
        except Gone as error:
            return Ready(Word.NOT_READY, "the log is no longer at its path", f"{error.message}; hint: {error.hint}")
        except Replaced as error:
            why = f"the log was replaced by {'an older copy' if isinstance(error, RolledBack) else 'another log'}"
            return Ready(Word.NOT_READY, why, f"{error.message}; hint: {_RESTART}")
        except (WaldError, OSError) as error:
            hint = getattr(error, "hint", "")
            return Ready(Word.NOT_READY, "the log cannot be read", f"{error}{f'; hint: {hint}' if hint else ''}")
        return _of_daemon(liveness(log.root, log.identity, self._socket, seconds=_DAEMON_SECONDS), log.root.path)


def _of_daemon(found: Liveness, root: Path) -> Ready:
    life = found.life if found.is_asked or found.life is not Life.RUNS else Life.UNKNOWN
    if life is not Life.RUNS:
        return Ready(Word.NOT_READY, _SENTENCES[life], f"{found.message}; hint: {found.hint}")
    if found.answer.get("degraded"):
        why = f"the disk is full, so records wait ({found.answer.get('degraded_by')})"
        return Ready(Word.DEGRADED, why, f"{why}; hint: {command_line(root, 'status')}")
    if found.answer.get("stalled_seconds", 0) > _STALLED_SECONDS:
        why = "records are waiting, and none has become durable for a while"
        return Ready(Word.DEGRADED, why, f"{why}; hint: {command_line(root, 'status --latency')}")
    return Ready(Word.READY)


_COUNTERS = {
    "stored_records": "Records stored for clients",
    "stored_bytes": "Payload bytes of requests to the daemon",
    "sent_records": "Records sent to clients",
    "sent_bytes": "Bytes of responses with records",
    "broken_answers": "Responses aborted by an error after they had started",
}


def of_gate(
    counts: Counts, pool: ConnectionPool, published: Published, word: Word, log_id: str, *, groups: int, leases: int
) -> Iterator[Metric]:
    """Yield copies of the metrics of ``wald-gate``, so that another thread may render them."""
    answered = counts.answered.items()
    requests: Samples = {(verb, str(code)): count for verb, each in answered for code, count in each.statuses.items()}
    meaning = 'Requests answered; the verb "none" is an unknown path or method'
    yield Metric("wald_gate_requests_total", "counter", meaning, ("verb", "status"), requests)
    durations: Samples = {(verb,): each.seconds.copy() for verb, each in answered}
    meaning = "Time from a request to the start of its response"
    yield Metric("wald_gate_request_seconds", "histogram", meaning, ("verb",), durations)
    for name, meaning in _COUNTERS.items():
        yield counter(f"wald_gate_{name}_total", meaning, getattr(counts, name))
    yield gauge("wald_gate_streams", "Open responses that continue with records appended later", counts.streams)
    yield gauge("wald_gate_groups", "Work groups that the gate owns", groups)
    yield gauge("wald_gate_waiting_leases", "Lease requests that wait for a record", leases)
    meaning = "Time until the records of a request to the daemon are durable, or the gate gives up"
    yield histogram("wald_gate_publish_seconds", meaning, published.seconds.copy())
    meaning = "Requests to the daemon retried after a restart or a full disk"
    yield counter("wald_gate_repeated_requests_total", meaning, published.repeated)
    handshakes = pool.count - len(pool.open)
    idle = max(0, len(pool.idle) - handshakes)
    connections: Samples = {("idle",): idle, ("busy",): len(pool.open) - idle, ("handshake",): handshakes}
    yield Metric("wald_gate_connections", "gauge", "Open connections", ("state",), connections)
    meaning = "Connections that the gate closed, by reason"
    ended: Samples = {(reason.value,): pool.ended[reason] for reason in Ended}
    yield Metric("wald_gate_connections_ended_total", "counter", meaning, ("reason",), ended)
    expiries: Samples = {(file,): at for file, at in counts.expiries.items()}
    meaning = "Earliest expiry of the certificates in a file of server certificates or client CAs"
    yield Metric("wald_gate_certificate_expiry_timestamp_seconds", "gauge", meaning, ("file",), expiries)
    meaning = "1 if the log is readable and its daemon responds"
    yield gauge("wald_gate_ready", meaning, float(word is not Word.NOT_READY))
    info: Samples = {(log_id, wald.__version__): 1}
    meaning = "Identity of the log and version of wald; always 1"
    yield Metric("wald_gate_info", "gauge", meaning, ("log", "version"), info)


CLIENT = "wald.client"
"""Key in the scope of a request: the name of the client, once it is known."""
_PATH_MAX = 256
_SERVER_ERROR = 500
_NOT_PROCESSED = 504  # in time, as the client has asked; not a failure of the gate
_request_log = logging.getLogger("wald_gate.requests")


class RequestLog:
    """Log on stderr of all requests, or only of failures of the gate.

    A line has the client's text as JSON in ASCII, shortened, without query and headers, so it contains no token.
    """

    def __init__(self, *, every: bool) -> None:
        self._every = every

    def note(self, scope: Scope, response: Response, seconds: float, *, broken: str = "") -> None:
        """Log a response; ``broken`` is the reason if it was aborted midway."""
        status = response.status_code
        is_failure = status >= _SERVER_ERROR and status != _NOT_PROCESSED
        if not (self._every or is_failure or broken):
            return
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "client": scope.get(CLIENT, ""),
            "address": str((scope["client"] or ("",))[0]),
            "method": scope["method"],
            "path": scope["path"][:_PATH_MAX],
            "status": status,
            "seconds": round(seconds, 6),
        }
        if broken:
            line["detail"] = f"broken off: {broken}"
        elif status >= _SERVER_ERROR and response.media_type == MEDIA_TYPE:
            line["detail"] = msgspec.json.decode(response.body)["detail"]
        _request_log.info("%s", json.dumps(line).replace("\x7f", "\\u007f"))

"""RECLAIM during the torture of a gate: a reader keeps a copy of the log, and ``wald-reclaim`` deletes it.

The reader follows a route as Server-Sent Events, and reconnects with the last id. Its cursor passes only records whose
requests were answered: the keys of the others are stored only in the log, so they must not be deleted (docs/http.md,
"Repeating a request").
"""

from __future__ import annotations

import base64
import http.client
import json
import random
import subprocess
import threading
from collections.abc import Callable, Container
from contextlib import suppress
from pathlib import Path
from typing import Any

from gating import ORDERS, Answer, Body, Gate
from running import launched, sidecar
from threads import started

READER = "reader"
_SECONDS = 90.0
_AGAIN = (429, 503)
_NO_ANSWER = (OSError, http.client.HTTPException)


def ask(gate: Gate, method: str, path: str, body: Body, headers: dict[str, str] | None = None) -> Answer | None:
    """Return the answer to a request; None without one."""
    try:
        return gate.ask(method, path, body, headers)
    except _NO_ANSWER:
        return None


class Reader:
    """Reader of all records of the route orders, while the gate restarts.

    Args:
        is_settled: returns True if a value may be deleted.
        wrong: receives descriptions of errors.
    """

    def __init__(self, gate: Gate, is_settled: Callable[[str], bool], wrong: list[str]) -> None:
        self.found: dict[int, str] = {}
        self.last = 0
        self._gate = gate
        self._is_settled = is_settled
        self._wrong = wrong
        self._over = threading.Event()
        self._threads = [started(each.__name__, each, wrong, hushed=self._over) for each in (self._read, self._move)]

    def stop(self) -> None:
        """Stop reading."""
        self._over.set()
        for thread in self._threads:
            thread.join(_SECONDS)

    def _read(self) -> None:
        while not self._over.wait(0.05):
            headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": str(self.last)} if self.last else {})
            with suppress(*_NO_ANSWER), self._gate.asked("GET", ORDERS, headers=headers) as answer:
                if answer.status == 200:
                    self._take(answer)
                elif answer.status not in _AGAIN:
                    self._wrong.append(f"a reader was answered {answer.status}: {answer.read().decode()}")
                    return

    def _take(self, answer: http.client.HTTPResponse) -> None:
        while not self._over.is_set() and (line := answer.readline()):
            if not (line.startswith(b"data: ") and line.endswith(b"\n")):
                continue
            record = json.loads(line.removeprefix(b"data: "))
            if record["sequence"] != self.last + 1:
                self._wrong.append(f"{record['sequence']} came behind {self.last}")
            self.found[record["sequence"]] = value_of(record)
            self.last = record["sequence"]  # last, because another thread reads ``found`` up to it

    def _move(self) -> None:
        passed = 0
        while not self._over.wait(0.2):
            following = passed
            while following < self.last and self._is_settled(self.found[following + 1]):
                following += 1
            if following == passed:
                continue
            answer = ask(self._gate, "PUT", f"/v1/routes/orders/cursors/{READER}", {"sequence": following})
            if answer is not None and answer.status not in (200, *_AGAIN):
                self._wrong.append(f"the cursor was answered {answer.status}: {answer.body.decode()}")
            if answer is not None and answer.status == 200:
                passed = following


class Reclaimer:
    """Repeated runs of ``wald-reclaim``, some of which are killed.

    Attributes:
        passes: number of runs that were not killed.
    """

    def __init__(self, root: Path, chance: random.Random, codes: Container[int], wrong: list[str]) -> None:
        self.passes = 0
        self._line = sidecar("reclaim", "--root", root, "--grace", "0")
        self._chance = chance
        self._codes = codes
        self._wrong = wrong
        self._over = threading.Event()
        self._thread = started("reclaimer", self._work, wrong)

    def stop(self) -> None:
        """Stop deleting."""
        self._over.set()
        self._thread.join(_SECONDS)

    def _work(self) -> None:
        while not self._over.wait(self._chance.uniform(0, 1.0)):
            with launched(self._line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
                if self._chance.random() < 0.2:
                    self._over.wait(self._chance.uniform(0, 0.3))
                    process.kill()
                    process.wait()
                    continue
                _, said = process.communicate(timeout=_SECONDS)
            self.passes += 1
            if process.returncode not in self._codes:
                self._wrong.append(f"wald-reclaim ended with {process.returncode}: {said.decode()[-500:]}")


def value_of(record: dict[str, Any]) -> str:
    """Return the value of a record in JSON."""
    return record["value"] if "value" in record else base64.b64decode(record["value_base64"]).decode()

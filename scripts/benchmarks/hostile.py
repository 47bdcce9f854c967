"""A good client beside hostile ones: how long it waits for an OK, and whether it always finds a connection.

The hostile clients are another user's where root runs this; a good one is the daemon's own user unless a row says
otherwise. Alone and beside each kind of them take turns. In the second part the limits are the default ones, so the
hostile clients fill all places that they can get; to a user at its own limit nothing is promised.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.report import Goal, Row, Samples
from benchmarks.stage import Daemon, Stage, environment

_GROUP = "One good client beside hostile ones, on disk"
_PLACES = "New connections beside hostile ones, default limits"
_MANY = {"connections_max": 4096, "connections_per_user": 4096}
_CROWD = 1000
_KINDS = {  # each that reads no reply sends some 10,000 records before nothing more is taken from it
    "idle": (_CROWD, "1,000 that send nothing"),
    "half": (_CROWD, "1,000 half-sent requests"),
    "mute": (50, "50 that read no reply"),
    "storm": (50, "a storm of connections"),
}
_CALM_SECONDS = 0.2
_GOOD_USER, _OTHER_USER = 54331, 54332  # they need no entry in the user database


def measure(stage: Stage) -> tuple[list[Row], list[str]]:
    seconds = 0.5 if stage.quick else 2.0
    rows = [*_latency(stage, seconds), *_places(stage, seconds)]
    return rows, [] if os.geteuid() == 0 else ["other users (only root can be another)"]


def _latency(stage: Stage, seconds: float) -> list[Row]:
    times: dict[str, list[tuple[float, float]]] = {}

    rows: list[Row] = []
    with _daemon(stage, **_MANY) as daemon:

        def alone(name: str, records: int) -> float:
            _calm(daemon)
            answer = _start(os.geteuid(), daemon.socket, "good", records, seconds).communicate()[0]
            median, late = map(float, answer.split())
            times.setdefault(name, []).append((median, late))
            return late

        def beside(kind: str, records: int) -> float:
            with _hostile(_other(_OTHER_USER), daemon.socket, kind, _KINDS[kind][0]):
                return alone(kind, records)

        for records in (1, 1000):
            contenders: dict[str, Callable[[], float]] = {}
            for kind in _KINDS:
                contenders[f"alone {kind}"] = partial(alone, f"alone {kind}", records)
                contenders[kind] = partial(beside, kind, records)
            times.clear()
            late = Samples.alternate(contenders, stage.repeat)
            median = Samples({name: [each for each, _ in found] for name, found in times.items()})
            for kind, (_, words) in _KINDS.items():
                what = f"{words}, {records:,} a request"
                for samples, which, goal in ((median, "p50", None), (late, "p99", Goal(2, at_most=True))):
                    row = samples.rows(_GROUP, f"µs {which}", (kind, what), {f"alone {kind}": goal})[0]
                    rows.append(replace(row, peer="alone"))
        rows.append(
            Row(
                _GROUP, "the daemon's peak (VmHWM)", "MiB", daemon.peak_bytes() / (1 << 20), goal=Goal(64, at_most=True)
            )
        )
    return rows


def _places(stage: Stage, seconds: float) -> list[Row]:
    """Connections without an answer: of the daemon's own user, of another, and of the hostile ones' own."""
    rows = []
    for kind, (_, words) in _KINDS.items():
        with _daemon(stage) as daemon, _hostile(_other(_OTHER_USER), daemon.socket, kind, _CROWD):
            good = [
                _start(user, daemon.socket, "newcomer", 2 * seconds)
                for user in (os.geteuid(), _other(_GOOD_USER), _other(_OTHER_USER))
            ]
            refused = [int(process.communicate()[0]) for process in good]
        for user, number in zip(("the daemon's user", "another user", "the same user"), refused, strict=True):
            goal = None if user == "the same user" else Goal(0, at_most=True)
            what = words.removeprefix("1,000 ").removeprefix("50 ")
            rows.append(Row(_PLACES, f"{what}, {user}", "refused", number, goal=goal))
    return rows


@contextmanager
def _daemon(stage: Stage, **settings: object) -> Iterator[Daemon]:
    with Daemon(stage.fresh(stage.disk), socket_mode="0666", **settings) as daemon:
        daemon.root.chmod(0o755)
        yield daemon


def _other(user_id: int) -> int:
    return user_id if os.geteuid() == 0 else os.geteuid()


@contextmanager
def _hostile(user_id: int, path: Path, kind: str, count: int) -> Iterator[None]:
    with _start(user_id, path, kind, count) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        yield
        process.stdin.close()


def _calm(daemon: Daemon) -> None:
    """Return when nothing of what hostile clients have sent is left to be taken."""
    with daemon.connect() as producer:
        before = -1
        while (records := json.loads(producer.command("STAT"))["records"]) != before:
            before = records
            time.sleep(_CALM_SECONDS)


def _start(user_id: int, path: Path, *words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.crowd", *map(str, (path, user_id, *words))]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment())

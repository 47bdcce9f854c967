"""Threads that run one at a time, in every possible order, so that tests find races without waiting for them.

Each thread stops at :meth:`Schedule.pause`; once all have stopped, the schedule chooses one. An order is the list of
these choices; :func:`interleavings` makes schedules until every order has run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from faults import SteppingDisk

_STUCK_SECONDS = 120.0


class Schedule:
    """One order: the given ``choices``, and then always the first thread that can run."""

    def __init__(self, choices: list[int]) -> None:
        self.taken: list[tuple[int, int]] = []
        self._choices = choices
        self._threads: list[_Scheduled] = []

    def run(self, *works: Callable[[], None]) -> None:
        """Run each of ``works`` to completion in a thread; raise the first error."""
        self._threads = [_Scheduled(work) for work in works]
        while running := [thread for thread in self._threads if not thread.ended]:
            able = [thread for thread in running if thread.needs is None or not thread.needs.held]
            assert able, "every thread waits for another"
            at = len(self.taken)
            choice = self._choices[at] if at < len(self._choices) else 0
            self.taken.append((choice, len(able)))
            able[choice].go_on()
        for thread in self._threads:
            if thread.failure is not None:
                raise thread.failure

    def pause(self, needs: Lock | None = None) -> None:
        """Let other threads run; a thread without a schedule does not stop."""
        for thread in self._threads:
            if thread.is_current:
                thread.pause(needs)


class Lock:
    """Replacement for a ``threading.Lock``: a thread that waits for it is not chosen until it is free."""

    def __init__(self, schedule: Schedule) -> None:
        self.held = False
        self._schedule = schedule

    def __enter__(self) -> None:
        self._schedule.pause(self)
        assert not self.held
        self.held = True

    def __exit__(self, *_: object) -> None:
        self.held = False


class PausingDisk(SteppingDisk):
    """Disk that pauses before each of ``calls``; the order of other calls does not matter."""

    def __init__(self, schedule: Schedule, *calls: str) -> None:
        super().__init__()
        self._schedule = schedule
        self._calls = calls

    def step(self, name: str, path: Path | None = None, descriptor: int = -1) -> None:
        if name in self._calls:
            self._schedule.pause()


def pausing(patched: pytest.MonkeyPatch, schedule: Schedule, name: str) -> None:
    """Pause before each call of ``name``."""
    module, _, function = name.rpartition(".")
    real = getattr(import_module(module), function)

    def paused(*given: Any, **more: Any) -> Any:
        schedule.pause()
        return real(*given, **more)

    patched.setattr(name, paused)


def interleavings() -> Iterator[Schedule]:
    """Yield a schedule for every order; each must be run before the next one is requested."""
    choices: list[int] = []
    while True:
        schedule = Schedule(choices)
        yield schedule
        taken = schedule.taken
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        if not taken:
            return
        choices = [choice for choice, _ in taken[:-1]] + [taken[-1][0] + 1]


class _Scheduled:
    """A thread that is stopped except during :meth:`go_on`."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.ended = False
        self.failure: BaseException | None = None
        self.needs: Lock | None = None
        self._work = work
        self._may_go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def go_on(self) -> None:
        """Return when it has stopped again."""
        self.needs = None
        self._may_go.release()
        assert self._stopped.acquire(timeout=_STUCK_SECONDS), "a thread waits for something that is not scheduled"

    def pause(self, needs: Lock | None) -> None:
        self.needs = needs
        self._stopped.release()
        self._may_go.acquire()

    def _run(self) -> None:
        self._may_go.acquire()
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001  (it is raised where the schedule runs)
            self.failure = error
        self.ended = True
        self._stopped.release()

"""A watcher wakes only for wanted changes and at the end of each period, and stops on request."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from running import TIMEOUT_SECONDS, run
from tracing import strace

from wald.loop import stop_on_signals, threads_without_signals, watch_files

NEVER_SECONDS = 3600.0


def wanted(path: Path) -> bool:
    return path.suffix == ".wanted"


def test_the_first_look_waits_for_nothing(tmp_path: Path) -> None:
    assert next(watch_files(lambda: [tmp_path], wanted, period_seconds=NEVER_SECONDS, stop=threading.Event())) is None


def test_a_wanted_change_wakes_also_in_a_directory_that_is_new(tmp_path: Path) -> None:
    def directories() -> list[Path]:
        return [tmp_path, *(path for path in tmp_path.iterdir() if path.is_dir())]

    looks = watch_files(
        directories,
        lambda path: path.name in ("new", "x.wanted"),
        period_seconds=NEVER_SECONDS,
        stop=threading.Event(),
    )
    next(looks)

    def change() -> None:
        (tmp_path / "new").mkdir(exist_ok=True)
        (tmp_path / "new/x.wanted").write_text("1")

    writing = _repeatedly(change)
    next(looks)
    writing.set()


def test_what_is_not_wanted_does_not_wake_and_does_not_put_off_what_is_due(tmp_path: Path) -> None:
    """Other changes neither wake the watcher nor delay the next periodic wake-up."""
    looks = watch_files(lambda: [tmp_path], wanted, period_seconds=0.3, stop=threading.Event())
    next(looks)
    writing = _repeatedly(lambda: (tmp_path / "x.other").write_text("1"))
    next(looks)
    writing.set()


def test_a_directory_that_is_missing_is_looked_for_every_period(tmp_path: Path) -> None:
    looks = watch_files(lambda: [tmp_path / "missing"], wanted, period_seconds=0.01, stop=threading.Event())
    assert [next(looks) for _ in range(3)] == [None] * 3


@pytest.mark.parametrize("call", ["inotify_init1:error=EMFILE", "inotify_add_watch:error=ENOSPC"])
def test_without_events_it_looks_every_period_and_reports_it_once(tmp_path: Path, call: str) -> None:
    """A node with many containers can exhaust a user's inotify instances and watches."""
    script = f"""
import threading, pathlib, wald.loop
looks = wald.loop.watch_files(
    lambda: [pathlib.Path({str(tmp_path)!r})], bool, period_seconds=0.01, stop=threading.Event(), report=print
)
for _ in range(4):
    next(looks)
"""
    injected = ["-e", f"trace={call.partition(':')[0]}", "-e", f"inject={call}"]
    done = run([strace(), "-f", "-qq", "-o", os.devnull, *injected, sys.executable, "-c", script])
    assert (done.returncode, done.stderr) == (0, b"")
    (line,) = done.stdout.decode().splitlines()
    assert line.startswith("inotify is unavailable (")
    assert "polling every 0.01 s" in line


def test_it_ends_when_told_to(tmp_path: Path) -> None:
    stop = threading.Event()
    looks = watch_files(lambda: [tmp_path], wanted, period_seconds=NEVER_SECONDS, stop=stop)
    next(looks)
    stop.set()
    assert list(looks) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])  # under nohup, SIGHUP is ignored
def test_a_signal_stops_work_before_the_main_thread_has_run(number: signal.Signals) -> None:
    """On a busy machine, a worker may see the exit code of a command long before the main thread runs."""
    with stop_on_signals() as stop:
        with threads_without_signals():
            assert not stop.is_set()
            signal.raise_signal(number)
            assert stop.is_set()
        assert stop.wait(TIMEOUT_SECONDS)


def test_after_a_signal_nothing_is_begun_though_no_other_thread_has_run() -> None:
    """Holding the event's lock keeps waiting threads from running, as on a busy machine."""
    with stop_on_signals() as stop:
        with stop._cond:  # type: ignore[attr-defined]
            signal.raise_signal(signal.SIGTERM)
            assert stop.is_set()
            assert stop.wait(NEVER_SECONDS)
        assert threading.Event.wait(stop, TIMEOUT_SECONDS)


def test_a_hangup_sets_the_event_unless_it_is_ignored() -> None:
    """``nohup`` starts a process that ignores SIGHUP."""
    for ignored in (False, True):
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
        try:
            with stop_on_signals() as stop:
                os.kill(os.getpid(), signal.SIGHUP)
                assert stop.is_set() is not ignored
        finally:
            signal.signal(signal.SIGHUP, before)


def test_a_signal_sets_the_event_and_afterwards_means_what_it_meant() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(TIMEOUT_SECONDS)
    assert signal.getsignal(signal.SIGTERM) is before


def _repeatedly(change: Callable[[], object]) -> threading.Event:
    """Repeat a change until the event is set, because the watch starts with a short delay."""
    done = threading.Event()

    def run() -> None:
        while not done.wait(0.05):
            change()

    threading.Thread(target=run, daemon=True).start()
    return done

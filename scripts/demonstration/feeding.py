"""The daemon and its producers: three ways in at once, with cuts and kills on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import wald
from demonstration.showing import (
    ENVIRONMENT,
    PATIENCE_SECONDS,
    WALD,
    Failed,
    expect,
    megabytes,
    rate,
    since,
    title,
    wald_command,
)
from demonstration.text import ROUTES, Text
from wald.client.producer import Producer

_KILLS_AT = (0.2, 0.45, 0.7)  # of the records
_CUTS_AT = (0.1, 0.35, 0.6)


class Daemon:
    """`wald run` as a separate process."""

    def __init__(self, root: Path, log: Path) -> None:
        self._root = root
        self._log = log.open("ab")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Returns after how many seconds it answered."""
        began = time.monotonic()
        self._process = subprocess.Popen([*WALD, "run", "--root", self._root], env=ENVIRONMENT, stderr=self._log)
        with Producer(self._root / "wald.sock", connect_for=PATIENCE_SECONDS) as producer:
            producer.command("PING")
        return time.monotonic() - began

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
        self._log.close()


def feed(daemon: Daemon, root: Path, texts: list[Text]) -> float:
    """Feed everything, with cuts and kills on the way; returns the seconds it took without those of the restarts."""
    title("Feeding", "three producers at full speed, while the daemon is killed (-9) and started again")
    daemon.start()
    for route in ROUTES:
        wald_command(root, "route", "add", route, *(["--fifo"] if route == "by-fifo" else []))
    fifo = root / "routes" / "by-fifo" / "in"
    # A process that holds a FIFO open preserves its contents, as `sleep infinity <> in` does.
    holder = os.open(fifo, os.O_RDWR)
    total = sum(text.lines for text in texts)
    log = wald.open(root)
    producers = Producers(root, fifo, texts)
    try:
        wait_for(log, 1, producers)  # wald append has found the daemon, and the others join in
        began, away = time.monotonic(), 0.0
        producers.join_in()
        for share, act in sorted([*((at, "kill") for at in _KILLS_AT), *((at, "cut") for at in _CUTS_AT)]):
            sequence = wait_for(log, int(share * total), producers)
            if act == "cut":
                daemon.signal(signal.SIGUSR1)
                print(f"  at {sequence:>9,}  cut (SIGUSR1)")
                continue
            killed = time.monotonic()
            daemon.kill()
            daemon.start()
            away += time.monotonic() - killed
            print(f"  at {sequence:>9,}  kill -9, start: {since(killed)}, then {last_recovery(root)}")
        wait_for(log, total, producers)
        producers.finish()
    finally:
        producers.end()
        os.close(holder)
    seconds = time.monotonic() - began - away
    head = log.head()
    assert head is not None
    expect(head.sequence == total, f"{total:,} lines were fed, but the head is at {head.sequence:,}")
    length = sum(text.length for text in texts)
    speed = rate(length, seconds)
    print(f"  {total:>12,}  all durable: {megabytes(length)} in {seconds:.2f} s, {speed};")
    print(f"                the {away:.2f} s that kills and starts took are not counted")
    print(f"                wald append said: {producers.appended}")
    return seconds


class Producers:
    """The three ways in, at once."""

    def __init__(self, root: Path, fifo: Path, texts: list[Text]) -> None:
        by_fifo, by_pipe, by_socket = texts
        self.appended = ""
        self._error: BaseException | None = None
        self._write_fifo = ["sh", "-c", 'exec cat "$1" > "$2"', "sh", str(by_fifo.path), str(fifo)]
        self._fifo: subprocess.Popen[bytes] | None = None
        self._cat = subprocess.Popen(["cat", by_pipe.path], stdout=subprocess.PIPE)
        self._append = subprocess.Popen(
            [*WALD, "--root", root, "append", "by-pipe"],
            stdin=self._cat.stdout,
            stdout=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        assert self._cat.stdout is not None
        self._cat.stdout.close()
        self._socket = threading.Thread(target=self._publish, args=(root, by_socket.path), daemon=True)

    def join_in(self) -> None:
        self._fifo = subprocess.Popen(self._write_fifo)
        self._socket.start()

    def check(self) -> None:
        """No producer has given up."""
        if self._error is not None:
            raise Failed(f"the producer on the socket: {self._error}")
        for name, process in (("cat", self._fifo), ("wald append", self._append)):
            if process is not None and process.poll():
                raise Failed(f"{name} ended with exit code {process.returncode}")

    def finish(self) -> None:
        """Every producer reports that all of it is durable."""
        out, _ = self._append.communicate(timeout=PATIENCE_SECONDS)
        self.appended = out.strip()
        assert self._fifo is not None
        self._fifo.wait(PATIENCE_SECONDS)
        self._socket.join(PATIENCE_SECONDS)
        self.check()
        expect(not self._socket.is_alive(), "the producer on the socket is still waiting for its acknowledgement")

    def end(self) -> None:
        for process in (self._fifo, self._cat, self._append):
            if process is not None:
                process.kill()
                process.wait()

    def _publish(self, root: Path, path: Path) -> None:
        try:
            with Producer(root / "wald.sock") as producer, path.open("rb") as file:
                while lines := file.readlines(1 << 16):
                    producer.publish("by-socket", b"".join(lines))
                producer.flush()
        except Exception as error:  # noqa: BLE001 - reported by check(), in the thread that reports
            self._error = error


def wait_for(log: wald.Log, sequence: int, producers: Producers) -> int:
    """Wait until the head has reached ``sequence``; return its sequence."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        head = log.head()
        reached = head.sequence if head is not None else 0
        if reached >= sequence:
            return reached
        producers.check()
        expect(time.monotonic() < deadline, f"the head stays at {reached:,}, but {sequence:,} lines were fed")
        time.sleep(0.0005)


def last_recovery(root: Path) -> str:
    """Summarise the newest report of a start."""
    report = json.loads(max((root / "recovery").iterdir(), key=lambda path: path.stat().st_mtime_ns).read_text())
    expect(not report["errors"], f"recovery found damage that a kill cannot cause: {report['errors']}")
    torn = report["trimmed_bytes"]
    tail = f"cut {torn:,} bytes of an unfinished write" if torn else "nothing to repair"
    return f"{megabytes(report['scanned_bytes'])} scanned in {report['seconds'] * 1000:.0f} ms, {tail}"

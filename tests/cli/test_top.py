"""``wald top`` in a terminal, where it refreshes, and without one, where it prints once."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Self

import pytest
from logs import Built
from running import Daemon, command, eventually, output_of, readable, refused, run

from wald.errors import InvalidInput
from wald.files.routes import add_route

_HOME = b"\x1b[H"
_CONTROL = re.compile(rb"\x1b\[[0-9;?]*[a-zA-Z]")
_ALTERNATE, _BACK = b"\x1b[?1049h", b"\x1b[?1049l"


class Terminal:
    """``wald top`` in a new pseudo-terminal."""

    def __init__(self, *arguments: object, columns: int = 80, rows: int = 24) -> None:
        self._keyboard, terminal = pty.openpty()
        self._terminal = terminal
        self.resize(columns, rows)
        self.modes = termios.tcgetattr(terminal)
        self.written = b""
        self.process = subprocess.Popen(
            command("top", *arguments),
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=os.environ | {"TERM": "xterm-256color"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - no test here has threads
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)
        os.close(self._keyboard)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: bytes) -> None:
        os.write(self._keyboard, keys)

    def screen(self) -> list[str]:
        """Return the lines of the last completely drawn screen."""
        while readable(self._keyboard):
            self.written += os.read(self._keyboard, 1 << 16)
        frames = self.written.split(_HOME)
        return _CONTROL.sub(b"", frames[-2]).decode().split("\r\n") if len(frames) > 2 else []

    def shows(self, pattern: str) -> bool:
        assert self.process.poll() is None, self.written.decode()
        return any(re.search(pattern, line) for line in self.screen())

    def fills(self, columns: int, rows: int) -> bool:
        """Return True if the last screen has this size."""
        shown = self.screen()
        return (len(shown), {len(line) for line in shown}) == (rows, {columns})

    def leave(self) -> int:
        """Wait for the process to end; return its exit code."""
        eventually(lambda: (self.screen(), self.process.poll() is not None)[1])
        self.screen()
        return self.process.wait()

    def is_restored(self) -> bool:
        """Return True if modes, screen buffer and cursor are restored."""
        modes = termios.tcgetattr(self._terminal)
        left = self.written.rpartition(_ALTERNATE)[2]
        return modes == self.modes and _BACK in left and left.rfind(b"\x1b[?25h") > left.rfind(b"\x1b[?25l")


MANY = 250


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of many routes, one of which pins a segment; tests must not change it."""
    built = Built(tmp_path_factory.mktemp("many") / "log")
    for number in range(MANY):
        add_route(built.root, built.disk, f"route-{number:04}")
    built.lines("route-0200", [b"x"] * 3)
    built.cut()
    built.seal()
    built.lines("route-0200", [b"x"])
    return built.root.path


@pytest.fixture
def live(daemon: Daemon, root: Path) -> Iterator[Terminal]:
    with Terminal("--root", root, "--interval", "100ms") as terminal:
        eventually(lambda: terminal.shows("^daemon +pid "))
        yield terminal


def test_the_screen_follows_the_log_until_q(live: Terminal, root: Path) -> None:
    assert live.shows("^head +nothing is durable yet") or live.shows("^head +0 ")
    output_of("append", "a", "--root", root, stdin=b"x\n" * 1234)
    eventually(lambda: live.shows("^head +1,234 "))
    eventually(lambda: live.shows(r"^a .*no cursor +1,234 "))
    output_of("append", "a", "--root", root, stdin=b"x\n" * 1000)
    output_of("cursor", "set", "a", "2000", "--root", root)
    eventually(lambda: live.shows("^head +2,234 "))
    eventually(lambda: live.shows(r"^a .* 2,000 +234 "))
    assert termios.tcgetattr(live._terminal) != live.modes

    live.press(b"q")

    assert live.leave() == 0
    assert live.is_restored()


@pytest.mark.parametrize("way", ["Ctrl-C", "SIGTERM"])
def test_other_ways_to_leave_restore_the_terminal_too(live: Terminal, way: str) -> None:
    if way == "Ctrl-C":
        live.press(b"\x03")
    else:
        live.process.send_signal(signal.SIGTERM)

    assert live.leave() == 0
    assert live.is_restored()


def test_a_screen_that_was_suspended_comes_back(live: Terminal) -> None:
    """Without job control the kernel does not stop the process, where a shell would wait for ``fg``."""
    live.press(b"\x1a")
    eventually(lambda: live.shows("^head ") and live.written.count(_ALTERNATE) == 2)

    assert live.written.count(_BACK) == 1
    live.press(b"q")
    assert live.leave() == 0
    assert live.is_restored()


def test_a_resize_is_followed_and_nothing_is_wider(live: Terminal) -> None:
    eventually(lambda: live.shows("^ROUTE +LAST +IN/S"))
    for columns, rows in ((40, 24), (120, 40), (1, 1), (80, 24)):
        live.resize(columns, rows)
        eventually(partial(live.fills, columns, rows))


def test_a_daemon_that_goes_and_comes_back_is_reported(live: Terminal, daemon: Daemon) -> None:
    daemon.stop()
    eventually(lambda: live.shows("^daemon +none runs"))
    daemon.start_again()
    eventually(lambda: live.shows(f"^daemon +pid {daemon.process.pid} "))


@pytest.mark.slow
def test_a_damaged_head_and_a_root_that_vanishes_are_a_line_on_the_screen(many: Path) -> None:
    head = many / "head"
    reported = head.read_bytes()
    with Terminal("--root", many, "--interval", "100ms", columns=200) as terminal:
        eventually(lambda: terminal.shows("^head +4 "))
        head.write_bytes(b"nonsense" * 20)
        eventually(lambda: terminal.shows("head: offset 0: not a valid head"))
        head.write_bytes(reported)
        eventually(lambda: terminal.shows("^head +4 ") and not terminal.shows("not a valid head"))
        many.rename(many.with_name("elsewhere"))
        eventually(lambda: terminal.shows("the log is gone"))
        many.with_name("elsewhere").rename(many)
        eventually(lambda: terminal.shows("^head +4 ") and terminal.shows("^route-0200 "))
        terminal.press(b"q")

        assert terminal.leave() == 0


def test_a_narrow_terminal_sums_up_many_routes(many: Path) -> None:
    with Terminal("--root", many, "--interval", "100ms", columns=40) as terminal:
        eventually(lambda: terminal.shows(r"^and \d{3} more routes, pinning"))
        assert terminal.shows("^route-0200 ")
        terminal.press(b"q")

        assert terminal.leave() == 0


def test_once_prints_plain_text(daemon: Daemon, root: Path) -> None:
    output_of("append", "a", "--root", root, stdin=b"x\n" * 1500)
    reported = output_of("top", "--once", "--interval", "100ms", "--root", root).decode()

    assert re.search(rf"^daemon +pid {daemon.process.pid} ", reported, re.MULTILINE)
    assert re.search(r"^head +1,500   0 records/s   0 B/s ", reported, re.MULTILINE)
    assert re.search(r"^a +1,500 +0 +processed +no cursor +1,500 ", reported, re.MULTILINE)
    assert "\x1b" not in reported


def test_without_a_terminal_every_route_is_printed_once(many: Path) -> None:
    reported = output_of("top", "--interval", "100ms", "--root", many).decode().splitlines()

    assert sum(line.startswith("route-") for line in reported) == MANY
    assert re.match("route-0200 +4 .* B$", next(line for line in reported if line.startswith("route-")))


def test_a_bar_is_replaced_if_the_encoding_lacks_it(many: Path) -> None:
    reported = output_of("top", "--interval", "100ms", "--root", many, env={"PYTHONIOENCODING": "latin-1"})

    assert b"\n          ???" in reported


def test_once_reports_errors_and_continues(many: Path) -> None:
    head = (many / "head").read_bytes()
    (many / "head").write_bytes(b"nonsense" * 20)
    reported = output_of("top", "--once", "--interval", "100ms", "--root", many).decode().splitlines()
    (many / "head").write_bytes(head)

    assert reported[0] == f"{many / 'head'}: offset 0: not a valid head"
    assert reported[1] == "head      -"
    assert any(line.startswith("route-0200 ") for line in reported)


def test_without_rich_it_says_what_to_install(many: Path) -> None:
    script = "import sys; sys.modules['rich'] = None; from wald.cli import main; main()"
    code, message, hint = refused(run([sys.executable, "-c", script, "top", "--root", str(many)]))

    assert (code, hint) == (InvalidInput.exit_code, "in a clone of wald: pip install '.[ui]'")
    assert message == "wald top: rich, which draws it, is not installed"

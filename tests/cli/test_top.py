"""``wald top`` in a terminal of any size, where it refreshes, and without one, where it prints once."""

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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logs import Built
from running import Daemon, command, eventually, output_of, readable, refused, run

from wald.cli.top_screen import cells, lines, plain
from wald.errors import InvalidInput
from wald.files.routes import add_route
from wald.retention.backlog import Condition
from wald.retention.cursors import CursorState
from wald.setting_types import GIB, MIB
from wald.status.rates import Activity, Amount, Inventory, Row, Snapshot

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


def test_the_screen_follows_the_log_its_size_and_its_daemon_until_q(live: Terminal, root: Path, daemon: Daemon) -> None:
    # The screen follows the log until q.
    assert live.shows("^head +nothing is durable yet") or live.shows("^head +0 ")
    output_of("append", "a", "--root", root, stdin=b"x\n" * 1234)
    eventually(lambda: live.shows("^head +1,234 "))
    eventually(lambda: live.shows(r"^a .*no cursor +1,234 "))
    output_of("append", "a", "--root", root, stdin=b"x\n" * 1000)
    output_of("cursor", "set", "a", "2000", "--root", root)
    eventually(lambda: live.shows("^head +2,234 "))
    eventually(lambda: live.shows(r"^a .* 2,000 +234 "))
    assert termios.tcgetattr(live._terminal) != live.modes

    # A resize is followed and nothing is wider.
    eventually(lambda: live.shows("^ROUTE +LAST +IN/S"))
    for columns, rows in ((40, 24), (120, 40), (1, 1), (80, 24)):
        live.resize(columns, rows)
        eventually(partial(live.fills, columns, rows))

    # A daemon that goes and comes back is reported.
    daemon.stop()
    eventually(lambda: live.shows("^daemon +none runs"))
    daemon.start_again()
    eventually(lambda: live.shows(f"^daemon +pid {daemon.process.pid} "))

    # A screen that was suspended comes back.
    live.press(b"\x1a")
    eventually(lambda: live.shows("^head ") and live.written.count(_ALTERNATE) == 2)
    assert live.written.count(_BACK) == 1
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


def test_without_a_terminal_every_route_is_printed_once_with_errors(many: Path) -> None:
    # Without a terminal every route is printed once.
    reported = output_of("top", "--interval", "100ms", "--root", many).decode().splitlines()
    assert sum(line.startswith("route-") for line in reported) == MANY
    assert re.match("route-0200 +4 .* B$", next(line for line in reported if line.startswith("route-")))

    # A bar is replaced if the encoding lacks it.
    latin = output_of("top", "--interval", "100ms", "--root", many, env={"PYTHONIOENCODING": "latin-1"})
    assert b"\n          ???" in latin

    # Once reports errors and continues.
    head = (many / "head").read_bytes()
    (many / "head").write_bytes(b"nonsense" * 20)
    reported = output_of("top", "--once", "--interval", "100ms", "--root", many).decode().splitlines()
    (many / "head").write_bytes(head)
    assert reported[0] == f"{many / 'head'}: offset 0: not a valid head"
    assert reported[1] == "head      -"
    assert any(line.startswith("route-0200 ") for line in reported)

    # Without rich it says what to install.
    script = "import sys; sys.modules['rich'] = None; from wald.cli import main; main()"
    code, message, hint = refused(run([sys.executable, "-c", script, "top", "--root", str(many)]))
    assert (code, hint) == (InvalidInput.exit_code, "in a clone of wald: pip install '.[ui]'")
    assert message == "wald top: rich, which draws it, is not installed"


ROW = Row(
    route="access",
    last_sequence=1_234_567,
    received_per_second=1500.0,
    group="processed",
    cursor=1_200_000,
    state=CursorState.VALID,
    retired=False,
    lag_records=34_567,
    oldest_seconds=93_784.0,
    processed_per_second=2.5,
    held_bytes=0,
)
ACTIVITY = Activity(1_234_567, 0.4, 1500.0, 1.5 * MIB, 2, 14, None, "pid 42 on host")
INVENTORY = Inventory(
    age_seconds=0.2,
    states={
        Condition.FREE: Amount(20, GIB),
        Condition.PINNED: Amount(80, 4 * GIB),
        Condition.ACTIVE: Amount(1, 64 * MIB),
    },
    rows=(ROW,),
    free_bytes=120 * GIB,
    total_bytes=400 * GIB,
    growth_bytes_per_second=GIB / 86400,
    seconds_until_full=120 * 86400.0,
)
SNAPSHOT = Snapshot("logs/one", ACTIVITY, INVENTORY)
HEADINGS = ["ROUTE", "LAST", "IN/S", "GROUP", "CURSOR", "LAG", "OLDEST", "OUT/S", "PINS"]


def with_rows(*rows: Row) -> Snapshot:
    return replace(SNAPSHOT, inventory=replace(INVENTORY, rows=rows))


def table(snapshot: Snapshot, *, width: int, height: int) -> list[str]:
    """Return the headings and the lines below them."""
    shown = [line.plain for line in lines(snapshot, width=width, height=height)]
    return shown[next(number for number, line in enumerate(shown) if line.startswith("ROUTE")) :]


def test_everything_is_reported() -> None:
    assert plain(SNAPSHOT, width=120).splitlines() == [
        "daemon    pid 42 on host",
        "head      1,234,567   1,500 records/s   1.5 MiB/s   last commit 0.4 s ago",
        "segments  101 segments, 5.1 GiB",
        "          " + "░" * 12 + "█" * 46 + "▓" * 2,
        "          ░ free 20, 1.0 GiB   █ pinned 80, 4.0 GiB   ▓ active 1, 64.0 MiB",
        "sealing   2 waiting   14 sealed since the start   - B/s",
        "disk      " + "█" * 42 + "░" * 18,
        "          120.0 GiB free of 400.0 GiB   grows 1.0 GiB a day   full in 120 d if nothing is reclaimed",
        "",
        "ROUTE        LAST   IN/S  GROUP         CURSOR     LAG   OLDEST  OUT/S  PINS",
        "access  1,234,567  1,500  processed  1,200,000  34,567  1 d 2 h    2.5   0 B",
    ]


def test_cursors_retired_routes_and_unknown_numbers_are_words() -> None:
    # A cursor that counts as nothing processed is a word.
    for state in set(CursorState) - {CursorState.VALID}:
        shown = plain(with_rows(replace(ROW, state=state)), width=120)
        assert ("no cursor" if state is CursorState.ABSENT else state.value) in shown
        assert "1,200,000" not in shown

    # A retired route holds nothing back.
    assert plain(with_rows(replace(ROW, retired=True)), width=120).endswith("retired")

    # What is not known is not zero.
    nothing = plain(Snapshot("logs/one", None, None, ("it is gone",)), width=120)
    unknown = replace(ROW, last_sequence=None, received_per_second=None, processed_per_second=None)
    assert nothing.splitlines() == ["it is gone", "head      -", "segments  -"]
    assert plain(with_rows(unknown), width=120).splitlines()[-1].split()[:4] == ["access", "?", "-", "processed"]

    # Without a daemon before the first record the screen says so.
    empty = replace(INVENTORY, states={}, rows=(), growth_bytes_per_second=None, seconds_until_full=None)
    fresh = Snapshot("logs/one", replace(ACTIVITY, sequence=0, durable_seconds=None, daemon=""), empty)
    shown = plain(fresh, width=120)
    assert all(words in shown for words in ("none runs", "nothing is durable yet", "no routes yet", "not known yet"))


def test_what_does_not_fit_is_summed_up_with_the_most_that_a_hidden_row_pins() -> None:
    # What does not fit is summed up.
    rows = [replace(ROW, route="big", held_bytes=GIB), *(replace(ROW, route=f"r{n:03}") for n in range(999))]
    shown = table(with_rows(*rows), width=80, height=22)
    assert [line.split()[0] for line in shown[:3]] == ["ROUTE", "big", "r000"]
    assert shown[-1] == f"and {1000 - (len(shown) - 2)} more routes, pinning nothing"

    # Hidden rows report the most that one of them pins.
    rows = [replace(ROW, group=group, held_bytes=GIB) for group in "abcdefghijklm"]
    shown = table(with_rows(*rows), width=80, height=16)
    assert shown[-1] == f"and {13 - (len(shown) - 2)} more groups of 1 route, pinning 1.0 GiB or less each"


def test_narrow_screens_shorten_names_and_keep_the_columns_about_pins() -> None:
    # Narrow screens keep the columns about pins.
    headings = [table(SNAPSHOT, width=width, height=40)[0].split() for width in (120, 60, 34)]
    assert headings[0] == HEADINGS
    assert headings[2] == ["ROUTE", "GROUP", "LAG", "PINS"]
    assert set(headings[2]) < set(headings[1]) < set(headings[0])

    # Long names are shortened before columns go.
    snapshot = with_rows(replace(ROW, route="r" * 127, group="g" * 127))
    heading, row = table(snapshot, width=100, height=40)
    assert heading.split() == HEADINGS
    assert "…" in row
    assert len(row) <= 100


@given(
    width=st.integers(1, 200),
    height=st.integers(0, 60),
    rows=st.integers(0, 40),
    held=st.integers(0, GIB),
    route=st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=127),
)
def test_the_screen_fits_every_terminal(width: int, height: int, rows: int, held: int, route: str) -> None:
    row = replace(ROW, route=route, held_bytes=held)
    snapshot = replace(with_rows(*[row] * rows), problems=("a problem in many words " * 5,))

    assert len(lines(snapshot, width=width, height=height)) <= height
    assert all(len(line) <= width for line in plain(snapshot, width=width).splitlines())


def test_names_cannot_move_the_cursor() -> None:
    """A file in a route's directory may have any name, including control characters."""
    snapshot = replace(with_rows(replace(ROW, group="\x1b[2J\n\udcff")), root="\x1b[31m", problems=("\x1b]0;x\x07",))
    shown = plain(snapshot, width=120)

    assert "\x1b" not in shown
    assert "?[2J??" in shown


@given(amounts=st.lists(st.integers(0, 1 << 50), max_size=6), width=st.integers(6, 200))
def test_a_bar_is_full_and_shows_all_there_is(amounts: list[int], width: int) -> None:
    counts = cells(amounts, width)

    assert sum(counts) == (width if any(amounts) else 0)
    assert [count > 0 for count in counts] == [amount > 0 for amount in amounts]

"""systemd's restarts, kills, hangs, reloads and stops of wald cost producers nothing."""

import itertools
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import pytest
import units
from contents import assert_sound, values
from full_disk import fill
from machine import Machine
from running import Client, eventually


class Load:
    """Producers that write during the block: writers of FIFOs, and clients of the socket.

    Each line is `NAME-NUMBER` and written once. They record failures that no producer may see: a broken pipe, a refused
    connection.
    """

    def __init__(self, root: Path) -> None:
        self.written: list[bytes] = []
        self.seen: list[BaseException] = []
        self._fifo = root / "routes/access/in"
        self._own_fifo = root / "routes/half/in"
        self._socket = root / "wald.sock"
        self._ending = threading.Event()
        self._threads = [
            threading.Thread(target=self._go, args=(way,))
            for way in (self._hold_fifo, self._open_fifo, self._open_fifo, self._connect, self._connect)
        ]
        for thread in self._threads:
            thread.start()

    def await_lines(self, count: int) -> None:
        """Return once ``count`` more lines were written."""
        wanted = len(self.written) + count
        eventually(lambda: self.seen or len(self.written) >= wanted)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Let each producer finish its line."""
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def _go(self, way: Callable[[Iterator[bytes]], None]) -> None:
        name = f"{way.__name__}-{secrets.token_hex(2)}"
        try:
            way(self._lines(name))
        except BaseException as error:  # noqa: BLE001  (whatever a producer meets is judged by the test)
            self.seen.append(error)

    def _lines(self, name: str) -> Iterator[bytes]:
        """Yield lines; each counts as written once the next one is requested."""
        for number in itertools.count():
            if self._ending.is_set():
                return
            line = f"{name}-{number}".encode()
            yield line
            self.written.append(line)
            self._ending.wait(0.002)

    def _hold_fifo(self, lines: Iterator[bytes]) -> None:
        """Keep a FIFO open in one writer, with half a line in it most of the time."""
        with self._own_fifo.open("wb", buffering=0) as fifo:
            for line in lines:
                fifo.write(line[:3])
                self._ending.wait(0.01)
                fifo.write(line[3:] + b"\n")

    def _open_fifo(self, lines: Iterator[bytes]) -> None:
        """Open and close a FIFO for each writer."""
        for line in lines:
            with self._fifo.open("wb", buffering=0) as fifo:
                fifo.write(line + b"\n")

    def _connect(self, lines: Iterator[bytes]) -> None:
        """Open a connection for each line, and retry without an answer, as a producer must."""
        producer = secrets.token_hex(8)
        for number, line in enumerate(lines, 1):
            while not self._is_durable(line, f"pid={producer} pseq={number}"):
                pass

    def _is_durable(self, line: bytes, options: str) -> bool:
        try:
            with Client(self._socket) as client:
                client.publish("access", line + b"\n", options)
                reply = client.reply()
        except (BrokenPipeError, ConnectionResetError):  # accepted, and closed by a daemon that ends
            return False
        assert reply.startswith("OK ") or not reply, reply
        return bool(reply)


SETTINGS = "\n[routes.access]\nfifo = true\n\n[routes.half]\nfifo = true\n"
ROOT = "/var/lib/wald"


@pytest.fixture(scope="module")
def host(machine: Machine) -> Machine:
    """A machine on which wald runs, with a watchdog that does not wait long."""
    units.install(machine)
    with machine.path("/etc/wald/wald.toml").open("a") as settings:
        settings.write(SETTINGS)
    units.drop_in(machine, "wald.service", "[Service]\nWatchdogSec=2s\n")
    machine.run("systemctl", "enable", "--now", "wald.service")
    return machine


@pytest.fixture
def root(host: Machine) -> Path:
    """The log as seen from outside; its records stay between tests."""
    machine_root = host.path(ROOT)
    eventually(host.is_active)
    return machine_root


def restart(host: Machine) -> None:
    host.run("systemctl", "restart", "wald.service")


def kill(host: Machine) -> None:
    before = pid(host)
    host.run("systemctl", "kill", "--kill-whom=main", "--signal=KILL", "wald.service")
    await_next(host, before)


def hang(host: Machine) -> None:
    """The watchdog has to see it."""
    before = pid(host)
    host.run("systemctl", "kill", "--kill-whom=main", "--signal=STOP", "wald.service")
    await_next(host, before)
    assert "Watchdog timeout" in host.journal("wald.service")


def await_next(host: Machine, before: str) -> None:
    """Return once the next daemon is ready; only then the watchdog watches it."""
    eventually(lambda: pid(host) not in ("0", before))
    eventually(host.is_active)


def pid(host: Machine, unit: str = "wald.service") -> str:
    return host.value(unit, "MainPID")


def new_values(root: Path, route: str, known: int) -> list[bytes]:
    return values(root, route)[known:]


@pytest.mark.slow
@pytest.mark.parametrize("disturb", [restart, kill, hang])
def test_under_load_nothing_is_lost_or_doubled(host: Machine, root: Path, disturb: Callable[[Machine], None]) -> None:
    """No producer sees a refused connection or a broken pipe. A half-written line continues after the restart."""
    known = len(values(root))
    with Load(root) as load:
        for _ in range(3):
            load.await_lines(50)
            disturb(host)
        load.await_lines(50)
    assert load.seen == []
    eventually(lambda: len(values(root)) - known >= len(load.written))

    assert sorted(values(root)[known:]) == sorted(load.written)


def test_what_is_unread_at_a_restart_is_read_after_it(host: Machine, root: Path) -> None:
    """A daemon that does not read any more, and no process but systemd that holds the FIFO."""
    known = len(values(root, "access"))
    host.run("systemctl", "kill", "--kill-whom=main", "--signal=STOP", "wald.service")
    with (root / "routes/access/in").open("wb", buffering=0) as writer:
        writer.write(b"unread\n" * 1000 + b"unfinished")
    host.run("systemctl", "kill", "--kill-whom=main", "--signal=KILL", "wald.service")
    eventually(lambda: len(new_values(root, "access", known)) == 1000)
    with (root / "routes/access/in").open("wb", buffering=0) as writer:
        writer.write(b" no more\n")
    eventually(lambda: len(new_values(root, "access", known)) == 1001)
    assert new_values(root, "access", known) == [b"unread"] * 1000 + [b"unfinished no more"]


def test_a_reload_of_wrong_settings_fails_and_changes_nothing(host: Machine, root: Path) -> None:
    settings = host.path("/etc/wald/wald.toml")
    right = settings.read_text()
    before = pid(host)
    settings.write_text(right.replace("[routes.half]", "segment_max_age = 5\n[routes.half]"))
    done = host.run("systemctl", "reload", "wald.service", check=False)

    assert done.returncode == 1
    assert "Job for wald.service failed" in done.stderr
    assert "wald.toml:" in host.journal("wald.service")
    settings.write_text(right + "\n[routes.late]\nfifo = true\n")
    host.run("systemctl", "reload", "wald.service")
    assert (root / "routes/late/in").is_fifo()  # it was waited for
    assert pid(host) == before


def test_a_stop_ends_the_service_and_a_connection_starts_it(host: Machine, root: Path) -> None:
    """The socket stays while wald.socket does; stopping that stops both, and removes it."""
    host.run("systemctl", "stop", "wald.service")
    assert (root / "wald.sock").is_socket()
    by_hand = host.run("wald", "--root", "/var/lib/wald", "run", user="wald", check=False)
    assert (by_hand.returncode, "another program listens on it" in by_hand.stderr) == (2, True)
    assert host.sh("echo activated | wald --root /var/lib/wald append access").split()
    host.run("systemctl", "stop", "wald.socket")
    assert not (root / "wald.sock").exists()
    assert not host.is_active()
    host.run("systemctl", "start", "wald.service")
    assert (root / "wald.sock").is_socket()


def test_a_store_that_is_full_keeps_nothing_from_working(host: Machine, root: Path) -> None:
    """systemd's journal names the descriptors that it drops, and a restart loses no line that was read."""
    units.drop_in(host, "wald.service", "[Service]\nWatchdogSec=2s\nFileDescriptorStoreMax=1\n")
    restart(host)
    known = len(values(root, "half"))
    with (root / "routes/half/in").open("wb", buffering=0) as writer:
        writer.write(b"one\n")
    eventually(lambda: new_values(root, "half", known) == [b"one"])
    restart(host)
    assert host.value("wald", "NFileDescriptorStore") == "1"
    units.drop_in(host, "wald.service", "[Service]\nWatchdogSec=2s\n")
    restart(host)
    fifos = f"{len(list(root.glob('routes/*/in')))}"
    eventually(lambda: host.value("wald", "NFileDescriptorStore") == fifos)


def test_a_fifo_of_systemds_own_outlives_even_a_stop(host: Machine, root: Path) -> None:
    """wald-fifo@.socket: its descriptor is matched to the route. A write starts the service."""
    host.run("systemctl", "stop", "wald.service")
    host.run("systemctl", "enable", "--now", "wald-fifo@held.socket")
    fifo = host.path("/run/wald/held")
    with fifo.open("wb", buffering=0) as writer:
        writer.write(b"one\n")
        eventually(lambda: values(root, "held") == [b"one"])
        host.run("systemctl", "stop", "wald.service")
        writer.write(b"two\n")  # as after SIGPIPE there would be none
        eventually(lambda: values(root, "held") == [b"one", b"two"])
    host.sh("echo three > /var/lib/wald/routes/held/in")
    eventually(lambda: values(root, "held") == [b"one", b"two", b"three"])
    assert "routes/held/in" not in host.sh("wald --root /var/lib/wald doctor", user="wald", check=False)
    host.run("systemctl", "disable", "--now", "wald-fifo@held.socket")
    assert not fifo.exists()


def test_a_second_log_has_units_of_its_own(host: Machine, root: Path) -> None:
    """wald@other: its root, settings and socket."""
    host.path("/etc/wald/other.toml").write_text("[routes.access]\nfifo = true\n")
    host.run("systemctl", "enable", "--now", "wald@other.service")
    assert host.sh("stat -c '%U:%G %a' /var/lib/wald-other").strip() == "wald:wald 2750"
    before = len(values(root, "access"))
    host.sh("echo elsewhere | wald --root /var/lib/wald-other append access")
    assert values(host.path("/var/lib/wald-other"), "access") == [b"elsewhere"]
    host.run("systemctl", "restart", "wald@other.service")
    assert len(values(root, "access")) == before


def test_a_daemon_on_a_full_disk_is_not_killed(host: Machine) -> None:
    """The watchdog is fed, a restart ends in time, and what waited is read once there is room."""
    host.sh(
        "mkdir -p /var/lib/wald-full; mount -t tmpfs -o size=64m,mode=2750,uid=wald,gid=wald tmpfs /var/lib/wald-full"
    )
    host.path("/etc/wald/full.toml").write_text("free_space_min = 0\n[routes.access]\nfifo = true\n")
    units.drop_in(host, "wald@full.service", "[Service]\nWatchdogSec=500ms\n")
    host.run("systemctl", "start", "wald@full.service")
    root = host.path("/var/lib/wald-full")
    before = pid(host, "wald@full.service")
    fill(root / "filler")
    with (root / "routes/access/in").open("wb", buffering=0) as writer:
        writer.write(b"waits\n")
    eventually(lambda: "disk full" in host.journal("wald@full.service"))
    fed = int(host.value("wald@full", "WatchdogTimestampMonotonic"))
    eventually(lambda: int(host.value("wald@full", "WatchdogTimestampMonotonic")) > fed + 1_500_000)
    assert pid(host, "wald@full.service") == before
    host.run("systemctl", "restart", "wald@full.service")
    (root / "filler").unlink()
    eventually(lambda: values(root, "access") == [b"waits"])


def test_the_log_is_sound_after_all_that(host: Machine, root: Path) -> None:
    host.run("systemctl", "stop", "wald.socket")
    assert_sound(root)

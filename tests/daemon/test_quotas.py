"""Quotas: a route over its quota accepts nothing, and its unread bytes are those of a sum over the records."""

import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from logging import CRITICAL
from pathlib import Path
from random import Random
from typing import NoReturn

import pytest
import structlog
from asking import is_quiet, stat
from contents import text, values
from logs import Built, commit, draft
from running import Client, Daemon, Start, eventually, output_of, refusal_of, run, sidecar, wald

from wald.daemon import quotas
from wald.daemon.metrics import Metrics
from wald.daemon.quotas import Quotas
from wald.errors import Unavailable
from wald.files.listing import list_segments
from wald.files.routes import add_route, retire_route
from wald.format.batch import Flag
from wald.format.names import Kind
from wald.settings import Config, RouteConfig
from wald.writing.writer import Draft, Route

QUOTA = 1000
LINES = b"".join(b"%099d\n" % number for number in range(11))  # more than the quota


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    """The route r has a quota, and others have none."""
    path = tmp_path / "wald.toml"
    write(path)
    return path


def write(settings: Path, *, policy: str = "block", quota: int = QUOTA) -> None:
    of_route = f'[routes.r]\nfifo = true\npinned_max_bytes = {quota}\non_pinned = "{policy}"\n'
    settings.write_text(of_route + "[routes.other]\nfifo = true\n")


def over(daemon: Daemon) -> dict[str, int]:
    """The routes over their quota, and how much of each is unread; nothing is being counted."""
    found = stat(daemon)["over_quota"]
    assert isinstance(found, list)
    return {each["route"]: each["unread_bytes"] for each in found}


def fill(daemon: Daemon) -> None:
    """Bring the route over its quota."""
    eventually(lambda: over(daemon) == {})
    with Client(daemon.socket_path) as client:
        client.publish("r", LINES)
        assert client.reply().startswith("OK ")
    eventually(lambda: over(daemon) == {"r": len(LINES)})


def set_cursor(daemon: Daemon, sequence: int, *, group: str = "processed", rewind: bool = False) -> None:
    options = ["--rewind"] if rewind else []
    done = wald("--root", daemon.root, "cursor", "set", "r", sequence, "--group", group, *options)
    assert done.returncode == 0, done.stderr


def held(daemon: Daemon, client: Client) -> None:
    """A request for the route is not answered, while one for another is."""
    client.publish("r", b"held\n")
    with Client(daemon.socket_path) as other:
        other.publish("other", b"x\n")
        assert other.reply().startswith("OK ")
    assert is_quiet(client)


def test_a_request_over_the_quota_waits_until_a_group_has_read_or_its_route_is_retired(
    start: Start, settings: Path
) -> None:
    """Requests behind it on its connection wait too, so that replies stay in order; other connections do not."""
    daemon = start("--config", settings)
    fill(daemon)
    with Client(daemon.socket_path) as client:
        held(daemon, client)
        client.send(b"PING\n")
        assert is_quiet(client)
        assert_reported(daemon)
        set_cursor(daemon, len(LINES) // 100)
        assert client.reply().startswith("OK ")
        assert client.reply() == "OK pong"
    assert text(daemon.root, "r") == LINES + b"held\n"
    set_cursor(daemon, len(LINES) // 100 + 2)  # one in between is of the other route
    fill(daemon)
    with Client(daemon.socket_path) as client:
        held(daemon, client)
        assert daemon.ask("ROUTE RETIRE r").startswith("OK ")
        assert client.reply().startswith("ERR no-route ")
        assert daemon.ask("ROUTE ADD r").startswith("OK ")
        client.publish("r", b"x\n")
        assert client.reply().startswith("OK ")
        eventually(lambda: over(daemon) == {"r": len(LINES) + 2})


def assert_reported(daemon: Daemon) -> None:
    """Check that commands name the route over its quota; no hint is about the disk, which is not full."""
    message = "route r is over its quota: group processed has not read 1100 bytes; pinned_max_bytes is 1000"
    done = wald("--root", daemon.root, "status")
    assert (done.returncode, message in done.stdout.decode()) == (14, True)
    assert message in output_of("--root", daemon.root, "explain").decode()
    code, message, hint = refusal_of("append", "r", "--root", daemon.root, "--retry-for", "0.3s", stdin=b"x\n")
    assert (code, "the daemon does not accept records now: route r is over its quota" in message) == (6, True)
    assert hint.startswith(f"wald --root {daemon.root} explain; then ")


def test_a_fifo_over_the_quota_is_not_read(start: Start, settings: Path) -> None:
    """Its lines stay in the pipe; the FIFO of another route is read, and so is a line that has begun, to its end."""
    daemon = start("--config", settings)
    fill(daemon)
    with open(daemon.root / "routes/r/in", "wb", 0) as fifo, open(daemon.root / "routes/other/in", "wb", 0) as other:
        fifo.write(b"waits\n")
        other.write(b"goes on\n")
        eventually(lambda: values(daemon.root, "other") == [b"goes on"])
        assert text(daemon.root, "r") == LINES
        assert stat(daemon)["stalled_seconds"] == 0
        set_cursor(daemon, 11)
        eventually(lambda: text(daemon.root, "r") == LINES + b"waits\n")
    line = b"x" * (3 << 20)  # a line longer than the quota would wait for ever, since no group can read it
    with open(daemon.root / "routes/r/in", "wb") as fifo:
        fifo.write(line + b"\n")
    eventually(lambda: values(daemon.root, "r")[-1] == line)
    eventually(lambda: over(daemon) == {"r": len(line) + 7})


def test_a_request_over_the_quota_is_refused_if_it_shall_be(start: Start, settings: Path) -> None:
    write(settings, policy="reject")
    daemon = start("--config", settings)
    fill(daemon)
    with Client(daemon.socket_path) as client:
        client.publish("r", b"x\n")
        reply = client.reply()
        assert reply.startswith("ERR full route r is over its quota: group processed has not read 1100 bytes")
        line = ("append", "r", "--root", daemon.root, "--retry-for", "0.3s")
        code, message, hint = refusal_of(*line, stdin=b"x\n")
        assert (code, "full: route r is over its quota" in message) == (Unavailable.exit_code, True)
        assert hint.startswith(f"wald --root {daemon.root} explain; ")
        assert "df" not in hint.split(), "the disk is not full"
        client.publish("other", b"x\n")
        assert client.reply().startswith("OK ")
        set_cursor(daemon, 11)
        eventually(lambda: over(daemon) == {})
        client.publish("r", b"x\n")
        assert client.reply().startswith("OK ")


def test_sighup_changes_a_quota(start: Start, settings: Path) -> None:
    """A higher quota releases waiting requests, reject refuses them, and a new quota counts existing records."""
    settings.write_text("[routes.r]\nfifo = true\n[routes.other]\n")
    daemon = start("--config", settings)
    with Client(daemon.socket_path) as client:
        client.publish("r", LINES)
        assert client.reply().startswith("OK ")
        write(settings)
        daemon.process.send_signal(signal.SIGHUP)
        eventually(lambda: over(daemon) == {"r": len(LINES)})
        held(daemon, client)
        write(settings, policy="reject")
        daemon.process.send_signal(signal.SIGHUP)
        assert client.reply().startswith("ERR full ")
        write(settings)
        daemon.process.send_signal(signal.SIGHUP)
        eventually(lambda: over(daemon) == {"r": len(LINES)})
        held(daemon, client)
        write(settings, quota=2 * QUOTA)
        daemon.process.send_signal(signal.SIGHUP)
        assert client.reply().startswith("OK ")
    assert over(daemon) == {}


@pytest.mark.usefixtures("unsound")
def test_segments_that_are_gone_count_no_more(start: Start, settings: Path) -> None:
    """A limit of the route may delete what no group has read."""
    with settings.open("a") as file:
        file.write('[retention]\nunread = "expire"\nmax_records = 1\ngrace = 0\n')
    daemon = start("--config", settings)
    fill(daemon)
    assert daemon.ask("CUT").startswith("OK ")
    with Client(daemon.socket_path) as client:
        held(daemon, client)
        raw = daemon.root / "segments" / f"{1:020}.wal"
        eventually(lambda: list(daemon.root.glob("segments/*.wal.zst")) and not raw.exists())  # reclaim may judge it
        done = run(sidecar("reclaim", "--root", daemon.root, "--config", settings))
        assert done.returncode == 0, done.stderr
        assert not list(daemon.root.glob("segments/*.wal.zst")), done.stdout
        assert client.reply().startswith("OK ")


def test_killed_or_stopped_while_a_route_is_over_its_quota_it_loses_nothing(start: Start, settings: Path) -> None:
    """The FIFO keeps its bytes, and the next run counts the segments first; a stop takes what nobody else holds."""
    daemon = start("--config", settings)
    fill(daemon)
    with open(daemon.root / "routes/r/in", "wb", 0) as fifo, Client(daemon.socket_path) as client:
        fifo.write(b"in the pipe\n")
        held(daemon, client)
        daemon.kill()
        daemon.start_again()
        eventually(lambda: over(daemon) == {"r": len(LINES)})
        assert text(daemon.root, "r") == LINES
        set_cursor(daemon, 11)
        eventually(lambda: text(daemon.root, "r") == LINES + b"in the pipe\n")
    set_cursor(daemon, 0, rewind=True)
    eventually(lambda: over(daemon))
    with Client(daemon.socket_path) as client:
        held(daemon, client)
        (daemon.root / "routes/r/in").write_bytes(b"at the end\n")
        assert daemon.stop() == 0
    assert text(daemon.root, "r") == LINES + b"in the pipe\nat the end\n"


def test_a_default_quota_is_that_of_every_route(start: Start, settings: Path) -> None:
    """Including later routes; each route is counted separately."""
    settings.write_text(f"[retention]\npinned_max_bytes = {QUOTA}\n[routes.free]\npinned_max_bytes = 0\n")
    daemon = start("--config", settings, routes=["r", "other"])
    with Client(daemon.socket_path) as client:
        client.publish("free", LINES)
        assert client.reply().startswith("OK ")
    fill(daemon)
    with Client(daemon.socket_path) as client:
        held(daemon, client)


RECORD = b"%09d\n"  # all are of one length, so that a share of a stretch is exact


class Life:
    """A log with a quota on r, counted by one life of a daemon after the other; time passes as the test says."""

    def __init__(self, path: Path) -> None:
        self.built = Built(path)
        self.config = of_quota(QUOTA)
        self.records: list[int] = []
        """Those of r that no group may have lost."""
        self.cursors: dict[str, int] = {}
        self.is_retired = False
        self.quotas = self.begun()
        for route in ("r", "other"):
            add_route(self.built.root, self.built.disk, route)

    def begun(self) -> Quotas:
        base, self.now = self.built.writer.base_sequence, time.monotonic()
        journal = structlog.wrap_logger(None, wrapper_class=structlog.make_filtering_bound_logger(CRITICAL))
        return Quotas(self.built.root, self.config, Metrics(), journal, log_id=self.built.log_id, base=base)

    def start_again(self) -> None:
        self.quotas.close()
        if self.built.writer.has_advanced:
            self.built.cut()
        self.quotas = self.begun()

    def append(self, count: int, route: str = "r") -> None:
        """One turn with a batch."""
        self.now += 0.01
        placed = [draft(RECORD % 0 * count, route=Route.named(route))]
        commit(self.built, placed)
        self.quotas.count(placed, self.built.writer.base_sequence)
        if route == "r":
            self.records += range(placed[0].base_sequence, placed[0].last_sequence + 1)

    def cut(self) -> None:
        if self.built.writer.has_advanced:
            self.built.cut()
            self.built.seal()
            self.quotas.count([], self.built.writer.base_sequence)

    def expire(self) -> None:
        """Delete the oldest segment, read or not."""
        first, *others = list_segments(self.built.root).segments
        if first.kind is Kind.SEALED and others:
            self.built.reclaim(first.base_sequence)
            self.records = [each for each in self.records if each >= others[0].base_sequence]

    def set_cursor(self, sequence: int, group: str = "processed") -> None:
        self.built.log.set_cursor("r", sequence, group, rewind=True)
        self.cursors[group] = sequence

    def retire(self) -> None:
        retire_route(self.built.root, self.built.disk, "r", now="")
        self.is_retired = True

    def take_back(self) -> None:
        add_route(self.built.root, self.built.disk, "r")
        self.is_retired = False

    def look(self, *, times: int = 1) -> None:
        """Run due updates and the counts that they start."""
        for _ in range(times):
            for seconds in (0.03, 1000, 0.03):  # what takes long to count is not counted again soon
                for thread in counting():
                    thread.join()
                self.now += seconds
                self.quotas.update(self.now, self.built.last)

    def over(self) -> int:
        """Return the unread bytes if they exceed the quota, else 0."""
        self.look(times=3)
        found = self.quotas.over_quota.get("r")
        assert found is None or found.group, "all is counted by now"
        return found.unread_bytes if found is not None else 0

    def expected(self) -> int:
        floor = min(self.cursors.values(), default=0)
        unread = sum(10 for each in self.records if each > floor)
        return unread if unread > QUOTA and not self.is_retired else 0


def of_quota(quota: int, policy: str = "block") -> Config:
    return Config(routes={"r": RouteConfig(pinned_max_bytes=quota, on_pinned=policy)})


def counting() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "quotas"]


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    made = Life(tmp_path / "root")
    yield made
    made.quotas.close()
    made.built.crash()


def test_a_quota_is_passed_by_one_byte_more_and_counts_after_retirements_and_restarts(life: Life) -> None:
    # A quota is passed by one byte more.
    life.append(100)
    assert life.over() == 0
    life.append(1)
    assert life.over() == 1010
    life.set_cursor(1)
    assert life.over() == 0

    # A route that was retired before the start counts when it is taken back.
    life.append(101)
    life.retire()
    life.start_again()
    assert life.over() == 0
    life.take_back()
    assert life.over() == 2010


def test_a_cursor_that_is_moved_back_counts_again_over_all_segments(life: Life) -> None:
    """Complete segments and the read part of the active one count again; a new group has the same effect."""
    for _ in range(2):
        life.append(110)
        life.cut()
    life.append(110)
    assert life.over() == 3300
    life.set_cursor(330)
    assert life.over() == 0
    life.set_cursor(90)
    assert life.over() == 2400
    life.set_cursor(0, "late")
    assert life.over() == 3300
    life.set_cursor(225, "late")
    life.set_cursor(225)
    assert life.over() == 1050


def test_many_small_turns_are_counted_once(life: Life) -> None:
    """Merged ranges, which bound the memory, may span the end of a segment."""
    for _ in range(2):
        for _ in range(101):
            life.append(1)
        life.cut()
    life.append(1)
    life.set_cursor(203)
    assert life.over() == 0
    life.set_cursor(0)
    assert life.over() == 2030


def test_the_rest_of_a_record_belongs_to_it(life: Life) -> None:
    for payload, count, flags in ((b"x" * 600, 1, Flag.CONTINUED), (b"x" * 600 + b"\n", 0, Flag.CONTINUES)):
        rest = Draft(Route.named("r"), [payload], len(payload), count, flags=int(flags), continues=1 - count)
        commit(life.built, [rest])
        life.quotas.count([rest], life.built.writer.base_sequence)
    assert life.over() == 1201
    life.set_cursor(1)
    assert life.over() == 0


def test_until_all_is_counted_nothing_is_taken_or_refused_and_a_quota_that_expires_holds_nothing_back(
    life: Life,
) -> None:
    # Until all is counted nothing is taken and nothing refused.
    life.append(110)
    life.config = of_quota(QUOTA, "reject")
    life.start_again()
    assert [(over.unread_bytes, over.rejects) for over in life.quotas.over_quota.values()] == [(0, False)]
    life.look(times=2)
    assert [(over.unread_bytes, over.rejects) for over in life.quotas.over_quota.values()] == [(1100, True)]

    # A quota that expires holds nothing back.
    life.config = of_quota(QUOTA, "expire")
    life.start_again()
    assert life.over() == 0


def out_of_descriptors(*_: object) -> NoReturn:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_count_that_fails_is_repeated_and_costs_nothing_else(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    # A count that fails is repeated and the route stays closed.
    life.append(110)
    monkeypatch.setattr(quotas, "_RECOUNT_SECONDS", 0.01)
    tried = []

    def refuse(*_: object) -> NoReturn:
        tried.append(life.now)
        out_of_descriptors()

    with monkeypatch.context() as patched:
        patched.setattr(quotas, "read_view", refuse)
        life.start_again()
        eventually(lambda: len(tried) > 1 or not counting())
        for _ in range(3):
            life.now += 1
            life.quotas.update(life.now, life.built.last)
        assert [(over.unread_bytes, over.group) for over in life.quotas.over_quota.values()] == [(0, "")]
    assert life.over() == 1100

    # A check that cannot list the segments does not end the daemon.
    monkeypatch.setattr(quotas, "list_segments", out_of_descriptors)
    assert life.over() == 1100


OPERATIONS = ["append"] * 3 + ["other", "cut", "cursor", "cursor", "again", "expire", "retire", "look"]


@pytest.mark.parametrize("seed", range(5))
def test_what_is_counted_is_what_a_group_has_not_read(life: Life, seed: int) -> None:
    random = Random(seed)
    for _ in range(30):
        match random.choice(OPERATIONS):
            case "append":
                life.append(random.choice([1, 7, 60]))
            case "other":
                life.append(random.randint(1, 3), "other")
                life.cut()  # records of r on both sides of it in one segment would be counted by their share
            case "cut":
                life.cut()
            case "cursor":
                last = life.built.last
                group = random.choice(["processed", "processed", "audit"])
                life.set_cursor(random.choice([0, last, random.randint(0, last)]), group)
            case "again":
                life.start_again()
            case "expire":
                life.expire()
            case "retire":
                life.retire()
                assert life.over() == 0
                life.take_back()
                life.append(1)  # with which it is looked at again
            case "look":
                life.look()
        if random.random() < 0.5:
            assert life.over() == life.expected()
    assert life.over() == life.expected()

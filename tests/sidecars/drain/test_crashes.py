"""Drain dies at every step it takes: the command gets every record, and a dead letter is there once.

Its steps are what it does to the disk; between two of them are the command and the dead letters.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from contents import records, values
from draining import InProcess, drain
from faults import Died, DyingDisk, FailingDisk, SteppingDisk, TracingDisk
from forgetting import forget
from running import Daemon

import wald
from wald.client.producer import Producer
from wald.errors import Damaged, DiskFailure
from wald.retention.handovers import ROUTES_MAX

ORIGINALS = [b"one", b"two"]
LATER = b"later"
ENOUGH_STEPS = 40
PARTS = [0.5, pytest.param(0.0, marks=pytest.mark.slow), pytest.param(1.0, marks=pytest.mark.slow)]
AFTER_SENDING = 15  # the step after the first dead letter was sent


class Case:
    """A route of its own, on a daemon that several cases share."""

    def __init__(self, root: Path, got: Path, name: str) -> None:
        self.root = root
        self.route = name
        self.dead_route = f"dead.{name}"
        self.got = got
        self.got.touch()
        with Producer(root) as producer:
            producer.command("ROUTE", "ADD", name)
        self.append(*ORIGINALS)

    def append(self, *lines: bytes) -> None:
        with Producer(self.root) as producer:
            producer.publish(self.route, b"".join(line + b"\n" for line in lines))
            producer.flush()

    def drain(self, exit_code: int, *, disk: SteppingDisk | None = None, now_ns: int = 7, records_max: int = 1) -> None:
        """Run drain once, with a command that keeps what it gets and then exits so."""
        script = f"cat >> {self.got}; exit {exit_code}"
        InProcess(self.root).run(
            "sh",
            "-c",
            script,
            route=self.route,
            dead_letter=self.dead_route,
            disk=disk,
            now_ns=now_ns,
            records_max=records_max,
        )

    @property
    def commanded(self) -> list[bytes]:
        """What the command got, over all its runs."""
        return self.got.read_bytes().splitlines()

    @property
    def dead(self) -> list[bytes]:
        """What is in the dead-letter route."""
        log = wald.open(self.root)
        return values(self.root, self.dead_route) if self.dead_route in log.routes() else []

    @property
    def is_processed(self) -> bool:
        last = records(self.root, self.route)[-1].sequence
        return wald.open(self.root).cursor(self.route).effective == last


NewCase = Callable[[], Case]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("crashes") / "log") as running:
        yield running


@pytest.fixture
def new_case(shared: Daemon, tmp_path: Path) -> NewCase:
    """Make a case."""
    names = (f"{tmp_path.name}.{number}" for number in itertools.count())

    def made() -> Case:
        name = next(names)
        return Case(shared.root, tmp_path / name, name)

    return made


def dying(case: Case, disk: SteppingDisk, exit_code: int) -> bool:
    """Drain with a disk that ends it; False if it came to its end."""
    try:
        case.drain(exit_code, disk=disk)
    except Died:
        disk.abandon()
        return True
    return False


def test_the_steps_are_the_ones_that_crashes_are_tried_at(new_case: NewCase) -> None:
    """First the file tells what is handed over and a pin retains it, then the cursor moves, then both are cleared."""
    case, disk = new_case(), TracingDisk()
    case.drain(1, disk=disk)

    cursor = [("create", ""), ("write", ""), ("sync", ""), ("rename", "processed.cursor"), ("sync_directory", "")]
    pin = [(name, path.replace(".cursor", ".pin")) for name, path in cursor]
    named = [(name, path if path.endswith((".cursor", ".pin")) else "") for name, path in disk.steps]
    file = [("truncate", ""), ("write", ""), ("sync", ""), *pin]
    handover = [*file, *cursor, ("truncate", ""), ("sync", ""), ("unlink", "processed.pin")]
    entered = [("sync_directory", ""), ("allocate", ""), *cursor]
    assert named == [*entered, *handover * len(ORIGINALS)]
    assert len([*entered, *file]) == AFTER_SENDING


@pytest.mark.parametrize("part", PARTS)
def test_a_crash_after_success_hands_the_records_out_again(new_case: NewCase, part: float) -> None:
    for step in range(ENOUGH_STEPS):
        case = new_case()
        died = dying(case, DyingDisk(step, part=part), 0)
        case.append(LATER)
        case.drain(0)

        assert case.is_processed
        assert set(case.commanded) == {*ORIGINALS, LATER}
        assert case.commanded[-1] == LATER
        assert case.dead == []
        if not died:
            assert case.commanded == [*ORIGINALS, LATER]
            break
    assert step > 5


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("mended", [False, True], ids=["fails-again", "mended"])
def test_a_crash_while_giving_up_doubles_no_dead_letter(new_case: NewCase, part: float, mended: bool) -> None:
    """Whatever has arrived since, and in whatever batches it is drained now."""
    for step in range(ENOUGH_STEPS):
        case = new_case()
        died = dying(case, DyingDisk(step, part=part), 1)
        given_up = len(case.dead)
        case.append(LATER)
        case.drain(0 if mended else 1, now_ns=8, records_max=2)

        assert case.is_processed
        assert set(case.commanded) == {*ORIGINALS, LATER}
        if not mended:
            assert case.dead == [*ORIGINALS, LATER]
        else:  # one more than was seen, if the file says so
            assert case.dead in (ORIGINALS[:given_up], ORIGINALS[: given_up + 1])
        if not died:
            break
    assert step > 8


@pytest.mark.slow
def test_a_crash_while_a_handover_is_finished_doubles_none_either(new_case: NewCase) -> None:
    """Killed in every step of the second start too."""
    for step in range(ENOUGH_STEPS):
        case = new_case()
        assert dying(case, DyingDisk(AFTER_SENDING), 1)
        case.append(LATER)
        died = dying(case, DyingDisk(step), 0)
        case.drain(0)

        assert case.is_processed
        assert case.dead == ORIGINALS[:1]
        assert set(case.commanded[1:]) == {*ORIGINALS[1:], LATER}
        if not died:
            break
    assert step > 8


def pinned(case: Case) -> bool:
    return any(case.root.glob(f"routes/{case.route}/cursors/*.pin"))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dead_letter_that_the_daemon_has_forgotten_is_not_sent_again(
    shared: Daemon, new_case: NewCase, workers: int
) -> None:
    case = new_case()
    assert dying(case, DyingDisk(AFTER_SENDING), 1)
    assert case.dead == ORIGINALS[:1]
    assert pinned(case)
    forget(shared)
    if workers:
        done = drain(case.route, "--root", case.root, "--workers", workers, "--exit-at-end", "--", "true")
        assert done.returncode == 10
    else:
        case.drain(0)

    assert case.dead == ORIGINALS[:1]
    assert case.is_processed
    assert not pinned(case)


def test_a_record_put_back_that_the_daemon_has_forgotten_is_not_sent_again(shared: Daemon, new_case: NewCase) -> None:
    case = new_case()
    case.drain(1)
    with pytest.raises(Died):
        InProcess(case.root).redrive(case.dead_route, disk=DyingDisk(AFTER_SENDING))
    assert values(case.root, case.route) == ORIGINALS * 2
    forget(shared)
    InProcess(case.root).redrive(case.dead_route)

    assert values(case.root, case.route) == ORIGINALS * 2


def test_dead_letters_of_many_routes_are_put_back_in_several_handovers(new_case: NewCase) -> None:
    """The pin of one handover names few routes."""
    case = new_case()
    routes = [f"{case.route}.{number}" for number in range(ROUTES_MAX + 1)]
    with Producer(case.root) as producer:
        for route in routes:
            producer.command("ROUTE", "ADD", route)
            producer.publish(route, b"bad\n")
    for route in routes:
        InProcess(case.root).run("false", route=route, dead_letter=case.dead_route)
    redriving = InProcess(case.root)
    redriving.redrive(case.dead_route)

    assert len(redriving.reported) == 2
    assert [values(case.root, route) for route in routes] == [[b"bad", b"bad"]] * len(routes)


def test_workers_finish_a_handover_and_count_it(new_case: NewCase) -> None:
    case = new_case()
    assert dying(case, DyingDisk(AFTER_SENDING), 1)
    done = drain(case.route, "--root", case.root, "--workers", 1, "--exit-at-end", "--", "true")

    assert done.returncode == 10
    assert f"1 record of {case.route} given up" in done.stderr.decode()
    assert case.dead == ORIGINALS[:1]
    assert case.is_processed


def test_records_given_up_again_after_a_rewind_are_dead_letters_again(new_case: NewCase) -> None:
    case = new_case()
    case.drain(1)
    wald.open(case.root).set_cursor(case.route, 0, rewind=True)
    case.drain(1, now_ns=8)

    assert case.dead == ORIGINALS * 2


def test_a_handover_is_not_finished_once_somebody_has_moved_the_cursor(new_case: NewCase) -> None:
    """What lies behind the cursor now is what counts; nothing in front of it is passed over."""
    case = new_case()
    assert dying(case, DyingDisk(AFTER_SENDING), 1)
    first = records(case.root, case.route)[0].sequence
    wald.open(case.root).set_cursor(case.route, first)
    case.drain(0)

    assert case.commanded[1:] == ORIGINALS[1:]
    assert case.is_processed


def test_a_handover_waits_for_a_cursor_that_can_be_trusted(new_case: NewCase) -> None:
    case = new_case()
    assert dying(case, DyingDisk(AFTER_SENDING), 1)
    cursor = wald.open(case.root).root.cursor(case.route, "processed")
    cursor.write_text("not a number\n")
    with pytest.raises(Damaged):
        case.drain(0)
    cursor.unlink()
    case.drain(0)

    assert case.commanded == ORIGINALS
    assert case.dead == ORIGINALS[:1]
    assert case.is_processed


def test_a_handover_goes_where_it_was_begun(new_case: NewCase) -> None:
    """Other options given now are for what comes after it."""
    case = new_case()
    assert dying(case, DyingDisk(AFTER_SENDING), 1)
    begun, case.dead_route = case.dead_route, f"other.{case.route}"
    case.append(LATER)
    case.drain(1, now_ns=8)

    assert values(case.root, begun) == ORIGINALS[:1]
    assert case.dead == [*ORIGINALS[1:], LATER]


@pytest.mark.slow
@pytest.mark.parametrize("exit_code", [0, 1])
def test_a_full_disk_ends_it_and_a_rerun_goes_on(new_case: NewCase, exit_code: int) -> None:
    for step in range(ENOUGH_STEPS):
        case = new_case()
        failed = False
        try:
            case.drain(exit_code, disk=FailingDisk(step, number=errno.ENOSPC))
        except DiskFailure:
            failed = True
        case.drain(exit_code)

        assert case.is_processed
        assert set(case.commanded) == set(ORIGINALS)
        assert case.dead == (ORIGINALS if exit_code else [])
        if not failed:
            break
    assert step > 5


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
def test_a_crash_while_putting_back_doubles_nothing(new_case: NewCase, part: float) -> None:
    """Every dead letter is put back once, whatever has become one since."""
    for step in range(ENOUGH_STEPS):
        case = new_case()
        case.drain(1)
        disk = DyingDisk(step, part=part)
        try:
            InProcess(case.root).redrive(case.dead_route, disk=disk)
            died = False
        except Died:
            disk.abandon()
            died = True
        case.append(LATER)
        case.drain(1, now_ns=8)
        InProcess(case.root).redrive(case.dead_route, now_ns=9)

        there = [*ORIGINALS, LATER, *case.dead]
        assert sorted(values(case.root, case.route)) == sorted(there)
        if not died:
            break
    assert step > 8

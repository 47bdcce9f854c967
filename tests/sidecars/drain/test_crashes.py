"""Crashes while records are sent to another route: each copy exists once."""

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from contents import records, values
from draining import NOW_NS, InProcess, Start, await_line, drain
from faults import Died, DyingDisk, after_each_death
from forgetting import forget
from running import TIMEOUT_SECONDS, Daemon

import wald
from wald.client.producer import Producer
from wald.errors import Damaged
from wald.files.disk import Disk
from wald.work.dead_letters import prepare
from wald_drain.redrive import Handover, HandoverFile, Handovers

ORIGINALS = [b"one", b"two"]
LATER = b"later"
AFTER_PINNING = 5  # first step after the copies are sent
AFTER_SENDING = 15  # same step in a redrive of a new group


class Case:
    """A separate route on a daemon that several cases share."""

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

    def drain(self, exit_code: int) -> InProcess:
        """Run drain once, with a command that stores its stdin and exits with the given code."""
        inside = InProcess(self.root)
        script = f"cat >> {self.got}; exit {exit_code}"
        inside.run("sh", "-c", script, route=self.route, dead_letter=self.dead_route, records_max=1)
        return inside

    def die_after_sending(self) -> None:
        """Crash as an earlier version did: send the dead letter of the first record, but do not move the cursor."""
        (record, *_) = records(self.root, self.route)
        consumer = InProcess(self.root).consumer(self.route, "processed", disk=DyingDisk(AFTER_PINNING), now_ns=NOW_NS)
        log = consumer.log
        head = log.head()
        assert head is not None
        after = log.cursor(self.route).effective
        sequence, reason = record.sequence, "exit 1 after 1 try"
        handover = Handover(after, sequence, sequence, reason, 1, self.dead_route, NOW_NS, head.sequence)
        prepare(self.root, log.root, self.dead_route)
        with HandoverFile(log.root, self.route, "processed", Disk()) as file:
            file.begin(handover)
            with pytest.raises(Died):
                Handovers(consumer, file, daemon=self.root, report=print)._execute(handover, [record])
        assert self.dead == ORIGINALS[:1]
        assert self.is_pinned

    @property
    def commanded(self) -> list[bytes]:
        """Return the input of the command from all its runs."""
        return self.got.read_bytes().splitlines()

    @property
    def dead(self) -> list[bytes]:
        log = wald.open(self.root)
        return values(self.root, self.dead_route) if self.dead_route in log.routes() else []

    @property
    def is_processed(self) -> bool:
        last = records(self.root, self.route)[-1].sequence
        return wald.open(self.root).cursor(self.route).effective == last

    @property
    def is_pinned(self) -> bool:
        return any(self.root.glob(f"routes/{self.route}/cursors/*.pin"))


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


def test_a_drain_that_is_killed_at_random_gives_up_each_record_once(new_case: NewCase, start: Start) -> None:
    case, chance = new_case(), random.Random(7)
    originals = [*ORIGINALS, *(b"%d" % number for number in range(30))]
    case.append(*originals[2:])
    words = (case.route, "--root", case.root, "--tries", 1, "--dead-letter", case.dead_route, "--batch-records", 4)
    for _ in range(6):
        process = start(*words, "--", "false")
        for _ in range(chance.randint(1, 4)):
            await_line(process, "given up: " if chance.random() < 0.5 else "try 1 of 1")
        process.kill()
        process.wait(TIMEOUT_SECONDS)
    done = drain(*words, "--exit-at-end", "--", "false")

    assert done.returncode == 10, done.stderr
    assert case.dead == originals
    assert case.is_processed
    assert not case.is_pinned


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("is_forgotten", [False, True], ids=["known to the daemon", "forgotten by it"])
def test_a_handover_of_an_earlier_version_is_finished_and_counted(
    shared: Daemon, new_case: NewCase, workers: int, is_forgotten: bool
) -> None:
    case = new_case()
    case.die_after_sending()
    if is_forgotten:
        forget(shared)
    options = ("--workers", workers) if workers else ()
    done = drain(case.route, "--root", case.root, *options, "--exit-at-end", "--", "true")

    assert done.returncode == 10
    assert f"1 record of {case.route} given up" in done.stderr.decode()
    assert case.dead == ORIGINALS[:1]
    assert case.is_processed
    assert not case.is_pinned


def test_records_given_up_again_after_a_rewind_are_dead_letters_again(new_case: NewCase) -> None:
    case = new_case()
    assert case.drain(1).given_up == 2
    wald.open(case.root).set_cursor(case.route, 0, rewind=True)
    case.drain(1)

    assert case.dead == ORIGINALS * 2


@pytest.mark.parametrize("cursor", ["moved", "damaged"])
def test_a_handover_is_not_finished_once_the_cursor_was_moved_and_waits_for_one_that_can_be_trusted(
    new_case: NewCase, cursor: str
) -> None:
    case = new_case()
    case.die_after_sending()
    if cursor == "moved":
        wald.open(case.root).set_cursor(case.route, records(case.root, case.route)[0].sequence)
        assert case.drain(0).given_up == 0
    else:
        path = wald.open(case.root).root.cursor(case.route, "processed")
        path.write_text("not a number\n")
        with pytest.raises(Damaged):
            case.drain(0)
        path.unlink()
        case.drain(0)

    assert case.commanded == ORIGINALS[1:]
    assert case.dead == ORIGINALS[:1]
    assert case.is_processed


def test_a_record_put_back_that_the_daemon_has_forgotten_is_not_sent_again(shared: Daemon, new_case: NewCase) -> None:
    case = new_case()
    case.drain(1)
    with pytest.raises(Died):
        InProcess(case.root).redrive(case.dead_route, disk=DyingDisk(AFTER_SENDING))
    assert values(case.root, case.route) == ORIGINALS * 2
    forget(shared)
    InProcess(case.root).redrive(case.dead_route)

    assert values(case.root, case.route) == ORIGINALS * 2


def test_dead_letters_of_many_routes_are_put_back_in_several_handovers(
    new_case: NewCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pin of one handover names a limited number of routes."""
    monkeypatch.setattr("wald_drain.redrive.ROUTES_MAX", 4)
    case = new_case()
    routes = [f"{case.route}.{number}" for number in range(5)]
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


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
def test_a_crash_while_putting_back_doubles_nothing(new_case: NewCase, part: float) -> None:
    """Every dead letter is put back once, even if more records became dead letters after the crash."""
    cases = []

    def die(number: int, disk: Disk) -> None:
        cases.append(new_case())
        cases[-1].drain(1)
        InProcess(cases[-1].root).redrive(cases[-1].dead_route, disk=disk)

    for _ in after_each_death(die, part=part, least=8):
        case = cases[-1]
        case.append(LATER)
        case.drain(1)
        InProcess(case.root).redrive(case.dead_route, now_ns=9)

        there = [*ORIGINALS, LATER, *case.dead]
        assert sorted(values(case.root, case.route)) == sorted(there)

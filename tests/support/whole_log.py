"""A random history of a whole log, compared with lists: each group receives exactly its unread records, byte for byte.

Long lines arrive in pieces on several routes at once, while the log is cut, sealed, reclaimed, shrunk and archived, and
the daemon is killed and restarted, or continues in a copy of its segment. Groups read in every possible way. Followers
keep their files open all the time. Tests use fixed seeds, ``scripts/torture`` any.
"""

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from archives import archive, restored
from contents import errors
from logs import Built
from reading import numbered, until_it_waits
from reclaiming import Reclaimer
from repairing import repair

import wald
from wald.errors import Damaged
from wald.files.layout import Root
from wald.files.listing import list_segments
from wald.format.names import Kind
from wald.reading.assembler import Batch
from wald.reading.reader import read_without_waiting
from wald.reading.search import Match, search
from wald.reading.selection import select
from wald.segments.view import State
from wald_archive.bundle import Records
from wald_reclaim import policy
from wald_spark.plan import Range, pieces_of
from wald_spark.progress import LogEndTracker

ROUTES = ("a", "b", "c")
OPERATIONS = 90  # of a run
THERE = {State.ACTIVE, State.CUT, State.SEALED, State.RELEASED}

Numbered = tuple[int, bytes]


@dataclass(slots=True)
class Follower:
    """A reader that is never closed, and the records that it was ``given``."""

    route: str
    steps: Iterator[Batch | int | None]
    given: list[Numbered] = field(default_factory=list)


@dataclass
class WholeLog:
    """One run."""

    place: Path
    rng: random.Random
    written: dict[str, list[Numbered]] = field(default_factory=lambda: {route: [] for route in ROUTES})
    begun: dict[str, Numbered] = field(default_factory=dict)
    cursors: dict[tuple[str, str], int] = field(default_factory=dict)
    followers: list[Follower] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    spoiled: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.built = Built(self.place / "root", segment_max_bytes=1 << 20)
        for route in ROUTES:
            self._keep(route, self.built.lines(route, [b"first"]), [b"first"])
            for group in ("one", "two") if route == "a" else ("one",):
                self._move(route, group, 0)

    def run(self, operations: int) -> None:
        """Run this number of steps."""
        steps: dict[Callable[[], object], int] = {
            self.append_lines: 6,
            self.append_columns: 2,
            self.append_piece: 14,
            self.cut: 8,
            self.seal: 6,
            self.restart: 3,
            self.continue_in_a_copy: 2,
            self.reclaim: 5,
            self.archive: 2,
            self.read_for_a_group: 14,
            self.work_for_a_group: 2,
            self.follow: 8,
            self.read_all: 2,
            self.spoil_an_index: 1,
            self.repair: 1,
            self.damage_a_copy: 2,
        }
        try:
            for step in self.rng.choices(list(steps), list(steps.values()), k=operations):
                self.done.append(step.__name__)
                step()
            self.finish()
        except BaseException as error:
            error.add_note(f"after {len(self.done)} steps in {self.place}: {' '.join(self.done)}")
            raise

    def finish(self) -> None:
        """Complete each open record, and let all readers read to the end."""
        for route in list(self.begun):
            self._append_end(route, b"end")
        self.read_all()
        for route, group in list(self.cursors):
            self._read(route, group, 1 << 30)
        for follower in self.followers:
            self._step(follower)
        self.repair()
        self.read_all()
        self.built.crash()

    # Changes of the log.

    def append_lines(self) -> None:
        route = self.rng.choice(ROUTES)
        if route not in self.begun:
            values = [self._value() for _ in range(self.rng.randint(1, 4))]
            self._keep(route, self.built.lines(route, values), values)

    def append_columns(self) -> None:
        route = self.rng.choice(ROUTES)
        if route not in self.begun:
            values = [self._value() for _ in range(self.rng.randint(1, 3))]
            self._keep(route, self.built.columns(route, values), values)

    def append_piece(self) -> None:
        """Append a piece of a long line: its beginning after other lines, its middle, or its end and the next lines."""
        route, text = self.rng.choice(ROUTES), self._value()
        if route not in self.begun:
            before = [self._value() for _ in range(self.rng.choice([0, 0, 1, 2]))]
            payload = b"".join(value + b"\n" for value in before) + text
            first = self.built.piece(route, payload, begins=True, ends=False)
            self._keep(route, first, before)
            self.begun[route] = first + len(before), text
        elif self.rng.random() < 0.6:
            self.built.piece(route, text, begins=False, ends=False)
            self.begun[route] = self.begun[route][0], self.begun[route][1] + text
        else:
            self._append_end(route, text)

    def _append_end(self, route: str, text: bytes) -> None:
        after = [self._value() for _ in range(self.rng.choice([0, 0, 1, 2]))]
        payload = b"".join(value + b"\n" for value in [text, *after])
        again = self._value() if self.rng.random() < 0.3 else b""
        first = self.built.piece(route, payload + again, begins=False, ends=not again)
        number, begun = self.begun.pop(route)
        self._keep(route, number, [begun + text])
        self._keep(route, first, after)
        if again:
            self.begun[route] = first + len(after), again

    def cut(self) -> None:
        if self.built.writer.has_advanced:
            self.built.cut()

    def seal(self) -> None:
        self.built.seal(keep=self.rng.choice([0, 0, 0, 1]))

    def restart(self) -> None:
        self.built.crash()
        self._start()

    def continue_in_a_copy(self) -> None:
        writer = self.built.writer
        if self.rng.random() < 0.5:
            writer.replace(now_ns=self.built.now_ns)
            self.built.publish()
        else:
            writer.path.unlink()
            writer.restore_name()

    def reclaim(self) -> None:
        """Delete segments that every group has read, and shrink pinned ones."""
        built = self.built
        reclaimer = Reclaimer(
            built.root, built.disk, grace_ns=0, boot=built.boot, shrink_pinned=self.rng.random() < 0.7
        )
        with closing(reclaimer.ledger), pytest.MonkeyPatch.context() as patch:
            patch.setattr(policy, "SHRINK_LEAST_BYTES", 0)  # the segments are small
            patch.setattr(policy, "SHRINK_LEAST_SHARE", 0.05)
            reclaimer.look(now_ns=built.now_ns, ahead_ns=built.ahead_ns)
        self.spoiled &= {segment.base_sequence for segment in list_segments(built.root).segments}

    def archive(self) -> None:
        """Bundle all complete records; the bundles contain the next unread records of their group."""
        route, place = self.rng.choice(ROUTES), self.place / "archive"
        due = self._due(route, "archive") if (route, "archive") in self.cursors else None
        if due is None:
            self._move(route, "archive", self.written[route][-1][0] if self.rng.random() < 0.5 else self._floor(route))
            due = self._due(route, "archive")
        if not due:
            return
        archive(self.built, place, route, group="archive", size=Records(self.rng.randint(1, 9)))
        assert restored(place, route, due[0][0]) == b"".join(value + b"\n" for _, value in due)
        at = self.built.log.cursor(route, "archive").sequence
        self.cursors[route, "archive"] = at
        assert at >= due[-1][0]

    def spoil_an_index(self) -> None:
        """Damage the index of a sealed segment, which is derived: no record is lost."""
        sealed = [each for each in list_segments(self.built.root).segments if each.kind is Kind.SEALED]
        if sealed:
            segment = self.rng.choice(sealed)
            data = bytearray(segment.path.read_bytes())
            data[data.rfind(b"WALDSIX1") + 20] ^= 1
            segment.path.write_bytes(data)
            self.spoiled.add(segment.base_sequence)

    def repair(self) -> None:
        """Repair without a daemon; no record is given up."""
        self.built.crash()
        plan = repair(self.built.root.path)
        assert [act.lost_spans for act in plan.actions if act.lost_spans] == []
        assert errors(self.built.root.path) == []
        self.spoiled.clear()
        self._start()

    def damage_a_copy(self) -> None:
        """Check that no reader of a damaged copy gets a torn record, and a repair gives up only unreadable records."""
        root = self.place / f"copy-{len(self.done)}"
        shutil.copytree(self.built.root.path, root)
        segments = list_segments(Root(root)).segments
        spoil(self.rng.choice(segments).path, self.rng, keep=len(segments) == 1)  # without any, nothing is mounted
        before, _ = self._readable(root)
        lost = {each for act in repair(root).actions for span in act.lost_spans for each in range(span[0], span[1] + 1)}
        after, damage = self._readable(root)
        assert (damage, errors(root)) == ([], [])
        given_up = {number for number, _ in before - after}
        assert not given_up, (given_up, lost)
        assert lost.isdisjoint(number for number, _ in after)
        shutil.rmtree(root)

    def _readable(self, root: Path) -> tuple[set[Numbered], list[Damaged]]:
        """Read a damaged log, all routes and each route; return the records and the reported damage."""
        written = {pair for route in ROUTES for pair in self.written[route]}
        damage: list[Damaged] = []
        log = wald.open(root)
        of_all = set(numbered(log.records(start=1, on_damage=damage.append, on_missing="skip")))
        of_each = {
            pair
            for route in ROUTES
            for pair in numbered(log.records(route, start=1, on_damage=damage.append, on_missing="skip"))
        }
        assert of_all <= written, sorted(number for number, _ in of_all - written)
        assert of_each <= written, sorted(number for number, _ in of_each - written)
        assert of_all <= of_each
        return of_all, damage

    def _start(self) -> None:
        was = self.built
        self.built = Built(was.root.path, segment_max_bytes=1 << 20, epoch=was.writer.epoch + 1, now_ns=was.now_ns)
        assert self.built.report.errors == []

    # Readers.

    def read_for_a_group(self) -> None:
        route, group = self.rng.choice([each for each in self.cursors if each[1] != "work"])
        self._read(route, group, self.rng.randint(1, 6))

    def _read(self, route: str, group: str, limit: int) -> None:
        due = self._due(route, group)[:limit]
        ways = [self._by_records, self._by_batches, self._by_arrow, self._by_search, self._by_spark]
        way = self.rng.choice(ways)
        self.done.append(f"{way.__name__}({route}, {group})")
        given = way(route, group, limit)
        assert given == due, (route, group, [number for number, _ in given], [number for number, _ in due])
        if due:
            self._move(route, group, due[-1][0])

    def _by_records(self, route: str, group: str, limit: int) -> list[Numbered]:
        return numbered(self.built.log.records(route, start="cursor", group=group, limit=limit))

    def _by_batches(self, route: str, group: str, limit: int) -> list[Numbered]:
        batches = self.built.log.batches(route, start="cursor", group=group, limit=limit)
        return [pair for batch in batches for pair in numbered(batch.records())]

    def _by_arrow(self, route: str, group: str, limit: int) -> list[Numbered]:
        with self.built.log.to_arrow_reader(route, start="cursor", group=group) as reader:
            rows = reader.read_all().to_pylist()
        return [(row["sequence"], row["value"]) for row in rows][:limit]

    def _by_search(self, route: str, group: str, limit: int) -> list[Numbered]:
        """Search like ``wald read --grep``, for text that every record contains."""
        view, found = self.built.view, list[Numbered]()

        def show(batch: Batch) -> Match:
            found.extend(numbered(batch.records()))
            return Match(batch.count, b"")

        if not self._due(route, group):
            return []
        selection = select(view, route, self.cursors[route, group] + 1, None, group)
        for event in search(view, selection, show, cannot_match=lambda _: False, jobs=1):
            assert isinstance(event, Match), event
        return found[:limit]

    def _by_spark(self, route: str, group: str, limit: int) -> list[Numbered]:
        """Read in pieces, like executors."""
        view, routes = self.built.view, frozenset([route])
        wanted = Range(routes, self.cursors[route, group] + 1, LogEndTracker(routes).end(view).complete)
        if wanted.first > wanted.last:
            return []
        pieces = pieces_of(view, wanted, limit_bytes=self.rng.choice([1, 3000, 1 << 20]), gaps=True)
        given = [pair for piece in pieces for batch in piece.batches() for pair in numbered(batch.records())]
        return sorted(given)[:limit]

    def work_for_a_group(self) -> None:
        """Lease records of a work group, and acknowledge all of them."""
        route = self.rng.choice(ROUTES)
        if (route, "work") not in self.cursors:
            self._move(route, "work", self._floor(route))
        due = self._due(route, "work")[: self.rng.randint(1, 6)]
        with wald.WorkGroup(self.built.root.path, route, "work") as work:
            given: list[Numbered] = []
            while len(given) < len(due):
                leased = work.lease("worker", len(due) - len(given), wait=20)
                given += [(each.record.sequence, each.record.value) for each in leased]
                assert leased, (given, due)
                work.ack("worker", [each.record.sequence for each in leased])
        assert given == due, (route, given, due)
        if due:
            self.cursors[route, "work"] = due[-1][0]

    def follow(self) -> None:
        """Let a follower continue after a pause, or start one."""
        if len(self.followers) < 3 or self.rng.random() < 0.2:
            route = self.rng.choice(ROUTES)
            steps = read_without_waiting(self.built.view, route=route, start="earliest", stop=None, group="f")
            self.followers.append(Follower(route, steps))
        self._step(self.rng.choice(self.followers))

    def _step(self, follower: Follower) -> None:
        given = until_it_waits(follower.steps)
        last = max([number for number, _ in follower.given], default=0)
        self._check_reading(follower.route, given, behind=last)
        follower.given += given

    def read_all(self) -> None:
        """Read everything, and look up some unread records."""
        for route in ROUTES:
            self._check_reading(route, numbered(self.built.log.records(route)))
            unread = [number for number, _ in self.written[route] if number > self._floor(route)]
            for number in self.rng.sample(unread, min(3, len(unread))):
                found = self.built.log.where(number)
                assert found.state in THERE, found
                assert found.route == route
        together = list(self.built.log.records())
        for route in ROUTES:
            self._check_reading(route, [(each.sequence, each.value) for each in together if each.route == route])
        if not self.spoiled:
            assert errors(self.built.root.path) == []

    def _check_reading(self, route: str, given: list[Numbered], *, behind: int = 0) -> None:
        """Check that the given records are complete and in order, and that no unread one is missing."""
        written = [pair for pair in self.written[route] if pair[0] > behind]
        unread = [pair for pair in written if pair[0] > self._floor(route)]
        torn = sorted(set(given) - set(written))
        assert not torn, (route, [number for number, _ in torn])
        assert given == sorted(given)
        missing = sorted(set(unread) - set(given))
        assert not missing, (route, [number for number, _ in missing])
        assert len(given) == len(set(given)), route

    # The lists.

    def _value(self) -> bytes:
        size = self.rng.choice([0, 3, 40, 900])
        return b"%d." % len(self.done) + self.rng.randbytes(size // 2).hex().encode()

    def _keep(self, route: str, first: int, values: list[bytes]) -> None:
        self.written[route] += [(first + number, value) for number, value in enumerate(values)]

    def _due(self, route: str, group: str) -> list[Numbered]:
        return [pair for pair in self.written[route] if pair[0] > self.cursors[route, group]]

    def _floor(self, route: str) -> int:
        return min(at for (of, _), at in self.cursors.items() if of == route)

    def _move(self, route: str, group: str, to: int) -> None:
        self.built.log.set_cursor(route, to, group=group)
        self.cursors[route, group] = to


def spoil(path: Path, rng: random.Random, *, keep: bool) -> None:
    """Damage a file, truncate it, or remove it unless it is to ``keep`` its name."""
    data = bytearray(path.read_bytes())
    at = rng.randrange(min(len(data), 1 << 16))
    match rng.choice(["flip", "flip", "zero", "cut", "gone"]):
        case "flip":
            data[at] ^= 0x55
        case "zero":
            data[at : at + 50] = bytes(len(data[at : at + 50]))
        case "cut":
            del data[at:]
        case _ if not keep:
            path.unlink()
            return
    path.write_bytes(data)


def whole_log(place: Path, *, seed: int, operations: int = OPERATIONS) -> int:
    """Run with a log below ``place``; return the number of steps."""
    place.mkdir(parents=True, exist_ok=True)
    log = WholeLog(place, random.Random(seed))
    log.run(operations)
    return len(log.done)

"""Unread bytes that quotas count, compared with a sum over the records, for any cursors and across restarts."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from logging import CRITICAL
from pathlib import Path
from random import Random
from typing import NoReturn

import pytest
import structlog
from logs import Built, commit, draft
from running import eventually

from wald.daemon import quotas
from wald.daemon.metrics import Metrics
from wald.daemon.quotas import Quotas
from wald.files.listing import list_segments
from wald.files.routes import add_route, retire_route
from wald.format.batch import Flag
from wald.format.names import Kind
from wald.settings import Config, Retention, RouteConfig
from wald.writing.writer import Draft, Route

QUOTA = 1000
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


def test_a_quota_is_passed_by_one_byte_more(life: Life) -> None:
    life.append(100)
    assert life.over() == 0
    life.append(1)
    assert life.over() == 1010
    life.set_cursor(1)
    assert life.over() == 0


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


def test_a_segment_that_was_begun_after_the_last_listing_is_there(life: Life) -> None:
    life.append(110)
    assert life.over() == 1100
    life.cut()
    life.append(5)
    life.now += 0.5
    life.quotas.update(life.now, life.built.last)
    assert life.quotas.over_quota["r"].unread_bytes == 1150


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


def test_a_route_that_was_retired_before_the_start_counts_when_it_is_taken_back(life: Life) -> None:
    life.append(110)
    life.retire()
    life.start_again()
    assert life.over() == 0
    life.take_back()
    assert life.over() == 1100


def test_until_all_is_counted_nothing_is_taken_and_nothing_refused(life: Life) -> None:
    life.append(110)
    life.config = of_quota(QUOTA, "reject")
    life.start_again()
    assert [(over.unread_bytes, over.rejects) for over in life.quotas.over_quota.values()] == [(0, False)]
    life.look(times=2)
    assert [(over.unread_bytes, over.rejects) for over in life.quotas.over_quota.values()] == [(1100, True)]


def test_other_settings_change_quotas_only_if_quotas_are_others(life: Life) -> None:
    assert not life.quotas.differ_from(of_quota(QUOTA))
    assert not life.quotas.differ_from(Config(routes=life.config.routes, segment_max_bytes=1 << 20))
    assert life.quotas.differ_from(of_quota(QUOTA + 1))
    assert life.quotas.differ_from(of_quota(QUOTA, "reject"))
    assert life.quotas.differ_from(of_quota(QUOTA, "expire"))  # which wald-reclaim enforces
    assert life.quotas.differ_from(Config(routes=life.config.routes, retention=Retention(pinned_max_bytes=5)))


def test_a_quota_that_expires_holds_nothing_back(life: Life) -> None:
    life.config = of_quota(QUOTA, "expire")
    life.start_again()
    life.append(110)
    assert life.over() == 0


def out_of_descriptors(*_: object) -> NoReturn:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_count_that_fails_is_repeated_and_the_route_stays_closed(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_check_that_cannot_list_the_segments_does_not_end_the_daemon(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    life.append(110)
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

"""A power cut at any moment of a whole program: unread records outlive it, and the same command then finishes."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from contents import errors
from every_program import (
    log_of_two_routes,
    log_with_a_bad_index,
    log_with_a_slow_group,
    log_with_released_segments,
    reclaim,
)
from powercut import recorded
from running import command, run, sidecar

import wald
from wald.format.names import DEFAULT_GROUP
from wald.store.files.identity import read_identity
from wald.store.retention.cursors import cursors_of

STATES = 24  # of a program, at most, evenly chosen
Positions = dict[tuple[str, str], int]


@dataclass(frozen=True)
class Program:
    """A program to cut the power of.

    Attributes:
        prepare: makes the log that it finds.
        line: its command line.
        after: the cursors once it has ended; those of the log before, if it moves none.
        damages: whether the log is damaged before it has ended.
    """

    prepare: Callable[[Path], None]
    line: Callable[[Path], list[str]]
    after: Positions
    damages: bool = False


WORK = """
import sys, wald
with wald.WorkGroup(sys.argv[1], "a", "workers") as group:
    leased = [delivery.record.sequence for delivery in group.lease("w", 3)]
    group.ack("w", leased[:1])
    group.nack("w", leased[1:2])
"""

PROGRAMS = {
    "reclaim": Program(log_of_two_routes, lambda root: reclaim(root, "--grace", "0"), {}),
    "reclaim takes back": Program(log_with_released_segments, lambda root: reclaim(root, "--grace", "0"), {}),
    "reclaim shrinks": Program(
        log_with_a_slow_group, lambda root: reclaim(root, "--grace", "0", "--compact-pinned"), {}
    ),
    "repair": Program(log_with_a_bad_index, lambda root: command("repair", "--root", root), {}, damages=True),
    "archive": Program(
        log_of_two_routes,
        lambda root: sidecar("archive", "a", "--root", root, "--dest", root.parent / "archive"),
        {("a", DEFAULT_GROUP): 17},
    ),
    "drain": Program(
        log_of_two_routes,
        lambda root: sidecar("drain", "feed", "a", "--root", root, "--batch-records", 3, "--exit-at-end", "--", "cat"),
        {("a", DEFAULT_GROUP): 17},
    ),
    "drain with workers": Program(
        log_of_two_routes,
        lambda root: sidecar("drain", "feed", "a", "--root", root, "--workers", 2, "--exit-at-end", "--", "cat"),
        {("a", DEFAULT_GROUP): 17},
    ),
    "work": Program(log_of_two_routes, lambda root: [sys.executable, "-c", WORK, str(root)], {("a", "workers"): 1}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_unread_records_outlive_a_power_cut_of(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = PROGRAMS[name]
    base = tmp_path / "run"
    root = base / "log"
    base.mkdir()
    program.prepare(root)
    before = cursors(root)
    log_of_two_routes(tmp_path / "whole")
    truth = {route: numbered(tmp_path / "whole", route) for route in ("a", "b")}
    monkeypatch.setenv("WALD_SEGMENT_MAX_BYTES", "64KiB")  # each state holds all content
    platter = recorded(program.line(root), base, tmp_path / "trace")
    assert cursors(root) == before | program.after | {key: at for key, at in cursors(root).items() if key not in before}
    states = list(platter.states)
    for number, state in enumerate(states[:: 1 + len(states) // STATES]):
        shutil.rmtree(base)
        base.mkdir()
        state.put(base)
        for key, at in cursors(root).items():
            begin = before.get(key, 0)
            assert begin <= at <= program.after.get(key, begin), (number, state.after, key)
        if not program.damages:
            assert_unread(root, truth, f"{number} {state.after}")
        again = run(program.line(root))
        assert again.returncode == 0, f"{state.after}: {again.stderr.decode()}"
        assert_unread(root, truth, f"{number} {state.after}, then the command again")
        left = [path.name for path in base.rglob("*") if path.suffix in (".whole", ".deleting")]
        assert not left, state.after


def cursors(root: Path) -> Positions:
    log = wald.open(root)
    head = log.head()
    assert head is not None
    log_id = read_identity(log.root).log_id
    return {
        (route, each.group): each.effective
        for route in log.routes()
        for each in cursors_of(log.root, route, log_id=log_id, head_sequence=head.sequence)
    }


def numbered(root: Path, route: str) -> dict[int, bytes]:
    return {record.sequence: record.value for record in wald.open(root).records(route)}


def assert_unread(root: Path, truth: dict[str, dict[int, bytes]], when: str) -> None:
    """Assert that each unread record is readable, a ledger explains each that is gone, and nothing is damaged."""
    assert errors(root) == [], when
    for number in sorted({number for records in truth.values() for number in records}):
        there = wald.open(root).where(number)
        assert there.durable or there.reclaimed, (when, there.message)
    for (route, group), at in cursors(root).items():
        found = {record.sequence: record.value for record in wald.open(root).records(route, at + 1)}
        wanted = {number: value for number, value in truth.get(route, {}).items() if number > at}
        assert {number: found.get(number) for number in wanted} == wanted, (when, group)

"""``wald where --since`` reports exactly whether a time span is complete in the log, and where the rest is."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from archives import archive
from damage import flip_bit
from logs import SECOND_NS, START_NS, Built
from reclaiming import Reclaimer
from running import refusal_of, wald

from wald.format.names import Kind
from wald.format.times import utc

GONE, DAMAGED = 12, 4


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """A log with records a, b, a, a, b, a at seconds 1 to 6, each in a sealed segment, and an active segment."""
    built = Built(tmp_path / "root")
    for _ in range(2):
        for route in "aba":
            built.lines(route, [route.encode()] * 10)
        built.cut()
    built.seal()
    return built


def asked(built: Built, since: float, until: float, *arguments: object) -> tuple[int, dict[str, Any]]:
    """Return exit code and answer for a span given in seconds after the start."""
    span = (utc(START_NS + int(at * SECOND_NS), 9) for at in (since, until))
    times = [word for name, at in zip(("--since", "--until"), span, strict=True) for word in (name, at)]
    done = wald("where", *times, "--json", "--root", built.root.path, *arguments)
    assert done.stderr == b"", done.stderr.decode()
    return done.returncode, json.loads(done.stdout)


def reclaim_first(built: Built) -> None:
    for route in "ab":
        if built.log.cursor(route).effective < 30:
            built.log.set_cursor(route, 30)
    Reclaimer(built.root, built.disk).look(now_ns=built.now_ns)
    assert not built.path(1, Kind.SEALED).exists()


def test_all_here_with_the_exact_number(built: Built) -> None:
    code, found = asked(built, 0, 7, "--route", "a")
    assert (code, found["complete"], found["records"], found["first"], found["last"]) == (0, True, 40, 1, 60)
    code, found = asked(built, 1.5, 3.5, "--route", "a")
    assert (code, found["records"], found["first"], found["last"]) == (0, 10, 21, 30)
    assert asked(built, 0, 7)[1]["records"] == 60
    code, found = asked(built, 100, 200, "--route", "a")  # nothing came then
    assert (code, found["complete"], found["records"], found["first"]) == (0, True, 0, None)


def test_what_was_reclaimed_is_named_and_no_bundle_has_it(built: Built) -> None:
    reclaim_first(built)
    code, found = asked(built, 0, 7, "--route", "a")
    (missing,) = found["missing"]

    assert (code, found["complete"], found["records"]) == (GONE, False, 20)
    assert (missing["records"], missing["exact"]) == (20, True)
    assert (missing["archived"], missing["archive"]) == (False, None)
    assert asked(built, 3.5, 7, "--route", "a")[0] == 0, "the later time is all here"


def test_what_was_reclaimed_and_is_in_a_bundle_is_found_there(built: Built, tmp_path: Path) -> None:
    archive(built, tmp_path / "bags", "a")
    reclaim_first(built)
    code, found = asked(built, 0, 7, "--route", "a")

    assert code == GONE
    assert [(each["archived"], each["archive"]) for each in found["missing"]] == [(True, str(tmp_path / "bags"))]
    span = ["--since", utc(START_NS), "--until", utc(START_NS + 7 * SECOND_NS)]
    text = wald("where", "--route", "a", *span, "--root", built.root.path).stdout.decode()
    assert f"wald-archive restore {tmp_path / 'bags'} a --from 1 --to 30" in text


def test_damage_in_the_time_is_reported_and_counts(built: Built) -> None:
    flip_bit(built.path(31, Kind.SEALED), 100)
    code, found = asked(built, 0, 7, "--route", "a")

    assert (code, found["complete"]) == (DAMAGED, False)
    assert found["damage"]


def test_a_time_to_come_is_answered_by_the_same_question_about_the_day_before(built: Built) -> None:
    since, until = datetime.now(UTC) + timedelta(hours=1), datetime.now(UTC) + timedelta(hours=2)
    words = ("--route", "a", "--since", since.isoformat(), "--until", until.isoformat())
    code, _, hint = refusal_of("where", *words, "--root", built.root.path)
    assert code == 2
    typed, _, _ = hint.partition(" asks about")
    before = [(each - timedelta(days=1)).strftime("%Y-%m-%dT%H:%M:%S.%fZ") for each in (since, until)]
    assert typed.endswith(f" where --route a --since {before[0]} --until {before[1]}")
    assert wald(*typed.split()[1:]).returncode in (0, 12)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["5", "--since", "1h"], "where takes a SEQUENCE, or --since"),
        (["--since", "2100-01-01T00:00:00Z"], "that time has not come yet"),
        (["--since", "1h", "--until", "2h"], "is not before --until"),
        (["--since", "1h", "--until", "1h"], "is not before --until"),
    ],
)
def test_a_question_without_a_time_in_it_is_refused(built: Built, words: list[str], reason: str) -> None:
    code, message, _ = refusal_of("where", *words, "--root", built.root.path)
    assert code == 2
    assert reason in message

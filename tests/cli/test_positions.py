"""``wald head``, ``where``, ``route``, ``cursor``, ``cut``: output for people and for programs."""

import json
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from archives import archive
from damage import flip_bit
from logs import SECOND_NS, START_NS, Built
from reclaiming import Reclaimer
from running import Daemon, eventually, output_of, refusal_of, wald

from wald.errors import Damaged, NotFound, Refused
from wald.format.names import Kind
from wald.format.times import utc


def reported(*arguments: object) -> Any:
    return json.loads(output_of(*arguments, "--json"))


def test_head_and_where_follow_appends_and_cuts(daemon: Daemon, root: Path) -> None:
    # Head is the last durable record.
    output_of("append", "a", "--root", root, stdin=b"one\ntwo\n")
    assert output_of("head", "--root", root).startswith(b"seq=2 segment=1 position=")
    assert reported("head", "--root", root)["sequence"] == 2

    # Cut begins a segment and an empty one is not cut.
    assert output_of("cut", "--root", root) == b"cut: the active segment begins with record 3\n"
    assert output_of("cut", "--root", root) == b"nothing to cut: the active segment begins with record 3\n"

    # Where has an answer for every number.
    eventually(lambda: list((root / "segments").glob("*.wal.zst")))
    output_of("append", "a", "--root", root, stdin=b"three\n")
    answers = [wald("where", sequence, "--root", root, "--json") for sequence in (1, 3, 4)]
    assert [json.loads(answer.stdout)["state"] for answer in answers] == ["sealed", "active", "never-issued"]
    assert [answer.returncode for answer in answers] == [0, 0, NotFound.exit_code]
    assert output_of("where", 1, "--root", root).startswith(b"1: sealed: ")


@pytest.mark.parametrize("sealed", [True, False])
def test_a_log_that_has_lost_its_head_does_not_say_that_nothing_was_durable(tmp_path: Path, sealed: bool) -> None:
    built = Built(tmp_path / "log")
    built.lines("a", [b"one", b"two"])
    if sealed:
        built.cut()
        built.seal()
    built.log.set_cursor("a", 2)
    root = built.root.path
    built.root.head.unlink()
    code, message, hint = refusal_of("head", "--root", root)

    assert code == Damaged.exit_code
    assert message.startswith(f"{built.root.head}: there is no readable head, so it is unknown which ")
    assert hint.endswith(f"wald --root {root} run")
    assert "nothing is durable" not in output_of("top", "--once", "--interval", "100ms", "--root", root).decode()
    (route,) = json.loads(wald("route", "list", "--json", "--root", root).stdout)["routes"]
    assert route["last"] == (2 if sealed else None)
    assert route["groups"][0]["state"] == ("valid" if sealed else "beyond")


def test_a_log_without_records_has_had_nothing_durable(tmp_path: Path) -> None:
    built = Built(tmp_path / "log")
    built.root.head.unlink()
    code, message, _ = refusal_of("head", "--root", built.root.path)

    assert (code, message) == (NotFound.exit_code, f"{built.root.head}: no record is durable yet")


def test_routes_show_cursors_and_lag(daemon: Daemon, root: Path) -> None:
    """The lag counts up to the last record of the route, not to the head of the log."""
    output_of("route", "add", "b", "--fifo", "--root", root)
    output_of("append", "a", "--root", root, stdin=b"1\n2\n3\n")
    output_of("append", "b", "--root", root, stdin=b"4\n5\n")
    output_of("cut", "--root", root)
    output_of("cursor", "set", "a", 2, "--root", root)
    assert wald("cursor", "set", "b", 5, "--group", "g", "--root", root).returncode == 0
    a, b = reported("route", "list", "--root", root)["routes"]

    assert (a["route"], a["last"], a["fifo"], a["groups"][0]["lag_records"]) == ("a", 3, False, 1)
    assert (b["route"], b["last"], b["fifo"], b["groups"][0]["lag_records"]) == ("b", 5, True, 0)
    assert [group["group"] for group in b["groups"]] == ["g"]
    table = [line.split() for line in output_of("route", "list", "--root", root).decode().splitlines()]
    assert table == [
        ["ROUTE", "LAST", "GROUP", "CURSOR", "LAG"],
        ["a", "3", "processed", "2", "1"],
        ["b", "5", "g", "5", "0", "fifo"],
    ]


@pytest.mark.parametrize("running", [True, False])
def test_a_route_is_added_and_retired_with_and_without_a_daemon(daemon: Daemon, root: Path, running: bool) -> None:
    if not running:
        daemon.stop()
    output_of("route", "add", "b", "--fifo", "--mode", "0600", "--root", root)
    output_of("route", "add", "b", "--root", root)
    fifo = root / "routes/b/in"

    assert fifo.is_fifo()
    assert stat.S_IMODE(fifo.stat().st_mode) == 0o600
    output_of("route", "retire", "b", "--root", root)
    assert (root / "routes/b/retired").exists()
    listed = wald("route", "list", "--root", root, "--json")
    shown = json.loads(listed.stdout)
    assert [route["retired"] for route in shown["routes"]] == [False, True]
    assert shown["no_daemon"].startswith("no daemon runs: ") != running
    output_of("route", "add", "b", "--root", root)
    assert not (root / "routes/b/retired").exists()


def test_a_directory_is_not_a_cursor(daemon: Daemon, root: Path) -> None:
    path = root / "routes/a/cursors/processed.cursor"
    path.mkdir()
    refusal = (Refused.exit_code, f"{path}: is a directory, not a cursor", f"ls -lR {path}; as root: rm -r {path}")
    for line in (("set", "a", 0, "--rewind"), ("remove", "a", "--group", "processed")):
        assert refusal_of("cursor", *line, "--root", root) == refusal


def test_a_new_group_is_reported_of(daemon: Daemon, root: Path) -> None:
    """A misspelled group would otherwise pin every later record unnoticed."""
    output_of("append", "a", "--root", root, stdin=b"one\n")
    assert wald("cursor", "set", "a", 1, "--root", root).stderr == b""
    first = wald("cursor", "set", "a", 1, "--group", "typo", "--root", root)
    taken_away = f"wald --root {root} cursor remove a --group typo"

    assert first.stdout == b"1\n"
    assert first.stderr.decode() == (
        "wald: group typo is new on route a, which already has processed: "
        "from now on, records are retained until it has read them\n"
        f"  hint: to remove the group: {taken_away}\n"
    )
    assert wald("cursor", "set", "a", 1, "--group", "typo", "--root", root).stderr == b""
    assert b"group other is new" in wald("read", "a", "--group", "other", "--commit", "--root", root).stderr
    output_of(*taken_away.split()[1:])
    assert b"group typo is new" in wald("cursor", "set", "a", 1, "--group", "typo", "--root", root).stderr


def test_cursors_are_listed_and_removed(daemon: Daemon, root: Path) -> None:
    output_of("append", "a", "--root", root, stdin=b"one\n")
    output_of("route", "add", "b", "--root", root)
    output_of("append", "b", "--root", root, stdin=b"two\n")
    wald("cursor", "set", "a", 1, "--root", root)
    wald("cursor", "set", "a", 0, "--group", "g", "--root", root)
    wald("cursor", "set", "b", 2, "--group", "g", "--root", root)

    assert output_of("cursor", "list", "--root", root).decode().splitlines() == [
        "ROUTE  GROUP      CURSOR  STATE",
        "a      g               0  valid",
        "a      processed       1  valid",
        "b      g               2  valid",
    ]
    (line,) = output_of("cursor", "list", "b", "--json", "--root", root).splitlines()
    reported_about = json.loads(line)
    assert (reported_about["route"], reported_about["group"], reported_about["sequence"]) == ("b", "g", 2)
    output_of("cursor", "remove", "a", "--group", "processed", "--root", root)
    last = wald("cursor", "remove", "a", "--group", "g", "--root", root)
    removed = last.stdout.decode().strip()
    assert not Path(removed).exists()
    assert last.stderr.decode().startswith("wald: no group reads route a any more, so its records are kept; ")
    assert last.stderr.decode().endswith(f"wald --root {root} route retire a\n")
    code, message, hint = refusal_of("cursor", "remove", "a", "--group", "g", "--root", root)
    assert (code, message) == (3, f"{removed}: group g has no cursor")
    output_of(*hint.split()[1:])


def test_the_last_record_is_not_known_where_the_newest_segment_is_damaged(daemon: Daemon, root: Path) -> None:
    """The route of the damaged first batch is unknown; later batches reveal the last record of one route only."""
    output_of("route", "add", "b", "--root", root)
    output_of("append", "a", "--root", root, stdin=b"x\n" * 10)

    def lasts() -> list[object]:
        return [
            reported["last"]
            for reported in json.loads(wald("route", "list", "--json", "--root", root).stdout)["routes"]
        ]

    assert lasts() == [10, 0]
    with (root / "segments/00000000000000000001.wal").open("r+b") as segment:
        segment.seek(json.loads(wald("head", "--json", "--root", root).stdout)["position"] - 30)
        segment.write(b"?")
    assert lasts() == [None, None]
    output_of("append", "b", "--root", root, stdin=b"y\n")
    assert lasts() == [None, 11]


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


WRONG_QUESTIONS = [
    (("5", "--since", "1h"), "where takes a SEQUENCE, or --since"),
    (("--since", "2100-01-01T00:00:00Z"), "that time has not come yet"),
    (("--since", "1h", "--until", "2h"), "is not before --until"),
    (("--since", "1h", "--until", "1h"), "is not before --until"),
]


def test_a_span_of_time_is_answered_by_records_that_are_here_or_were_reclaimed(built: Built) -> None:
    root = built.root.path
    # A time to come is answered by the same question about the day before.
    since, until = datetime.now(UTC) + timedelta(hours=1), datetime.now(UTC) + timedelta(hours=2)
    span = ("--route", "a", "--since", since.isoformat(), "--until", until.isoformat())
    code, _, hint = refusal_of("where", *span, "--root", root)
    assert code == 2
    typed, _, _ = hint.partition(" asks about")
    before = [(each - timedelta(days=1)).strftime("%Y-%m-%dT%H:%M:%S.%fZ") for each in (since, until)]
    assert typed.endswith(f" where --route a --since {before[0]} --until {before[1]}")
    assert wald(*typed.split()[1:]).returncode in (0, 12)

    # A question without a time in it is refused.
    for words, reason in WRONG_QUESTIONS:
        code, message, _ = refusal_of("where", *words, "--root", root)
        assert code == 2
        assert reason in message

    # All here with the exact number.
    code, found = asked(built, 0, 7, "--route", "a")
    assert (code, found["complete"], found["records"], found["first"], found["last"]) == (0, True, 40, 1, 60)
    code, found = asked(built, 1.5, 3.5, "--route", "a")
    assert (code, found["records"], found["first"], found["last"]) == (0, 10, 21, 30)
    assert asked(built, 0, 7)[1]["records"] == 60
    code, found = asked(built, 100, 200, "--route", "a")  # nothing came then
    assert (code, found["complete"], found["records"], found["first"]) == (0, True, 0, None)

    # What was reclaimed is named and no bundle has it.
    reclaim_first(built)
    code, found = asked(built, 0, 7, "--route", "a")
    (missing,) = found["missing"]
    assert (code, found["complete"], found["records"]) == (GONE, False, 20)
    assert (missing["records"], missing["exact"]) == (20, True)
    assert (missing["archived"], missing["archive"]) == (False, None)
    assert asked(built, 3.5, 7, "--route", "a")[0] == 0, "the later time is all here"

"""If index and frames of a sealed segment are damaged, only the ledger can name the routes of the lost records."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, combinations, product
from pathlib import Path

import pytest
from contents import errors
from damage import flipped
from logs import Built
from reclaiming import ANYTHING_READ, EXPIRE, bases, ledger, reclaim
from running import output_of, run, sidecar

from wald.format.names import Kind
from wald.format.sealed_index import Frame
from wald.retention.audit import audit_deletion
from wald.retention.backlog import Backlog, SegmentStatus
from wald.retention.history import History
from wald.retention.progress import measure_lags
from wald.segments.sealed_file import FRAME_BYTES, SealedFile
from wald_reclaim.policy import Limits
from wald_reclaim.survey import Survey

LASTS = {"a": 2, "b": 5}
"""Last record of each route in the first segment."""


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """Create segment 1 with records 1 and 2 of a, and 3 to 5 of b, each in a separate frame; then two segments of a."""
    built = Built(tmp_path / "root", segment_max_bytes=16 << 20)
    for number, route in enumerate("aabbb"):
        built.lines(route, [b"%d" % number * (FRAME_BYTES * 2 // 3)])
    for _ in range(2):
        built.cut()
        built.lines("a", [b"later"])
    built.seal()
    assert len(frames(built)) == 5
    return built


def frames(built: Built) -> Sequence[Frame]:
    with SealedFile(built.path(1, Kind.SEALED)) as sealed:
        return sealed.index.frames


def spoil(built: Built, whole: bytes, places: Iterable[int]) -> None:
    """Give segment 1 the bytes ``whole`` with a bit flipped at each of ``places``."""
    for place in places:
        whole = flipped(whole, 8 * place)
    built.path(1, Kind.SEALED).write_bytes(whole)


def lose_rest(built: Built, number: int) -> None:
    """Flip a bit of a frame's header and one of the seek table: the next frame cannot be found."""
    whole = built.path(1, Kind.SEALED).read_bytes()
    spoil(built, whole, [frames(built)[number].offset, len(whole) - 1])


def cut_short(built: Built, number: int) -> None:
    os.truncate(built.path(1, Kind.SEALED), frames(built)[number].offset + 9)


def forget(built: Built) -> None:
    """Remove the ledger of the sealer."""
    (built.root.ledger / "segments.jsonl").unlink()


def lose_rest_unknown(built: Built) -> None:
    lose_rest(built, 1)
    forget(built)


def put(built: Built, **cursors: int) -> None:
    for route, sequence in cursors.items():
        built.log.set_cursor(route, sequence, rewind=True)


def status(built: Built) -> SegmentStatus:
    return next(s for s in Backlog(built.view).segments() if s.segment.base_sequence == 1)


@pytest.mark.parametrize("spoilt", [lose_rest, cut_short])
@pytest.mark.parametrize("number", [1, 2])
def test_a_route_whose_records_are_all_behind_the_damage_holds_the_segment_back(
    built: Built, spoilt: Callable[[Built, int], None], number: int
) -> None:
    spoilt(built, number)
    put(built, a=7)
    reclaim(built)
    assert bases(built.root) == [1]
    assert [(pin.route, pin.needs) for pin in status(built).pins] == [("b", 5)]
    assert status(built).last_sequence == 5

    put(built, b=5)
    reclaim(built)
    assert bases(built.root) == []
    reported = next(line for line in ledger(built.root.path) if line["base"] == 1)
    assert (reported["last"], reported["damaged"]) == (5, True)
    assert {each["route"]: (each["count"], each["first"], each["last"]) for each in reported["routes"]} == {
        "a": (2, 1, 2),
        "b": (3, 3, 5),
    }
    assert audit_deletion(reported, History(built.root).sealing_of(1)).errors == ()
    assert errors(built.root.path) == []


def test_a_route_that_has_read_its_last_record_need_not_pass_those_of_others(built: Built) -> None:
    """The ledger tells whose the lost ones were."""
    lose_rest(built, 3)
    put(built, a=2, b=5)
    reclaim(built)

    assert bases(built.root) == [6]


def test_a_frame_of_which_no_byte_is_left_is_missed(built: Built) -> None:
    """The others are whole, and follow each other; the ledger tells of a record more."""
    whole, (*_, last) = built.path(1, Kind.SEALED).read_bytes(), frames(built)
    built.path(1, Kind.SEALED).write_bytes(whole[: last.offset] + whole[last.offset + last.compressed_bytes :])
    put(built, a=7, b=4)
    reclaim(built)
    assert bases(built.root) == [1]
    assert [(pin.route, pin.needs) for pin in status(built).pins] == [("b", 5)]


def test_whose_frames_are_whole_is_not_damaged_though_its_successor_is_lost(built: Built) -> None:
    path = built.path(1, Kind.SEALED)
    path.write_bytes(flipped(path.read_bytes(), 8 * (path.stat().st_size - 60)))
    built.path(6, Kind.SEALED).unlink()
    put(built, a=7, b=5)
    reclaim(built)
    (line,) = ledger(built.root.path)

    assert line["base"] == 1
    assert "damaged" not in line
    assert line["sha256"]


@pytest.mark.parametrize("spoilt", [lose_rest, cut_short])
@pytest.mark.parametrize("number", [1, 4])
def test_without_the_line_about_its_sealing_it_stays_and_what_to_type_is_said(
    built: Built, spoilt: Callable[[Built, int], None], number: int
) -> None:
    spoilt(built, number)
    forget(built)
    put(built, a=7, b=7)
    done = run(sidecar("reclaim", "--root", built.root.path, "--grace", 0))
    words = output_of("explain", "--root", built.root.path).decode()
    reported = json.loads(output_of("explain", "--json", "--root", built.root.path).splitlines()[0])

    assert bases(built.root) == [1]
    for answer in (done.stderr.decode(), words):
        assert "segments.jsonl does not list the routes of their records" in answer
        assert "give up the lost records: wald " in answer
    assert "the routes of their records" in reported["message"]


def lose_all(built: Built) -> None:
    path = built.path(1, Kind.SEALED)
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("spoilt", [lose_rest_unknown, lose_all])
def test_what_to_type_names_the_file_that_is_there(built: Built, spoilt: Callable[[Built], None]) -> None:
    """A segment that was released has its old name back by the time it is reported, except in a dry run."""
    spoilt(built)
    built.reclaim(1, keep=True)
    put(built, a=7, b=7)
    for arguments, kind in [(["--dry-run"], Kind.RELEASED), ([], Kind.SEALED)]:
        done = run(sidecar("reclaim", "--root", built.root.path, "--grace", 0, *arguments))
        path = built.path(1, kind)
        assert path.exists()
        assert "give up the lost records: wald " in done.stderr.decode()
        assert set(re.findall(r"/\S*\.wal\S*?(?=:? )", done.stderr.decode())) == {str(path)}


def test_without_that_line_the_frames_alone_tell_while_all_of_them_are_there(built: Built) -> None:
    whole = built.path(1, Kind.SEALED).read_bytes()
    spoil(built, whole, [len(whole) - 1])
    forget(built)
    put(built, a=7, b=4)
    reclaim(built)
    assert bases(built.root) == [1]
    put(built, b=5)
    reclaim(built)
    assert bases(built.root) == []


def test_frames_that_are_all_there_tell_it_all_when_the_segment_behind_is_gone(built: Built) -> None:
    """By its name alone it could extend to the next existing segment; the ledger proves that it does not."""
    whole = built.path(1, Kind.SEALED).read_bytes()
    spoil(built, whole, [len(whole) - 1])
    built.reclaim(6)
    put(built, a=2, b=5)
    reclaim(built)

    assert bases(built.root) == []
    assert "damaged" not in next(line for line in ledger(built.root.path) if line["base"] == 1)


@pytest.mark.parametrize("damage", [b'{"event": "sealed"', None])
def test_a_ledger_that_is_damaged_lets_nothing_go(built: Built, damage: bytes | None) -> None:
    path = built.root.ledger / "segments.jsonl"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'["b",3,3,5', b'["b",3,3,3') if damage is None else damage + b"\n" + data)
    assert path.read_bytes() != data
    lose_rest(built, 2)
    put(built, a=7, b=7)
    reclaim(built)

    assert bases(built.root)[0] == 1
    assert not status(built).readable


@pytest.mark.parametrize("sealed_line", [True, False])
def test_whatever_is_damaged_it_goes_only_when_everybody_who_has_records_in_it_is_past(
    built: Built, sealed_line: bool
) -> None:
    """Any of its frames and its index × how far its routes are × where their last records are known from."""
    whole, places = built.path(1, Kind.SEALED).read_bytes(), [frame.offset for frame in frames(built)]
    if not sealed_line:
        forget(built)
    subsets = chain.from_iterable(combinations(places, size) for size in range(len(places) + 1))
    damages = [(whole, (*subset, len(whole) - 1)) for subset in subsets]
    damages += [(whole[: place + 9], subset) for place in places for subset in ((), tuple(places[:1]))]
    cursors = list(product((0, 1, LASTS["a"], 7), (0, 3, LASTS["b"], 7)))
    went = 0
    for number, (data, subset) in enumerate(damages):
        spoil(built, data, subset)
        # Each damage with some of the cursors, and those with which it may go, just so.
        for a, b in (cursors[5 * number % len(cursors)], (LASTS["a"], LASTS["b"])):
            put(built, a=a, b=b)
            goes = first_goes(built)
            assert not goes or (a >= LASTS["a"] and b >= LASTS["b"]), (subset, len(data), a, b)
            reported = status(built)
            assert goes == (reported.readable and not reported.pins)
            went += goes
    assert went > (len(damages) // 2 if sealed_line else 0)


def first_goes(built: Built) -> bool:
    survey = Survey(built.root, ANYTHING_READ, log_id=built.log_id)
    return next(iter(survey.decisions(now_ns=built.now_ns))).verdict.is_deletion


@pytest.mark.parametrize("sealed_line", [True, False])
def test_lag_counts_what_a_reader_would_still_get(built: Built, sealed_line: bool) -> None:
    lose_rest(built, 3)
    if not sealed_line:
        forget(built)
    for at in (0, 1, 3):
        put(built, a=at, b=at)
        backlog = Backlog(built.view)
        list(backlog.segments())
        cursors = [group.cursor for group in backlog.groups.values()]
        counted = {route: sum(r.sequence > at for r in built.log.records(route, on_damage=print)) for route in "ab"}
        assert {group.cursor.route: group.lag.records for group in backlog.groups.values()} == counted
        assert {route: lag.records for (route, _), lag in measure_lags(built.view, cursors).items()} == (counted)


@pytest.mark.parametrize(("a", "b", "lost"), [(0, 0, {"a": 2, "b": 3}), (1, 4, {"a": 1, "b": 1}), (2, 0, {"b": 3})])
def test_of_what_expires_the_lost_records_count_as_unread(built: Built, a: int, b: int, lost: dict[str, int]) -> None:
    lose_rest(built, 2)
    put(built, a=a, b=b)
    reclaim(built, Limits(max_records=1, others=EXPIRE))
    reported: Sequence[dict[str, object]] = [line for line in ledger(built.root.path) if line["base"] == 1]

    assert [line["lost"] for line in reported] == [lost]
    assert audit_deletion(reported[0], History(built.root).sealing_of(1)).errors == ()

"""Readers without workers skip records that workers of the group have acknowledged, or refuse to start."""

import asyncio
from collections.abc import Callable

import pytest
from logs import Built
from owning import Owning
from running import refusal_of, wald

from wald import aio
from wald.consumer import Consumer
from wald.errors import Damaged, Locked, Refused


@pytest.fixture
def log(built: Built) -> Built:
    """Six records of route a."""
    built.lines("a", [b"%d" % number for number in range(1, 7)])
    return built


def consumed(log: Built) -> list[int]:
    with Consumer(log.root.path, "a", "g") as consumer:
        return [record.sequence for record in consumer]


def consumed_by_a_task(log: Built) -> list[int]:
    async def main() -> list[int]:
        async with aio.Consumer(log.root.path, "a", "g") as consumer:
            return [record.sequence async for record in consumer]

    return asyncio.run(main())


def acked(log: Built, *sequences: int) -> None:
    with Owning(log.root.path, "a", "g") as owner:
        owner.lease("w", 6)
        owner.ask("ack", "w", sequences)


@pytest.mark.parametrize("consume", [consumed, consumed_by_a_task])
def test_a_consumer_refuses_what_would_come_again(log: Built, consume: Callable[[Built], list[int]]) -> None:
    acked(log, 1, 3, 4, 5)
    with pytest.raises(Refused) as refused:
        consume(log)
    assert refused.value.message == (
        "route a: workers of group g have processed records above the cursor, 1, which would be processed again"
    )
    assert "feed a --group g --workers 1 --exit-at-end -- COMMAND processes the rest" in refused.value.hint
    assert log.log.cursor("a", "g").sequence == 1


def test_a_consumer_refuses_beside_an_owner(log: Built) -> None:
    with Owning(log.root.path, "a", "g") as owner:
        owner.lease("w", 6)
        with pytest.raises(Locked, match="another process works on route a for group g"):
            consumed(log)
    assert consumed(log) == [1, 2, 3, 4, 5, 6]


def test_a_consumer_continues_at_the_ack_floor_of_a_killed_owner(log: Built) -> None:
    owner = Owning(log.root.path, "a", "g")
    owner.lease("w", 6)
    owner.ask("ack", "w", [1, 2, 3])
    owner.kill()
    assert consumed(log) == [4, 5, 6]
    with Owning(log.root.path, "a", "g") as owner:
        assert owner.ask("lease", "w", 6) == []


def test_what_is_left_of_a_group_without_a_cursor_does_not_count(log: Built) -> None:
    acked(log, 3, 4, 5)
    log.root.cursor("a", "g").unlink()
    assert consumed(log) == [1, 2, 3, 4, 5, 6]


def test_a_damaged_journal_stops_a_consumer(log: Built) -> None:
    acked(log, 3, 4, 5)
    path = log.root.cursor_directory("a") / "g.work"
    path.write_bytes(b"damaged\n" + path.read_bytes())
    with pytest.raises(Damaged, match=r"g\.work: offset 0"):
        consumed(log)


def test_a_read_that_commits_refuses_and_one_that_does_not_shows_all_above_the_cursor(log: Built) -> None:
    acked(log, 1, 3, 4, 5)
    reading = ("read", "a", "--group", "g", "--root", log.root.path)
    code, message, hint = refusal_of(*reading, "--commit")
    assert (code, "which would be processed again" in message) == (9, True)
    assert "processes the rest" in hint
    assert wald(*reading).stdout == b"2\n3\n4\n5\n6\n"
    with Owning(log.root.path, "a", "g"):
        assert refusal_of(*reading, "--commit")[0] == 5

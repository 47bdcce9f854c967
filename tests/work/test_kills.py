"""Random kills of an owner: acknowledged records are never redelivered, all others are."""

from __future__ import annotations

import random
import subprocess
import sys

import working
from logs import Built
from running import launched

RECORDS = 1500


def run(built: Built, *, killed_after: int | None) -> list[list[str]]:
    """Return the output of an owner until it ends, or until it is killed after a number of lines."""
    line = [sys.executable, working.__file__, str(built.root.path), "a", "g", "4"]
    with launched(line, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        said = []
        for text in process.stdout:
            said.append(text.decode())
            if len(said) == killed_after:
                process.kill()
    assert killed_after is not None or process.returncode == 0
    return [text.split() for text in said if text.endswith("\n")]


def test_what_was_acknowledged_never_comes_again(built: Built) -> None:
    for _ in range(RECORDS // 100):
        built.lines("a", [b"job"] * 100)
    chance = random.Random(0)
    acknowledged: set[int] = set()
    tries: dict[int, int] = {}
    kills = [chance.randint(1, 800) for _ in range(4)]
    for killed_after in (*kills, None):
        said = run(built, killed_after=killed_after)
        done_before = acknowledged.copy()
        for what, sequence, *more in said:
            number = int(sequence)
            if what == "done":
                acknowledged.add(number)
                continue
            assert number not in done_before
            assert int(more[0]) >= tries.get(number, 0)
            tries[number] = int(more[0])
    assert built.log.cursor("a", "g").sequence == RECORDS

"""A record that is too large for a dead letter stops drain, by name, and there is a way on that loses nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from contents import values
from draining import InProcess, drain, drain_refusal
from running import Daemon, output_of

import wald
from wald.client.producer import Producer
from wald.errors import InvalidInput

LARGE = b"x" * 200_000
SMALL_LIMIT = {"WALD_REQUEST_MAX_BYTES": "128KiB"}


@pytest.fixture
def limited(daemon: Daemon) -> Daemon:
    """Records 1 to 4 on route a, of which the daemon would not take the third any more."""
    with Producer(daemon.root) as producer:
        producer.command("ROUTE", "ADD", "a")
        producer.publish("a", b"one\ntwo\n" + LARGE + b"\nfour\n")
        producer.flush()
    restart(daemon, SMALL_LIMIT)
    return daemon


def restart(daemon: Daemon, env: dict[str, str]) -> None:
    daemon.stop()
    daemon.env = {name: value for name, value in daemon.env.items() if name not in SMALL_LIMIT} | env
    daemon.start_again()


def words(root: Path, *command: object) -> list[object]:
    return ["a", "--root", root, "--exit-at-end", "--tries", 1, "--group", "g", "--", *command]


def cursor(root: Path, group: str = "g") -> int:
    return wald.open(root).cursor("a", group).effective


def test_the_refusal_names_the_record_and_the_ways_on(limited: Daemon) -> None:
    for _ in range(2):  # a later start is told the same
        code, message, hint = drain_refusal(*words(limited.root, "false"))

        assert code == 2
        assert re.fullmatch(r"a 3: cannot be a dead letter: the payload has \d+ bytes; the limit is 131072", message)
        assert "request_max_bytes" in hint
        assert f"wald --root {limited.root} cursor set a 3 --group g" in hint
    assert cursor(limited.root) == 2


def test_passed_over_it_is_the_only_one(limited: Daemon, tmp_path: Path) -> None:
    """What came before it is a dead letter, once; what came after it is drained."""
    got = tmp_path / "got"
    _, _, hint = drain_refusal(*words(limited.root, "false"))
    typed = re.search(r"wald (--root .+ --group g)", hint)
    assert typed
    output_of(*typed[1].split())
    done = drain(*words(limited.root, "sh", "-c", f"cat > {got}"))

    assert (done.returncode, done.stderr) == (0, b"")
    assert got.read_bytes() == b"four\n"
    assert values(limited.root, "dead_letter") == [b"one", b"two"]


def test_a_raised_limit_lets_it_go_on(limited: Daemon) -> None:
    drain_refusal(*words(limited.root, "false"))
    restart(limited, {})
    done = drain(*words(limited.root, "false"))

    assert done.returncode == 10
    assert values(limited.root, "dead_letter") == [b"one", b"two", LARGE, b"four"]
    assert cursor(limited.root) == 4


def test_what_no_daemon_takes_is_not_begun(limited: Daemon, tmp_path: Path) -> None:
    """The records before it are given up, and each start tries the command with it again."""
    inside = InProcess(limited.root)
    for _ in range(2):
        with pytest.raises(InvalidInput, match="a 3: cannot be a dead letter: more than 131072 bytes") as refused:
            inside.run("false", letter_max_bytes=131_072)
        assert "cursor set a 3 --group processed" in refused.value.hint
        assert values(limited.root, "dead_letter") == [b"one", b"two"]
        assert cursor(limited.root, "processed") == 2
    assert [line for line in inside.reported if line.startswith("a 3: exit 1")]

    got = tmp_path / "got"
    inside.run("sh", "-c", f"cat > {got}", letter_max_bytes=131_072)
    assert got.read_bytes() == LARGE + b"\nfour\n"
    assert cursor(limited.root, "processed") == 4

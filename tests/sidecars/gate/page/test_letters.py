"""The route page shows where dead letters go and how many there are, to clients with the right to read them."""

from __future__ import annotations

import hashlib
import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from draining import drain
from gating import Gate
from running import Daemon, eventually, wald

CONFIG = """
[groups."orders/billing"]
max_tries = 1
dead_letter = "unpaid"
"""
GROUP = "/v1/routes/orders/groups/billing"
TOKENS = ({"name": "chief", "admin": True}, {"name": "reader", "read": ["orders"]})
CHIEF, READER = ({"Authorization": f"Bearer {token['name']}"} for token in TOKENS)


@pytest.fixture
def gate(daemon: Daemon, tmp_path: Path) -> Iterator[Gate]:
    """A gate with tokens and one try per record."""
    config, tokens = tmp_path / "gate.toml", tmp_path / "tokens"
    config.write_text(CONFIG)
    lines = [{**token, "sha256": hashlib.sha256(str(token["name"]).encode()).hexdigest()} for token in TOKENS]
    tokens.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokens.chmod(0o600)
    with Gate(daemon.root, "--config", config, "--tokens", tokens) as running:
        yield running


def letters(gate: Gate, rights: dict[str, str] = CHIEF) -> str:
    """Return the dead-letter section of the page, or "" without one."""
    answer = gate.ask("GET", "/routes/orders", headers=rights)
    assert answer.status == 200, answer.body
    found = re.search(r'<section aria-labelledby="letters">.*?</section>', answer.body.decode(), re.DOTALL)
    return found[0] if found else ""


def words(source: str) -> str:
    return " ".join(html.unescape(re.sub("<[^>]*>", "", source)).split())


def send(gate: Gate, line: bytes) -> None:
    answer = gate.ask("POST", "/v1/routes/orders/records", line, CHIEF | {"Content-Type": "text/plain"})
    assert answer.status == 200, answer.body


def ask_group(gate: Gate, verb: str, **fields: object) -> dict[str, Any]:
    headers = CHIEF | {"Content-Type": "application/json"}
    answer = gate.ask("POST", f"{GROUP}/{verb}", json.dumps({"worker": "w1", **fields}).encode(), headers)
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json()
    return found


def lease(gate: Gate, line: bytes) -> int:
    """Send a record and lease it; return its sequence."""
    send(gate, line)
    [record] = ask_group(gate, "lease", wait=20)["records"]
    return int(record["sequence"])


def give_up(gate: Gate, sequence: int) -> None:
    """Reject a record; check that it is not leased again."""
    assert ask_group(gate, "nack", sequences=[sequence], reason="odd") == {"refused": []}
    assert ask_group(gate, "lease")["records"] == []  # it is not retried


def test_dead_letters_are_counted_where_they_are_and_on_the_way_there(gate: Gate, daemon: Daemon, root: Path) -> None:
    assert letters(gate) == ""
    daemon.ask("ROUTE ADD unpaid")
    give_up(gate, lease(gate, b"first\n"))
    told = "What billing gives up goes to unpaid: none is on the way, and 1 there not processed"
    eventually(lambda: told in words(letters(gate)))
    assert 'href="../routes/unpaid"' in letters(gate)
    assert f"wald-drain --root {root} redrive unpaid" in words(letters(gate))

    second = lease(gate, b"second\n")
    daemon.kill()
    give_up(gate, second)
    eventually(lambda: "1 record on the way, and 1 there" in words(letters(gate)))


def test_who_may_not_read_dead_letters_does_not_learn_of_them(gate: Gate, daemon: Daemon) -> None:
    daemon.ask("ROUTE ADD unpaid")
    give_up(gate, lease(gate, b"first\n"))
    eventually(lambda: "1 there not processed" in words(letters(gate)))

    assert letters(gate, READER) == ""
    assert b"unpaid" not in gate.ask("GET", "/routes/orders", headers=READER).body


def test_a_group_that_was_drained_may_have_given_up_through_the_usual_route(
    gate: Gate, daemon: Daemon, root: Path
) -> None:
    daemon.ask("ROUTE ADD dead_letter")
    for group in ("only-read", "drained"):
        assert wald("cursor", "set", "orders", 0, "--group", group, "--root", root).returncode == 0
    eventually(lambda: b"only-read" in gate.ask("GET", "/routes/orders", headers=CHIEF).body)
    assert letters(gate) == ""
    done = drain("feed", "orders", "--root", root, "--group", "drained", "--exit-at-end", "--", "true")
    assert done.returncode == 0, done.stderr
    eventually(lambda: "What drained gives up goes to dead_letter: none is on the way" in words(letters(gate)))

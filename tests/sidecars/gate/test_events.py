"""Server-Sent Events: a client that reconnects with the last event id misses nothing, wherever it was disconnected."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browsing import Chromium, lack
from gating import Gate
from repeating import ORDERS
from running import Daemon, output_of, reclaim

import wald

EVENTS = f"{ORDERS}?format=events"
_GONE = "ERR_|Failed to load"  # console messages about a killed gate


class Source:
    """State of an EventSource (HTML, section 9.2): its events and the id that it sends when it reconnects."""

    def __init__(self) -> None:
        self.last_id = ""
        self.events: list[str] = []

    def take(self, lines: Iterator[bytes]) -> None:
        """Parse lines; discard an incomplete block."""
        name = data = ""
        for line in lines:
            field, _, value = line.decode().rstrip("\n").partition(": ")
            if field == "id":
                name = value
            elif field == "data":
                data = value
            elif not field and line == b"\n":
                self.last_id = name or self.last_id
                if data:
                    self.events.append(json.loads(data)["value"])
                data = ""
                return

    def headers(self) -> dict[str, str]:
        """Return the headers for reconnecting."""
        return {"Last-Event-ID": self.last_id} if self.last_id else {}


def cut_off(gate: Gate, query: str, source: Source, lines: int) -> None:
    """Read the given number of lines, then close the connection."""
    with gate.asked("GET", f"{EVENTS}&{query}", headers=source.headers()) as answer:
        assert answer.status == 200, answer.read()
        read = iter(answer.readline, b"")
        block: list[bytes] = []
        for _ in range(lines):
            block.append(next(read))
            if block[-1] == b"\n":
                source.take(iter(block))
                block = []


def append(root: Path, *values: str) -> None:
    output_of("append", "orders", "--root", root, stdin="".join(f"{value}\n" for value in values).encode())


def test_events_go_on_behind_the_last_one_that_came(gate: Gate, root: Path) -> None:
    append(root, "one", "two")
    source = Source()
    source.last_id = "1"
    with gate.asked("GET", EVENTS, headers=source.headers()) as events:
        for value in ("two", "three"):
            while value not in source.events:
                source.take(iter(events.readline, b""))
            append(root, "three")


@pytest.mark.parametrize("query", ["from=end", "from=1s", "from=earliest"])
@pytest.mark.parametrize("before", [[], ["old"]])
def test_who_is_cut_off_before_the_first_event_misses_nothing(
    gate: Gate, root: Path, query: str, before: list[str]
) -> None:
    if before:
        append(root, *before)
    source = Source()
    cut_off(gate, query, source, 3)
    append(root, "between")
    cut_off(gate, query, source, 6 + 3 * len(before if query != "from=end" else []))

    assert source.events[-1] == "between"
    assert source.events in (["between"], [*before, "between"])


@pytest.mark.parametrize(
    ("start", "events"), [("2100-01-01T00:00:00Z", []), ("2000-01-01T00:00:00Z", ["between"]), ("1s", ["between"])]
)
def test_who_comes_again_gets_nothing_that_is_older_than_was_asked_for(
    gate: Gate, root: Path, start: str, events: list[str]
) -> None:
    append(root, "old")
    source = Source()
    source.last_id = "1"
    append(root, "between")
    body = gate.get(f"{EVENTS}&from={start}&limit=5", **source.headers()).body
    found = [json.loads(data)["value"] for data in re.findall(rb"^data: (.*)$", body, re.MULTILINE)]

    assert found == events


def test_an_id_without_an_event_is_where_the_log_ends(gate: Gate, root: Path) -> None:
    """The id is sent even if the route has no records."""
    with gate.asked("GET", f"{EVENTS}&from=end") as events:
        assert [events.readline() for _ in range(3)] == [b": nothing new\n", b"id: 0\n", b"\n"]
        append(root, "first")
        assert events.readline() == b"id: 1\n"


@pytest.mark.parametrize("query", ["from=end&limit=1", "from=end&to=1"])
def test_an_answer_without_an_event_says_where_to_go_on(gate: Gate, root: Path, query: str) -> None:
    append(root, "old")
    body = gate.get(f"{EVENTS}&{query}").body

    assert body.startswith(b": nothing new\nid: 1\n")
    assert set(re.findall(rb"^id: (.*)$", body, re.MULTILINE)) == {b"1"}


def test_wherever_the_connection_breaks_each_record_comes_once(gate: Gate, daemon: Daemon, root: Path) -> None:
    """The connection breaks inside and between events, batches and chunks, among records of another route."""
    daemon.ask("ROUTE ADD others")
    values = [str(number) for number in range(12_000)]
    at = 0
    for count in (1, 3, 1, 5000, 2, 6993):
        append(root, *values[at : at + count])
        gate.post("/v1/routes/others/records", b"x\n" * count)
        at += count
    source = Source()
    lines = 1
    while len(source.events) < len(values):
        left = 3 * (len(values) - len(source.events)) + 3
        cut_off(gate, "from=earliest", source, min(lines, left))
        lines = lines * 3 // 2 + 4

    assert source.events == values


def test_a_silent_source_may_come_again_once_what_it_passed_over_is_reclaimed(
    daemon: Daemon, root: Path, gate: Gate
) -> None:
    """With its initial id it would get 410, after which an EventSource gives up."""
    with gate.asked("GET", f"{EVENTS}&from=end") as events:
        source = Source()
        source.take(iter(events.readline, b""))
        append(root, "one", "two")
        source.take(iter(events.readline, b""))
        source.take(iter(events.readline, b""))
    wald.open(root).set_cursor("orders", 2)
    daemon.ask("CUT")
    reclaim(root, "--grace", "0")
    append(root, "three")
    cut_off(gate, "from=end", source, 6)

    assert source.events == ["one", "two", "three"]


@pytest.mark.slow
@pytest.mark.skipif(bool(lack()), reason=lack() or "there is one")
def test_an_eventsource_of_a_browser_misses_nothing_while_the_gate_is_away(gate: Gate, root: Path) -> None:
    """The EventSource has only its initial id and no event yet; it reconnects automatically."""
    with Chromium() as chromium, chromium.visit(gate.origin, allowed=_GONE) as visit:
        visit.page.goto("/login")
        visit.page.evaluate(
            f"""() => new Promise((resolve) => {{
                const values = [], source = new EventSource("{EVENTS}&from=end")
                source.onopen = () => fetch("/healthz").then(resolve)  // the id was sent before that is answered
                window.seen = new Promise((resolve) => {{
                    source.onmessage = (event) => {{
                        values.push(JSON.parse(event.data).value)
                        if (values.at(-1) == "later") resolve(values)
                    }}
                }})
            }})"""
        )
        gate.kill()
        append(root, "between")
        gate.start()
        append(root, "later")
        assert visit.page.evaluate("seen") == ["between", "later"]

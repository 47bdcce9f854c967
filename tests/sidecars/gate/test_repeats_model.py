"""Random histories of clients that repeat keyed requests at two gates, with disconnects and kills.

The invariants are those that docs/http.md states for keys ("Repeating a request"):

- 200 names the sequences at which the log has the complete body, once
- the same body under the same key gets the same answer at either gate; a body that was never sent is not a replay
- another body gets 422, and none of it is stored after the part that differs
- a partly stored body can be completed; until then the log has the beginning of one body that was sent
"""

import gzip
import http.client
import shutil
import threading
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest
from gating import ORDERS, Answer, Gate
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from repeating import send
from running import Daemon, eventually

import wald as library

_AGAIN = (409, 503)  # docs/http.md: retry with the same key
_SHORT, _LONG = 3, 25_000  # lines; a long body has several parts
_EXAMPLES = count()
GATES, KEYS = st.integers(0, 1), st.integers(0, 2)
BODIES = st.sampled_from(["short", "other", "long", "long, another end", "long, cut short", "long, and more"])
MOMENTS = st.floats(0, 0.06)  # seconds; a request takes about 10 ms
VICTIMS = st.sampled_from(["gate", "daemon", "both"])


def lines(key: str, body: str) -> list[str]:
    """Return the records of a body; long bodies begin with the same parts."""
    if body in ("short", "other"):
        return [f"{key} {body} {number}" for number in range(_SHORT)]
    begin = [f"{key} long {number}" for number in range(_LONG)]
    return {
        "long": begin,
        "long, another end": [*begin[:-1], f"{key} the end"],
        "long, cut short": begin[:-1],
        "long, and more": [*begin, f"{key} more"],
    }[body]


class Site:
    """A log with a daemon and two gates, shared by all histories, each of which uses its own keys."""

    def __init__(self, daemon: Daemon, gates: list[Gate]) -> None:
        self.daemon = daemon
        self.gates = gates
        self.found: dict[str, list[tuple[int, str]]] = defaultdict(list)
        self._read = 0

    def look(self) -> None:
        """Read new records from the log, by key."""
        for record in library.open(self.daemon.root).records("orders", start=self._read + 1):
            value = record.value.decode()
            self.found[value.partition(" ")[0]].append((record.sequence, value))
            self._read = record.sequence

    def kill(self, gate: Gate, who: str) -> None:
        """Kill and restart the victims."""
        if who != "gate":
            self.daemon.kill()
        if who != "daemon":
            gate.kill()
        if who != "gate":
            self.daemon.start_again()
        if who != "daemon":
            gate.start()


class Clients(RuleBasedStateMachine):
    """State machine of clients and the expected state of their keys."""

    site: Site

    def __init__(self) -> None:
        super().__init__()
        self._example = next(_EXAMPLES)
        self._sent: dict[str, set[str]] = defaultdict(set)  # bodies that may be stored, completely or in part
        self._answers: dict[str, tuple[str, bytes]] = {}  # the body that got 200, and the response

    def _key(self, number: int) -> str:
        return f"{self._example}-{number}"

    @rule(gate=GATES, number=KEYS, body=BODIES, packed=st.booleans())
    def send(self, gate: int, number: int, body: str, packed: bool) -> None:
        """Send a request, retrying until it is answered."""
        key = self._key(number)
        self._judge(key, body, self._at_last(gate, key, body, packed=packed))

    @rule(number=KEYS, body=BODIES)
    def send_to_both(self, number: int, body: str) -> None:
        """Send the same request to both gates at once."""
        key = self._key(number)
        with ThreadPoolExecutor() as threads:
            answers = list(threads.map(lambda gate: self._at_last(gate, key, body), (0, 1)))
        self._sent[key].add(body)
        for answer in answers:
            self._judge(key, body, answer)

    @rule(gate=GATES, number=KEYS, body=BODIES, share=st.floats(0, 0.99))
    def cut_off(self, gate: int, number: int, body: str, share: float) -> None:
        """Disconnect in the middle of the body."""
        key = self._key(number)
        whole = _bytes(key, body)
        sent = whole[: int(share * len(whole))]
        asked = f"POST {ORDERS}", f"Idempotency-Key: {key}"
        with self.site.gates[gate].begin(*asked, body=sent, more=len(whole) - len(sent)):
            self._sent[key].add(body)

    @rule(gate=GATES, number=KEYS, body=BODIES, moment=MOMENTS, who=VICTIMS)
    def kill_meanwhile(self, gate: int, number: int, body: str, moment: float, who: str) -> None:
        """Kill the gate, the daemon or both during a request; an answer that arrives counts."""
        key = self._key(number)
        with ThreadPoolExecutor() as threads:
            asked: Future[Answer] = threads.submit(send, self.site.gates[gate], key, _bytes(key, body))
            threading.Event().wait(moment)
            self.site.kill(self.site.gates[gate], who)
        error = asked.exception()
        if error is not None or asked.result().status in _AGAIN:
            assert error is None or isinstance(error, OSError | http.client.HTTPException), error
            self._sent[key].add(body)
        else:
            self._judge(key, body, asked.result())

    @rule(gate=GATES)
    def lose_table(self, gate: int) -> None:
        """Stop both gates and delete their key tables."""
        for each in self.site.gates:
            each.kill()
        shutil.rmtree(self.site.daemon.root / "gate", ignore_errors=True)
        for each in (self.site.gates[gate], self.site.gates[1 - gate]):
            each.start()

    @invariant()
    def the_log_has_each_body_once(self) -> None:
        self.site.look()
        for key, bodies in self._sent.items():
            found = [value for _, value in self.site.found[key]]
            assert any(found == lines(key, body)[: len(found)] for body in bodies), (key, bodies, found[-3:])

    def teardown(self) -> None:
        """Complete each unanswered request with one of the bodies that were sent."""
        for key, bodies in self._sent.items():
            for body in [] if key in self._answers else sorted(bodies):
                self._judge(key, body, self._at_last(0, key, body))
            assert not bodies or key in self._answers, (key, bodies)
        self.the_log_has_each_body_once()

    def _judge(self, key: str, body: str, answer: Answer) -> None:
        known = self._answers.get(key)
        others = [each for each in self._sent[key] if each != body]
        if known is None and others:
            assert answer.status in (200, 422), answer.body
        else:
            assert answer.status == (200 if known is None or known[0] == body else 422), (answer.body, known)
        if known is not None and answer.status == 200:
            assert answer.body == known[1]
        assert not answer.headers.get("idempotency-replayed") or self._sent[key]
        if answer.status == 200:
            self._answers[key] = body, answer.body
            self._sent[key].add(body)
            self.site.look()
            said, expected = answer.json(), lines(key, body)
            assert [value for _, value in self.site.found[key]] == expected
            places = [sequence for sequence, _ in self.site.found[key]]
            assert (said["first"], said["last"], said["count"]) == (places[0], places[-1], len(expected))
        else:
            assert answer.json()["code"] == "other-body"
            self._sent[key].add(body)  # the parts before the difference may be stored

    def _at_last(self, gate: int, key: str, body: str, *, packed: bool = False) -> Answer:
        answers: list[Answer] = []

        def is_answered() -> bool:
            headers = {"Content-Encoding": "gzip"} if packed else {}
            whole = _bytes(key, body)
            answers[:] = [send(self.site.gates[gate], key, gzip.compress(whole, 1) if packed else whole, **headers)]
            if answers[0].status == 503:  # it may be stored nevertheless
                self._sent[key].add(body)
            return answers[0].status not in _AGAIN

        eventually(is_answered)
        return answers[0]


def _bytes(key: str, body: str) -> bytes:
    return "".join(f"{line}\n" for line in lines(key, body)).encode()


@pytest.mark.slow
def test_whatever_clients_repeat_is_stored_once(gate: Gate, daemon: Daemon, root: Path) -> None:
    with Gate(root) as other:
        histories = type("Histories", (Clients,), {"site": Site(daemon, [gate, other])})
        run_state_machine_as_test(histories, settings=settings(max_examples=12, stateful_step_count=12))

        assert "Traceback" not in gate.log + other.log

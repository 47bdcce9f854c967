"""Requests for work groups that are wrong: each is refused with what is wrong, and nothing is leased or settled."""

from __future__ import annotations

import json

import pytest
from gating import Gate

pytestmark = pytest.mark.usefixtures("billing")
GROUP = "/v1/routes/orders/groups/billing"
RECORDS = "/v1/routes/orders/records"
SEQUENCES = ", ".join(map(str, range(1, 100_002)))

WRONG = {
    "lease": [
        "",
        "[]",
        "null",
        "{",
        "{}",
        '{"consumer": null}',
        '{"consumer": 7}',
        '{"consumer": "w", "max_record": 1}',
        '{"consumer": "w", "max_records": 0}',
        '{"consumer": "w", "max_records": 10001}',
        '{"consumer": "w", "max_records": 1.5}',
        '{"consumer": "w", "max_records": true}',
        '{"consumer": "w", "max_bytes": 0}',
        '{"consumer": "w", "max_bytes": 99999999999999999999999}',
        '{"consumer": "w", "lease_for": 0}',
        '{"consumer": "w", "lease_for": -1}',
        '{"consumer": "w", "lease_for": NaN}',
        '{"consumer": "w", "lease_for": Infinity}',
        '{"consumer": "w", "lease_for": 1e999}',
        '{"consumer": "w", "lease_for": 43201}',
        '{"consumer": "w", "lease_for": "30s"}',
        '{"consumer": "w", "wait": -0.1}',
        '{"consumer": "w", "wait": 301}',
        '{"consumer": "w", "done": [0]}',
        '{"consumer": "w", "done": 1}',
    ],
    "ack": [
        '{"consumer": "w"}',
        '{"consumer": "w", "sequences": null}',
        '{"consumer": "w", "sequences": [-1]}',
        '{"consumer": "w", "sequences": [9223372036854775808]}',
        '{"consumer": "w", "sequences": [1.5]}',
        '{"consumer": "w", "sequences": ["1"]}',
        '{"consumer": "w", "sequences": [1], "reason": "x"}',
        f'{{"consumer": "w", "sequences": [{SEQUENCES}]}}',
    ],
    "nack": [
        '{"consumer": "w", "sequences": [1], "delay": -1}',
        '{"consumer": "w", "sequences": [1], "delay": NaN}',
        '{"consumer": "w", "sequences": [1], "delay": 1e10}',
        '{"consumer": "w", "sequences": [1], "reason": 7}',
        json.dumps({"consumer": "w", "sequences": [1], "reason": "x" * 10_001}),
    ],
    "extend": ['{"consumer": "w", "sequences": [1], "lease_for": 0}'],
    "release": ['{"consumer": "w", "sequences": [0]}', '{"consumer": ""}'],
}
NAMES = ["", "a\nb", "\x1b[31mred", "tab\there", "\u202eback", "\u2028", "x" * 201, "\x00"]


def test_what_is_wrong_is_said_and_nothing_happens(gate: Gate) -> None:
    gate.post(RECORDS, b"1\n")
    assert [record["sequence"] for record in gate.post(f"{GROUP}/lease", {"consumer": "w"}).json()["records"]] == [1]
    for verb, bodies in WRONG.items():
        for body in bodies:
            answer = gate.ask("POST", f"{GROUP}/{verb}", body.encode())
            assert (answer.status, answer.json()["code"]) == (400, "invalid"), (verb, body[:80], answer.body)
    [entry] = gate.get(f"{GROUP}/pending").lines()
    assert (entry["first"], entry["consumer"], entry["tries"]) == (1, "w", 1)


def test_a_consumer_has_a_name_that_fits_on_a_line(gate: Gate) -> None:
    for name in NAMES:
        for verb, more in {"lease": {}, "ack": {"sequences": [1]}, "release": {}}.items():
            answer = gate.post(f"{GROUP}/{verb}", {"consumer": name, **more})
            assert (answer.status, answer.json()["code"]) == (400, "invalid"), answer.body


def test_a_name_may_have_any_letters(gate: Gate) -> None:
    gate.post(RECORDS, b"1\n")
    name = "Zoë 工人 №1 \\ \" ' 🙂"
    assert len(gate.post(f"{GROUP}/lease", {"consumer": name}).json()["records"]) == 1
    [entry] = gate.get(f"{GROUP}/pending").lines()
    assert entry["consumer"] == name


def test_a_body_that_is_too_large_or_no_json_is_refused(gate: Gate) -> None:
    large = gate.ask("POST", f"{GROUP}/ack", b'{"consumer": "w", "sequences": [' + b"1," * (3 << 20) + b"1]}")
    assert (large.status, large.json()["code"]) == (413, "too-large")
    other = gate.post(f"{GROUP}/lease", b'{"consumer": "w"}', "text/plain")
    assert (other.status, other.json()["code"]) == (415, "media-type")
    assert gate.get(f"{GROUP}/lease").status == 405
    assert gate.get(f"{GROUP}/pending?limit=0").status == 400


def test_a_name_that_is_none_is_refused(gate: Gate) -> None:
    for path in ["/v1/routes/..%2Fx/groups/g/lease", "/v1/routes/orders/groups/.hidden/lease"]:
        assert gate.post(path, {"consumer": "w"}).status in (400, 404)
        assert not list(gate.root.rglob("*.work"))

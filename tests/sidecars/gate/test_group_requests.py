"""Invalid requests for work groups are rejected with the reason, and nothing is leased or settled."""

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
        '{"worker": null}',
        '{"worker": 7}',
        '{"worker": "w", "max_record": 1}',
        '{"worker": "w", "max_records": 0}',
        '{"worker": "w", "max_records": 10001}',
        '{"worker": "w", "max_records": 1.5}',
        '{"worker": "w", "max_records": true}',
        '{"worker": "w", "max_bytes": 0}',
        '{"worker": "w", "max_bytes": 99999999999999999999999}',
        '{"worker": "w", "lease_for": 0}',
        '{"worker": "w", "lease_for": -1}',
        '{"worker": "w", "lease_for": NaN}',
        '{"worker": "w", "lease_for": Infinity}',
        '{"worker": "w", "lease_for": 1e999}',
        '{"worker": "w", "lease_for": 43201}',
        '{"worker": "w", "lease_for": "30s"}',
        '{"worker": "w", "wait": -0.1}',
        '{"worker": "w", "wait": 301}',
        '{"worker": "w", "done": [0]}',
        '{"worker": "w", "done": 1}',
    ],
    "ack": [
        '{"worker": "w"}',
        '{"worker": "w", "sequences": null}',
        '{"worker": "w", "sequences": [-1]}',
        '{"worker": "w", "sequences": [9223372036854775808]}',
        '{"worker": "w", "sequences": [1.5]}',
        '{"worker": "w", "sequences": ["1"]}',
        '{"worker": "w", "sequences": [1], "reason": "x"}',
        f'{{"worker": "w", "sequences": [{SEQUENCES}]}}',
    ],
    "nack": [
        '{"worker": "w", "sequences": [1], "delay": -1}',
        '{"worker": "w", "sequences": [1], "delay": NaN}',
        '{"worker": "w", "sequences": [1], "delay": 1e10}',
        '{"worker": "w", "sequences": [1], "reason": 7}',
        json.dumps({"worker": "w", "sequences": [1], "reason": "x" * 10_001}),
    ],
    "extend": ['{"worker": "w", "sequences": [1], "lease_for": 0}'],
    "release": ['{"worker": "w", "sequences": [0]}', '{"worker": ""}'],
}
NAMES = ["", "a\nb", "\x1b[31mred", "tab\there", "\u202eback", "\u2028", "x" * 201, "\x00"]


def test_what_is_wrong_is_said_and_nothing_happens(gate: Gate) -> None:
    gate.post(RECORDS, b"1\n")
    assert [record["sequence"] for record in gate.post(f"{GROUP}/lease", {"worker": "w"}).json()["records"]] == [1]
    for verb, bodies in WRONG.items():
        for body in bodies:
            answer = gate.ask("POST", f"{GROUP}/{verb}", body.encode())
            assert (answer.status, answer.json()["code"]) == (400, "invalid"), (verb, body[:80], answer.body)
    [entry] = gate.get(f"{GROUP}/pending").lines()
    assert (entry["first"], entry["worker"], entry["tries"]) == (1, "w", 1)


def test_a_consumer_has_a_name_that_fits_on_a_line(gate: Gate) -> None:
    for name in NAMES:
        for verb, more in {"lease": {}, "ack": {"sequences": [1]}, "release": {}}.items():
            answer = gate.post(f"{GROUP}/{verb}", {"worker": name, **more})
            assert (answer.status, answer.json()["code"]) == (400, "invalid"), answer.body


def test_a_name_may_have_any_letters(gate: Gate) -> None:
    gate.post(RECORDS, b"1\n")
    name = "Zoë 工人 №1 \\ \" ' 🙂"
    assert len(gate.post(f"{GROUP}/lease", {"worker": name}).json()["records"]) == 1
    [entry] = gate.get(f"{GROUP}/pending").lines()
    assert entry["worker"] == name


def test_a_body_that_is_too_large_or_no_json_is_refused(gate: Gate) -> None:
    large = gate.ask("POST", f"{GROUP}/ack", b'{"worker": "w", "sequences": [' + b"1," * (3 << 20) + b"1]}")
    assert (large.status, large.json()["code"]) == (413, "too-large")
    other = gate.post(f"{GROUP}/lease", b'{"worker": "w"}', "text/plain")
    assert (other.status, other.json()["code"]) == (415, "media-type")
    assert gate.get(f"{GROUP}/lease").status == 405
    assert gate.get(f"{GROUP}/pending?limit=0").status == 400


def test_a_name_that_is_none_is_refused(gate: Gate) -> None:
    for path in ["/v1/routes/..%2Fx/groups/g/lease", "/v1/routes/orders/groups/.hidden/lease"]:
        assert gate.post(path, {"worker": "w"}).status in (400, 404)
        assert not list(gate.root.rglob("*.work"))

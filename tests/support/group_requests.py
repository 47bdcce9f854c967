"""Requests for the work group ``billing`` of the route ``orders``, and their answers."""

from __future__ import annotations

from typing import Any

from gating import Gate

GROUP = "/v1/routes/orders/groups/billing"
RECORDS = "/v1/routes/orders/records"


def ask(gate: Gate, verb: str, worker: str = "w1", **fields: Any) -> Any:
    """Return the answer to a verb of the group."""
    answer = gate.post(f"{GROUP}/{verb}", {"worker": worker, **fields})
    assert answer.status == 200, answer.body
    return answer.json()


def lease(gate: Gate, worker: str = "w1", **fields: Any) -> list[Any]:
    """Return the records of a lease."""
    records = ask(gate, "lease", worker, **fields)["records"]
    assert isinstance(records, list)
    return records

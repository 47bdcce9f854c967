"""Operating system errors during a snapshot of the log are shown on the page, which does not fail."""

from __future__ import annotations

import html
from pathlib import Path

import pytest
from gating import Gate
from running import eventually
from tracing import traced


def shown(gate: Gate, path: str) -> str:
    answer = gate.get(path)
    assert answer.status == 200, answer.body
    return html.unescape(answer.body.decode())


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("flock:error=ENOLCK", "it is unknown whether a daemon runs: No locks available"),
        ("statfs:error=EIO", "/log/segments: Input/output error"),
    ],
)
def test_a_look_that_is_refused_is_said_until_one_succeeds(gate: Gate, tmp_path: Path, call: str, said: str) -> None:
    gate.post("/v1/routes/orders/records", b"one\n")
    assert said not in shown(gate, "/")
    with traced(gate.process.pid, tmp_path / "trace", f"inject={call}", threads=True):
        eventually(lambda: said in shown(gate, "/"))
        for path in ("/routes", "/routes/orders"):
            shown(gate, path)
    eventually(lambda: said not in shown(gate, "/"))
    assert "Traceback" not in gate.log

"""``wald status --latency``: the daemon's own measurements and the conclusions drawn from them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from running import Client, Daemon, output_of

from wald.status.rates import conclusion

FAST = {"count": 10, "mean": 0.001, "p50": 0.001, "p90": 0.001, "p99": 0.001}
NONE = {"count": 0, "mean": 0.0, "p50": None, "p90": None, "p99": None}


def test_it_shows_what_the_daemon_has_measured(tmp_path: Path) -> None:
    with Daemon(tmp_path / "log") as daemon, Client(daemon.socket_path) as client:
        daemon.ask("ROUTE ADD a")
        for _ in range(3):
            assert client.ask(b"PUB a 2\nx\n").startswith("OK")
        found = json.loads(output_of("status", "--latency", "--json", "--root", daemon.root))
        assert (found["schema"], found["commit_seconds"]["count"]) == ("wald.status.latency/1", 3)
        assert found["sync_seconds"]["mean"] <= found["commit_seconds"]["mean"]
        assert found["round_records"]["p99"] == 1
        assert found["received_bytes_of_users"][str(os.getuid())] >= 3 * len(b"PUB a 2\nx\n")
        assert (os.getpid(), 30) in {(each["pid"], each["bytes"]) for each in found["connections"]}
        quiet = json.loads(output_of("status", "--latency", "--during", "0.1s", "--json", "--root", daemon.root))
        assert (quiet["commit_seconds"]["count"], quiet["conclusion"][:7]) == (0, "Nothing")
        assert b"process %d" % os.getpid() in output_of("status", "--latency", "--root", daemon.root)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"degraded": True, "degraded_by": "disk"}, "Input waits for room on the disk (disk)"),
        ({"stalled_seconds": 5.0}, "Input has waited for 5 s"),
        ({"commit_seconds": NONE}, "Nothing was committed"),
        ({}, "Commits are fast (1 ms on average)"),
        ({"commit_seconds": FAST | {"mean": 0.1}, "sync_seconds": FAST | {"mean": 0.09}}, "The disk is slow"),
        ({"commit_seconds": FAST | {"mean": 0.1}}, "The daemon is slow"),
    ],
)
def test_the_conclusion_names_the_cause(state: dict[str, Any], expected: str) -> None:
    found = {"degraded": False, "stalled_seconds": 0, "commit_seconds": FAST, "sync_seconds": FAST}
    assert conclusion(found | state, Path("log")).startswith(expected)

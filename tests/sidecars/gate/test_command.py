"""The `wald-gate` command: required options, listening addresses and shutdown."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from gating import Gate
from running import Daemon, run, sidecar

from wald.errors import InvalidInput, NotFound


@pytest.mark.parametrize("package", ["httptools", "msgspec", "starlette", "uvloop"])
def test_without_the_extra_it_says_what_to_install(root: Path, daemon: Daemon, package: str) -> None:
    script = f"import sys; sys.modules[{package!r}] = None; from wald_gate.command import main; main()"
    line = [sys.executable, "-c", script, "--root", str(root), "--listen", "127.0.0.1:0"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)

    assert done.returncode == InvalidInput.exit_code
    assert f"wald-gate: {package}, which it needs, is not installed" in done.stderr
    assert "pip install '.[gate]'" in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--listen", "0.0.0.0:0"), "without TLS and tokens"),
        (("--listen", "nowhere"), "is not HOST:PORT"),
        (("--certificate", "no.pem"), "no.pem"),
    ],
)
def test_it_does_not_start_where_it_would_not_be_safe(
    root: Path, daemon: Daemon, options: tuple[str, ...], said: str
) -> None:
    done = run(sidecar("gate", "--root", root, *options))

    assert done.returncode == InvalidInput.exit_code
    assert said in done.stderr.decode()


def test_it_needs_a_log(tmp_path: Path) -> None:
    assert run(sidecar("gate", "--root", tmp_path / "none")).returncode == NotFound.exit_code


def test_at_sigterm_a_client_that_follows_gets_a_whole_answer(gate: Gate) -> None:
    gate.post("/v1/routes/orders/records", b"one\n")
    with gate.asked("GET", "/v1/routes/orders/records?follow=1&format=raw") as lines:
        assert lines.readline() == b"one\n"
        assert gate.stop() == 0
        assert lines.read() == b""
    assert "Traceback" not in gate.log

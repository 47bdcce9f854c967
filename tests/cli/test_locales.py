"""Locales and paths that are not UTF-8: every command prints, and JSON stays valid."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gating import Gate
from running import TIMEOUT_SECONDS, Daemon, output_of, run, sidecar, wald

TEXT = "grüß 日".encode()
# Run all commands in one interpreter; an exception ends it.
RUN = """
import json, sys
from wald.cli import cli
from wald.cli.command import run
from wald_archive.command import command
for line in json.loads(sys.argv[1]):
    program = command if line[0] == "wald-archive" else cli
    code = run(program, line[0], line[1:])
    assert code in (0, 3, 13, 14), (line, code)
"""


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[Path]:
    """A log in a directory with a Latin-1 name, containing text, non-text bytes, and a reason in a ledger."""
    root = tmp_path / os.fsdecode(b"l\xf6g")
    with Daemon(root):
        output_of("route", "add", "a", "--root", root)
        output_of("append", "a", "--root", root, stdin=TEXT + b"\nlatin \xfc\n")
        line = json.dumps({"value": "wärt", "key": "kéy日", "headers": {"hé": "v日l"}}) + "\n"
        output_of("append", "a", "--jsonl", "--root", root, stdin=line.encode())
        assert wald("cursor", "set", "a", 1, "--root", root).returncode == 0
        assert wald("cursor", "skip", "a", 2, "--why", "kein 日", "--root", root).returncode == 0
        yield root


@pytest.mark.parametrize("encoding", ["iso-8859-1", "ascii", "euc_jp"])
def test_every_command_prints_in_every_encoding(filled: Path, tmp_path: Path, encoding: str) -> None:
    bags = tmp_path / "cöld"
    assert run(sidecar("archive", "--root", filled, "a", "--group", "kept", "--dest", bags)).returncode == 0
    words = [
        line.split()
        for line in (
            *("read a", "read a --format json", "read --prefix --grep latin", "show 1", "show 2", "show 3", "status"),
            *("route list", "where 1", "explain", "history", "cursor list", "verify"),
        )
    ]
    lines = [["wald", *each, "--root", str(filled)] for each in (*words, ["read", "none"], ["doctor"])]
    lines += [["wald", *each, "--json", "--root", str(filled)] for each in (["history"], ["route", "list"], ["status"])]
    segment = max((filled / "segments").glob("*.wal"))
    files = [filled / "head", filled / "ledger/skips.jsonl", segment]
    lines += [["wald", "inspect", str(file)] for file in files]
    lines += [["wald", "inspect", "--records", str(segment)]]
    lines += [["wald", "inspect", "--content", "--json", str(file)] for file in files[:2]]
    lines += [["wald-archive", "verify", str(bags), "--root", str(filled)]]
    env = os.environ | {"PYTHONIOENCODING": f"{encoding}:strict"}
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(lines)],
        env=env,
        capture_output=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )

    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    assert TEXT in done.stdout  # records are bytes
    for line in done.stdout.split(b"\n"):
        if line.startswith(b'{"schema"'):
            json.loads(line)


def test_a_gate_answers_for_a_root_whose_name_is_not_text(filled: Path) -> None:
    with Gate(filled) as gate:
        for path in ("/v1/head", "/v1/routes", "/v1/explain", "/v1/routes/a/cursors/processed", "/v1/routes/a/records"):
            assert gate.get(path).status == 200, path
        assert gate.get("/v1/routes/none/records").status == 404
        assert [each["path"] for each in gate.get("/v1/explain").lines() if "path" in each]

"""The settings file of a gate: its values apply, the command line overrides them, and errors name the setting."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from gating import Gate
from running import Daemon, eventually, refused, run, sidecar

from wald.errors import InvalidInput
from wald_gate.settings import GroupSettings, Settings, load

ORDERS = "/v1/routes/orders/records"


def written(directory: Path, text: str) -> Path:
    path = directory / "gate.toml"
    path.write_text(text)
    return path


def test_the_command_line_comes_before_the_file_and_the_file_before_the_defaults(tmp_path: Path) -> None:
    path = written(tmp_path, 'uds = "a.sock"\nlisten = "127.0.0.1:1"\n[limits]\nbody_max_bytes = "64MiB"\n')

    found = load(path, {"listen": "127.0.0.1:2", "hosts": ("log.example",)})

    assert (found.listen, found.uds, found.hosts, found.key) == ("127.0.0.1:2", "a.sock", ("log.example",), "")
    assert (found.limits.body_max_bytes, found.limits.json_max_bytes) == (64 << 20, 4 << 20)
    assert load(None, {}) == Settings()


def test_each_work_group_has_a_table_of_its_own(tmp_path: Path) -> None:
    path = written(tmp_path, '[groups."orders/billing"]\norder = "key"\nmax_tries = 5\nwindow = 10\n')

    found = load(path, {})

    assert found.groups["orders/billing"] == GroupSettings("key", 5, "dead_letter", 10)
    assert GroupSettings() == GroupSettings("log", 0, "dead_letter", 1_000_000)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("\nlistn = 'a'", "gate.toml:2: there is no setting 'listn'", "did you mean 'listen'?"),
        ("listen = 7700", "listen must be HOST:PORT", "wald-gate serve --help"),
        ("body_max_bytes = 1", "is above all tables", "move body_max_bytes to [limits]"),
        ("[limits]\ntokens = 'a'", "gate.toml:2: 'tokens' is inside [limits]", "above the first table"),
        ("[limits]\nhead_timeout = '2d'", "gate.toml:2: limits.head_timeout must be", "wald-gate serve --help"),
        ("limits = 1", "limits must be a table", "write a table: [limits]"),
        ('[groups."orders"]', "is not a route and a group", "ROUTE/GROUP"),
        ('[groups."../billing"]', "gate.toml:1: ", "letters"),
        ('[groups."a/b"]\n\nordr = "key"', "gate.toml:3: there is no setting 'ordr'", "did you mean 'order'?"),
        ('[groups."a/b"]\ndead_letter = "a"', "its own dead-letter route", "dead_letter = ROUTE"),
        ('[groups."dead_letter/b"]\nmax_tries = 2', "its own dead-letter route", "dead_letter = ROUTE"),
        (
            "trusted_proxies = ['10.0.0.1/8']",
            "gate.toml:1: trusted_proxies must be a list of addresses",
            "wald-gate serve --help",
        ),
        ("hosts = 'a b'", "hosts must be a list of host names", "wald-gate serve --help"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, text: str, message: str, hint: str) -> None:
    path = written(tmp_path, text)

    with pytest.raises(InvalidInput) as error:
        load(path, {})

    assert message in error.value.message
    assert hint in error.value.hint


def test_check_reads_the_files_that_the_settings_name(tmp_path: Path, root: Path) -> None:
    """The check does not start the server, and works without a log."""
    line = sidecar("gate", "--root", root, "--check", "--config", written(tmp_path, "tokens = 'none'"))
    assert run(line).returncode != 0

    line[-1] = str(written(tmp_path, "[limits]\nconnections_max = 0"))
    assert refused(run(line))[0] == InvalidInput.exit_code
    line[-1] = str(written(tmp_path, "[limits]\nconnections_max = 9"))
    done = run(line)
    assert done.returncode == 0
    assert f"{root}: there is no log here, which a start needs" in done.stderr.decode()


def test_check_says_what_a_file_of_tokens_does_not_do(daemon: Daemon, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    line = sidecar("gate", "--root", daemon.root, "--check", "--tokens", tokens)
    tokens.touch()
    assert run(line).stderr.decode() == f"wald-gate: {tokens}: it names no client, so none may do anything over TCP\n"

    added = run(sidecar("gate", "token", "add", "a", "--tokens", tokens, "--user", "nosuchuser", "--admin"))
    assert (added.returncode, b"there is no user 'nosuchuser' on this machine" in added.stderr) == (0, True)
    assert run(line).stderr.decode() == f"wald-gate: {tokens}: there is no user 'nosuchuser' on this machine\n"

    added = run(sidecar("gate", "token", "add", "b", "--tokens", tokens, "--certificate", "*.example", "--admin"))
    assert b"'*' stands for itself" in added.stderr


def test_tables_of_groups_whose_routes_are_not_there_are_said(daemon: Daemon, tmp_path: Path) -> None:
    known, typo = '[groups."orders/packing"]\n', '[groups."oders/packing"]\ndead_letter = "unpacked"\n'
    path = written(tmp_path, known + typo)

    done = run(sidecar("gate", "--root", daemon.root, "--check", "--config", path))

    assert done.returncode == 0
    use, dead_letter = done.stderr.decode().splitlines()
    assert use == """wald-gate: [groups."oders/packing"] has no effect: there is no route 'oders'"""
    assert """[groups."oders/packing"]: dead_letter: there is no route 'unpacked' yet""" in dead_letter
    with Gate(daemon.root, "--config", path) as gate:
        assert use in gate.log
        written(tmp_path, known)
        before = len(gate.log)
        gate.process.send_signal(signal.SIGHUP)
        eventually(lambda: "limits and hosts are read again" in gate.log[before:])
        assert "of no use" not in gate.log[before:]


def test_sighup_changes_limits_and_reports_what_waits_for_a_restart(daemon: Daemon, tmp_path: Path) -> None:
    path = written(tmp_path, "")
    with Gate(daemon.root, "--config", path) as gate:
        assert gate.post(ORDERS, b"x" * 5000, "application/octet-stream").status == 200
        written(tmp_path, 'uds = "a.sock"\n[limits]\nbody_max_bytes = 1024\n')
        gate.process.send_signal(signal.SIGHUP)
        eventually(lambda: "changes of uds take effect after a restart" in gate.log)
        assert gate.post(ORDERS, b"x" * 5000, "application/octet-stream").status == 413

        written(tmp_path, "[limits]\nbody_max_byts = 1\n")
        gate.process.send_signal(signal.SIGHUP)
        eventually(lambda: "body_max_byts" in gate.log)
        assert gate.post(ORDERS, b"x" * 5000, "application/octet-stream").status == 413

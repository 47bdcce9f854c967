"""The machine that units are tried on is one: it boots, has a sandbox, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

from machine import Machine


def test_it_runs_units_in_a_sandbox_of_its_own(machine: Machine) -> None:
    machine.sh("echo inside > /usr/local/wald-was-here")
    unit = ["--wait", "--pipe", "--property=ProtectSystem=strict", "--property=NoNewPrivileges=yes"]
    done = machine.run("systemd-run", *unit, "sh", "-c", "cat /usr/local/wald-was-here; echo no >/usr/x", check=False)

    assert done.stdout.splitlines() == ["inside"]
    assert "Read-only file system" in done.stderr
    assert machine.path("/usr/local/wald-was-here").read_text() == "inside\n"
    assert not Path("/usr/local/wald-was-here").exists()

"""The doctor on a machine reports the units as systemd sees them."""

from __future__ import annotations

import json
from typing import Any

import units
from machine import Machine


def examined(machine: Machine) -> dict[str, Any]:
    """The checks by name; ``Any``: it is JSON."""
    printed = json.loads(machine.sh("wald --root /var/lib/wald doctor --json || true", user="wald"))
    return {check["check"]: check for check in printed["checks"]}


def outcomes(checks: dict[str, Any], *names: str) -> dict[str, str]:
    return {name: checks[name]["outcome"] for name in names}


def test_the_unit_of_the_daemon_is_judged(machine: Machine) -> None:
    units.install(machine)
    machine.run("systemctl", "start", "wald.service")
    checks = examined(machine)
    assert outcomes(checks, "daemon", "service", "user", "rights", "files", "socket") == dict.fromkeys(
        ("daemon", "service", "user", "rights", "files", "socket"), "ok"
    )
    assert checks["service"]["measured"]["unit"] == "wald.service"
    assert checks["service"]["measured"]["store_max"] >= 1

    units.drop_in(machine, "wald.service", "[Service]\nWatchdogSec=0\n")
    machine.run("systemctl", "restart", "wald.service")
    assert "no watchdog" in examined(machine)["service"]["message"]

    machine.run("systemctl", "stop", "wald.service", "wald.socket")
    assert outcomes(examined(machine), "daemon", "service") == {"daemon": "ok", "service": "skipped"}


def test_a_canary_goes_through_the_installed_daemon(machine: Machine) -> None:
    units.install(machine)
    machine.run("systemctl", "start", "wald.service")

    assert "acknowledged" in machine.sh("wald --root /var/lib/wald doctor --canary", user="wald")

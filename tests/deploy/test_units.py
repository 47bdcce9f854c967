"""Unit files: valid, closed except for what wald needs; doctor, metrics and docs/systemd.md with them."""

import json
import re
import subprocess
from typing import Any

import programs
import pytest
import units
from endpoint import samples_of
from machine import Machine
from pages import blocks
from running import eventually
from typed import type_blocks

EXPOSURE_MAX = 1.5
_KINDS = {".service", ".socket", ".timer"}


def analyze(*arguments: object) -> subprocess.CompletedProcess[str]:
    program = programs.program("systemd-analyze")
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", units.SERVICES)
def test_the_exposure_is_low_and_every_relaxation_has_its_reason(name: str) -> None:
    # The exposure is low.
    judged = analyze("security", "--offline=true", f"--threshold={EXPOSURE_MAX * 10:.0f}", units.UNITS / name)
    assert judged.returncode == 0, judged.stdout

    # Every relaxation has its reason.
    judged = analyze("security", "--offline=true", "--json=short", units.UNITS / name)
    comments = "\n".join(re.findall("^#.*", (units.UNITS / name).read_text(), re.MULTILINE))
    missing = [each["name"] for each in json.loads(judged.stdout) if not each["set"]]
    unexplained = [directive for directive in missing if not any(word in comments for word in _words(directive))]
    assert not unexplained


def _words(directive: str) -> list[str]:
    """Return the names by which a comment may refer to a directive, such as @resources for SystemCallFilter."""
    name, _, value = directive.partition("=~")
    return re.findall(r"@?\w+", value.replace("(", "")) if value else [name.split("=")[0]]


@pytest.mark.parametrize("name", ["wald.service", "wald.socket", "wald-reclaim.service"])
def test_an_instance_differs_from_the_one_log_in_its_paths_only(name: str) -> None:
    instance = (units.UNITS / name.replace(".", "@.")).read_text()
    named = instance.replace("wald@%i", "wald").replace("-%i", "").replace("%i.toml", "wald.toml").replace(" (%i)", "")
    assert named == (units.UNITS / name).read_text()


def test_systemd_finds_nothing_wrong_and_reads_the_other_files(machine: Machine) -> None:
    # Systemd finds nothing wrong.
    units.install(machine)
    names = [path.name.replace("@.", "@x.") for path in units.UNITS.iterdir() if path.suffix in _KINDS]
    judged = machine.run("systemd-analyze", "verify", "--man=no", *names, check=False)
    assert (judged.returncode, judged.stdout + judged.stderr) == (0, "")
    assert len(names) >= 10

    # Systemd reads the other files.
    assert machine.sh("stat -c '%U:%G %a' /var/lib/wald").strip() == "wald:wald 2750"
    assert machine.sh("getent passwd wald").split(":")[5] == "/var/lib/wald"
    assert "fs.pipe-user-pages-soft" in machine.sh("systemd-analyze cat-config sysctl.d/60-wald.conf")


def scraped(machine: Machine, port: int) -> dict[tuple[str, ...], float]:
    return samples_of(machine.scraped(port))


def test_units_export_what_the_directory_shows(machine: Machine) -> None:
    """The daemon may start a process that reads it, and a drop-in has wald-reclaim serve its own numbers."""
    units.install(machine)
    units.drop_in(machine, "wald-reclaim.service", '[Service]\nEnvironment="OPTIONS=--metrics 127.0.0.1:9465"\n')
    machine.run("systemctl", "start", "wald.service", "wald-reclaim.service")
    machine.run("wald", "--root", "/var/lib/wald", "route", "add", "r")

    eventually(lambda: scraped(machine, 9464).get(("wald_group_lag_records", "r", "processed")) == 0)
    eventually(lambda: ("wald_reclaim_last_pass_timestamp_seconds",) in scraped(machine, 9465))
    assert scraped(machine, 9464)["wald_measurement_failures_total",] == 0


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


def test_the_drop_in_for_newer_versions_has_only_what_this_one_lacks(machine: Machine) -> None:
    """It is for systemd 254; an older version reports two unknown lines and ignores them."""
    units.install(machine)
    units.drop_in(machine, "wald.service", (units.UNITS / "254.conf").read_text())
    judged = machine.run("systemd-analyze", "verify", "--man=no", "wald.service", check=False)
    unknown = re.findall(r"254|notify-reload|FileDescriptorStorePreserve|Unknown|Failed", judged.stdout + judged.stderr)
    version = int(machine.sh("systemctl --version").split()[1])
    assert unknown == ([] if version >= 254 else ["Failed", "notify-reload", "Unknown", "FileDescriptorStorePreserve"])


PAGE = "docs/systemd.md"


@pytest.mark.slow
def test_the_page_can_be_typed(machine: Machine) -> None:
    units.install(machine)
    type_blocks(blocks(PAGE), shell=lambda script: machine.run("bash", "-c", script).stdout)

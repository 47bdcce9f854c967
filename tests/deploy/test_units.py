"""Unit files: valid, closed except for wald's needs, with a reason for each exception."""

from __future__ import annotations

import json
import re
import subprocess

import programs
import pytest
import units
from machine import Machine

EXPOSURE_MAX = 1.5


def analyze(*arguments: object) -> subprocess.CompletedProcess[str]:
    program = programs.program("systemd-analyze")
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", units.SERVICES)
def test_the_exposure_is_low(name: str) -> None:
    judged = analyze("security", "--offline=true", f"--threshold={EXPOSURE_MAX * 10:.0f}", units.UNITS / name)
    assert judged.returncode == 0, judged.stdout


@pytest.mark.parametrize("name", units.SERVICES)
def test_every_relaxation_has_its_reason(name: str) -> None:
    """A comment names each directive that `systemd-analyze security` finds missing, or its value."""
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


def test_systemd_finds_nothing_wrong(machine: Machine) -> None:
    """All units together, where the package puts them; manual pages are the package's."""
    units.install(machine)
    names = [path.name.replace("@.", "@x.") for path in units.UNITS.iterdir() if path.suffix in _KINDS]
    judged = machine.run("systemd-analyze", "verify", "--man=no", *names, check=False)
    assert (judged.returncode, judged.stdout + judged.stderr) == (0, "")
    assert len(names) >= 10


def test_the_drop_in_for_newer_versions_has_only_what_this_one_lacks(machine: Machine) -> None:
    """It is for systemd 254; an older version reports two unknown lines and ignores them."""
    units.install(machine)
    units.drop_in(machine, "wald.service", (units.UNITS / "254.conf").read_text())
    judged = machine.run("systemd-analyze", "verify", "--man=no", "wald.service", check=False)
    unknown = re.findall(r"254|notify-reload|FileDescriptorStorePreserve|Unknown|Failed", judged.stdout + judged.stderr)
    version = int(machine.sh("systemctl --version").split()[1])
    assert unknown == ([] if version >= 254 else ["Failed", "notify-reload", "Unknown", "FileDescriptorStorePreserve"])


def test_systemd_reads_the_other_files(machine: Machine) -> None:
    units.install(machine)
    assert machine.sh("stat -c '%U:%G %a' /var/lib/wald").strip() == "wald:wald 2750"
    assert machine.sh("getent passwd wald").split(":")[5] == "/var/lib/wald"
    assert "fs.pipe-user-pages-soft" in machine.sh("systemd-analyze cat-config sysctl.d/60-wald.conf")


_KINDS = {".service", ".socket", ".timer"}

"""The Debian package on a machine: installed as the page says, upgraded under load, removed, purged, in this order."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import packages
import programs
import pytest
from machine import Machine
from pages import blocks
from running import eventually
from typed import type_blocks

LOAD = """
import os, select, sys
fifo, lines = os.open(sys.argv[1], os.O_WRONLY), 0
while not select.select([0], [], [], 0.001)[0]:
    os.write(fifo, b"".join(b"%d\\n" % number for number in range(lines, lines + 100)))
    lines += 100
print(lines)
"""
# Completions that a shell offers for a line up to TAB.
SHELLS = {
    "bash": """
        source /usr/share/bash-completion/completions/wald
        COMP_WORDS=(LINE) COMP_CWORD=$(($(wc -w <<< 'LINE') - 1))
        _wald_completion wald
        echo "${COMPREPLY[@]}"
    """,
    "zsh": """
        zmodload zsh/zpty
        zpty shell 'TERM=dumb zsh -f -i'
        zpty -w shell 'autoload -Uz compinit; compinit -D; PROMPT=; echo rea''dy'
        zpty -r -m shell seen '*ready*'
        zpty -n -w shell $'LINE\\t'
        zpty -r -m shell seen '*WANTED*'
        echo $seen
    """,
    "fish": "complete --do-complete 'LINE'",
}
# Files of the system except logs, records, caches and messages of dpkg, apt and others.
FILES = r"""
    find /etc /lib/ /opt /usr /var -xdev \( -path '/var/lib/wald*' -o -path /var/lib/dpkg -o -path /var/lib/apt \
        -o -path /var/lib/PackageKit -o -path /var/lib/systemd/linger -o -path /var/cache -o -path /var/log \) -prune \
        -o ! -type d -printf '%p %M %U:%G %s\n' -o -printf '%p %M %U:%G\n'
"""
# Apt's daily timer, which may fire while the test runs, copies files to /var/backups.
USERS = re.compile(r"/etc/(passwd|group|shadow|gshadow)-? |/var/backups/")

pytestmark = pytest.mark.slow


@dataclass
class System:
    """A machine that has the package.

    Attributes:
        before: the files that it had before.
    """

    machine: Machine
    before: set[str]

    def install(self, package: Path) -> None:
        shutil.copy(package, self.machine.path("/srv"))
        self.type(f"apt install ./{package.name}")

    def type(self, script: str) -> str:
        """Run a command in root's shell, in a directory with packages; return its output."""
        environment = ["env", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND=noninteractive"]
        return self.machine.run(*environment, "bash", "-euc", f"cd /srv\n{script}").stdout

    def files(self) -> set[str]:
        return set(self.machine.sh(FILES).splitlines())

    def received(self, route: str) -> list[str]:
        return self.machine.sh(f"/usr/bin/wald --root /var/lib/wald read {route}", user="wald").splitlines()

    @contextmanager
    def loaded(self, route: str) -> Iterator[None]:
        """Write numbers to the FIFO of a route; at the end, check that each was stored once, in order."""
        before = self.received(route)
        fifo = Path(f"/var/lib/wald/routes/{route}/in")
        eventually(self.machine.path(fifo).is_fifo)
        writer = self.machine.start("/usr/bin/python3", "-c", LOAD, fifo)
        eventually(lambda: self.received(route) != before)
        yield
        lines, errors = writer.communicate(b"stop\n", timeout=60)
        assert writer.returncode == 0, errors.decode()
        sent = [str(number) for number in range(int(lines))]
        eventually(lambda: len(self.received(route)) >= len(before + sent))
        assert self.received(route) == before + sent


@pytest.fixture(scope="module")
def system(machine: Machine, package: Path) -> System:
    machine.sh("rm -f /usr/sbin/policy-rc.d")  # containers have one that starts nothing
    system = System(machine, set())
    system.before = system.files()
    shutil.copy(package, machine.path("/srv"))
    type_blocks([block for block in blocks("docs/install.md") if block.heading == "Debian"], shell=system.type)
    return system


def test_lintian_finds_nothing(package: Path) -> None:
    lintian = [programs.program("lintian"), "--allow-root", "--fail-on", "error,warning", str(package)]
    done = subprocess.run(lintian, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (0, "")


def test_equal_sources_make_an_equal_package(package: Path, tmp_path: Path) -> None:
    assert packages.build(tmp_path, umask=0o077).read_bytes() == package.read_bytes()


def test_the_daemon_runs_and_nothing_else_does(system: System) -> None:
    # The daemon runs and nothing else does.
    assert system.machine.sh("systemctl is-active wald.service wald.socket").split() == ["active", "active"]
    assert system.machine.sh("systemctl is-enabled wald.service wald.socket").split() == ["enabled", "enabled"]
    assert system.machine.sh("pgrep -c -u wald").strip() == "1"

    # Every user may enter the directory of sockets.
    assert system.machine.sh("stat -c '%U %a' /run/wald").strip() == "root 755"

    # Manual pages open.
    for page in ("wald", "wald-audit", "wald-drain", "wald-gate", "wald.toml"):
        assert system.machine.sh(f"man {page}").split()[0].startswith(f"{page.upper()}(")

    # What needs spark says what is missing.
    done = system.machine.run("/usr/bin/wald-export", "--root", "/var/lib/wald", "--out", "/tmp/out", check=False)
    assert (done.returncode, "hint: in a clone of wald: pip install '.[spark]'" in done.stderr) == (3, True)


def test_the_fifo_outlives_restarts_under_load(system: System) -> None:
    with system.loaded("access"):
        for _ in range(3):
            system.machine.sh("systemctl restart wald")


def test_an_upgrade_under_load_restarts_the_daemon_and_loses_nothing(
    system: System, package: Path, tmp_path: Path
) -> None:
    system.machine.sh("/usr/bin/wald --root /var/lib/wald route add upgraded --fifo", user="wald")
    daemon = system.machine.sh("systemctl show --property=MainPID wald")
    with system.loaded("upgraded"):
        system.install(packages.newer(package, tmp_path))

    assert system.machine.sh("dpkg-query --show wald").rstrip().endswith("-2")
    assert system.machine.sh("systemctl show --property=MainPID wald") != daemon


def test_a_service_that_was_stopped_is_not_started_by_an_upgrade(system: System, package: Path, tmp_path: Path) -> None:
    system.machine.sh("systemctl stop wald.service wald.socket")
    system.machine.sh("dpkg-reconfigure wald")

    assert system.machine.sh("systemctl is-active wald.service || true").strip() == "inactive"
    system.machine.sh("systemctl start wald.service")


def test_a_daemon_that_cannot_start_is_reported_and_holds_no_other_package_up(system: System) -> None:
    settings = system.machine.path("/etc/wald/wald.toml")
    right = settings.read_text()
    settings.write_text(right + "misspelt = 1\n")
    done = system.machine.run("dpkg-reconfigure", "wald")
    settings.write_text(right)

    assert "Job for wald.service failed" in done.stderr
    system.machine.sh("systemctl restart wald")


def test_the_gate_runs_once_it_is_switched_on_and_outlives_an_upgrade(
    system: System, package: Path, tmp_path: Path
) -> None:
    """It is for the network, so installing it does not start it."""
    assert system.machine.sh("systemctl is-enabled wald-gate.service || true").strip() == "disabled"
    ask = "curl -sS --fail --unix-socket /run/wald/gate.sock http://log/readyz"
    system.machine.sh("systemctl enable --now wald-gate")
    gate = system.machine.sh("systemctl show --property=MainPID wald-gate")
    assert system.machine.sh(ask) == '{"status":"ready"}'
    system.install(packages.newer(package, tmp_path, revision=3))

    assert system.machine.sh("dpkg-query --show wald").rstrip().endswith("-3")
    assert system.machine.sh("systemctl show --property=MainPID wald-gate") != gate
    assert system.machine.sh(ask) == '{"status":"ready"}'
    system.machine.sh("systemctl disable --now wald-gate.service wald-gate.socket")


def test_after_a_removal_it_starts_again_with_what_was_enabled(system: System) -> None:
    units = "wald.service wald.socket wald-reclaim.service wald-fifo@kept.socket"
    system.machine.sh("systemctl stop wald.service; systemctl enable --now wald-reclaim wald-fifo@kept.socket")
    system.machine.sh("apt-get remove --yes wald")
    assert not system.machine.path("/run/wald").exists()

    system.type("apt-get install --yes ./wald_*.deb")

    assert system.machine.sh(f"systemctl is-active {units}").split() == ["active"] * 4
    assert system.machine.sh(f"systemctl is-enabled {units}").split() == ["enabled"] * 4
    system.machine.sh("systemctl stop wald.service; systemctl disable --now wald-reclaim wald-fifo@kept.socket")
    system.machine.sh("systemctl start wald.service")


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(("line", "wanted"), [("wald cur", "cursor"), ("wald append --key-s", "--key-separator")])
def test_shells_complete(system: System, shell: str, line: str, wanted: str) -> None:
    programs.program(shell)
    script = SHELLS[shell].replace("LINE", line).replace("WANTED", wanted)
    environment = ["env", "-i", "PATH=/usr/bin:/bin", "HOME=/root", "LANG=C.UTF-8"]

    assert wanted in system.machine.run(*environment, shell, "-c", script).stdout.split()


def test_removed_it_leaves_data_and_settings_and_purged_only_data(system: System) -> None:
    system.machine.sh(
        "echo >/etc/wald/other.toml; systemctl enable --now wald@other wald-archive@access.timer;"
        " systemctl enable wald-drain@access"
    )
    system.machine.sh("apt-get remove --yes wald")
    removed = {line.split()[0] for line in system.files() - system.before if not USERS.match(line)}

    assert {name for name in removed if not name.startswith(("/etc/", "/var/lib/systemd/"))} == set()
    assert "/etc/wald/wald.toml" in removed
    assert system.machine.sh("pgrep -c -u wald || true").strip() == "0"
    said = system.machine.sh("rm -r /etc/wald/other.toml /var/lib/wald-other; apt-get purge --yes wald")
    assert "wald: /var/lib/wald holds a log and stays" in said
    assert {line for line in system.files() ^ system.before if not USERS.match(line)} == set()
    assert system.machine.path("/var/lib/wald/log.json").exists()


def test_it_is_installed_and_purged_where_no_systemd_runs(system: System, package: Path) -> None:
    """A container build has no systemd."""
    system.type(f"""unshare --mount bash -euc '
        mount -t tmpfs tmpfs /run/systemd
        apt-get install --yes ./{package.name}
        /usr/bin/wald --version
        apt-get purge --yes wald
    '""")
    assert {line for line in system.files() ^ system.before if not USERS.match(line)} == set()

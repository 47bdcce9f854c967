"""Runbooks of docs/operations.md, typed unchanged on machines with the failures that they describe."""

import base64
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import machine as machines
import packages
import programs
import pytest
from damage import flipped
from pages import blocks, headings
from sites import LOG, OUT, SETTINGS, Site
from typed import type_blocks

AS_WALD = "setpriv --reuid=wald --regid=wald --init-groups"
FED = f"{OUT}/fed"
PAGE = "docs/operations.md"
Scenario = Callable[[Site], Iterator[None]]
SCENARIOS: dict[str, Scenario] = {}
PACKAGED = ("Install", "Upgrade", "Roll back")  # where wald is a package; elsewhere it is this checkout


def failure(heading: str) -> Callable[[Scenario], Scenario]:
    """Mark a function that causes a runbook's failure, yields while it is typed, and then checks the fix."""

    def mark(scenario: Scenario) -> Scenario:
        SCENARIOS[heading] = scenario
        return scenario

    return mark


@pytest.fixture
def site(heading: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A machine for one failure, which may spoil all of it."""
    if reason := machines.lack():
        programs.lack(reason)
    machine = machines.Machine(tmp_path_factory.mktemp("machine"))
    site = Site(machine)
    if heading in PACKAGED:
        package = request.getfixturevalue("package")
        site.copy(package, "/srv/wald.deb")
        site.copy(packages.newer(package, tmp_path_factory.mktemp("newer")), "/srv/wald-new.deb")
        site.sh("rm -f /usr/sbin/policy-rc.d")  # containers have one that starts nothing
    else:
        site.install()
    yield site
    machine.close()


@failure("Install")
def new(site: Site) -> Iterator[None]:
    yield
    assert site.sh("systemctl is-active wald wald-reclaim").split() == ["active"] * 2


@failure("Upgrade")
def old(site: Site) -> Iterator[None]:
    installed(site)
    yield
    assert site.sh("dpkg-query --show wald").strip().endswith("-2")
    assert site.read() == ["before"]


@failure("Roll back")
def rolled_back(site: Site) -> Iterator[None]:
    installed(site)
    site.sh("apt-get install --yes /srv/wald-new.deb; mv /srv/wald.deb /srv/wald-old.deb")
    site.append(["after"])
    yield
    assert site.sh("dpkg-query --show wald").strip().endswith("-1")
    assert site.read() == ["before", "after"]


def installed(site: Site) -> None:
    site.sh(f"apt-get install --yes /srv/wald.deb; printf '\n[routes.orders]\nfifo = true\n' >> {SETTINGS}")
    site.sh("systemctl reload wald")
    site.append(["before"])


@failure("The disk is full")
def full(site: Site) -> Iterator[None]:
    """The log fills the disk, because the only group's records stay for a minute; a writer waits."""
    site.sh(f"mount -t tmpfs -o size=64m,mode=2750,uid=wald,gid=wald tmpfs {LOG}")
    site.start("wald-reclaim")
    site.feed("cat > /dev/null")
    lines = incompressible(100_000)
    site.write("/tmp/lines", "".join(f"{line}\n" for line in lines))
    writer = site.machine.start("bash", "-c", f"cat /tmp/lines > {LOG}/routes/orders/in")
    site.until("journalctl -u wald | grep degraded_by")
    yield
    writer.communicate()
    assert writer.returncode == 0
    site.until(f"wald --root {LOG} head | grep 'seq=100000 '")
    kept = site.read()
    assert 0 < len(kept) < len(lines)
    assert kept == lines[-len(kept) :]
    site.sh("systemctl is-active wald-reclaim")


@failure("A group does not read")
def stuck(site: Site) -> Iterator[None]:
    """Its wald-drain was stopped by a signal."""
    site.start()
    site.feed("cat > /dev/null")
    site.until(f"fuser -s {LOG}/routes/orders/cursors/drain.drain")
    site.sh("systemctl kill --kill-who=main --signal=STOP wald-drain@orders")
    site.append(range(1000))
    site.until("ps -o stat= -p $(systemctl show -P MainPID wald-drain@orders) | grep T")  # not before its disk answers
    yield
    assert "drain" not in site.wald("cursor", "list", "orders")


@failure("A record makes its consumer fail")
def poison(site: Site) -> Iterator[None]:
    poisoned(site)
    yield
    assert json.loads(site.text("/tmp/orders-3.json"))["value"] == "poison"
    assert site.text(FED) == "one\ntwo\nfour\n"


@failure("A record that no worker can process")
def stuck_worker(site: Site) -> Iterator[None]:
    site.start()
    site.append(["one", "two", "poison", "four"])
    site.sh(f"install -d -o wald -g wald {OUT}")
    site.write("/srv/each", f"#!/bin/bash\nread line\ntest $line != poison && echo $line >> {FED}\n")
    site.sh("chmod 755 /srv/each")
    workers = f"wald-drain feed orders --root {LOG} --group billing --workers 2 --batch-records 1 -- /srv/each"
    site.sh(f"systemd-run --unit=workers --uid=wald --gid=wald {workers}")
    site.until(f"test $(wc -l < {FED}) = 3")
    yield
    assert json.loads(site.text("/tmp/orders-3.json"))["value"] == "poison"
    site.until("test $(cat /var/lib/wald/routes/orders/cursors/billing.cursor | head -n 1) = 4")
    site.sh("systemctl is-active workers")


@failure("Set failing records aside")
def dead_letters(site: Site) -> Iterator[None]:
    """Only the log's user may write to the route."""
    site.write(SETTINGS, site.text(SETTINGS) + 'writers = ["wald"]\n')
    poisoned(site)
    yield
    assert site.text(FED) == "one\ntwo\nfour\n"
    assert site.read() == ["one", "two", "poison", "four", "poison"]


def poisoned(site: Site) -> None:
    """Its consumer fails at the third record, again and again."""
    site.start()
    site.append(["one", "two", "poison", "four"])
    site.feed(f"tee {OUT}/batch | grep -q poison && exit 1; cat {OUT}/batch >> {FED}")
    site.until("journalctl -u wald-drain@orders -o cat | tail -n 1 | grep 'orders 3:'")


@failure("A segment is damaged, and there is a copy")
def damaged(site: Site) -> Iterator[None]:
    site.start()
    damaged_in(site)
    yield
    site.until(f"test $(wc -l < {FED}) = 20")
    assert site.read() == [str(number) for number in range(20)]


@failure("A segment is damaged, and there is no copy")
def lost(site: Site) -> Iterator[None]:
    site.start()
    site.sh("install -d -o wald /srv/cold")
    damaged_in(site)
    site.start("wald-reclaim")
    yield
    site.until(f"test $(wc -l < {FED}) = 20")
    assert site.text(FED).split() == [str(number) for number in range(20)]
    deleted = json.loads(site.text(f"{LOG}/ledger/reclaim.jsonl").splitlines()[0])
    assert (deleted["base"], deleted["damaged"]) == (1, True)


def damaged_in(site: Site) -> None:
    """A bit of the first segment has flipped since it was copied and archived; its consumer has ended at it."""
    for numbers in (range(10), range(10, 20)):
        site.segment(numbers)
    if site.exists("/srv/cold"):
        site.wald("wald-archive", "orders", "--group", "archive", "--dest", "/srv/cold")
    site.sh(f"cp -a {LOG} /srv/backup")
    segment = site.machine.path(f"{LOG}/segments/{1:020}.wal.zst")
    with segment.open("r+b") as file:
        data = file.read()
        file.seek(0)
        file.write(flipped(data, 8 * 60))
    site.feed(f"cat >> {FED}")
    site.until("systemctl show -P ExecMainStatus wald-drain@orders | grep -x 4")


@failure("wald verify reports damage")
def repaired(site: Site) -> Iterator[None]:
    site.start()
    damaged_in(site)
    yield
    site.until(f"test $(wc -l < {FED}) = 10")
    assert site.text(FED).split() == [str(number) for number in range(10, 20)]
    assert "records 1 to 10 are lost: " in site.sh("wald verify --root " + LOG)


@failure("A second writer")
def second_writer(site: Site) -> Iterator[None]:
    """A daemon was started by hand, on a machine that calls itself otherwise."""
    site.wald("init")
    site.wald("route", "add", "orders", "--fifo")
    by_hand = site.machine.start("unshare", "--uts", "sh", "-c", f"hostname other; {AS_WALD} wald run --root {LOG}")
    site.until(f"test -S {LOG}/wald.sock")
    site.append(["one"])
    yield
    by_hand.communicate()
    assert by_hand.returncode == 0
    assert site.read() == ["one"]


@failure("Restore records from an archive")
def archived(site: Site) -> Iterator[None]:
    site.start()
    site.segment(range(10))
    site.sh("install -d -o wald /srv/cold")
    site.wald("wald-archive", "orders", "--dest", "/srv/cold")
    site.wald("wald-reclaim", "--grace", "0")
    assert site.read() == []
    yield
    assert site.read("restored") == [str(number) for number in range(10)]


@failure("Move the log to another disk")
def moved(site: Site) -> Iterator[None]:
    """The new disk is a file system in a file."""
    site.start()
    site.feed(f"cat >> {FED}")
    site.segment(range(10))
    site.sh("truncate -s 600M /srv/disk; mkfs.ext4 -q /srv/disk; mkdir /srv/new")
    site.sh("echo '/srv/disk /srv/new ext4 loop 0 0' >> /etc/fstab; systemctl daemon-reload; mount /srv/new")
    yield
    site.append(range(10, 20))
    assert site.read() == [str(number) for number in range(20)]
    site.until(f"test $(wc -l < {FED}) = 20")
    assert site.sh(f"stat -f -c %T {LOG}").strip() == "ext2/ext3"


@failure("The disk is lost")
def disk_lost(site: Site) -> Iterator[None]:
    """Its file system has gone; another one, in a file, is to take its place."""
    site.sh(f"mount -t tmpfs -o mode=2750,uid=wald,gid=wald tmpfs {LOG}; install -d -o wald /srv/cold")
    site.start()
    site.append(range(10))
    site.wald("wald-archive", "orders", "--group", "archive", "--dest", "/srv/cold")
    site.feed(f"cat >> {FED}")
    site.until(f"test $(wc -l < {FED}) = 10")
    site.sh(f"truncate -s 600M /srv/disk; mkfs.ext4 -q /srv/disk; echo '/srv/disk {LOG} ext4 loop 0 0' >> /etc/fstab")
    site.sh(f"umount --lazy {LOG}")
    yield
    assert site.read() == [str(number) for number in range(10)]
    site.until(f"test $(wc -l < {FED}) = 20")


@failure("A cursor is lost or overwritten")
def cursor(site: Site) -> Iterator[None]:
    site.start()
    site.segment(range(10))
    site.wald("cursor", "set", "orders", 10, "--group", "drain")
    site.wald("wald-reclaim", "--grace", "0")
    site.append(range(10, 20))
    site.sh(f"echo garbage > {LOG}/routes/orders/cursors/drain.cursor")
    site.feed(f"cat >> {FED}")
    site.until("systemctl show -P ExecMainStatus wald-drain@orders | grep -x 4")
    yield
    assert site.text(FED).split() == [str(number) for number in range(10, 20)]


@failure("The power was cut")
def power_cut(site: Site) -> Iterator[None]:
    """The daemon is dead, and the last commit is followed by the start of another one."""
    site.start()
    site.append(range(10))
    site.sh("systemctl kill --kill-who=main --signal=KILL wald; systemctl stop wald.socket wald")
    segment = site.machine.path(f"{LOG}/segments/{1:020}.wal")
    with segment.open("r+b") as file:
        file.seek(int(site.wald("head").split("position=")[1].split()[0]))
        file.write(b"WBATtorn")
    site.start()
    yield
    assert site.read() == [str(number) for number in range(10)]
    assert site.sh(f"ls {LOG}/quarantine") == ""


@failure("The daemon starts again and again")
def crash_loop(site: Site) -> Iterator[None]:
    """A setting is misspelt."""
    site.sh(f"sed -i '1i fre_space_min = \"1MiB\"' {SETTINGS}; systemctl start wald || true")
    site.until("test $(systemctl show -P NRestarts wald) -gt 1")
    yield
    site.append(["one"])


@failure("Files in the log belong to root")
def copied_by_root(site: Site) -> Iterator[None]:
    """Root has put the ledger back from a copy. A daemon that root ran before it has left nothing of root's."""
    site.start()
    site.append(["one"])
    site.sh("systemctl stop wald.socket wald")
    site.sh(f"wald --root {LOG} run & until wald --root {LOG} cut; do sleep 0.1; done; kill $!; wait")
    assert site.sh(f"find {LOG} -user root") == ""
    site.sh(f"cp -r {LOG}/ledger /tmp/; rm -r {LOG}/ledger; cp -r /tmp/ledger {LOG}/")
    site.sh("systemctl start wald || true")
    site.until("systemctl show -P ExecMainStatus wald | grep -x 11")
    yield
    site.append(["two"])
    assert site.read() == ["one", "two"]


@failure("Segments are not sealed")
def unsealed(site: Site) -> Iterator[None]:
    """Another program's file has taken the room."""
    site.sh(f"mount -t tmpfs -o size=64m,mode=2750,uid=wald,gid=wald tmpfs {LOG}")
    site.start()
    lines = incompressible(20_000)
    site.append(lines)
    site.sh(f"head -c 30M /dev/zero > {LOG}/core.12345")
    site.wald("cut")
    site.until("journalctl -u wald | grep degraded_by")
    yield
    assert [path.suffix for path in sorted(site.machine.path(f"{LOG}/segments").glob("0*.*[!x]"))] == [".zst", ".wal"]
    assert site.read() == lines


@failure("The daemon does not answer")
def silent(site: Site) -> Iterator[None]:
    """It was stopped by a signal."""
    site.start()
    site.append(["one"])
    site.sh("systemctl kill --kill-who=main --signal=STOP wald")
    yield
    site.append(["two"])
    assert site.read() == ["one", "two"]


@failure("The gate answers 503, or not at all")
def not_ready(site: Site) -> Iterator[None]:
    """Its daemon was stopped by a signal."""
    site.start("wald-gate")
    site.append(["one"])
    site.sh("systemctl kill --kill-who=main --signal=STOP wald")
    yield
    assert site.sh("curl -sS --fail --unix-socket /run/wald/gate.sock http://log/readyz") == '{"status":"ready"}'
    assert site.read() == ["one"]


@failure("A FIFO misbehaves")
def fifo(site: Site) -> Iterator[None]:
    """A file has taken its place, and another writer holds half a line in the new one."""
    site.start()
    site.sh(f"rm {LOG}/routes/orders/in; echo beside > {LOG}/routes/orders/in")
    site.until(f"test -p {LOG}/routes/orders/in -a -e {LOG}/routes/orders/in.found-1")
    writer = site.machine.start("sh", "-c", f"exec 3> {LOG}/routes/orders/in; printf half >&3; echo written; cat")
    assert writer.stdout
    assert writer.stdout.readline() == b"written\n"
    yield
    site.sh(f"echo new > {LOG}/routes/orders/in")
    site.until(f"wald --root {LOG} read orders | grep new")
    writer.communicate()
    site.until(f"wald --root {LOG} read orders | grep half")
    assert sorted(site.read()) == ["beside", "half", "new"]


@failure("Add a route")
def added(site: Site) -> Iterator[None]:
    site.start()
    yield
    site.sh(f"echo one > {LOG}/routes/invoices/in")
    site.until(f"wald --root {LOG} read invoices | grep one")


@failure("Retire a route")
def retired(site: Site) -> Iterator[None]:
    """Another route's table follows without an empty line and stays unchanged."""
    site.write(SETTINGS, site.text(SETTINGS) + '[routes.secret]\nwriters = ["wald"]\n')
    site.start()
    site.feed("cat > /dev/null")
    site.segment(range(10))
    yield
    assert "retired" in site.wald("route", "list")
    assert site.text(SETTINGS).endswith('[routes.secret]\nwriters = ["wald"]\n')
    site.wald("wald-reclaim", "--grace", "0")
    assert site.read() == []
    site.sh("systemctl restart wald")
    assert "retired" in site.wald("route", "list")


@failure("Rename or merge routes")
def renamed(site: Site) -> Iterator[None]:
    """The group has processed one of three records; the others come to the new route."""
    site.start()
    site.append(range(3))
    site.wald("cursor", "set", "orders", 1, "--group", "drain")
    site.feed("exit 75")
    yield
    assert "retired" in site.wald("route", "list")
    assert site.read("sales") == ["1", "2"]


@failure("What may be deleted by hand")
def deleted(site: Site) -> Iterator[None]:
    site.start()
    site.append(range(10))
    site.sh(f"echo torn > {LOG}/quarantine/x; echo appended > {LOG}/routes/orders/in.found-1")
    site.sh(f"touch -d 2020-01-01 {LOG}/recovery/0000000001.json")
    yield
    site.sh("systemctl restart wald")
    assert site.read() == [str(number) for number in range(10)]


def incompressible(count: int) -> list[str]:
    return [base64.b64encode(random.Random(number).randbytes(300)).decode() for number in range(count)]


def test_every_runbook_has_its_failure() -> None:
    assert headings(PAGE) == list(SCENARIOS)


@pytest.mark.slow
@pytest.mark.parametrize("heading", SCENARIOS)
def test_a_runbook_fixes_its_failure(site: Site, heading: str) -> None:
    with contextmanager(SCENARIOS[heading])(site):
        type_blocks([block for block in blocks(PAGE) if block.heading in ("", heading)], shell=site.type)

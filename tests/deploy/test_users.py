"""Commands of docs/users.md, typed unchanged on a machine whose daemon is the user wald."""

import pytest
import units
from machine import Machine
from pages import blocks
from sites import FEED, LOG, Site

PAGE = "docs/users.md"


@pytest.fixture(scope="module")
def site(machine: Machine) -> Site:
    site = Site(machine)
    site.install()
    site.start()
    site.append(range(1, 6))
    return site


def block(line: str) -> str:
    """The one block of the page that has this text."""
    (found,) = (each.text for each in blocks(PAGE) if line in each.text)
    return found


def typed(site: Site, script: str, user: str = "") -> str:
    return site.machine.run("env", f"WALD_ROOT={LOG}", "bash", "-euc", f"cd /tmp; {script}", user=user).stdout


def test_a_consumer_is_added_and_leaves_cursors(site: Site) -> None:
    typed(site, block("usermod --append --groups billing wald"))
    site.until("systemctl is-active wald")
    typed(site, block("wald route add orders --consumers billing"), "wald")
    site.write("/tmp/import-orders", "#!/bin/sh\ncat > /dev/null\n")
    site.sh("chmod 755 /tmp/import-orders")
    script = block("wald-drain orders --group billing")
    site.append(range(6, 4712))
    typed(site, script.replace("wald-drain orders", "wald-drain orders --exit-at-end"), "alice")

    assert site.wald("cursor", "get", "orders", "--group", "billing") == "4711\n"
    assert site.sh(f"stat -c '%U %a' {LOG}/routes/orders/cursors/billing.cursor") == "alice 644\n"
    assert f"{LOG}/routes/orders/cursors" not in site.sh(f"find {LOG} -perm -o=w")


def test_the_settings_do_the_same(site: Site) -> None:
    site.sh("groupadd --system --force billing; usermod --append --groups billing wald; systemctl restart wald")
    text = site.text("/etc/wald/wald.toml").replace("[routes.orders]\nfifo = true\n", "")
    site.write("/etc/wald/wald.toml", text + block('consumers = "billing"'))
    site.sh("systemctl reload wald")
    site.until(f"test \"$(stat -c '%G %a' {LOG}/routes/orders/cursors)\" = 'billing 3775'")


def test_the_unit_of_wald_drain_runs_as_a_consumer_and_reclaim_sees_its_cursor(site: Site) -> None:
    if site.machine.run("id", "alice", check=False).returncode:
        typed(site, block("usermod --append --groups billing wald"))
    site.wald("route", "add", "orders", "--consumers", "billing")
    site.write("/etc/systemd/system/wald-drain@orders.service.d/user.conf", block("User=alice"))
    site.write(FEED, "#!/bin/sh\ncat > /dev/null\n")
    site.sh(f"chmod 755 {FEED}; systemctl daemon-reload; systemctl start wald-drain@orders wald-reclaim")
    site.until(f"wald --root {LOG} cursor get orders --group drain")
    for options in ("billing", "processed"):
        line = f"wald --root {LOG} cursor remove orders --group {options}"
        site.machine.run(*line.split(), user="wald", check=False)
    site.append(["last"])
    site.wald("cut")
    site.until(f"ls {LOG}/segments/00000000000000000001.wal.zst.released")
    assert site.sh(f"stat -c %U {LOG}/routes/orders/cursors/drain.cursor") == "alice\n"


def test_a_reader_reads_and_a_daemon_is_seen_to_run(site: Site) -> None:
    typed(site, block("--groups wald carol"))
    for line in ("wald explain", "wald top --once", "wald head", "wald cursor list"):
        done = site.machine.run("env", f"WALD_ROOT={LOG}", *line.split(), user="carol")
        assert done.stderr == ""
    done = site.machine.run("wald", "--root", LOG, "cursor", "set", "orders", "1", user="carol", check=False)
    assert done.returncode == 11


def test_a_producer_writes_to_a_fifo(site: Site) -> None:
    typed(site, block("--groups wald collector"))
    line = f"echo 1 > {LOG}/routes/metrics/in"
    assert site.machine.run("sh", "-c", line, user="collector", check=False).returncode != 0
    site.wald("route", "add", "metrics", "--fifo", "--mode", "0620")
    site.machine.run("sh", "-c", line, user="collector")
    site.until(f'test "$(wald --root {LOG} read metrics)" = 1')


def test_a_producer_that_may_not_read_gets_a_socket_outside(site: Site) -> None:
    site.sh("useradd --system shop; useradd --system stranger")
    site.write("/etc/wald/wald.toml", site.text("/etc/wald/wald.toml") + block("[routes.sales]"))
    site.write("/etc/systemd/system/wald.socket.d/outside.conf", block("[Socket]"))
    typed(site, block("systemctl stop wald.socket"))
    producer = block("wald.Producer")
    site.machine.run(units.PYTHON, "-c", producer, user="shop")
    assert "NotPermitted" in site.machine.run(units.PYTHON, "-c", producer, user="stranger", check=False).stderr
    assert site.read("sales") == ["sold"]


def test_a_directory_of_another_group_gives_all_that_is_made_in_it_that_group(machine: Machine) -> None:
    site = Site(machine)
    site.install()
    site.sh(f"systemctl stop wald.socket wald; rm -rf {LOG}; groupadd --system readers")
    typed(site, block("--group readers --mode 2750"))
    site.wald("init")
    site.wald("route", "add", "orders", "--fifo")
    assert site.sh(f"find {LOG} ! -group readers") == ""
    assert set(site.sh(f"find {LOG} -type d -printf '%m\\n'").split()) == {"2750"}

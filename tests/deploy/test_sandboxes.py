"""Each service does its work inside its sandbox: the log is written, sealed, drained, archived, reclaimed, proven."""

import hashlib
import json
import re
from pathlib import Path

import pytest
import units
from contents import values
from machine import Machine
from running import eventually

ROOT = "/var/lib/wald"
SETTINGS = 'metrics = "127.0.0.1:9464"\n[routes.access]\nfifo = true\n'
LINES = 4000


@pytest.fixture(scope="module")
def host(machine: Machine) -> Machine:
    """A machine on which wald runs; its log has four complete segments."""
    units.install(machine)
    machine.path("/etc/wald/wald.toml").write_text(SETTINGS)
    machine.run("systemctl", "start", "wald.service")
    for first in range(1, LINES, LINES // 4):
        machine.sh(f"seq {first} {first + LINES // 4 - 1} | wald --root {ROOT} append access; wald --root {ROOT} cut")
    return machine


@pytest.fixture
def root(host: Machine) -> Path:
    return host.path(ROOT)


def test_the_daemon_takes_input_seals_and_serves_metrics(host: Machine, root: Path) -> None:
    eventually(lambda: values(root, "access")[-1:] == [b"%d" % LINES])
    eventually(lambda: len(list(root.glob("segments/*.zst"))) == 4)
    scraped = host.scraped(9464)
    assert f"wald_records_total {LINES}" in scraped.replace(f"{LINES}.0", str(LINES))
    assert 'route="access"' in scraped  # from a separate process
    nice = host.sh("ps -L -o ni= -p $(systemctl show --property=MainPID --value wald)").split()
    assert "19" in nice  # the thread that seals
    journal = host.journal("wald.service")
    assert "not permitted" not in journal
    assert "SYS" not in journal


def test_a_gate_serves_whom_it_knows(host: Machine) -> None:
    """Root and the log's user on its socket, token holders on TCP; a restart refuses no one."""
    token = {"name": "shop", "sha256": hashlib.sha256(b"secret").hexdigest(), "read": ["access"]}
    host.path("/etc/wald/tokens").write_text(json.dumps(token) + "\n")
    with host.path("/etc/wald/gate.toml").open("a") as settings:
        settings.write('tokens = "/etc/wald/tokens"\n')
    units.drop_in(host, "wald-gate.socket", "[Socket]\nListenStream=127.0.0.1:7700\n")
    host.run("systemctl", "start", "wald-gate.service")
    at_socket = "curl -sS --unix-socket /run/wald/gate.sock"
    by_tcp = "curl -sS -H 'Authorization: Bearer secret'"

    assert host.sh(f"{at_socket} http://log/readyz") == '{"status":"ready"}'
    assert host.sh(f"{at_socket} 'http://log/v1/routes/access/records?limit=1&format=raw'", user="wald") == "1\n"
    assert "has no rights on this gate" in host.sh(f"{at_socket} http://log/v1/head", user="daemon")
    assert host.sh(f"{by_tcp} 'http://127.0.0.1:7700/v1/routes/access/records?limit=1&format=raw'") == "1\n"
    host.sh("sed -i s/shop/store/ /etc/wald/tokens; systemctl reload wald-gate")
    host.sh(f"systemctl kill --signal=KILL wald-gate; {by_tcp} --fail http://127.0.0.1:7700/v1/head")
    assert "unknown token" in host.sh("curl -sS -H 'Authorization: Bearer x' http://127.0.0.1:7700/v1/head")
    cursor = "-X PUT --json '{\"sequence\": 0}' http://log/v1/routes/access/cursors/gate"
    assert '"state":"valid"' in host.sh(f"{at_socket} {cursor}", user="wald")
    host.sh(f"wald --root {ROOT} cursor remove access --group gate")
    host.run("systemctl", "stop", "wald-gate.service")
    assert host.value("wald-gate.service", "Result") == "success"
    journal = host.journal("wald-gate.service")
    assert "Traceback" not in journal
    assert "not permitted" not in journal


def test_a_gate_speaks_tls_with_a_key_of_its_group(host: Machine) -> None:
    host.sh(
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
        " -keyout /etc/wald/gate.key -out /etc/wald/gate.pem"
    )
    host.sh("chown root:wald /etc/wald/gate.key; chmod 640 /etc/wald/gate.key")
    with host.path("/etc/wald/gate.toml").open("a") as settings:
        settings.write('certificate = "/etc/wald/gate.pem"\nkey = "/etc/wald/gate.key"\n')
    units.drop_in(host, "wald-gate.socket", "[Socket]\nListenStream=127.0.0.1:7701\n")
    host.sh("systemctl stop wald-gate.socket; systemctl start wald-gate.service")

    ask = "curl -sS --fail --cacert /etc/wald/gate.pem https://localhost:7701/healthz"
    assert host.sh(ask) == '{"status":"ok"}'
    host.run("systemctl", "stop", "wald-gate.service", "wald-gate.socket")


def test_a_program_is_fed(host: Machine) -> None:
    """A drop-in allows its output directory."""
    host.sh("mkdir -p /etc/wald/drain /srv/fed; chown wald: /srv/fed")
    program = host.path("/etc/wald/drain/access")
    program.write_text("#!/bin/sh\ncat >> /srv/fed/lines\n")
    program.chmod(0o755)
    units.drop_in(host, "wald-drain@access.service", "[Service]\nReadWritePaths=/srv/fed\n")
    host.run("systemctl", "start", "wald-drain@access.service")
    fed = host.path("/srv/fed/lines")
    eventually(lambda: fed.exists() and fed.read_text().endswith(f"\n{LINES}\n"))
    host.run("systemctl", "stop", "wald-drain@access.service")
    assert fed.read_text() == "".join(f"{number}\n" for number in range(1, LINES + 1))
    assert host.value("wald-drain@access.service", "Result") == "success"


def test_a_route_is_archived_and_the_log_verified(host: Machine, root: Path) -> None:
    # A route is archived.
    host.run("systemctl", "start", "wald-archive@access.service")
    assert host.value("wald-archive@access.service", "Result") == "success"
    host.sh(f"wald-archive verify {ROOT}/archive --root {ROOT}")

    # A log is verified and the daemon exports it.
    host.run("systemctl", "start", "wald-verify.service")
    eventually(lambda: "\nwald_last_verify_timestamp_seconds " in host.scraped(9464))
    assert "\nwald_last_verify_errors 0" in host.scraped(9464)
    assert host.sh(f"stat -c '%U:%G %a' {ROOT}/ledger/verify.jsonl").strip() == "wald:wald 640"


@pytest.mark.slow
def test_a_verification_that_finds_damage_fails(host: Machine, root: Path) -> None:
    """A failed unit and a metric show it."""
    segment = f"{ROOT}/segments/{1:020}.wal.zst"
    host.sh(f"mv {segment} /srv/whole; echo damaged > {segment}")
    done = host.run("systemctl", "start", "wald-verify.service", check=False)
    host.sh(f"mv /srv/whole {segment}")
    assert done.returncode == 1
    assert f"{1:020}.wal.zst" in host.journal("wald-verify.service")
    eventually(lambda: re.search(r"^wald_last_verify_errors [1-9]", host.scraped(9464), re.MULTILINE))


def test_what_all_have_read_is_reclaimed(host: Machine, root: Path) -> None:
    """After the two before; of all groups only that of another user has not read everything."""
    host.sh("groupadd --system billing; usermod --append --groups billing wald")
    host.sh("useradd --system --groups wald,billing alice; systemctl restart wald")
    host.path("/etc/wald/wald.toml").write_text(SETTINGS + 'consumers = "billing"\n')
    host.run("systemctl", "reload", "wald.service")
    set_cursor = f"wald --root {ROOT} cursor set access --group billing"
    host.sh(f"{set_cursor} {LINES // 2}", user="alice")
    units.drop_in(host, "wald-reclaim.service", '[Service]\nEnvironment="OPTIONS=--grace 0 --metrics 127.0.0.1:9465"\n')
    assert len(list(root.glob("segments/*.zst"))) == 4
    host.run("systemctl", "start", "wald-reclaim.service")
    eventually(lambda: len(list(root.glob("segments/*.zst*"))) == 2)
    host.sh(f"{set_cursor} {LINES}", user="alice")
    eventually(lambda: not list(root.glob("segments/*.zst*")))
    eventually(lambda: "wald_reclaim" in host.scraped(9465))
    host.run("systemctl", "stop", "wald-reclaim.service")
    assert host.value("wald-reclaim.service", "Result") == "success"


def test_an_audit_without_java_fails_and_names_it(host: Machine) -> None:
    """A timer that was switched on where Java is missing has to be seen."""
    units.drop_in(host, "wald-audit.service", "[Service]\nInaccessiblePaths=-/usr/lib/jvm -/usr/bin/java\n")
    assert host.run("systemctl", "start", "wald-audit.service", check=False).returncode == 1
    assert "apt install default-jre-headless" in host.journal("wald-audit.service")


@pytest.mark.spark
def test_an_audit_proves_the_log(host: Machine) -> None:
    units.drop_in(host, "wald-audit.service", '[Service]\nEnvironment="OPTIONS=--json"\n')
    host.run("systemctl", "start", "wald-audit.service", seconds=300)
    assert json.loads(host.journal("wald-audit.service").split("\n{", 1)[1].join(["{", ""]).splitlines()[0])


def test_a_gate_keeps_keys_and_work_groups_in_the_log(host: Machine) -> None:
    host.run("systemctl", "start", "wald-gate.service")
    at_socket = "curl -sS --unix-socket /run/wald/gate.sock"
    host.sh(f"{at_socket} --fail -X POST http://log/v1/routes/jobs")
    keyed = "-H 'Idempotency-Key: a' -H 'Content-Type: text/plain' --data-binary one http://log/v1/routes/jobs/records"
    assert len({host.sh(f"{at_socket} --fail {keyed}") for _ in range(2)}) == 1
    group = "http://log/v1/routes/jobs/groups/work"
    cursor = '-X PUT --json \'{"sequence": "earliest"}\' http://log/v1/routes/jobs/cursors/work'
    host.sh(f"{at_socket} --fail {cursor}")
    leased = host.sh(f'{at_socket} --json \'{{"worker": "ann"}}\' {group}/lease')
    (record,) = json.loads(leased)["records"]
    done = f'{{"worker": "ann", "sequences": [{record["sequence"]}]}}'
    assert host.sh(f"{at_socket} --json '{done}' {group}/ack") == '{"refused":[]}'
    host.run("systemctl", "stop", "wald-gate.service", "wald-gate.socket")


def test_nothing_is_writable_but_the_log(host: Machine) -> None:
    """Inside the daemon's sandbox, the log's user cannot write to the rest of the machine."""
    for place in ("/etc/wald/x", "/usr/x", "/var/x", "/run/x"):
        assert "Read-only" in _inside(host, f"touch {place}") or "denied" in _inside(host, f"touch {place}")
    assert _inside(host, f"touch {ROOT}/ledger/x && rm {ROOT}/ledger/x") == ""


def _inside(host: Machine, script: str) -> str:
    """Return the output of a shell in the daemon's sandbox, as its user."""
    target = f"--target={host.value('wald', 'MainPID')}"
    entering = ["nsenter", target, "--mount", "setpriv", "--reuid=wald", "--regid=wald", "--clear-groups"]
    return host.run(*entering, "sh", "-c", script, check=False).stderr

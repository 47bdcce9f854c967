"""Pods of the manifests in k8s/: each container runs as written, in the order of a node."""

import hashlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kubelet
import programs
import pytest
from contents import values
from full_disk import fill, small_file_system
from kubelet import Pod, give
from kustomize import of_kind, pods
from running import eventually, run, sidecar

from wald.errors import Locked

pytestmark = pytest.mark.slow

GROUP = 10001
LOG = "/var/lib/wald/log"
FIFO = f"{LOG}/routes/access/in"
LINES = 3000
WRITE = f'i=0; while [ $i -lt {LINES} ]; do i=$((i + 1)); echo "bulk $i"; done >{FIFO}'
STORE = """
import ssl, sys, urllib.request as r
trusting = ssl.create_default_context(cafile="/etc/wald-gate/tls/tls.crt")
headers = {"Content-Type": "text/plain", "Authorization": f"Bearer {sys.argv[1]}"}
request = r.Request("https://localhost:7700/v1/routes/access/records", sys.argv[2].encode(), headers)
print(r.urlopen(request, context=trusting).read().decode())
"""
HEALTH = "from urllib.request import urlopen; print(urlopen('http://127.0.0.1:9464/healthz').read())"
Start = Callable[..., Pod]


@pytest.fixture
def volumes(tmp_path: Path) -> dict[str, Path]:
    """The volume of each claim, by name; it outlives pods."""
    paths = {name: tmp_path / f"volume-{name}" for name in ("root", "archive", "wald", "wald-archive")}
    for path in paths.values():
        path.mkdir()
        give(path, GROUP)
    return paths


@pytest.fixture
def pod(tmp_path: Path, volumes: dict[str, Path]) -> Iterator[Start]:
    """Make the pods of an overlay, by the name of their owner."""
    if reason := kubelet.lack():
        programs.lack(reason)
    made: list[Pod] = []

    def make(overlay: str, owner: str = "StatefulSet wald") -> Pod:
        (config,) = of_kind(overlay, "ConfigMap")
        maps = {config["metadata"]["name"]: config["data"]} | (secrets(tmp_path) if overlay == "gate" else {})
        template = dict(pods(overlay))[owner]
        claims = {} if overlay == "pod" else volumes
        made.append(Pod(template, tmp_path / f"pod-{len(made)}", claims=claims, maps=maps))
        return made[-1]

    yield make
    for each in made:
        each.__exit__(None, None, None)


def secrets(directory: Path) -> dict[str, dict[str, str]]:
    """Secrets that docs/kubernetes.md asks for: a certificate, and a token that is "secret"."""
    key, certificate = directory / "tls.key", directory / "tls.crt"
    openssl = programs.program("openssl")
    line = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    line += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(line, check=True, capture_output=True)
    token = {"name": "shop", "sha256": hashlib.sha256(b"secret").hexdigest(), "read": ["*"], "write": ["access"]}
    return {
        "wald-gate-tls": {path.name: path.read_text() for path in (key, certificate)},
        "wald-gate-tokens": {"tokens": json.dumps(token) + "\n"},
    }


def numbers(lines: list[str], word: str) -> list[int]:
    """The numbers of the lines that begin with a word, as they come."""
    return [int(line.split()[1]) for line in lines if re.fullmatch(rf"{word} \d+", line)]


def assert_whole(lines: list[str]) -> None:
    """Every line of the example application is there once and in order, and its last one, which has no end."""
    count = int(lines[-1].removeprefix("stopped after "))

    assert numbers(lines, "line") == list(range(1, count + 1))


def is_pending(process: int, number: signal.Signals) -> bool:
    """Return True if a process has a pending signal."""
    pending = re.search(r"^ShdPnd:\t(\w+)$", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    return pending is not None and bool(int(pending[1], 16) >> (number - 1) & 1)


def test_a_buffer_beside_an_application_hands_over_all_of_it(pod: Start) -> None:
    """Including lines written while the daemon is down, and the application's last line."""
    buffer = pod("pod")
    buffer.start()
    eventually(lambda: "line 1\n" in buffer.stdout("drain"))
    assert buffer.run("application", "sh", "-c", f"({WRITE}) &").returncode == 0
    eventually(lambda: "bulk 10\n" in buffer.stdout("drain"))
    buffer.restart("wald")
    eventually(lambda: f"bulk {LINES}\n" in buffer.stdout("drain"))
    codes = buffer.stop()

    lines = buffer.stdout("drain").splitlines()
    assert codes == dict.fromkeys(("application", "drain", "hold", "reclaim", "wald"), 0)
    assert numbers(lines, "bulk") == list(range(1, LINES + 1))
    assert_whole([line for line in lines if not line.startswith("bulk")])


def test_a_buffer_hands_over_what_its_drain_was_too_slow_for(pod: Start) -> None:
    """The drain is stopped until the daemon has ended and SIGTERM has come."""
    buffer = pod("pod")
    buffer.start()
    eventually(lambda: "line 1\n" in buffer.stdout("drain"))
    _, drain = buffer.processes("drain")
    os.kill(drain, signal.SIGSTOP)
    with ThreadPoolExecutor() as stopping:
        codes = stopping.submit(buffer.stop)
        eventually(lambda: is_pending(drain, signal.SIGTERM))
        os.kill(drain, signal.SIGCONT)

    assert set(codes.result().values()) == {0}
    assert_whole(buffer.stdout("drain").splitlines())


def test_a_log_outlives_its_pod_and_is_archived(pod: Start, volumes: dict[str, Path]) -> None:
    """Its records were drained once and in order; each is in the archive, in the log, or in both."""
    lives = [pod("single"), pod("single")]
    for life, bundles in zip(lives, ("1 bundle", "2 bundles"), strict=True):
        life.start()
        eventually(lambda: f"OK: {bundles} proven" in life.stdout("archive"))  # noqa: B023  # waited for at once
        assert set(life.stop().values()) == {0}
        assert_whole(life.stdout("drain").splitlines())
        assert [life.stderr(name) for name in ("application", "archive", "hold", "reclaim")] == [""] * 4

    lines = "".join(life.stdout("drain") for life in lives).splitlines()
    archived = run(sidecar("archive", "restore", volumes["archive"], "access")).stdout.decode().splitlines()
    held = [value.decode() for value in values(volumes["root"] / "log")]
    assert lines == archived + held[len(held) - (len(lines) - len(archived)) :]


def test_a_gate_takes_records_over_tls_with_a_token(pod: Start) -> None:
    """It survives a restart of the daemon, is not ready during it, and stops in order."""
    served = pod("gate")
    served.start()
    assert '"count":1' in served.run("gate", "python", "-c", STORE, "secret", "over https").stdout
    eventually(lambda: "over https" in served.stdout("drain").splitlines())
    assert "401" in served.run("gate", "python", "-c", STORE, "guess", "x").stderr
    daemon, *_ = served.processes("wald")
    os.kill(daemon, signal.SIGSTOP)
    eventually(lambda: not served.probe("gate", "readiness"))
    assert served.probe("gate", "liveness")
    served.restart("wald")
    eventually(lambda: served.probe("gate", "readiness"))
    assert '"count":1' in served.run("gate", "python", "-c", STORE, "secret", "and again").stdout
    codes = served.stop()

    assert set(codes.values()) == {0}
    assert [line for line in served.stdout("drain").splitlines() if not line.startswith("line")][:2] == [
        "over https",
        "and again",
    ]


def test_a_second_daemon_on_the_volume_is_refused(pod: Start) -> None:
    """This happens after a forced deletion, with the first daemon still running."""
    first, second = pod("single"), pod("single")
    first.start()

    assert second.begin("wald").wait() == Locked.exit_code
    eventually(lambda: "line 1\n" in first.stdout("drain"))


def test_jobs_archive_and_audit_beside_the_daemon(pod: Start, volumes: dict[str, Path]) -> None:
    node = pod("node")
    node.start()
    assert node.run("hold", "sh", "-c", f"echo one >{FIFO}").returncode == 0
    eventually(lambda: values(volumes["wald"] / "log") == [b"one"])
    pod("node", "CronJob wald-archive").run_to_end()
    pod("node", "CronJob wald-audit").run_to_end()
    (bundle,) = volumes["wald-archive"].glob("access/*/data/*.tar.zst")
    bundle.write_bytes(b"damaged")
    audit = pod("node", "CronJob wald-audit")

    with pytest.raises(AssertionError):
        audit.run_to_end()
    assert str(bundle.name) in audit.stdout("archive")
    assert set(node.stop().values()) == {0}


def test_a_full_disk_restarts_nothing(pod: Start, volumes: dict[str, Path], tmp_path: Path) -> None:
    """Input waits, and the pod keeps running: a restart would not free space."""
    with small_file_system(tmp_path / "small", 64 << 20) as small:
        volumes["wald"] = give(small, GROUP)
        full = pod("node")
        full.start()
        fill(small / "others")

        eventually(lambda: "degraded" in full.run("wald", "python", "-c", HEALTH).stdout)
        assert full.probe("wald", "readiness")
        assert full.probe("wald", "liveness")
        (small / "others").unlink()
        assert full.run("hold", "sh", "-c", f"echo one >{FIFO}").returncode == 0
        eventually(lambda: values(small / "log") == [b"one"])
        assert set(full.stop().values()) == {0}


def test_the_promises_hold_in_the_pod_which_is_ready_with_what_producers_open(
    pod: Start, volumes: dict[str, Path]
) -> None:
    # The doctor finds that the promises hold in the pod.
    node = pod("node")
    node.start()
    examined = node.run("wald", "wald", "doctor")
    assert [line for line in examined.stdout.splitlines() if line.startswith(("fail", "unknown"))] == []
    assert examined.returncode in (0, 14), "14: a warning about the clock of this machine, for instance"

    # A pod without what producers open is not ready.
    socket = volumes["wald"] / "log/wald.sock"
    socket.rename(socket.with_name("moved"))
    assert not node.probe("wald", "readiness")
    assert node.probe("wald", "liveness")


def test_the_service_serves_metrics_and_an_application_can_write_to_the_log_and_change_nothing_of_it(
    pod: Start,
) -> None:
    # Every port of the service serves metrics.
    buffer = pod("pod")
    buffer.start()
    (service,) = of_kind("pod", "Service")
    for port in [each["port"] for each in service["spec"]["ports"]]:
        ask = f"from urllib.request import urlopen; print(urlopen('http://127.0.0.1:{port}/metrics').read().decode())"
        eventually(lambda ask=ask: "# TYPE wald_" in buffer.run("application", "python", "-c", ask).stdout)  # type: ignore[misc]

    # An application can write to the log and change nothing of it.
    attempts = (f"echo 9 >{LOG}/head", f"rm {FIFO}", f"mv {FIFO} {LOG}/in", f"touch {LOG}/new", f"chmod 777 {FIFO}")
    for attempt in attempts:
        refused = buffer.run("application", "sh", "-c", attempt)
        assert (refused.returncode != 0, "Read-only" in refused.stderr) == (True, True), attempt
    for way in (f"echo by pipe >{FIFO}", f"echo by socket | wald --root {LOG} append access"):
        assert buffer.run("application", "sh", "-c", way).returncode == 0
    eventually(lambda: {"by pipe", "by socket"} <= set(buffer.stdout("drain").splitlines()))

"""A pod as a node runs it, without an engine: a manifest's containers in namespaces, in the order of the kubelet.

Each container has separate processes and mounts. Its image is this machine's file system, read-only. It can write only
to its volumes, runs as its user and the pod's group without capabilities, and has the environment of its manifest. The
network is the pod's. Seccomp, control groups and automatic restarts are left out.

Native sidecars start one after the other, each after the startup probe of the previous one; then the containers start.
At the end all preStop hooks run at once, the containers get SIGTERM, and then the sidecars, from the last to the first.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from kustomize import Object
from programs import missing
from running import eventually

_CONTAINER = """
mount --make-rprivate /
mount -t tmpfs tmpfs "$AT"
cd "$AT"
mkdir upper work root
mount -t overlay overlay -o lowerdir=/,upperdir=upper,workdir=work root
echo "$MOUNTS" | while read -r source path mode; do mkdir -p "root$path"; done
for directory in $PASSED; do chmod a+x "root$directory"; done
mount -o remount,ro root
mount -t proc proc root/proc
mount --rbind /dev root/dev
echo "$MOUNTS" | while read -r source path mode; do
    mount --bind "$source" "root$path"
    if [ "$mode" = ro ]; then mount -o remount,bind,ro "root$path"; fi
done
exec chroot root "$@"
"""
_ASK = """
import ssl, sys, urllib.request as r
unchecked = ssl._create_unverified_context()  # as the kubelet asks
r.urlopen(sys.argv[1], timeout=float(sys.argv[2]), context=unchecked).read()
"""
_PROGRAMS = Path(sys.executable).parent
# An image gives every user access to the interpreter and its imports through these directories.
_PASSED = [*Path(sys.executable).resolve().parents, *Path(__file__).resolve().parents]


def lack() -> str:
    """Return the reason why no pod can run here, or ""."""
    if os.geteuid() != 0:
        return "only root can run a pod"
    return missing("nsenter", "ip")


class Pod:
    """A pod of a manifest; leaving a ``with`` block kills it if it still runs."""

    def __init__(
        self, template: Object, directory: Path, *, claims: Mapping[str, Path], maps: Mapping[str, Mapping[str, str]]
    ) -> None:
        self._spec = template["spec"]
        self._directory = directory
        directory.mkdir(parents=True)
        self._claims = claims
        self._volumes = dict(claims) | {each["name"]: self._volume(each, maps) for each in self._spec["volumes"]}
        self._containers = {each["name"]: each for each in self._all}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._pause = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "ip link set lo up && echo up && exec sleep infinity"],
            stdout=subprocess.PIPE,
        )
        assert self._pause.stdout is not None
        assert self._pause.stdout.readline() == b"up\n"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._running:
            with contextlib.suppress(OSError, ValueError):  # it has ended, or not begun
                os.kill(self._first_process(name), signal.SIGKILL)  # `unshare` does not do so after a setpriv
        for process in [*self._running.values(), self._pause]:
            process.kill()
            process.wait()
        assert self._pause.stdout is not None
        self._pause.stdout.close()

    def start(self) -> None:
        """Start it, and return when it is ready."""
        for container in self._spec.get("initContainers", ()):
            name = container["name"]
            self.begin(name)
            if container.get("restartPolicy") != "Always":
                assert self._running.pop(name).wait() == 0, self.stderr(name)
            elif "startupProbe" in container:
                eventually(lambda name=name: self._has_started(name))  # type: ignore[misc]  # bound at once
        for container in self._spec["containers"]:
            self.begin(container["name"])
        for name in [each["name"] for each in self._all if "readinessProbe" in each]:
            eventually(lambda name=name: self.probe(name, "readiness"))  # type: ignore[misc]

    def begin(self, name: str) -> subprocess.Popen[bytes]:
        """Start or restart a container."""
        container = self._containers[name]
        at = self._directory / name
        at.mkdir(exist_ok=True)
        mounts = [
            f"{self._volumes[each['name']]} {each['mountPath']} {'ro' if each.get('readOnly') else 'rw'}"
            for each in container["volumeMounts"]
        ]
        apart = ["unshare", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "sh", "-euc"]
        net = ["nsenter", f"--net=/proc/{self._pause.pid}/ns/net"]
        line = [*net, *apart, _CONTAINER, "sh", *self._confined(container, container["command"])]
        with self._output(name, "out").open("ab") as out, self._output(name, "err").open("ab") as err:
            env = os.environ | {"AT": str(at), "MOUNTS": "\n".join(mounts), "PASSED": " ".join(map(str, _PASSED))}
            process = subprocess.Popen(line, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        self._running[name] = process
        eventually(lambda: process.poll() is not None or self._is_inside(name))
        return process

    def run_to_end(self) -> None:
        """Run the pod of a job until its containers have exited successfully."""
        self.start()
        for name, process in self._running.items():
            assert process.wait() == 0, self.stderr(name)
        self._running.clear()

    def restart(self, name: str) -> None:
        """Kill a container, like the OOM killer, and restart it."""
        os.kill(self._first_process(name), signal.SIGKILL)
        self._running[name].wait()
        self.begin(name)

    def stop(self) -> dict[str, int]:
        """Stop it in order; return the exit codes."""
        ends = time.monotonic() + self._spec["terminationGracePeriodSeconds"]
        with ThreadPoolExecutor() as hooks:
            done = list(hooks.map(self._pre_stop, self._all))
        assert done == [0] * len(done)
        codes = self._terminate([each["name"] for each in self._spec["containers"]], ends)
        for container in reversed(self._spec.get("initContainers", ())):
            if container.get("restartPolicy") == "Always":
                codes |= self._terminate([container["name"]], ends)
        return codes

    def probe(self, name: str, question: str) -> bool:
        """Return True if a container's probe succeeds."""
        container = self._containers[name]
        probe = container[f"{question}Probe"]
        if "exec" in probe:
            return self.run(name, *probe["exec"]["command"]).returncode == 0
        (port,) = (each["containerPort"] for each in container["ports"] if each["name"] == probe["httpGet"]["port"])
        scheme = probe["httpGet"].get("scheme", "HTTP").lower()
        url = f"{scheme}://127.0.0.1:{port}{probe['httpGet']['path']}"
        net = ["nsenter", f"--net=/proc/{self._pause.pid}/ns/net"]
        ask = [sys.executable, "-c", _ASK, url, str(probe["timeoutSeconds"])]
        return subprocess.run([*net, *ask], capture_output=True, check=False).returncode == 0

    def run(self, name: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a container, as its user."""
        flags = ["--mount", "--pid", "--uts", "--ipc", "--net", "--root", "--wdns=/"]
        line = ["nsenter", "--target", str(self._first_process(name)), *flags]
        line += self._confined(self._containers[name], command)
        return subprocess.run(line, capture_output=True, text=True, check=False)

    def processes(self, name: str) -> list[int]:
        """Return the first process of a container, and its descendants."""
        first = self._first_process(name)
        return [first, *_children(first)]

    def stdout(self, name: str) -> str:
        return self._output(name, "out").read_text()

    def stderr(self, name: str) -> str:
        return self._output(name, "err").read_text()

    @property
    def _all(self) -> list[Object]:
        return [*self._spec.get("initContainers", ()), *self._spec["containers"]]

    def _output(self, name: str, stream: str) -> Path:
        return self._directory / f"{name}.{stream}"

    def _has_started(self, name: str) -> bool:
        assert self._running[name].poll() is None, self.stderr(name)
        return self.probe(name, "startup")

    def _confined(self, container: Object, command: Iterable[str]) -> Sequence[str]:
        """Return a command line with the user and the environment of a container."""
        pod, own = self._spec["securityContext"], container["securityContext"]
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert own["allowPrivilegeEscalation"] is False
        assert own["readOnlyRootFilesystem"] is True
        user = [f"--reuid={own.get('runAsUser', pod['runAsUser'])}", f"--regid={pod['runAsGroup']}"]
        none = ["--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"]
        env = [
            f"PATH={_PROGRAMS}:/usr/bin:/bin",
            *(f"{each['name']}={each['value']}" for each in container.get("env", ())),
        ]
        return ["setpriv", *user, f"--groups={pod['fsGroup']}", *none, "env", "-i", *env, *command]

    def _is_inside(self, name: str) -> bool:
        """Return True if a container has entered its file system."""
        try:
            return os.readlink(f"/proc/{self._first_process(name)}/root") != "/"
        except (OSError, ValueError):  # it has not begun, or has ended
            return False

    def _first_process(self, name: str) -> int:
        """Return the first process of a container, which receives signals."""
        (first,) = _children(self._running[name].pid)
        return first

    def _pre_stop(self, container: Object) -> int:
        hook = container.get("lifecycle", {}).get("preStop")
        return self.run(container["name"], *hook["exec"]["command"]).returncode if hook else 0

    def _terminate(self, names: Sequence[str], ends: float) -> dict[str, int]:
        for name in names:
            os.kill(self._first_process(name), signal.SIGTERM)
        eventually(
            lambda: all(self._running[name].poll() is not None for name in names), timeout=ends - time.monotonic()
        )
        return {name: self._running.pop(name).wait() for name in names}

    def _volume(self, volume: Object, maps: Mapping[str, Mapping[str, str]]) -> Path:
        """Return the directory of a volume."""
        if "persistentVolumeClaim" in volume:
            return self._claims[volume["persistentVolumeClaim"]["claimName"]]
        directory: Path = self._directory / "volumes" / volume["name"]
        directory.mkdir(parents=True)
        for name, text in maps[volume["configMap"]["name"]].items() if "configMap" in volume else ():
            (directory / name).write_text(text)
        for name, text in maps[volume["secret"]["secretName"]].items() if "secret" in volume else ():
            path = directory / name
            path.write_text(text)
            os.chown(path, 0, self._spec["securityContext"]["fsGroup"])
            path.chmod(volume["secret"]["defaultMode"])
        if "emptyDir" in volume:
            give(directory, self._spec["securityContext"]["fsGroup"])
        return directory


def give(directory: Path, group: int) -> Path:
    """Give a new volume to the group of a pod, as the kubelet does."""
    os.chown(directory, 0, group)
    directory.chmod(0o2775)
    return directory


def _children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]

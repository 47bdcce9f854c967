"""The Containerfile: its steps build an image that runs, with the documented properties."""

import json
import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import kubelet
import programs
import pytest
from kustomize import containers, pods

import wald

CONTEXT = Path(__file__).parents[2]
_OVERLAY = """
mount --make-rprivate /
mount -t tmpfs tmpfs "$AT"
cd "$AT"
for stage in build final; do
    mkdir -p $stage/upper $stage/work $stage/root
    mount -t overlay overlay -o lowerdir=/,upperdir=$stage/upper,workdir=$stage/work $stage/root
    mount -t proc proc $stage/root/proc
    mount --rbind /dev $stage/root/dev
done
echo mounted
exec sleep infinity
"""
_FINAL = "final"


def instructions() -> list[tuple[str, str]]:
    """Return each instruction of the Containerfile with its arguments, in order."""
    text = re.sub(r"^#.*\n", "", (CONTEXT / "Containerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n", " ", text).splitlines()
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines if line]


def environment() -> dict[str, str]:
    """Return the variables that a container starts with."""
    (variables,) = (arguments for name, arguments in instructions() if name == "ENV")
    return dict(each.split("=", 1) for each in shlex.split(variables))


class Image:
    """The Containerfile without an engine: its steps run unchanged on a temporary file system.

    The base is this machine's file system with an overlay in memory: later steps see the files of earlier ones, and the
    machine does not. Every stage starts from the base, because a stage only copies files from another one. The last one
    is the image.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._holder = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "sh", "-euc", _OVERLAY],  # ends with these tests
            env=os.environ | {"AT": str(directory)},
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"mounted\n"

    def build(self) -> None:
        """Run every step."""
        stage, at = "", "/"
        for name, arguments in instructions():
            if name == "FROM":
                stage, at = arguments.partition(" AS ")[2] or _FINAL, "/"
            elif name == "WORKDIR":
                at = arguments
                self._inside(f'mkdir -p "{stage}/root{at}"')
            elif name == "COPY":
                self._copy(stage, at, shlex.split(arguments))
            elif name == "RUN":
                self._inside(f"exec chroot {stage}/root sh -euc {shlex.quote(f'cd {at}; {arguments}')}")

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the image, as its user and with its variables."""
        (user,) = (arguments for name, arguments in instructions() if name == "USER")
        uid, gid = user.split(":")
        confined = ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--bounding-set=-all"]
        variables = [f"{name}={value}" for name, value in environment().items()]
        line = [*confined, "env", "-i", *variables, *command]
        return self._enter(f"exec chroot {_FINAL}/root {shlex.join(line)}")

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()
        assert self._holder.stdout is not None
        self._holder.stdout.close()

    def _copy(self, stage: str, at: str, arguments: list[str]) -> None:
        source = str(CONTEXT)
        if arguments[0].startswith("--from="):
            source = f"{arguments.pop(0).removeprefix('--from=')}/root"
        *names, to = arguments
        target = f"{stage}/root{to if to.startswith('/') else f'{at}/{to}'}"
        for name in names:
            path = f"{source}/{name.lstrip('/')}"
            copy = f'cp -a "{path}/." "{target}"' if not to.endswith("/") else f'cp -a "{path}" "{target}"'
            self._inside(f'mkdir -p "{target}" && {copy}')

    def _inside(self, script: str) -> None:
        done = self._enter(script)
        assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"

    def _enter(self, script: str) -> subprocess.CompletedProcess[str]:
        line = ["nsenter", "--target", str(self._holder.pid), "--mount", f"--wdns={self._directory}"]
        env = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "http", "no_"))}
        env["PATH"] = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        return subprocess.run([*line, "sh", "-euc", script], env=env, capture_output=True, text=True, check=False)


PROJECT = tomllib.loads((CONTEXT / "pyproject.toml").read_text())
PROGRAMS: list[str] = sorted(PROJECT["project"]["scripts"])

PROGRAMS_AT = Path(environment()["PATH"].split(":")[0])


def arguments_of(name: str) -> list[str]:
    return [arguments for instruction, arguments in instructions() if instruction == name]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    if reason := kubelet.lack():
        programs.lack(reason)
    built = Image(tmp_path_factory.mktemp("image"))
    try:
        built.build()
        yield built
    finally:
        built.close()


def test_it_runs_as_the_user_of_the_manifests_with_their_commands_and_what_it_copies() -> None:
    # It runs as the user of the manifests.
    (user,) = arguments_of("USER")
    security = [template["spec"]["securityContext"] for _, template in pods("node")]
    assert {f"{each['runAsUser']}:{each['runAsGroup']}" for each in security} == {user}
    assert arguments_of("STOPSIGNAL") == ["SIGTERM"]
    assert arguments_of("HEALTHCHECK") == []

    # The build gets what it copies and nothing else.
    ignored, *allowed = [
        line for line in (CONTEXT / ".containerignore").read_text().splitlines() if line and line[0] != "#"
    ]
    copied = {name for each in arguments_of("COPY") if not each.startswith("--from") for name in each.split()[:-1]}
    assert ignored == "*"
    assert {line[1:] for line in allowed if line[0] == "!"} == copied

    # Every command of the manifests is found in it.
    commands = {
        each["command"][0]
        for overlay in ("node", "pod", "single")
        for _, template in pods(overlay)
        for each in containers(template)
    }
    assert commands - {"sh"} <= set(PROGRAMS)
    assert f"COPY --from=build {PROGRAMS_AT.parent} {PROGRAMS_AT.parent}" in (CONTEXT / "Containerfile").read_text()


@pytest.mark.slow
def test_the_image_runs_every_program_writes_a_log_and_cannot_be_changed(image: Image) -> None:
    # Every program answers.
    for program in PROGRAMS:
        done = image.run(program, "--version")
        assert (done.returncode, done.stderr) == (0, "")
        assert wald.__version__ in done.stdout

    # A log is made written and read.
    script = "printf 'one\\ntwo\\n' | wald run --stdin access && wald read access"
    done = image.run("sh", "-euc", script)
    assert done.stdout == "one\ntwo\n", done.stderr
    assert image.run("stat", "--format=%U:%G %a", "/var/lib/wald").stdout == "wald:wald 2750\n"

    # It has what the lock has and no installer.
    ask = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    found: dict[str, str] = json.loads(image.run("python", "-c", ask).stdout)
    pinned = dict(
        re.findall(r"^([a-z0-9-]+)==([^ ]+)", (CONTEXT / "requirements-runtime.lock").read_text(), re.MULTILINE)
    )
    assert found.pop("wald") == wald.__version__
    assert {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found.items()}.items() <= pinned.items()
    assert {"s3fs", "rich"} <= set(found)

    # It is compiled and its user can change nothing.
    ask = "import wald.cli, pathlib; print(pathlib.Path(wald.cli.__cached__).exists())"
    writable = image.run("find", str(PROGRAMS_AT.parent), "-writable", "-not", "-type", "l")
    assert image.run("python", "-c", ask).stdout == "True\n"
    assert (writable.returncode, writable.stdout) == (0, "")

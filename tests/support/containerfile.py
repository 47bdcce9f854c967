"""The Containerfile without an engine: its steps run unchanged on a temporary file system.

The base is this machine's file system with an overlay in memory: later steps see the files of earlier ones, and the
machine does not. Every stage starts from the base, because a stage only copies files from another one.
"""

import os
import re
import shlex
import subprocess
from pathlib import Path

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
    """The file systems of the stages; the last one is the image."""

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

"""Programs as forks of a process that has already imported them.

An interpreter and our imports need a third of a second of processor time, most of a test that runs commands. A fork has
a separate environment, working directory and descriptors, changes its user like setpriv, and exits like the program.
Tests of interpreter start or of memory run ``python -m`` instead (:func:`forks`).
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import re
import runpy
import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

SETTINGS = ("WALD_", "ARCHIVE_", "_WALD_", "COMP_")  # the variables of the environment that only our programs read
_PROGRAMS = ("wald", "wald_archive", "wald_drain", "wald_gate", "wald_reclaim")
_SCRIPTS = {str(Path(__file__).with_name("owning.py"))}  # programs of the tests
_PACKAGES = ("wald.cli", "wald.daemon", "wald.work", *_PROGRAMS[1:])  # their late imports
# Codecs that json and sockets import late; another user may not be able to read the interpreter's directory.
_ENCODINGS = ("utf_16", "utf_16_be", "utf_16_le", "utf_32", "utf_32_be", "utf_32_le", "idna")
_USER = re.compile(r"\S*/setpriv --reuid=(\d+) --regid=(\d+) (?:--clear-groups|--groups=([\d,]+)) ")
_PR_SET_DUMPABLE = 4  # prctl(2)
_MESSAGE_BYTES = 1 << 17
_NUMBER_BYTES = 8
_DESCRIPTORS_MAX = 1 << 20
_NOT_GIVEN = -1  # as in subprocess
_template: list[tuple[socket.socket, subprocess.Popen[bytes]]] = []  # started by the first request


class Forked(subprocess.Popen[bytes]):
    """A process with the interface of Popen; it is a child of the template, which reports its exit status.

    An omitted standard stream is the null device.
    """

    def __init__(
        self,
        line: Sequence[str],
        *,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        env: Mapping[str, str],
    ) -> None:
        super().__init__(line, stdin=stdin, stdout=stdout, stderr=stderr, env=env)

    def _execute_child(self, args: Sequence[str], *rest: object) -> None:
        """Fork and close the other ends of the pipes, for :class:`subprocess.Popen`."""
        env, pipes = rest[5], [each for each in rest[9:15] if isinstance(each, int)]
        assert isinstance(env, dict)
        stdin, _, _, stdout, _, stderr = pipes
        reported, telling = socket.socketpair()
        with telling, open(os.devnull, "r+b", buffering=0) as null:
            standard = [null.fileno() if each == _NOT_GIVEN else each for each in (stdin, stdout, stderr)]
            settings = {name: value for name, value in env.items() if name.startswith(SETTINGS)}
            user, program = _user_and_program(args)
            asked = {"line": program[1:], "user": user, "env": settings, "cwd": os.getcwd()}
            message = json.dumps(asked).encode()
            socket.send_fds(_asking(), [message], [telling.fileno(), *standard])
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        self._reported = reported
        self.pid = _number(reported)

    def poll(self) -> int | None:
        """Return the exit code, or None if it is running."""
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit and return the code."""
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal; ignore a process that has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _ended(self, seconds: float | None) -> int | None:
        if self.returncode is None and _readable(self._reported, seconds):
            self.returncode = os.waitstatus_to_exitcode(_number(self._reported))
            self._reported.close()
        return self.returncode


def _readable(connection: socket.socket, seconds: float | None) -> bool:
    poller = select.poll()  # not select(2): descriptors may be above 1024 in a long run
    poller.register(connection, select.POLLIN)
    return bool(poller.poll(None if seconds is None else seconds * 1000))


def _number(connection: socket.socket) -> int:
    data = connection.recv(_NUMBER_BYTES)
    assert len(data) == _NUMBER_BYTES, "who waits for the process has been killed"
    return int.from_bytes(data, "little")


def run_forked(
    line: Sequence[str], *, stdin: bytes, env: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[bytes]:
    """Run like :func:`subprocess.run`; the output goes to files, so that it needs no reader."""
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(writing, "wb", buffering=0) as feed:
        with open(reading, "rb", buffering=0):
            process = Forked(line, stdin=reading, stdout=out.fileno(), stderr=err.fileno(), env=env)
        with suppress(BrokenPipeError):
            feed.write(stdin)
        feed.close()
        try:
            process.wait(timeout)
        finally:
            process.kill()
            process.wait()  # even after a timeout: only then are all its descriptors closed
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(line, process.wait(), out.read(), err.read())


def forks(line: Sequence[str], env: Mapping[str, str]) -> bool:
    """Return True if a command line can run as a fork: our program, any user, no settings but ours."""
    _, program = _user_and_program(line)
    ours = program[:1] == [sys.executable] and (
        program[1] in _SCRIPTS or (program[1] == "-m" and program[2] in _PROGRAMS)
    )
    return ours and all(name.startswith(SETTINGS) or os.environ.get(name) == value for name, value in env.items())


def _user_and_program(line: Sequence[str]) -> tuple[list[int], list[str]]:
    """Return the user, group and further groups of the setpriv prefix, and the rest of the command line."""
    if match := _USER.match(" ".join([*line[:4], ""])):
        return [int(number) for number in re.findall(r"\d+", " ".join(filter(None, match.groups())))], list(line[4:])
    return [], list(line)


def _act_as(user: int, group: int, *groups: int) -> None:
    """Become another user permanently; as after the exec(2) of setpriv, /proc/self belongs to that user."""
    os.setgroups(groups)
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


def _asking() -> socket.socket:
    """Return the connection to the template."""
    if not _template:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            env = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
            line = [sys.executable, __file__, str(theirs.fileno())]
            process = subprocess.Popen(line, stdin=subprocess.DEVNULL, env=env, pass_fds=[theirs.fileno()])
        _template.append((ours, process))
    return _template[0][0]


def _serve(asking: socket.socket) -> None:
    """Fork each requested program and report its pid and exit status, until no client remains."""
    gc.freeze()  # objects that are never traversed are never copied
    events = select.poll()
    events.register(asking, select.POLLIN)
    running: dict[int, tuple[int, int]] = {}  # pidfd → pid, and where its exit status is awaited
    while True:
        for event, _ in events.poll():
            if event in running:
                events.unregister(event)
                pid, reporting = running.pop(event)
                _report(reporting, os.waitpid(pid, 0)[1])
                os.close(reporting)
                os.close(event)
                continue
            message, descriptors, _, _ = socket.recv_fds(asking, _MESSAGE_BYTES, 8)
            if not message:
                return
            reporting, *standard = descriptors
            pid = os.fork()
            if pid == 0:
                _become(message, standard)
                return
            for descriptor in standard:
                os.close(descriptor)
            _report(reporting, pid)
            handle = os.pidfd_open(pid)
            running[handle] = (pid, reporting)
            events.register(handle, select.POLLIN)


def _report(reporting: int, number: int) -> None:
    with suppress(BrokenPipeError):  # the test has ended
        os.write(reporting, number.to_bytes(_NUMBER_BYTES, "little"))


def _become(message: bytes, standard: list[int]) -> None:
    """Run as the program, with its standard streams and without the descriptors of others."""
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
    os.closerange(3, _DESCRIPTORS_MAX)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    asked = json.loads(message)
    os.chdir(asked["cwd"])
    os.environ.update(asked["env"])
    if asked["user"]:
        _act_as(*asked["user"])
    sys.argv = asked["line"]
    _run()


def _run() -> None:
    """Run a program and exit like an interpreter, but leave the memory to the system.

    Freeing each object would write to each page shared with the template: six times the cost of everything else.
    """
    code: int | None = None
    try:
        if sys.argv[0] == "-m":
            del sys.argv[0]
            runpy.run_module(f"{sys.argv[0]}.__main__", run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        code = ended.code
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        sys.exit(code)  # reported by the interpreter
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    for package in _PACKAGES:
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    # Another user may not have access to the standard library of this interpreter.
    for module_name in (*(f"encodings.{encoding}" for encoding in _ENCODINGS), "crc32c"):
        importlib.import_module(module_name)
    _serve(socket.socket(fileno=int(sys.argv[1])))

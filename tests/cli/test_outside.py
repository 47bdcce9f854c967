"""No program writes outside its log and archive, and none creates anything writable for all users."""

import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest
from running import TIMEOUT_SECONDS, Daemon, command, output_of, refusal_of, run, sidecar, wald
from tracing import strace

from wald.errors import Damaged, InvalidInput
from wald.files.layout import Root

_TRACED = "%file,fchmod,fchown,ftruncate,bind"
_SETTINGS = {"WALD_SEGMENT_MAX_BYTES": "1MiB", "WALD_FREE_SPACE_MIN": "0"}
_TORN = b"torn" * 10


@dataclass
class Life:
    """A log, an archive of it, and methods to run its programs."""

    root: Path
    archive: Path
    umask: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    traces: Path | None = None
    failed: list[str] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)

    def live(self) -> None:
        """Run each program once: with a daemon, then with one that finds the traces of a crash."""
        self._run(command("init", "--root", self.root))
        with self._daemon() as daemon:
            if daemon.wait_or_ready():
                self._beside_a_daemon()
            daemon.kill()
        active = max(self.root.glob("segments/*.wal"), default=None)
        if active is not None and not active.is_symlink() and not active.parent.is_symlink():
            with active.open("r+b") as file:  # a crash leaves bytes after the last batch
                file.seek(len(active.read_bytes().rstrip(b"\0")) + 8)
                file.write(_TORN)
        with self._daemon() as daemon:
            if daemon.wait_or_ready():
                daemon.stop()
        self._without_a_daemon()

    def _beside_a_daemon(self) -> None:
        root = ("--root", self.root)
        for route in ("r", "x"):
            self._run(command("route", "add", *root, route))
        self._run(command("route", "add", *root, "f", "--fifo"))
        self._run(command("route", "add", *root, "c", "--consumers", os.getgid()))
        self._run(command("append", *root, "c"), stdin=b"x\n")
        self._run(command("cursor", "set", *root, "c", 0, "--group", "g"))
        for _ in range(2):
            self._run(command("append", *root, "r"), stdin=b"one\ntwo\nthree\n")
            self._run(command("cut", *root))
        self._run(command("append", *root, "r"), stdin=b"l" * (300 << 10) + b"\n")
        with suppress(OSError), open(os.open(self.root / "routes/f/in", os.O_WRONLY | os.O_NONBLOCK), "wb") as fifo:
            fifo.write(b"line\n")
        self._run(command("route", "retire", *root, "x"))
        self._run(command("cursor", "set", *root, "r", 1, "--group", "g"))
        self._run(command("cursor", "remove", *root, "r", "--group", "g"))
        self._run(sidecar("drain", "r", *root, "--group", "d", "--tries", 1, "--exit-at-end", "--", "false"))
        self._run(sidecar("drain", "r", *root, "--exit-at-end", "--", "cat"))
        self._archive()

    def _without_a_daemon(self) -> None:
        root = ("--root", self.root)
        self._run(command("route", "add", *root, "x"))
        self._run(command("route", "add", *root, "y", "--fifo"))
        self._run(command("route", "retire", *root, "y"))
        self._run(command("cursor", "set", *root, "r", 1, "--group", "s"))
        self._run(command("verify", *root))
        self._archive()

    def _archive(self) -> None:
        dest = ("--dest", self.archive)
        self._run(sidecar("archive", "pack", "--root", self.root, *dest, "r", "--group", "a", "--engine", "local"))
        self._run(sidecar("archive", "verify", self.archive))
        self._run(sidecar("archive", "restore", self.archive, "r"))
        self._run(sidecar("reclaim", "--root", self.root, "--grace", "0s"))

    def _daemon(self) -> Daemon:
        return Daemon(self.root, env=self._settings, ready=False, prefix=self._prefix("-D"))

    def _run(self, line: Sequence[str], stdin: bytes = b"") -> None:
        if prefix := self._prefix():
            line, env = [*prefix, *line], os.environ | self._settings
            done = subprocess.run(line, input=stdin, env=env, capture_output=True, timeout=TIMEOUT_SECONDS, check=False)
        else:
            done = run(line, stdin=stdin, env=self._settings)
        assert b"Traceback" not in done.stderr, done.stderr.decode()
        if done.returncode:
            self.failed.append(f"{' '.join(line)}: {done.stderr.decode()}")

    @property
    def _settings(self) -> dict[str, str]:
        return {**_SETTINGS, **self.environment}

    def _prefix(self, *options: str) -> list[str]:
        prefix = [] if self.umask is None else ["sh", "-c", f'umask {self.umask:o}; exec "$@"', "sh"]
        if self.traces is None:
            return prefix
        path = self.traces / f"{next(self._numbers)}"
        return [*prefix, strace(), "-f", *options, "-y", "-e", f"trace={_TRACED}", "-o", str(path)]


_NUMBER = re.compile(r"\d+")
_HOSTILE = ("..", ".", "../x", "a/b", "/x", "a\nb", "-x", ".x", "x" * 128, "grün", "a b", "%2e%2e", "~", "$HOME", "")
_FOLDERS = ("segments", "routes", "ledger", "quarantine", "recovery")


def state(place: Path, *, without: tuple[Path, ...] = ()) -> dict[str, tuple[object, ...]]:
    """Map everything below ``place`` except ``without`` to its metadata and content, so that any change shows."""
    found: dict[str, tuple[object, ...]] = {}
    for path in (place, *place.rglob("*")):
        if any(path == each or each in path.parents for each in without):
            continue
        status = path.lstat()
        is_used = stat.S_ISFIFO(status.st_mode) or path in {each.parent for each in without}
        times = 0 if is_used else status.st_mtime_ns
        content = hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(status.st_mode) else ""
        found[str(path)] = (status.st_mode, status.st_uid, status.st_gid, status.st_ino, times, content)
    return found


# Links.


@pytest.fixture
def lived(tmp_path: Path) -> Path:
    """A directory with a log and its archive after every program has run on them."""
    place = tmp_path / "inside"
    place.mkdir()
    Life(place / "log", place / "archive").live()
    return place


def kinds(place: Path) -> Iterator[Path]:
    """Yield one path of each kind below ``place``: names that differ only in digits are of the same kind."""
    found: dict[str, Path] = {}
    for path in sorted(place.glob("*/**/*")):
        relative = path.relative_to(place)
        found.setdefault(_NUMBER.sub("0", str(relative)), relative)
    yield from found.values()


def replace(path: Path, target: Path, link: str) -> None:
    """Replace ``path`` with a link, either to the same file moved outside or to a target that does not exist."""
    target.parent.mkdir()
    if link == "to its like":
        path.rename(target)
        path.symlink_to(os.path.relpath(target, path.parent))
        return
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    path.symlink_to(target)


@pytest.mark.slow
@pytest.mark.parametrize("parity", [0, 1])
def test_no_link_leads_a_program_outside(lived: Path, tmp_path: Path, parity: int) -> None:
    """A link to its like or to nothing replaces each kind of file and directory of a log and an archive, in turn."""
    led = []
    for number, path in list(enumerate(kinds(lived)))[parity::2]:
        link = ("to its like", "to nothing")[number // 2 % 2]
        place, outside = tmp_path / f"{number}", tmp_path / f"{number}-outside"
        subprocess.run(["cp", "-a", lived, place], check=True)
        replace(place / path, outside / "target", link)
        before = state(outside)
        Life(place / "log", place / "archive").live()
        if state(outside) != before:
            led.append(str(path))
    assert led == []


@pytest.mark.parametrize("folder", _FOLDERS)
def test_a_directory_of_the_log_that_is_a_link_is_refused(tmp_path: Path, folder: str) -> None:
    """The daemon and every other program refuse it; only the root itself may be a link."""
    root, link = tmp_path / "log", tmp_path / "link"
    root.mkdir()
    link.symlink_to(root)
    output_of("init", "--root", link)
    (root / folder).rename(tmp_path / "outside")
    (root / folder).symlink_to(tmp_path / "outside")
    before = state(tmp_path / "outside")
    lines = [
        *(command(*words, "--root", root) for words in (["run"], ["init"], ["route", "add", "r"], ["verify"])),
        *(sidecar(*words, "--root", root) for words in (["reclaim"], ["archive", "pack", "r"])),
    ]
    for line in lines:
        done = run(line)
        assert done.returncode == Damaged.exit_code, (line, done.stderr)
        assert f"{root / folder}: is a symbolic link; wald does not write through links" in done.stderr.decode()
    assert state(tmp_path / "outside") == before


def test_a_link_is_not_a_route(tmp_path: Path) -> None:
    root, outside = tmp_path / "log", tmp_path / "outside"
    outside.mkdir()
    with Daemon(root) as daemon:
        (root / "routes/r").symlink_to(outside)
        before = state(outside)
        assert "is a symbolic link" in daemon.ask("ROUTE ADD r fifo")
        assert daemon.ask("PUB r 2\nx").startswith("ERR no-route ")
        assert daemon.ask("ROUTE RETIRE r").startswith("ERR no-route ")
        assert daemon.stop() == 0
    for words in (("route", "add", "r", "--fifo"), ("route", "retire", "r"), ("cursor", "set", "r", 0)):
        assert wald(*words, "--root", root).returncode != 0
    assert state(outside) == before


def test_the_mode_of_a_fifo_elsewhere_is_not_changed(tmp_path: Path) -> None:
    """A route's FIFO may be a link; the settings must then match the mode of its target."""
    root, outside = tmp_path / "log", tmp_path / "fifo"
    output_of("init", "--root", root)
    output_of("route", "add", "r", "--root", root)
    os.mkfifo(outside, 0o640)
    (root / "routes/r/in").symlink_to(outside)
    settings = tmp_path / "wald.toml"
    settings.write_text('[routes.r]\nfifo = true\nmode = "0620"\n')
    code, message, hint = refusal_of("run", "--root", root, "--config", settings)
    assert (code, "the mode of its target is not 0620" in message) == (InvalidInput.exit_code, True)
    assert hint == f"chmod 0620 {outside}"
    assert stat.S_IMODE(outside.stat().st_mode) == 0o640


# Names.


FEED = "wald_drain feed --exit-at-end"
WAYS = {  # {} is the name
    "route add": "wald route add --fifo -- {}",
    "route retire": "wald route retire -- {}",
    "append": "wald append -- {}",
    "stdin": "wald run --stdin={}",
    "route of a cursor": "wald cursor set -- {} 0",
    "group of a cursor": "wald cursor set --group={} r 0",
    "group removed": "wald cursor remove --group={} r",
    "drain": f"{FEED} {{}} -- cat",
    "group of drain": f"{FEED} --group={{}} r -- cat",
    "dead letters": f"{FEED} --dead-letter={{}} r -- cat",
    "archive": "wald_archive pack -- {}",
    "group of archive": "wald_archive pack --group={} r",
}


@pytest.mark.parametrize("way", WAYS)
def test_no_name_on_a_command_line_leads_outside(tmp_path: Path, way: str) -> None:
    root = tmp_path / "inside" / "log"
    root.parent.mkdir()
    output_of("init", "--root", root)
    output_of("route", "add", "r", "--root", root)
    before = state(tmp_path, without=(root,))
    for name in _HOSTILE if way == "route add" else ("..", "../x", "/x", "a\nb", ""):  # names have one parser
        module, *words = (word.replace("{}", name) for word in WAYS[way].split())
        run([sys.executable, "-m", module, *words], stdin=b"x\n", env={"WALD_ROOT": str(root)})
    assert state(tmp_path, without=(root,)) == before
    assert set(Root(root).route_names()) <= {"r", "dead_letter"}


def test_no_name_over_the_socket_or_in_the_settings_leads_outside(tmp_path: Path) -> None:
    # No name in the settings leads outside.
    settings = tmp_path / "wald.toml"
    for name in (*_HOSTILE, "a\0b"):
        quoted = name.replace("\n", "\\n").replace("\0", "\\u0000")
        settings.write_text(f'[routes."{quoted}"]\nfifo = true\n')
        code, _, _ = refusal_of("run", "--root", tmp_path / "log", "--config", settings)
        assert code == InvalidInput.exit_code, name
        assert os.listdir(tmp_path) == ["wald.toml"], name

    # No name over the socket leads outside: NUL bytes are rejected too; a name may have up to 127 bytes.
    root = tmp_path / "inside" / "log"
    root.parent.mkdir()
    with Daemon(root) as daemon:
        before = state(tmp_path, without=(root, daemon.log_path))
        for name in (*(name for name in _HOSTILE if name.split() == [name]), "a\0b"):
            for words in (f"ROUTE ADD {name} fifo", f"ROUTE RETIRE {name}", f"PUB {name} 2\nx"):
                assert daemon.ask(words).startswith("ERR "), words
        assert daemon.ask(f"ROUTE ADD {'x' * 127}").startswith("OK ")
        assert state(tmp_path, without=(root, daemon.log_path)) == before
    assert Root(root).route_names() == ["x" * 127]


def test_directories_that_can_be_no_routes_are_left_alone(tmp_path: Path) -> None:
    """Their contents do not matter."""
    root = tmp_path / "log"
    output_of("init", "--root", root)
    planted = root / "routes"
    for name in (".x", "-x", "a b", "a\nb", "grün", "x" * 128):
        (planted / name).mkdir()
        os.mkfifo(planted / name / "in")
        (planted / name / "processed.cursor").write_text("0\n")
    before = state(planted)
    with Daemon(root) as daemon:
        assert daemon.stop() == 0
    run(sidecar("reclaim", "--root", root))
    assert state(planted) == before


# The environment and the settings.


def test_the_socket_takes_the_place_of_nothing_else(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("precious")
    (outside / "directory").mkdir()
    (outside / "link").symlink_to("file")
    (outside / "link to nothing").symlink_to("nothing")
    before = state(outside)
    for path in outside.iterdir():
        code, message, _ = refusal_of("run", "--root", tmp_path / "log", env={"WALD_SOCKET": str(path)})
        assert (code, "the existing file is not a socket" in message) == (InvalidInput.exit_code, True)
    assert state(outside) == before


@pytest.mark.slow
def test_no_variable_of_the_environment_leads_outside(tmp_path: Path) -> None:
    """The variables name the usual places of temporary files, home directories and caches."""
    outside = tmp_path / "outside"
    names = ("TMPDIR", "TEMP", "TMP", "HOME", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME")
    for name in names:
        (outside / name).mkdir(parents=True)
    before = state(outside)
    place = tmp_path / "inside"
    place.mkdir()
    life = Life(place / "log", place / "archive", umask=0o22, environment={name: str(outside / name) for name in names})
    life.live()
    assert [each for each in life.failed if "-- false:" not in each] == []
    assert state(outside) == before


# Modes.

_MAKING = re.compile(r"\b(openat|open|creat|mkdir|mkdirat|mknod|mknodat|chmod|fchmod|fchmodat)\((.*)")
_MODE = re.compile(r", (?:S_IF[A-Z]+\|)?(0[0-7]*)(?=[), ])")
_WRITING = re.compile(r"O_WRONLY|O_RDWR|O_CREAT|O_TRUNC")
_CHANGING = re.compile(
    r"\b(mkdir|mkdirat|mknod|mknodat|chmod|fchmod|fchmodat|rename|renameat|renameat2|link|linkat|symlink|symlinkat|unlink"
    r"|unlinkat|rmdir|truncate|ftruncate|chown|fchown|lchown|fchownat|utimensat|setxattr|bind)\((.*)"
)
_APART = (
    "/dev/null",
    "/dev/tty",
    "/proc/self/comm",  # the name of the process itself
    "/proc/self/fd/",  # opened earlier below a known directory
)
_PATH = re.compile(r'"(/[^"]*)"|\d<(/[^>]*)>')


@pytest.mark.slow
@pytest.mark.parametrize("umask", [0o000, 0o077], ids=oct)
def test_nothing_is_ever_writable_for_all_nor_made_outside(tmp_path: Path, umask: int) -> None:
    """The test checks every system call that creates or changes something while all programs run."""
    place, traces = tmp_path / "inside", tmp_path / "traces"
    place.mkdir()
    traces.mkdir()
    life = Life(place / "log", place / "archive", umask=umask, traces=traces)
    life.live()
    assert [each for each in life.failed if "-- false:" not in each] == []

    calls = [line for trace in traces.iterdir() for line in trace.read_text().splitlines() if "= -1 E" not in line]
    made = [line for line in calls if _is_making(line)]
    assert len(made) > 50
    assert [line for line in made if (mode := _MODE.search(line)) and int(mode[1], 8) & 0o002] == []
    changed = [line for line in calls if _CHANGING.search(line) or ("open" in line and _WRITING.search(line))]
    paths = {first or second for line in changed for first, second in _PATH.findall(line.partition(" = ")[0])}
    cwd = os.getcwd()
    assert [path for path in paths if not path.startswith((str(place), *_APART)) and path != cwd] == []
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in place.rglob("*") if not path.is_symlink()}
    assert [path for path, mode in modes.items() if mode & 0o002] == []


def _is_making(line: str) -> bool:
    call = _MAKING.search(line)
    return call is not None and (not call[1].startswith("open") or "O_CREAT" in line or "O_TMPFILE" in line)

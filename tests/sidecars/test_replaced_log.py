"""Running programs detect that another log, or an older copy, has replaced their log."""

import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from copied_back import copy, copy_back
from running import TIMEOUT_SECONDS, Daemon, command, eventually, launched, output_of, sidecar

import wald

REPLACED = 16
OTHER, OLDER = "this is not the log that the process opened", "an older copy of the log was restored here"
ALL = ["1", "2", "3", "4", "5"]
GROUPS = {"plain": [], "workers": ["--workers", 2]}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def daemon(root: Path) -> Iterator[Daemon]:
    with Daemon(root) as daemon:
        yield daemon


def append(root: Path, *texts: str) -> None:
    output_of("route", "add", "--root", root, "a")
    output_of("append", "--root", root, "a", stdin="".join(f"{text}\n" for text in texts).encode())


def another_log(daemon: Daemon, root: Path) -> None:
    """Replace the log as ``mv R old`` and the start of a new daemon do."""
    daemon.stop()
    root.rename(root.with_name("old"))
    daemon.start_again()


def older_copy(daemon: Daemon, root: Path) -> None:
    """Replace the log as ``rsync -a --delete copy/ R/`` does."""
    copy_back(daemon, root, root.with_name("copy"))


@dataclass
class Program:
    """A running program and the files with its output."""

    process: subprocess.Popen[bytes]
    stdout: Path
    stderr: Path

    @property
    def says(self) -> str:
        return self.stderr.read_text()


def program(held: ExitStack, path: Path, line: list[str]) -> Program:
    stdout, stderr = path.with_suffix(".out"), path.with_suffix(".err")
    with stdout.open("wb") as out, stderr.open("wb") as err:
        process = held.enter_context(launched(line, stdout=out.fileno(), stderr=err.fileno()))
    held.callback(process.kill)
    return Program(process, stdout, stderr)


def has_processed(root: Path, group: str) -> bool:
    return wald.open(root).cursor("a", group).sequence == len(ALL)


@pytest.mark.slow
@pytest.mark.parametrize(("replace", "words"), [(another_log, OTHER), (older_copy, OLDER)])
def test_they_end_with_the_right_words(
    daemon: Daemon, root: Path, tmp_path: Path, replace: Callable[[Daemon, Path], None], words: str
) -> None:
    append(root, *ALL[:3])
    copy(daemon, root, root.with_name("copy"))
    append(root, *ALL[3:])
    with ExitStack() as held:
        start = partial(program, held)
        follower = start(tmp_path / "follower", command("read", "--root", root, "a", "--follow"))
        programs = [follower]
        for group, options in GROUPS.items():
            words_of = ["--root", root, "a", "--group", group, *options, "--", "sh", "-c", f"cat >> {tmp_path / group}"]
            programs.append(start(tmp_path / f"drain-{group}", sidecar("drain", *words_of)))
            eventually(partial(has_processed, root, group))
        programs.append(start(tmp_path / "reclaim", sidecar("reclaim", "--root", root, "--watch", "--grace", 0)))
        eventually(lambda: not list((root / "segments").glob("00000000000000000001.*")))  # reclaim works
        eventually(lambda: follower.stdout.read_text().split() == ALL)
        for each in programs:  # no program may see a half-replaced log
            each.process.send_signal(signal.SIGSTOP)
        replace(daemon, root)
        append(root, *(f"new-{number}" for number in range(30)))
        for each in programs:
            each.process.send_signal(signal.SIGCONT)

        for each in programs:
            assert (each.process.wait(TIMEOUT_SECONDS), words in each.says) == (REPLACED, True), each.says
            assert "hint: restart this program" in each.says
            assert not any(word in each.says for word in ("verify", "Traceback", "move it", "missing"))
    assert follower.stdout.read_text().split() == ALL
    for group in GROUPS:
        assert sorted((tmp_path / group).read_text().split()) == ALL
        assert wald.open(root).cursor("a", group).sequence == 0

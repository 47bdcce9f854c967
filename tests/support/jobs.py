"""A command for workers that logs its records, waits while a test holds it, and fails on demand."""

import subprocess
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from running import TIMEOUT_SECONDS, eventually

_SCRIPT = """
x=
while read -r v; do x="$x$v "; done  # no further process: some tests run a thousand of these
echo "begin ${WALD_WORKER:-0} $WALD_TRY $$ $PPID $x" >> "$1/journal"
code=0
while [ -e "$1/hold-from-$WALD_FIRST" ]; do sleep 0.02; done
for v in $x; do
    while [ -e "$1/hold-$v" ]; do sleep 0.02; done
    [ ! -e "$1/fail-$v" ] || read -r code < "$1/fail-$v"
done
echo "end ${WALD_WORKER:-0} $code $$ $PPID $x" >> "$1/journal"
exit $code
"""


VALUES = [str(number) for number in range(1, 21)]
"""Values of the records in most tests."""
ONCE = dict.fromkeys(VALUES, 1)


class Line(NamedTuple):
    """A line of the journal."""

    begins: bool
    worker: int
    number: int
    pid: int
    keeper: int
    values: tuple[str, ...]


class Jobs:
    """The command and its journal."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "jobs"
        self.folder.mkdir()
        (self.folder / "journal").touch()
        script = self.folder / "command"
        script.write_text(_SCRIPT)
        self.words = ("sh", script, self.folder)

    def arguments(self, root: Path, *options: object) -> list[object]:
        """Return the arguments of a wald-drain that feeds route a to the command."""
        return ["a", "--root", root, *options, "--", *self.words]

    def hold(self, *values: object) -> None:
        """Hold commands that receive one of these values; ``from-N`` holds all from record N."""
        for value in values:
            (self.folder / f"hold-{value}").touch()

    def end(self) -> None:
        """Release all commands, so that none outlives its test."""
        for held in self.folder.glob("hold-*"):
            held.unlink()

    def let_go(self, *values: object) -> None:
        """Release held commands."""
        for value in values:
            (self.folder / f"hold-{value}").unlink()

    def fail(self, *values: object, code: int = 1) -> None:
        """Have a command that gets one of these values exit with ``code``."""
        for value in values:
            (self.folder / f"fail-{value}").write_text(f"{code}\n")

    def mend(self, *values: object) -> None:
        """Have commands with these values succeed again."""
        for value in values:
            (self.folder / f"fail-{value}").unlink()

    def forget_running(self) -> None:
        """Count killed commands as ended."""
        for line in self.running.values():
            with (self.folder / "journal").open("a") as journal:
                journal.write(f"end {line.worker} 137 {line.pid} {line.keeper} {' '.join(line.values)}\n")

    @property
    def lines(self) -> list[Line]:
        found = []
        for line in (self.folder / "journal").read_text().splitlines():
            what, *numbers, words = line.split(" ", 5)
            worker, number, pid, keeper = map(int, numbers)
            found.append(Line(what == "begin", worker, number, pid, keeper, tuple(words.split())))
        return found

    @property
    def running(self) -> dict[str, Line]:
        """Return the values of running commands; those of a killed command stay.

        A value that two commands have at the same time fails the test.
        """
        running: dict[str, Line] = {}
        for line in self.lines:
            for value in line.values:
                if line.begins:
                    assert value not in running, f"{value} is with two commands"
                    running[value] = line
                else:
                    del running[value]
        return running

    def await_running(self, *values: object) -> None:
        """Return once commands with these values are running."""
        eventually(lambda: set(map(str, values)) <= set(self.running))

    def kill_while_running(self, drain: subprocess.Popen[bytes], *values: object) -> None:
        """Kill a drain once commands with these values are running."""
        self.await_running(*values)
        drain.kill()
        drain.wait(TIMEOUT_SECONDS)

    @property
    def processed(self) -> Counter[str]:
        """Return how often each value was in a successful run."""
        return Counter(value for line in self.lines if not line.begins and not line.number for value in line.values)

    def tries(self, value: object) -> list[int]:
        """Return the number of each try of a value alone."""
        return [line.number for line in self.lines if line.begins and line.values == (str(value),)]

"""Start of a short command, which shells and cron pay thousands of times, compared with `python -c pass`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import click

from benchmarks.report import Goal, Row, Samples
from benchmarks.stage import ROUTE, Daemon, Stage
from wald.cli import cli

_WALD = str(Path(sys.executable).with_name("wald"))
_PYTHON = "python -c pass"
_PROGRAMS = (
    *("wald-archive --help", "wald-audit --help", "wald-compact --help", "wald-drain feed --help"),
    *("wald-export --help", "wald-gate serve --help", "wald-reclaim --help"),
)
_TIMES = 5  # repetitions of a measurement: one takes 60 ms, and an interrupt is visible in it
_SHORT = Goal(5.5, at_most=True)
_HELP = Goal(6, at_most=True)
_UNITS = ("ms of CPU", "ms")


def measure(stage: Stage) -> tuple[list[Row], list[str]]:
    with Daemon(stage.fresh(stage.fast) / "log") as daemon:
        root = ["--root", str(daemon.root)]
        lines = {
            "wald append": ["append", ROUTE, *root],
            "wald head": ["head", *root],
            "wald cursor list": ["cursor", "list", *root],
            "wald --help": ["--help"],
        }
        commands = {_PYTHON: [sys.executable, "-c", "pass"]} | {name: [_WALD, *line] for name, line in lines.items()}
        helps = [f"wald {name} --help" for name in cli.list_commands(click.Context(cli))]
        commands |= {name: [_WALD, *name.split()[1:]] for name in helps}
        commands |= {line: [str(Path(_WALD).with_name(line.split()[0])), *line.split()[1:]] for line in _PROGRAMS}
        for command in commands.values():  # compiles the byte code
            _seconds(command)
        measured = {unit: Samples({name: [] for name in commands}) for unit in _UNITS}
        for _ in range(stage.repeat * _TIMES):
            for name, command in commands.items():
                for samples, seconds in zip(measured.values(), _seconds(command), strict=True):
                    samples.values[name].append(seconds * 1000)
    rows = []
    for unit, samples in measured.items():
        slowest = max(helps, key=samples.median)
        for name in (*lines, slowest, *_PROGRAMS):
            is_help = name.endswith("--help")
            what = f"{name}, the slowest help" if name == slowest else name
            goals: dict[str, Goal | None] = {_PYTHON: _HELP if is_help else _SHORT}
            rows += samples.rows("Start of a command", unit, (name, what), goals)
    return rows, []


def _seconds(command: list[str]) -> tuple[float, float]:
    """Run a command with one line on stdin; return its CPU time and the elapsed time."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    reading, writing = os.pipe()
    os.write(writing, b"one line\n")
    os.close(writing)
    null = (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)
    began = time.perf_counter()
    child = os.posix_spawn(command[0], command, environment, file_actions=[(os.POSIX_SPAWN_DUP2, reading, 0), null])
    os.close(reading)
    _, status, usage = os.wait4(child, 0)
    elapsed = time.perf_counter() - began
    if status:
        raise RuntimeError(f"{' '.join(command)}: exit code {os.waitstatus_to_exitcode(status)}")
    return usage.ru_utime + usage.ru_stime, elapsed

"""The command line of ``wald doctor``."""

from __future__ import annotations

import shutil
import signal
import textwrap
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from wald.cli.command import Command, examples
from wald.cli.doctor.canary import ROUTE
from wald.cli.doctor.findings import Finding, Outcome
from wald.cli.options import config_option, duration_option, json_option, root_option, socket_option
from wald.cli.output import json_line
from wald.errors import InvalidInput, WaldError
from wald.hints import command_line

if TYPE_CHECKING:
    from wald.cli.doctor.canary import Step

FAILED = 13
WARNED = 14
_COLORS = {Outcome.OK: "green", Outcome.WARN: "yellow", Outcome.FAIL: "red", Outcome.UNKNOWN: "cyan"}
_MOST_COLUMNS = 120
_EXAMINE_SECONDS = 5.0
_CANARY_SECONDS = 10.0


@click.command(cls=Command, epilog=examples("wald doctor", "wald doctor --canary"))
@root_option
@config_option("The daemon's TOML file of settings.")
@socket_option
@click.option("--canary", is_flag=True, help=f"Send a record through route {ROUTE} instead, and report each step.")
@duration_option("--timeout", None, "Give up after this long.  [default: 5s; with --canary 10s]")
@json_option
def doctor(
    root: Path, config_path: Path | None, socket: Path | None, canary: bool, timeout: float | None, as_json: bool
) -> int:
    """Report which promises hold on this directory and this host, and what to type if one does not.

    The directory may be a log, with or without a running daemon, or one that does not exist yet. The checks run in a
    scratch directory inside it, which is removed. The exit code is 0 if nothing is wrong, 13 if a check failed, 14 if
    there are only warnings. With --canary a record is sent to the running daemon, read back and acknowledged; the exit
    code is 0 if it arrived in time.
    """
    from wald.cli.doctor.examination import examine

    if timeout == 0:
        raise InvalidInput("--timeout 0: the timeout must be longer", hint="--timeout 5s")
    if canary:
        _canary(root, socket, _CANARY_SECONDS if timeout is None else timeout, as_json)
        return 0
    with _interrupted_by_sigterm():
        within = _EXAMINE_SECONDS if timeout is None else timeout
        findings = examine(root, config_path=config_path, socket=socket, within=within)
    code = _exit_code(findings)
    if as_json:
        click.echo(json_line("doctor", _object(root, findings, code)))
    else:
        click.echo("\n".join(_text(root, findings)))
    return code


def _exit_code(findings: list[Finding]) -> int:
    outcomes = {finding.outcome for finding in findings}
    return FAILED if Outcome.FAIL in outcomes else WARNED if Outcome.WARN in outcomes else 0


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as Ctrl-C does, so that the scratch directory is removed."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _text(root: Path, findings: list[Finding]) -> Iterator[str]:
    checks, outcomes = (max(map(len, column)) for column in zip(*((f.check, f.outcome) for f in findings), strict=True))
    margin = outcomes + checks + 4
    width = max(40, min(_MOST_COLUMNS, shutil.get_terminal_size((_MOST_COLUMNS, 0)).columns) - margin)
    for finding in _merged(findings):
        outcome = click.style(finding.outcome.ljust(outcomes), fg=_COLORS.get(finding.outcome))
        first, *more = _wrapped(finding.message, width)
        yield f"{outcome}  {finding.check.ljust(checks)}  {first}".rstrip()
        yield from (f"{'':{margin}}{line}" for line in more)
        if finding.advice:
            yield f"{'':{margin}}hint: {finding.advice}"  # on one line, so that it can be copied
    yield ""
    yield from _wrapped(_summary(root, findings), margin + width)


def _merged(findings: list[Finding]) -> Iterator[Finding]:
    """Merge consecutive findings with the same message."""
    for _, alike in groupby(findings, key=lambda finding: (finding.outcome, finding.message)):
        first, *others = alike
        names = ", ".join(other.check for other in others)
        yield replace(first, message=f"{first.message}; also {names}") if others else first


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def _summary(root: Path, findings: list[Finding]) -> str:
    counts = Counter(finding.outcome for finding in findings)
    parts = ", ".join(f"{counts[outcome]} {outcome}" for outcome in Outcome if counts[outcome])
    broken = _promises(findings, (Outcome.FAIL,))
    weaker = _promises(findings, (Outcome.WARN,)) - broken
    unseen = _promises(findings, tuple(Outcome)) - broken - weaker - _promises(findings, (Outcome.OK,))
    groups = (("broken here", broken), ("weaker here", weaker), ("not examined", unseen))
    affected = "; ".join(f"{words}: {', '.join(map(str, sorted(numbers)))}" for words, numbers in groups if numbers)
    return f"{root}: {parts}. " + (
        f"Promises of docs/guarantees.md {affected}." if affected else "No promise is in doubt."
    )


def _promises(findings: list[Finding], outcomes: Collection[Outcome]) -> set[int]:
    return {number for finding in findings if finding.outcome in outcomes for number in finding.promises}


def _object(root: Path, findings: list[Finding], code: int) -> dict[str, object]:
    worst = max((finding.outcome for finding in findings), key=lambda outcome: outcome.severity)
    return {
        "root": str(root),
        "outcome": worst,
        "exit_code": code,
        "checks": [
            {
                "check": finding.check,
                "outcome": finding.outcome,
                "message": finding.message,
                "promises": finding.promises,
                "advice": finding.advice,
                "measured": finding.measured,
            }
            for finding in findings
        ],
    }


def _canary(root: Path, socket: Path | None, timeout: float, as_json: bool) -> None:
    """Print each step when it is complete; with --json all of them, even if a step fails."""
    from wald.cli.doctor.canary import send

    steps: list[Step] = []
    try:
        for step in send(root, socket, within=timeout):
            steps.append(step)
            if not as_json:
                click.echo(f"{step.seconds * 1000:9.1f} ms  {step.name:12}  {step.message}")
    except WaldError as error:
        if as_json:
            click.echo(json_line("doctor.canary", _canary_object(root, steps, error)))
        raise
    if as_json:
        click.echo(json_line("doctor.canary", _canary_object(root, steps, None)))
    else:
        total = sum(step.seconds for step in steps) * 1000
        click.echo(f"{total:9.1f} ms  in total; {command_line(root, f'read {ROUTE}')} shows the records")


def _canary_object(root: Path, steps: list[Step], error: WaldError | None) -> dict[str, object]:
    return {
        "root": str(root),
        "outcome": Outcome.FAIL if error else Outcome.OK,
        "exit_code": error.exit_code if error else 0,
        "message": error.message if error else "",
        "sequence": next((step.sequence for step in reversed(steps)), 0),
        "steps": [{"step": step.name, "seconds": round(step.seconds, 6)} for step in steps],
    }

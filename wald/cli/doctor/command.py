"""The command line of ``wald doctor``, and its canary: one record sent through the log.

The canary has a separate route, which is kept: its one cursor follows each record, so the route pins nothing. If a
canary ends between the record and the cursor, the next one moves the cursor past both.
"""

from __future__ import annotations

import os
import shutil
import signal
import textwrap
import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

import wald
from wald.cli.command import Command, examples
from wald.cli.doctor.findings import Finding, Outcome, interrupted
from wald.cli.options import config_option, duration_option, json_option, root_option, runs, socket_option
from wald.cli.output import json_line
from wald.errors import Damaged, InvalidInput, NotPermitted, Refused, Unavailable, WaldError
from wald.format.names import DEFAULT_GROUP
from wald.hints import command_line, user_name

if TYPE_CHECKING:
    from wald.log import Log

FAILED = 13
WARNED = 14
ROUTE = "wald.canary"
_COLORS = {Outcome.OK: "green", Outcome.WARN: "yellow", Outcome.FAIL: "red", Outcome.UNKNOWN: "cyan"}
_MOST_COLUMNS = 120
_EXAMINE_SECONDS = 5.0
_CANARY_SECONDS = 10.0
_EXPLAIN_SECONDS = 1.2  # for the client to determine why the daemon does not answer


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
    """Report which promises hold on this directory and this host, and what to do if one does not.

    The directory may be a log, with or without a running daemon, or one that does not exist yet. The checks run in a
    scratch directory inside it, which is removed. The exit code is 0 if nothing is wrong, 13 if a check failed, 14 if
    there are only warnings. With --canary a record is sent to the running daemon, read back and acknowledged; the exit
    code is 0 if it arrived in time.
    """
    if timeout == 0:
        raise InvalidInput("--timeout 0: the timeout must be longer", hint="--timeout 5s")
    if canary:
        _canary(root, socket, _CANARY_SECONDS if timeout is None else timeout, as_json)
        return 0
    from wald.cli.doctor.examination import examine

    with interrupted(KeyboardInterrupt, signal.SIGTERM, signal.SIGHUP):  # so that the scratch directory is removed
        within = _EXAMINE_SECONDS if timeout is None else timeout
        findings = examine(root, config_path=config_path, socket=socket, within=within)
    worst = max((finding.outcome for finding in findings), key=lambda outcome: outcome.severity)
    code = {Outcome.FAIL: FAILED, Outcome.WARN: WARNED}.get(worst, 0)
    if as_json:
        fields = {"root": str(root), "outcome": worst, "exit_code": code}
        click.echo(json_line("doctor", fields | {"checks": [asdict(finding) for finding in findings]}))
    else:
        click.echo("\n".join(_text(root, findings)))
    return code


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
    promises = f"Promises of docs/guarantees.md {affected}." if affected else "No promise is in doubt."
    return f"{root}: {parts}. {promises}"


def _promises(findings: list[Finding], outcomes: Collection[Outcome]) -> set[int]:
    return {number for finding in findings if finding.outcome in outcomes for number in finding.promises}


class _Step(NamedTuple):
    """A completed step: connected, appended, head, read or acknowledged; ``sequence`` is 0 before the append."""

    name: str
    seconds: float
    sequence: int
    message: str


def _canary(root: Path, socket: Path | None, timeout: float, as_json: bool) -> None:
    """Print each step once it is complete; with --json, print all at the end, even if a step fails."""
    steps: list[_Step] = []
    error = None
    try:
        for step in send(root, socket, within=timeout):
            steps.append(step)
            if not as_json:
                click.echo(f"{step.seconds * 1000:9.1f} ms  {step.name:12}  {step.message}")
    except WaldError as failure:
        error = failure
    if as_json:
        fields: dict[str, object] = {"root": str(root), "outcome": Outcome.FAIL if error else Outcome.OK}
        fields |= {"exit_code": error.exit_code if error else 0, "message": error.message if error else ""}
        fields["sequence"] = steps[-1].sequence if steps else 0
        fields["steps"] = [{"step": step.name, "seconds": round(step.seconds, 6)} for step in steps]
        click.echo(json_line("doctor.canary", fields))
    if error:
        raise error
    if not as_json:
        total = sum(step.seconds for step in steps) * 1000
        click.echo(f"{total:9.1f} ms  in total; {command_line(root, f'read {ROUTE}')} shows the records")


def send(root: Path, socket: Path | None, *, within: float) -> Iterator[_Step]:
    log = wald.open(root)
    if not runs(root):
        raise Unavailable(f"{log.root.lock}: no daemon runs", hint=command_line(root, "run"))
    hint = f"{command_line(root, 'head')}; {command_line(root, 'explain')}; --timeout 60s"
    late = Unavailable(f"{root}: the canary was not acknowledged within {within:g} s", hint=hint)
    deadline = time.monotonic() + within
    with interrupted(lambda: late, after=within):
        yield from _steps(log, socket, deadline)


def _steps(log: Log, socket: Path | None, deadline: float) -> Iterator[_Step]:
    from wald.client.producer import Producer

    begun = time.monotonic()
    patience = max(0.1, deadline - begun - _EXPLAIN_SECONDS)
    with Producer(socket or log.root.path, retry_for=patience, connect_for=patience) as producer:
        if not log.root.route(ROUTE).is_dir() or log.root.retired(ROUTE).exists():
            producer.command("ROUTE", "ADD", ROUTE)
        else:
            producer.command("PING")
        directory = log.root.cursor_directory(ROUTE)
        if not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):  # the record would be pinned
            owner = user_name(directory.stat().st_uid)
            raise NotPermitted(f"{directory}: this user may not move a cursor here", hint=f"run it as user {owner}")
        yield _Step("connected", time.monotonic() - begun, 0, f"the daemon answers, and route {ROUTE} exists")
        begun, value = time.monotonic(), os.urandom(16).hex().encode()
        producer.send(ROUTE, [value])
        sequence = producer.flush()[-1].last
    yield _Step("appended", time.monotonic() - begun, sequence, f"record {sequence} is durable (OK)")
    begun = time.monotonic()
    head = log.head()
    if head is None or head.sequence < sequence:
        shown = "nothing" if head is None else f"record {head.sequence}"
        message = f"{log.root.head}: the head shows {shown}, but record {sequence} was acknowledged"
        raise Damaged(message, hint=command_line(log.root.path, "verify"))
    yield _Step("head", time.monotonic() - begun, sequence, f"the head shows record {head.sequence}")
    begun = time.monotonic()
    found = [record.value for record in log.records(ROUTE, start=sequence, stop=sequence)]
    if found != [value]:
        message = f"{log.root.path}: record {sequence} was read back with a different value"
        raise Damaged(message, hint=command_line(log.root.path, f"where {sequence}"))
    yield _Step("read", time.monotonic() - begun, sequence, "read back the same value")
    begun = time.monotonic()
    try:
        log.set_cursor(ROUTE, sequence)
    except Refused:
        if log.cursor(ROUTE).effective < sequence:  # otherwise another canary has already acknowledged both
            raise
    yield _Step("acknowledged", time.monotonic() - begun, sequence, f"the cursor of {DEFAULT_GROUP} is at the record")

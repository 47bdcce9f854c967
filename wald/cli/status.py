"""``wald status``: the state of the daemon and the log, with an exit code for monitoring."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import wald
from wald.cli.command import Command, examples
from wald.cli.options import duration_option, json_option, root_option, socket_option
from wald.cli.output import aligned, counted, print_result
from wald.errors import InvalidInput, Unavailable
from wald.format.times import utc
from wald.hints import command_line
from wald.setting_types import format_bytes, format_seconds

if TYPE_CHECKING:
    from wald.status.findings import Facts, Finding
    from wald.status.rates import Item

_EXIT_CODES = {"warning": 14, "failing": 13, "down": Unavailable.exit_code}


@click.command(cls=Command, epilog=examples("wald status", "wald status --latency --during 10s"))
@root_option
@socket_option
@duration_option("--timeout", "5s", "How long the daemon may take to answer.", seconds_min=0.001, hidden=True)
@duration_option("--lag-max", None, "Warn if a record has waited longer than this for a group.", days_max=366)
@click.option("--settings", "with_settings", is_flag=True, help="Print only the effective settings and their sources.")
@click.option("--latency", is_flag=True, help="Print only why producers wait: commits, syncs, who sends most.")
@duration_option("--during", None, "With --latency: measure for this long.  [default: since the daemon's start]")
@json_option
def status(
    root: Path,
    socket: Path | None,
    timeout: float,
    lag_max: float | None,
    with_settings: bool,
    latency: bool,
    during: float | None,
    as_json: bool,
) -> int:
    """Report whether the daemon is alive, what is wrong, how far groups are behind, and when the disk will be full.

    The exit code is 0 if all is well (the last line is OK), 14 if there are warnings, 13 if something fails (the disk
    is full, a segment cannot be read), and 6 if the daemon is dead, frozen or silent. The settings are those of the
    running daemon, or of its last run.

    --latency prints what producers wait for, and the daemon's histograms of commits and syncs. A quantile is the upper
    bound of its bucket. It needs the daemon.
    """
    if latency and with_settings:
        raise InvalidInput("--latency and --settings are mutually exclusive", hint="wald status --help")
    if during is not None and not latency:
        raise InvalidInput("--during needs --latency", hint=f"--latency --during {during:g}s")
    if latency:
        measured = _measured(root, socket, during)
        print_result("status.latency", as_json, measured, _latency_text(measured))
        return 0
    from wald.status.findings import findings, read_facts

    now_ns = time.time_ns()
    facts = read_facts(wald.open(root), socket=socket, seconds=timeout, now_ns=now_ns)
    found = findings(facts, now_ns=now_ns, lag_max=lag_max)
    if with_settings:
        settings = {"epoch": facts.report.get("epoch"), "settings": facts.settings}
        print_result("status.settings", as_json, settings, _settings_text(facts))
        return 0
    print_result("status", as_json, _object(facts, found, now_ns), _text(facts, found, now_ns))
    return _EXIT_CODES[_word(found[0])] if found else 0


def _measured(root: Path, socket: Path | None, during: float | None) -> dict[str, Any]:
    from wald.cli.options import daemon_at
    from wald.status.rates import measured

    with daemon_at(root, socket) as daemon:
        before: Item = {}
        if during is not None:
            before = json.loads(daemon.command("STAT"))
            time.sleep(during)
        return measured(before, json.loads(daemon.command("STAT")), root)


def _latency_text(found: Item) -> Iterator[str]:
    from wald.status.rates import MEASURED

    yield found["conclusion"]
    rows = [["", "count", "mean", "p50", "p90", "p99"]]
    for name in MEASURED:
        numbers = [found[name][key] for key in ("mean", "p50", "p90", "p99")]
        rows.append([name, str(found[name]["count"]), *("-" if each is None else f"{each:.3g}" for each in numbers)])
    yield from aligned(rows, range(1, 6))
    yield f"segments sealed in this time: {found['segments_sealed']}; requests held: {found['held_requests']}"
    for user, length in found["received_bytes_of_users"].items():
        yield f"user {user} sent {length} bytes"
    for each in found["connections"]:
        name = f" ({each['process']})" if each["process"] else ""
        yield f"connected: user {each['user']}, process {each['pid']}{name}: {each['bytes']} bytes so far"


def _word(finding: Finding) -> str:
    return finding.severity.name.lower()


def _text(facts: Facts, found: list[Finding], now_ns: int) -> Iterator[str]:
    held = facts.daemon.answer.get("unfinished_lines") or {}
    lines = ", ".join(f"{route} holds {length} bytes of an unfinished line" for route, length in held.items())
    software = facts.daemon.answer.get("software") or facts.report.get("software")
    daemon = facts.daemon.message + (f"; {software}" if software else "")
    rows = [("daemon", daemon), ("last crash", _crash(facts)), ("head", _head(facts, now_ns))]
    rows += [("clock steps", _steps(facts)), ("lag", _lag(facts, now_ns)), ("lines", lines), ("space", _space(facts))]
    yield from aligned([row for row in rows if row[1]], ())
    for finding in found:
        yield f"{_word(finding)}: {finding.message}"
        if finding.hint:
            yield f"  hint: {finding.hint}"
    yield _word(found[0]) if found else "OK"


def _crash(facts: Facts) -> str:
    crash = facts.crash
    if crash is None:
        return "none recorded in recovery/"
    if crash.found_ns is None:
        return f"epoch {crash.epoch} {crash.how}; the next start reports what was lost"
    lost = "; ".join(crash.lost) or "nothing acknowledged was lost"
    cut = f", {crash.cut_bytes} bytes of an unfinished write were cut" if crash.cut_bytes else ""
    return f"epoch {crash.epoch} {crash.how}; found at {utc(crash.found_ns)}: {lost}{cut}"


def _head(facts: Facts, now_ns: int) -> str:
    from wald.segments.durable_end import seconds_ahead

    if facts.head_damage is not None:
        return "not known"
    if facts.head is None or not facts.head.at_ns:
        return "no record is durable yet"
    if seconds_ahead(facts.head.at_ns, now_ns):
        return f"record {facts.head.sequence} was the last to become durable; its append time is in the future"
    age = format_seconds(max(0.0, (now_ns - facts.head.at_ns) / 1e9))
    return f"record {facts.head.sequence} was the last to become durable, {age} ago"


def _steps(facts: Facts) -> str:
    if not facts.contents.steps:
        return ""
    last = facts.contents.steps[-1]
    times = f"append times were at {utc(last.before_ns)}, the clock at {utc(last.at_ns)}"
    return f"{len(facts.contents.steps)}; the latest before record {last.base}: {times}"


def _lag(facts: Facts, now_ns: int) -> str:
    from wald.status.findings import named

    waiting = facts.contents.waiting
    if not waiting and facts.contents.lost_routes:
        return f"unknown for {named(facts.contents.lost_routes)}"
    if not waiting and facts.contents.unreadable:
        return "unknown for unreadable records"
    if not waiting:
        return "every group has processed everything"
    oldest, others = waiting[0], len(waiting) - 1
    cursor, lag = oldest.cursor, oldest.lag
    more = f", and {counted(others, 'more group')}" if others else ""
    waited = format_seconds(lag.seconds(now_ns))
    return f"{cursor.route}/{cursor.group}: {counted(lag.records, 'record')}, for {waited}{more}"


def _space(facts: Facts) -> str:
    free = f"{format_bytes(facts.free_bytes)} are free"
    needed = facts.daemon.answer.get("needed_bytes")
    kept = f", {format_bytes(needed)} are needed" if isinstance(needed, int) else ""
    if facts.contents.full_seconds is None:
        return f"{free}{kept}; the log does not grow, or is too young to tell"
    return f"{free}{kept}; full in {format_seconds(facts.contents.full_seconds)} if nothing is reclaimed"


def _settings_text(facts: Facts) -> Iterator[str]:
    rows = [(name, each.get("value", ""), each.get("origin", "")) for name, each in facts.settings.items()]
    if not rows:
        starting = command_line(facts.root, "run")
        yield f"no run of the daemon has recorded its settings in recovery/; {starting}"
        return
    yield from aligned([("SETTING", "VALUE", "FROM"), *rows], ())


def _object(facts: Facts, found: list[Finding], now_ns: int) -> dict[str, object]:
    from wald.status.schema import time_fields

    daemon, crash, head = facts.daemon, facts.crash, facts.head
    waiting = []
    for group in facts.contents.waiting:
        fields: dict[str, object] = {"route": group.cursor.route, "group": group.cursor.group}
        fields |= {"lag_records": group.lag.records, **time_fields("oldest", group.lag.oldest_ns)}
        waiting.append(fields | {"lag_seconds": round(group.lag.seconds(now_ns), 3)})
    last_crash = crash and {
        "epoch": crash.epoch,
        "how": crash.how,
        "lost": list(crash.lost),
        "cut_bytes": crash.cut_bytes,
        **time_fields("found", crash.found_ns),
    }
    return {
        "verdict": _word(found[0]) if found else "good",
        "findings": [{"severity": _word(each), "message": each.message, "hint": each.hint} for each in found],
        "daemon": {
            "life": daemon.life.value,
            "message": daemon.message,
            "pid": daemon.pid,
            "epoch": daemon.epoch,
            "host": daemon.wrote.get("host"),
            "since": daemon.wrote.get("started"),
            "software": daemon.answer.get("software") or facts.report.get("software"),
        },
        "last_crash": last_crash,
        "head": None if head is None else {"sequence": head.sequence, **time_fields("at", head.at_ns or None)},
        "clock_steps": [
            {"sequence": step.base, **time_fields("before", step.before_ns), **time_fields("at", step.at_ns)}
            for step in facts.contents.steps
        ],
        "waiting": waiting,
        "unfinished_lines": daemon.answer.get("unfinished_lines") or {},
        "free_bytes": facts.free_bytes,
        "needed_bytes": daemon.answer.get("needed_bytes"),
        "seconds_until_full": facts.contents.full_seconds,
    }

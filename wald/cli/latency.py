"""``wald latency``: where the time of an acknowledgement goes, by what the daemon has measured of itself."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import click

from wald.cli.options import duration_option, json_option, root_option, socket_option
from wald.cli.output import aligned, json_line
from wald.errors import command_line

_MEASURED = ("commit_seconds", "sync_seconds", "turn_records", "turn_bytes")
_SLOW_SECONDS = 0.01  # a commit that takes no longer on average is not what a producer waits for
_MOST = 0.5  # of the time of a commit
Item = Mapping[str, Any]  # JSON


@click.command()
@root_option
@socket_option
@json_option
@duration_option("--during", None, "Measure for this long.  [default: since the daemon has started]")
def latency(root: Path, socket: Path | None, as_json: bool, during: float | None) -> None:
    """Show why producers wait: how long commits and syncs take, what input waits for, and who sends most.

    The numbers are the daemon's own; nothing is measured for this command. A quantile is the upper end of the range
    that it lies in. Needs the daemon.
    """
    from wald.cli.connect import daemon_at

    with daemon_at(root, socket) as daemon:
        before: Item = {}
        if during is not None:
            before = json.loads(daemon.command("STAT"))
            time.sleep(during)
        after = json.loads(daemon.command("STAT"))
    found = measured(before, after, root)
    click.echo(json_line("latency", found) if as_json else "\n".join(_lines(found)))


def measured(before: Item, after: Item, root: Path) -> dict[str, Any]:
    """What happened between two answers to STAT of the daemon at ``root``; ``before`` may be empty."""
    earlier = before.get("histograms", {})
    found: dict[str, Any] = {name: _spread(after["histograms"][name], earlier.get(name)) for name in _MEASURED}
    sent = before.get("received", {})
    received = {user: total - sent.get(user, 0) for user, total in after["received"].items()}
    found |= {
        "degraded": after["degraded"],
        "degraded_by": after["degraded_by"],
        "held_requests": after["held_requests"],
        "stalled_seconds": after["stalled_seconds"],
        "segments_sealed": after["sealed"] - before.get("sealed", 0),
        "received_bytes_of_users": {user: length for user, length in received.items() if length},
        "connections": after["senders"],
    }
    return {"conclusion": conclusion(found, root)} | found


def conclusion(found: Item, root: Path) -> str:
    """What producers wait for, in one sentence."""
    commit, sync = found["commit_seconds"], found["sync_seconds"]
    if found["degraded"]:
        explain = command_line(root, "explain")
        return f"Input waits for room on the disk ({found['degraded_by']}): {explain} shows what fills it."
    if found["stalled_seconds"] >= 1:
        status = command_line(root, "status")
        return f"Input has waited for {found['stalled_seconds']:g} s and the head stands still: {status} says more."
    if not commit["count"]:
        return "Nothing was committed, so no producer of records has waited for a commit."
    share = sync["mean"] * sync["count"] / (commit["mean"] * commit["count"]) if commit["mean"] else 0.0
    mean = f"{1000 * commit['mean']:.3g} ms on average"
    if commit["mean"] <= _SLOW_SECONDS:
        return f"Commits are fast ({mean}): a producer that waits for longer waits elsewhere."
    if share >= _MOST:
        return f"The disk is slow: a commit takes {mean}, {share:.0%} of it the sync."
    return f"The daemon is slow: a commit takes {mean}, {share:.0%} of it the sync; look at its CPU."


def _spread(after: Item, before: Item | None) -> dict[str, Any]:
    """Count, mean and quantiles of what a histogram has counted since ``before``; infinite beyond its last bound."""
    counts = list(after["counts"])
    total = after["sum"]
    if before is not None:
        counts = [now - then for now, then in zip(counts, before["counts"], strict=True)]
        total -= before["sum"]
    count = sum(counts)
    quantiles = {f"p{percent}": _quantile(counts, after["bounds"], percent) for percent in (50, 90, 99)}
    return {"count": count, "mean": total / count if count else 0.0} | quantiles


def _quantile(counts: list[int], bounds: list[float], percent: int) -> float | None:
    """The upper end of the range of a percentile; None if there is no value, or the range has no end."""
    wanted = sum(counts) * percent / 100
    reached = (bound for bound, total in zip(bounds, accumulate(counts), strict=False) if total and total >= wanted)
    return next(reached, None)


def _lines(found: Item) -> list[str]:
    rows = [["", "count", "mean", "p50", "p90", "p99"]]
    for name in _MEASURED:
        spread = found[name]
        numbers = [spread[key] for key in ("mean", "p50", "p90", "p99")]
        rows.append([name, str(spread["count"]), *("-" if each is None else f"{each:.3g}" for each in numbers)])
    lines = [found["conclusion"], *aligned(rows, range(1, 6))]
    lines.append(f"segments sealed meanwhile: {found['segments_sealed']}; requests held: {found['held_requests']}")
    lines += [f"user {user} sent {length} bytes" for user, length in found["received_bytes_of_users"].items()]
    for each in found["connections"]:
        name = f" ({each['process']})" if each["process"] else ""
        lines.append(f"connected: user {each['user']}, process {each['pid']}{name}: {each['bytes']} bytes so far")
    return lines

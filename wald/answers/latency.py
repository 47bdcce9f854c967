"""Where the time of an acknowledgement goes: what happened between two answers to STAT."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from wald.hints import command_line

MEASURED = ("commit_seconds", "sync_seconds", "round_records", "round_bytes")
_SLOW_SECONDS = 0.01  # a commit that takes no longer on average is not what a producer waits for
_MOST = 0.5  # of the time of a commit
Item = Mapping[str, Any]  # JSON


def measured(before: Item, after: Item, root: Path) -> dict[str, Any]:
    """What happened between two answers to STAT of the daemon at ``root``; ``before`` may be empty."""
    earlier = before.get("histograms", {})
    found: dict[str, Any] = {name: _spread(after["histograms"][name], earlier.get(name)) for name in MEASURED}
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

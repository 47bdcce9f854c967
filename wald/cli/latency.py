"""``wald latency``: where the time of an acknowledgement goes, by what the daemon has measured of itself."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from wald.cli.options import duration_option, json_option, root_option, socket_option
from wald.cli.output import aligned, json_line

if TYPE_CHECKING:
    from wald.answers.latency import Item


@click.command()
@root_option
@socket_option
@json_option
@duration_option("--during", None, "Measure for this long.  [default: since the daemon has started]")
def latency(root: Path, socket: Path | None, as_json: bool, during: float | None) -> None:
    """Show why producers wait: the time of commits and syncs, what input waits for, and who sends most.

    The numbers come from the daemon's histograms. A quantile is the upper bound of its bucket. Needs the daemon.
    """
    from wald.answers.latency import measured
    from wald.cli.connect import daemon_at

    with daemon_at(root, socket) as daemon:
        before: Item = {}
        if during is not None:
            before = json.loads(daemon.command("STAT"))
            time.sleep(during)
        after = json.loads(daemon.command("STAT"))
    found = measured(before, after, root)
    click.echo(json_line("latency", found) if as_json else "\n".join(_lines(found)))


def _lines(found: Item) -> list[str]:
    from wald.answers.latency import MEASURED

    rows = [["", "count", "mean", "p50", "p90", "p99"]]
    for name in MEASURED:
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

"""The command line: arguments in, text out. Of the modules of wald, only these print and exit.

Commands are imported when they are called, because their start has a budget (``wald append``: 150 ms).
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

_collects = gc.isenabled()
gc.disable()  # imports make many objects and no garbage

import click  # noqa: E402

import wald  # noqa: E402
from wald.cli.entry import run  # noqa: E402
from wald.cli.lazy_group import LazyCommand, LazyGroup  # noqa: E402

if _collects:
    gc.enable()

# name → (module, function, summary)
_COMMANDS = {
    "run": ("service", "run", "Run the daemon: take records, make them durable, cut, seal."),
    "init": ("service", "init", "Create a log for a daemon that must not create one."),
    "append": ("append", "append", "Send lines from stdin or files; print FIRST LAST once they are durable."),
    "read": ("read", "read", "Write records to stdout, from a position or with --grep."),
    "status": ("status", "status", "Report whether the daemon is alive and what is wrong; for monitoring too."),
    "head": ("positions", "head", "Show how far the log is durable."),
    "where": ("positions", "where", "Show where a record is, or why it is gone."),
    "show": ("show", "show", "Show a record from the log or from an archive."),
    "route": ("routes", "route", "List routes with their cursors and lag; add or retire one."),
    "cursor": ("cursors", "cursor", "Show or move a consumer group's cursor."),
    "group": ("groups", "group", "Inspect work groups, and unblock a stuck one."),
    "explain": ("explain", "explain", "Show which groups pin which segments, and when the disk will be full."),
    "top": ("top", "top", "Watch the log live: segments, routes, rates, lag, disk."),
    "metrics": ("service", "metrics", "Print Prometheus metrics from the directory."),
    "doctor": ("doctor.command", "doctor", "Report which promises hold on this directory and this host."),
    "hold": ("hold", "hold", "Keep FIFOs readable while the daemon restarts."),
    "cut": ("service", "cut", "Ask the daemon to cut the active segment."),
    "clock": ("clock", "clock", "Restart append times after the clock was far ahead."),
    "inspect": ("inspect", "inspect", "Show what a file is, what wrote it, whether it may be deleted; or its content."),
    "history": ("history", "history", "Show the events of the log, and check every deletion."),
    "repair": ("repair", "repair", "Repair a damaged log, and record what is lost."),
    "verify": ("verify", "verify", "Read everything, change nothing, report damage."),
}
_REMOVED = {
    "dump": "inspect --content FILE",
    "file": "inspect FILE",
    "grep": "read --grep PATTERN --prefix",
    "latency": "status --latency",
    "routes": "route list",
}
_LAZY = {name: LazyCommand(f"wald.cli.{module}", *rest) for name, (module, *rest) in _COMMANDS.items()}


@click.command(cls=LazyGroup, lazy=_LAZY, removed=_REMOVED, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--root", type=click.Path(path_type=Path, readable=False), help="The directory of the log.  [env: WALD_ROOT]"
)
@click.version_option(wald.__version__, message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context, root: Path | None) -> None:
    """A durable append-only log for one machine: pipe records in, read them at any pace."""
    ctx.obj = root


def main() -> None:
    """The console script."""
    gc.freeze()  # modules live as long as the process, so that its end need not search them for garbage
    sys.exit(run(cli, "wald", sys.argv[1:]))

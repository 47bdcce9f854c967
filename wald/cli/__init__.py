"""The command line. Only its modules print and exit.

Commands are imported when they are called, to keep their start-up fast (``wald append``: 150 ms).
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

_collects = gc.isenabled()
gc.disable()  # imports create many objects but no garbage

import click  # noqa: E402

import wald  # noqa: E402
from wald.cli.command import (  # noqa: E402
    LazyCommand,
    LazyGroup,
    Program,
    examples,
    run,
)

if _collects:
    gc.enable()

# name → (module, function, summary)
_COMMANDS = {
    "append": ("append", "append", "Send lines of stdin or files; print FIRST LAST once they are durable."),
    "read": ("read", "read", "Write records to stdout, from a position or time; search them with --grep."),
    "show": ("positions", "show", "Show one record, from the log or from an archive."),
    "cursor": ("cursors", "cursor", "Show or move the position of a group that reads a route in order."),
    "group": ("groups", "group", "Show and unblock a work group: workers that share a route and retry."),
    "status": ("status", "status", "Report the state of the daemon, and what is wrong; for monitoring, too."),
    "explain": ("explain", "explain", "Show why the disk fills: which groups pin which segments, and until when."),
    "top": ("top", "top", "Watch segments, routes, rates, lag and the disk live."),
    "head": ("positions", "head", "Show the last durable record."),
    "where": ("positions", "where", "Show where a record is, or why it is gone."),
    "history": ("explain", "history", "Show the events of the log, and check every deletion."),
    "inspect": ("inspect", "inspect", "Show what a file is, whether it may be deleted, and its content."),
    "metrics": ("service", "metrics", "Print Prometheus metrics of the log's directory."),
    "doctor": ("doctor.command", "doctor", "Check which promises hold on this directory and this host."),
    "route": ("service", "route", "List, add (also with a FIFO) or retire routes."),
    "cut": ("service", "cut", "Complete the active segment now."),
    "verify": ("repair", "verify", "Read everything, change nothing, report damage."),
    "repair": ("repair", "repair", "Repair a damaged log, and record what is lost."),
    "clock": ("service", "clock", "Recover from a clock that was far ahead."),
    "run": ("service", "run", "Run the daemon, which makes records durable."),
    "init": ("service", "init", "Create a log for a daemon that must not create one."),
    "hold": ("service", "hold", "Keep FIFOs readable while the daemon restarts."),
}
_LAZY = {name: LazyCommand(f"wald.cli.{module}", *rest) for name, (module, *rest) in _COMMANDS.items()}
_PROGRAMS = {
    "drain": Program("wald_drain.command", "Run a command for each batch of records, with retries and dead letters."),
    "reclaim": Program("wald_reclaim.command", "Delete the segments that every group has read."),
    "archive": Program("wald_archive.command", "Pack routes into an archive, verify it, restore from it."),
    "gate": Program("wald_gate.command", "Serve the log over HTTP, with leases for workers in any language.", "gate"),
    "export": Program(
        "wald_spark.export.command", "Write Parquet, keep latest values, or prove completeness, with Spark.", "spark"
    ),
    "compact": Program(
        "wald_spark.compact.command", "Keep the latest value of each key as Parquet, with Spark.", "spark"
    ),
    "audit": Program("wald_spark.audit.command", "Prove logs and archives complete, with Spark.", "spark"),
}
_SECTIONS = {
    "Write and read": ("append", "read", "show"),
    "Consumers and workers": ("cursor", "group", "drain"),
    "Inspect": ("status", "explain", "top", "head", "where", "history", "inspect", "metrics", "doctor"),
    "Maintain": ("route", "cut", "reclaim", "archive", "verify", "repair", "clock", "export, compact, audit"),
    "Run": ("run", "init", "hold", "gate"),
}
# former name → replacement
_REMOVED = {
    "dump": "inspect --content FILE",
    "file": "inspect FILE",
    "grep": "read --grep PATTERN --prefix",
    "latency": "status --latency",
    "routes": "route list",
}


@click.command(
    "wald",
    cls=LazyGroup,
    lazy=_LAZY,
    programs=_PROGRAMS,
    sections=_SECTIONS,
    removed=_REMOVED,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples("echo hello | wald append access", "wald read access -n 20 --follow"),
)
@click.option(
    "--root", type=click.Path(path_type=Path, readable=False), help="The directory of the log.  [env: WALD_ROOT]"
)
@click.version_option(wald.__version__, message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context, root: Path | None) -> None:
    """A durable append-only log for one machine: pipe records in, read them at any pace.
    `wald drain` runs the program `wald-drain`, and so on for each program wald-NAME.
    """
    ctx.obj = root


def main() -> None:
    gc.freeze()  # modules live as long as the process, so exclude them from garbage collection at exit
    sys.exit(run(cli, "wald", sys.argv[1:]))

"""The command line: arguments in, one line of error and its exit code out; the only place that prints and exits.

Commands are imported when they are called, because what a command needs to start is a budget (``wald append``: 150 ms).

Exit codes: 0 done; 1 a bug, or an error of the operating system; 2 wrong usage or input; 3 not found; 4 damage;
5 another daemon holds the root; 6 the daemon does not answer; 7 the disk is full or fails; 8 the root is of a newer
wald; 9 refused, because it would break a promise; 130 interrupted; 141 whoever read the output has left.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import click

import wald
from wald.errors import WaldError

INTERRUPTED = 130
OUTPUT_CLOSED = 141
_COMPLETE = "_WALD_COMPLETE"  # eval "$(_WALD_COMPLETE=bash_source wald)" completes in bash

# name → (module, function, what it does)
_COMMANDS = {
    "run": ("service", "run", "Run the daemon: take records, make them durable, cut, seal."),
    "append": ("append", "append", "Send lines from stdin or files; print FIRST LAST once they are durable."),
    "read": ("read", "read", "Write records to stdout, from a place on."),
    "head": ("look", "head", "Show how far the log is durable."),
    "where": ("look", "where", "Say where a sequence is, or what became of it."),
    "routes": ("routes", "routes", "List routes, their cursors and their lag."),
    "route": ("routes", "route", "Add or retire a route."),
    "cursor": ("cursors", "cursor", "Show or move a consumer group's cursor."),
    "cut": ("service", "cut", "Ask the daemon to cut the active segment."),
    "dump": ("inspect", "dump", "Print what is in a file of the log, and what does not fit."),
    "verify": ("inspect", "verify", "Read everything, change nothing, report damage."),
}


class Commands(click.Group):
    """A group that knows the names of its commands, and imports one when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, function, _ = _COMMANDS[cmd_name]
        command = getattr(importlib.import_module(f"wald.cli.{module}"), function)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, words) for name, (_, _, words) in _COMMANDS.items()])


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--root", type=click.Path(path_type=Path), help="The directory of the log.  [env: WALD_ROOT]")
@click.version_option(wald.__version__, message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context, root: Path | None) -> None:
    """A durable spool for one machine: pipe in, append-only log, readers at their own pace."""
    ctx.obj = root


def main() -> None:
    """The console script."""
    sys.exit(_run(sys.argv[1:]))


def _run(arguments: list[str]) -> int:
    if completing := os.environ.get(_COMPLETE):
        from click.shell_completion import shell_complete

        return shell_complete(cli, {}, "wald", _COMPLETE, completing)
    try:
        with cli.make_context("wald", arguments) as context:
            code = cli.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as left:  # after --help and --version
        return left.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return error.exit_code
    except click.ClickException as error:
        return _fail(error.format_message(), _help_hint(error), error.exit_code)
    except WaldError as error:
        return _fail(error.message, error.hint, error.exit_code)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter complains at its exit
        return OUTPUT_CLOSED
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}", "", 1)
    return code if isinstance(code, int) else 0


def _fail(message: str, hint: str, code: int) -> int:
    print(f"wald: {' '.join(message.split())}", file=sys.stderr)
    if hint:
        print(f"  hint: {hint}", file=sys.stderr)
    return code


def _help_hint(error: click.ClickException) -> str:
    context = error.ctx if isinstance(error, click.UsageError) else None
    return f"{context.command_path if context else 'wald'} --help"

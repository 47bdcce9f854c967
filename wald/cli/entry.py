"""Entry point of all programs: every error becomes one line, a hint and an exit code.

Exit codes: 0 done; 1 a bug, or an error of the operating system; 2 wrong usage or input; 3 not found; 4 damage;
5 another process does this work already; 6 the daemon does not answer; 7 the disk is full or fails; 8 the root is of a
newer wald; 9 refused, because it would break a promise; 10 records were given up; 11 not permitted; 12 read in part,
because the rest was reclaimed; 13 and 14 `wald doctor` or `wald status` found what fails, or warnings only;
15 durable, and not processed in time; 16 the log at the path was replaced or is gone;
130 interrupted; 141 the reader of a result has exited.
"""

from __future__ import annotations

import os
import sys

import click

from wald.cli.streams import prepare_streams
from wald.errors import DISK_ERRORS, DiskFailure, InvalidInput, NotPermitted, WaldError, wrong_type
from wald.hints import command_line, room_commands

INTERRUPTED = 130
OUTPUT_CLOSED = 141
HELP_WIDTH = 100
ROOT = "wald.root"  # key in the context: the log of the command


def run(command: click.Command, program: str, arguments: list[str]) -> int:
    """Run ``command`` and return the exit code of the process.

    ``eval "$(_WALD_COMPLETE=bash_source wald)"`` completes in bash; for ``wald-archive`` it is _WALD_ARCHIVE_COMPLETE.
    """
    prepare_streams()
    variable = f"_{program.upper().replace('-', '_')}_COMPLETE"
    if instruction := os.environ.get(variable):
        from wald.cli.completion import complete

        return complete(command, program, variable, instruction)
    context = None
    try:
        with command.make_context(program, arguments, max_content_width=HELP_WIDTH) as context:
            code = command.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as left:  # after --help and --version
        return left.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return error.exit_code
    except click.ClickException as error:
        return _fail(program, error.format_message(), _help_hint(error, program), error.exit_code)
    except WaldError as error:
        return _fail(program, error.message, error.hint, error.exit_code)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return OUTPUT_CLOSED
    except PermissionError as error:
        refused = NotPermitted.from_error(error)
        return _fail(program, refused.message, refused.hint, refused.exit_code)
    except OSError as error:
        if (misplaced := wrong_type(error)) is not None:
            if str(error.filename) in arguments:
                return _fail(program, misplaced.message, "name a file", InvalidInput.exit_code)
            return _fail(program, misplaced.message, misplaced.hint, misplaced.exit_code)
        where = f"{error.filename}: " if error.filename else ""
        failing = error.errno in DISK_ERRORS
        hint = f"{room_commands(error=error)}; {_reclaim(context)} frees what every group has read" if failing else ""
        return _fail(program, f"{where}{error.strerror or error}", hint, DiskFailure.exit_code if failing else 1)
    return code if isinstance(code, int) else 0


def _reclaim(context: click.Context | None) -> str:
    root = context.meta.get(ROOT) if context is not None else None
    return "wald-reclaim" if root is None else command_line(root, program="wald-reclaim")


def _fail(program: str, message: str, hint: str, code: int) -> int:
    print(f"{program}: {' '.join(message.split())}", file=sys.stderr)
    if hint:
        print(f"  hint: {hint}", file=sys.stderr)
    return code


def _help_hint(error: click.ClickException, program: str) -> str:
    context = error.ctx if isinstance(error, click.UsageError) else None
    return f"{context.command_path if context else program} --help"

"""Commands with short help, groups that import commands on demand, and the way commands run.

Exit codes: 0 done; 1 a bug, or an error of the operating system; 2 wrong usage or input; 3 not found; 4 damage;
5 another process does this work already; 6 the daemon does not answer; 7 the disk is full or fails; 8 the root is of a
newer wald; 9 refused, because it would break a promise; 10 records were given up; 11 not permitted; 12 read in part,
because the rest was reclaimed; 13 and 14 `wald doctor` or `wald status` found what fails, or warnings only;
15 durable, and not processed in time; 16 the log at the path was replaced or is gone;
130 interrupted; 141 the reader of a result has exited.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from wald.cli.output import prepare_streams
from wald.errors import DISK_ERRORS, DiskFailure, InvalidInput, NotPermitted, WaldError, wrong_type
from wald.hints import command_line, room_commands

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from wald.settings import Setting


INTERRUPTED = 130
OUTPUT_CLOSED = 141
HELP_WIDTH = 100
ROOT = "wald.root"  # key in the context: the log of the command


def examples(*lines: str) -> str:
    """Return the epilog of a command: examples that click does not wrap."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


class Command(click.Command):
    """A command with hidden options and ``tables`` of settings, which ``--help-all`` shows and ``--help`` omits."""

    def __init__(
        self, *args: Any, tables: Callable[[], Iterable[tuple[str, list[Setting]]]] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._tables = tables

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        params = super().get_params(ctx)
        everything = click.Option(
            ["--help-all"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=self._show_all,
            help="Show all options" + (" and settings" if self._tables else "") + ", and exit.",
        )
        return [*params[:-1], everything, *params[-1:]]  # the last one is --help

    def _show_all(self, ctx: click.Context, _: click.Parameter, given: bool) -> None:
        if not given or ctx.resilient_parsing:
            return
        for param in self.params:
            if isinstance(param, click.Option):
                param.hidden = False
        formatter = ctx.make_formatter()
        self.format_help(ctx, formatter)
        for title, settings in self._tables() if self._tables else ():
            with formatter.section(title):
                formatter.write_dl([_described(setting) for setting in settings], col_max=40)
        click.echo(formatter.getvalue().rstrip("\n"))
        ctx.exit()


def _described(setting: Setting) -> tuple[str, str]:
    default = f" = {setting.default}" if setting.default else ""
    unit = f", {setting.unit}" if setting.unit and setting.unit not in ("octal", "fraction") else ""
    name = f"{setting.name}{default}{' *' if setting.reloadable else ''}"
    return name, f"{setting.meaning} [{setting.bounds}{unit}]"


class LazyCommand(NamedTuple):
    """Location of a command, and its line in the group's help."""

    module: str
    function: str
    summary: str


class Program(NamedTuple):
    """A separate program; ``extra`` installs its packages."""

    module: str
    summary: str
    extra: str = ""


class LazyGroup(click.Group):
    """A group whose help and completion import no commands; ``wald NAME`` also runs the program ``wald-NAME``."""

    def __init__(
        self,
        *args: Any,
        lazy: Mapping[str, LazyCommand],
        programs: Mapping[str, Program] | None = None,
        sections: Mapping[str, tuple[str, ...]] | None = None,  # of the help; in "a, b" two names share a line
        removed: Mapping[str, str] | None = None,  # former commands, each with the command to type instead
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._lazy, self._programs, self._removed = lazy, programs or {}, removed or {}
        self._sections = sections or {"Commands": tuple(lazy)}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if (program := self._programs.get(cmd_name)) is not None:
            command = _ProgramCommand(f"{self.name}-{cmd_name}", program)
            return command.module().command if ctx.resilient_parsing else command
        found = self._lazy.get(cmd_name)
        if found is None:
            return None
        command = getattr(importlib.import_module(found.module), found.function)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in self._removed:
            hint = command_line(ctx.obj, self._removed[args[0]])
            raise InvalidInput(f"{ctx.command_path} {args[0]} was removed", hint=hint)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        summaries = self._summaries()
        named = [CompletionItem(name, help=summaries[name]) for name in summaries if name.startswith(incomplete)]
        return named + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        summaries = self._summaries()
        for title, names in self._sections.items():
            with formatter.section(title):
                formatter.write_dl([(each, summaries[each.partition(",")[0]]) for each in names])

    def _summaries(self) -> dict[str, str]:
        summaries = {name: command.summary for name, command in self._lazy.items()}
        return summaries | {name: program.summary for name, program in self._programs.items()}


class _ProgramCommand(click.Command):
    """Runs a program with unchanged arguments, preceded by the root given before its name."""

    def __init__(self, name: str, program: Program) -> None:
        super().__init__(name, add_help_option=False)
        self._program = program

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return []

    def invoke(self, ctx: click.Context) -> None:
        root = ctx.find_object(Path)
        sys.argv = [str(self.name), *(() if root is None else ("--root", str(root))), *ctx.args]
        self.module().main()

    def module(self) -> Any:
        try:
            return importlib.import_module(self._program.module)
        except ModuleNotFoundError as error:
            extra = f"in a clone of wald: pip install '.[{self._program.extra}]'" if self._program.extra else ""
            raise InvalidInput(
                f"{error.name}, which {self.name} needs, is not installed", hint=extra or f"install {self.name}"
            ) from error


def run(command: click.Command, program: str, arguments: list[str]) -> int:
    """Run ``command`` and return the exit code for the process.

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
        usage = error.ctx if isinstance(error, click.UsageError) else None
        return _fail(
            program, error.format_message(), f"{usage.command_path if usage else program} --help", error.exit_code
        )
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
        message = f"{f'{error.filename}: ' if error.filename else ''}{error.strerror or error}"
        if error.errno not in DISK_ERRORS:
            return _fail(program, message, "", 1)
        reclaiming = command_line(context.meta.get(ROOT) if context is not None else None, program="wald-reclaim")
        hint = f"{room_commands(error=error)}; {reclaiming} frees what every group has read"
        return _fail(program, message, hint, DiskFailure.exit_code)
    return code if isinstance(code, int) else 0


def _fail(program: str, message: str, hint: str, code: int) -> int:
    print(f"{program}: {' '.join(message.split())}", file=sys.stderr)
    if hint:
        print(f"  hint: {hint}", file=sys.stderr)
    return code

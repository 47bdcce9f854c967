"""Commands and settings, as click and the configuration have them."""

from __future__ import annotations

import importlib
import re
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click

from documents.tables import table
from wald.settings import Retention, RouteConfig, RouteLimits, Setting, reference
from wald_gate import settings as gate

ROOT = Path(__file__).resolve().parents[2]


def settings() -> str:
    """Every setting outside of tables."""
    return _settings(reference())


def retention() -> str:
    """Every setting that only ``[retention]`` has."""
    return _settings(reference(Retention))


def routes() -> str:
    """Return the settings of a route, without its limits."""
    return _settings(reference(RouteConfig))


def limits() -> str:
    """Return the limits of a route."""
    return _settings(reference(RouteLimits))


def gate_settings() -> str:
    """Every setting of the gate outside of tables."""
    return _settings(reference(gate.Settings))


def gate_limits() -> str:
    """Return the limits of the gate's clients."""
    return _settings(reference(gate.LimitSettings))


def gate_groups() -> str:
    """Every setting of a work group of the gate."""
    return _settings(reference(gate.GroupSettings))


def _settings(settings: list[Setting]) -> str:
    rows = []
    for each in settings:
        name, default = f"`{each.name}`{' *' if each.reloadable else ''}", f"`{each.default}`" if each.default else ""
        rows.append([name, default, each.bounds, each.meaning])
    return table(["setting", "default", "may be", "meaning"], rows)


def commands() -> str:
    """Every command and option of every program."""
    return "\n".join(section for program in programs() for section in command_sections(program, level=2))


def programs() -> list[click.Context]:
    """Return every installed program."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    return [click.Context(program(target), info_name=name) for name, target in scripts.items()]


def program(target: str) -> click.Command:
    """The command that a console script runs."""
    module = importlib.import_module(target.partition(":")[0])
    found = [each for each in vars(module).values() if isinstance(each, click.Command)]
    return next((each for each in found if isinstance(each, click.Group)), found[0])


def command_sections(context: click.Context, level: int) -> Iterator[str]:
    """The section of a command, then one for each of those below it."""
    command = context.command
    text = f"{'#' * level} {context.command_path}\n\n```text\n{usage(context)}\n```\n\n{prose(command.help or '')}"
    if examples := example_lines(command):
        text += f"\n```text\n{examples}\n```\n"
    if options := described(context):
        text += "\n" + table(["option", "meaning"], [[f"`{option}`", meaning] for option, meaning in options])
    yield text
    for inner in below(context):
        yield from command_sections(inner, level=min(level + 1, 4))


def usage(context: click.Context) -> str:
    """The command with its arguments, in one line."""
    return " ".join([context.command_path, *context.command.collect_usage_pieces(context)])


def below(context: click.Context) -> Iterator[click.Context]:
    """The commands of a group; none if it is not one."""
    group = context.command
    if isinstance(group, click.Group):
        for name in group.list_commands(context):
            inner = group.get_command(context, name)
            assert inner is not None
            yield click.Context(inner, info_name=name, parent=context)


def described(context: click.Context) -> list[tuple[str, str]]:
    """Every option with its meaning, but for those that all commands have."""
    options = [each for each in context.command.params if isinstance(each, click.Option)]
    for each in options:
        each.hidden = False  # --help-all shows all
    records = [each.get_help_record(context) for each in options]
    shown = [record for record in records if record and not re.search(r"--(help|version|root)\b", record[0])]
    return [(option, " ".join(meaning.split())) for option, meaning in shown]


def example_lines(command: click.Command) -> str:
    """The examples of a command, a line for each."""
    return "\n".join(line.strip() for line in (command.epilog or "").splitlines()[2:])


def prose(help_text: str) -> str:
    """Return the help text of a command as Markdown; text that click must not wrap stays verbatim."""
    paragraphs = textwrap.dedent(help_text).strip().split("\n\n")
    return "\n".join(
        f"```text\n{part.partition(chr(10))[2]}\n```\n" if part.startswith("\b") else f"{' '.join(part.split())}\n"
        for part in paragraphs
    )

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
from wald.config import reference

ROOT = Path(__file__).resolve().parents[2]


def settings() -> str:
    """Every setting of the daemon."""
    rows = []
    for each in reference():
        name, default = f"`{each.name}`{' *' if each.reloadable else ''}", f"`{each.default}`" if each.default else ""
        rows.append([name, default, each.bounds, each.meaning])
    return table(["setting", "default", "may be", "meaning"], rows)


def commands() -> str:
    """Every command and option of every program."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    return "\n".join(section for program, target in scripts.items() for section in program_sections(program, target))


def program_sections(program: str, target: str) -> Iterator[str]:
    """The section of a program, then one for each of its commands."""
    module = importlib.import_module(target.partition(":")[0])
    found = [each for each in vars(module).values() if isinstance(each, click.Command)]
    command = next((each for each in found if isinstance(each, click.Group)), found[0])
    yield from command_sections(command, click.Context(command, info_name=program), level=2)


def command_sections(command: click.Command, context: click.Context, level: int) -> Iterator[str]:
    """The section of a command, then one for each of those below it."""
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    text = f"{'#' * level} {context.command_path}\n\n```text\n{usage}\n```\n\n{prose(command.help or '')}"
    if rows := option_rows(command, context):
        text += "\n" + table(["option", "meaning"], rows)
    yield text
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            inside = click.Context(inner, info_name=name, parent=context)
            yield from command_sections(inner, inside, level=min(level + 1, 4))


def option_rows(command: click.Command, context: click.Context) -> list[list[str]]:
    """Every option but those that all commands have."""
    records = [each.get_help_record(context) for each in command.get_params(context) if isinstance(each, click.Option)]
    shown = [record for record in records if record and not re.search(r"--(help|version|root)\b", record[0])]
    return [[f"`{usage}`", " ".join(meaning.split())] for usage, meaning in shown]


def prose(help_text: str) -> str:
    """The help text of a command as Markdown; what click must not wrap is shown as it stands."""
    paragraphs = textwrap.dedent(help_text).strip().split("\n\n")
    return "\n".join(
        f"```text\n{part.partition(chr(10))[2]}\n```\n" if part.startswith("\b") else f"{' '.join(part.split())}\n"
        for part in paragraphs
    )

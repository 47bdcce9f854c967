"""A group of commands that knows their names and summaries, and imports a command when it is called."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from wald.errors import InvalidInput
from wald.hints import command_line

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class LazyCommand(NamedTuple):
    """Location of a command, and its line in the help of the group."""

    module: str
    function: str
    summary: str


class LazyGroup(click.Group):
    """A group whose help and completion import no command.

    Args:
        lazy: the commands by name, in the order of the help.
        removed: former commands, each with the command to type instead.
    """

    def __init__(
        self, *args: Any, lazy: Mapping[str, LazyCommand], removed: Mapping[str, str] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = lazy
        self._removed = removed or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
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
            raise InvalidInput(
                f"{ctx.command_path} {args[0]} was removed", hint=command_line(ctx.obj, self._removed[args[0]])
            )
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        matching = [name for name in self._lazy if name.startswith(incomplete)]
        named = [CompletionItem(name, help=self._lazy[name].summary) for name in matching]
        return named + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.summary) for name, command in self._lazy.items()])

"""The commands of a click program, as a user types them."""

from collections.abc import Iterator

import click


def commands(program: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """Yield every command except groups, with its words: ``name`` and the groups above it."""
    if isinstance(program, click.Group):
        context = click.Context(program)
        for each in program.list_commands(context):
            inner = program.get_command(context, each)
            assert inner is not None
            yield from commands(inner, f"{name} {each}")
    else:
        yield name, program

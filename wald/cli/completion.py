"""Shell completion of routes, groups, positions and times.

Completion must be fast and imports no command, so the arguments are listed here; a test compares the list with the
commands.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import click

ARGUMENTS: dict[str, tuple[str, ...]] = {
    "wald append": ("route",),
    "wald read": ("route",),
    "wald route add": ("route",),
    "wald route retire": ("route",),
    "wald cursor get": ("route",),
    "wald cursor list": ("route",),
    "wald cursor remove": ("route",),
    "wald cursor show": ("route",),
    "wald cursor skip": ("route", ""),
    "wald cursor set": ("route", "position"),
    "wald cursor from-checkpoint": ("", "route"),
    "wald group list": ("route",),
    "wald group show": ("route", "work group"),
    "wald group pending": ("route", "work group"),
    "wald group release": ("route", "work group", ""),
    "wald group remove": ("route", "work group"),
    "wald group skip": ("route", "work group", ""),
    "wald hold": ("route", "..."),
    "wald-drain": ("route",),
    "wald-drain feed": ("route",),
    "wald-drain redrive": ("route",),
    "wald-archive": ("route", "..."),
    "wald-archive pack": ("route", "..."),
    "wald-archive restore": ("", "route", "..."),
}
"""The kinds of a command's arguments; "..." repeats the preceding kind, "" is any other kind."""

OPTIONS = {
    "--group": "group",
    "--wait-processed": "group",
    "--route": "route",
    "--stdin": "route",
    "--dead-letter": "route",
    "--from": "start",
    "--to": "position",
    "--since": "time",
    "--until": "time",
}
"""The kind of an option's value."""

VALUED = {*OPTIONS, "--root", "--archive", "--at", "--config", "--consumers", "--delay", "--format", "--grep"}
VALUED |= {"--interval", "--jobs", "--key-separator", "--lag-max", "--last", "--limit", "--mode", "--needed-bytes"}
VALUED |= {"--on-missing", "--retry-for", "--socket", "--processed-within", "--timeout", "--during", "--worker"}
VALUED |= {"--why", "-n"}
"""The options of ``wald`` that take a value."""

_TIMES = ("now", "today", "yesterday", "5m", "1h", "1d")
_STARTS = ("earliest", "end", "cursor")


def complete(command: click.Command, program: str, variable: str, instruction: str) -> int:
    """Print completions or the shell script for an instruction such as ``bash_complete`` or ``zsh_source``."""
    from click.shell_completion import CompletionItem, get_completion_class, shell_complete

    shell, _, what = instruction.partition("_")
    if what == "complete" and (asking := get_completion_class(shell)) is not None:
        asked = asking(command, {}, program, variable)
        words, incomplete = asked.get_completion_args()
        if (names := _names(program, words, incomplete)) is not None:
            for name in names:
                print(asked.format_completion(CompletionItem(name)))
            return 0
    return shell_complete(command, {}, program, variable, instruction)


def _names(program: str, words: Sequence[str], incomplete: str) -> list[str] | None:
    """Return the completions of ``incomplete``; None to fall back to click."""
    typed = _typed(program, words)
    option, joined, value = incomplete.partition("=")
    if words and words[-1] in VALUED:
        kind = OPTIONS.get(words[-1], "")
    elif joined and option in OPTIONS:
        kind = OPTIONS[option]
    else:
        kind = "" if incomplete.startswith("-") else typed.following()
    if not kind:
        return None
    before = f"{option}=" if joined and option in OPTIONS else ""
    found = [*_KINDS[kind](typed)]
    if kind == "route" and not typed.arguments:  # wald-drain takes a route or a command
        found += [each.rpartition(" ")[2] for each in ARGUMENTS if each.rpartition(" ")[0] == typed.command]
    return [before + name for name in found if name.startswith(value if before else incomplete)]


@dataclass(frozen=True, slots=True)
class _Typed:
    """The typed words of a command line; ``arguments`` are those after the command, without options."""

    root: Path | None
    command: str
    arguments: tuple[str, ...]

    def following(self) -> str:
        """Return the kind of the next argument; "" if unknown."""
        kinds = ARGUMENTS.get(self.command, ())
        if kinds[-1:] == ("...",):
            return kinds[min(len(self.arguments), len(kinds) - 2)]
        return kinds[len(self.arguments)] if len(self.arguments) < len(kinds) else ""

    def routes(self) -> list[str]:
        kinds = ARGUMENTS.get(self.command, ())
        return [name for name, kind in zip(self.arguments, kinds, strict=False) if kind == "route"]


def _typed(program: str, words: Sequence[str]) -> _Typed:
    pairs = list(pairwise(["", *words]))
    roots = [word for before, word in pairs if before == "--root"]
    roots += [word.removeprefix("--root=") for word in words if word.startswith("--root=")]
    root = roots[-1] if roots else os.environ.get("WALD_ROOT")
    plain = [word for before, word in pairs if not word.startswith("-") and before not in VALUED]
    command = program
    if plain and any(each.partition(" ")[0] == f"{program}-{plain[0]}" for each in ARGUMENTS):
        command = f"{program}-{plain.pop(0)}"  # wald NAME runs wald-NAME
    while plain and any(f"{each} ".startswith(f"{command} {plain[0]} ") for each in ARGUMENTS):
        command = f"{command} {plain.pop(0)}"
    return _Typed(Path(root).expanduser() if root else None, command, tuple(plain))


def _routes(typed: _Typed) -> list[str]:
    from wald.format.names import is_route

    return [] if typed.root is None else [name for name in _listed(typed.root / "routes") if is_route(name)]


def _groups(typed: _Typed, *, suffix: str) -> list[str]:
    """Return the groups that have a file with this suffix. Other names may contain commands for the shell."""
    from wald.format.names import CURSORS, is_route

    if typed.root is None:
        return []
    of_routes = [typed.root / "routes" / route for route in typed.routes() or _routes(typed)]
    files = {name for route in of_routes for name in _listed(route / CURSORS)}
    names = (name.removesuffix(suffix) for name in files if name.endswith(suffix))
    return sorted(filter(is_route, names))


def _listed(directory: Path) -> list[str]:
    """The names in a directory, read without wald's checks, which take long to import."""
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


_KINDS: dict[str, Callable[[_Typed], Iterable[str]]] = {
    "route": _routes,
    "group": partial(_groups, suffix=".cursor"),
    "work group": partial(_groups, suffix=".work"),
    "start": lambda _: (*_STARTS, *_TIMES),
    "position": lambda _: _TIMES,
    "time": lambda _: _TIMES,
}

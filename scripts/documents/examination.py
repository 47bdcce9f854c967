"""Checks and findings of `wald doctor` as tables, read from the source of the verdicts."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Iterator

from documents.errors import branches_of, hint_for_any, shown
from documents.tables import table
from wald.cli.doctor import files, host, log, medium
from wald.cli.doctor.examination import CHECKS

_PATHS = {"paths.root": "ROOT", "paths.at": "ROOT", "paths.wald": "wald --root ROOT"}

# The facts of each check, in the order of the checks.
FACTS = (
    log.Place,
    log.User,
    log.Settings,
    medium.Mount,
    medium.Device,
    medium.Sync,
    files.Replacement,
    files.Links,
    files.Locks,
    files.Allocation,
    files.Mapping,
    files.Fifos,
    files.Names,
    files.Events,
    host.Pipes,
    medium.Space,
    medium.Inodes,
    medium.Quota,
    log.Rights,
    log.Files,
    log.SocketPath,
    log.Running,
    host.Service,
    host.Limits,
    host.Clock,
    host.Uptime,
    host.Parts,
    host.Spark,
)


def checks() -> str:
    """Return every check, its question, and the promises that depend on it."""
    rows = [[f"`{check.name}`", check.about, ", ".join(map(str, check.promises)) or "–"] for check in CHECKS]
    return table(["check", "what is examined", "promises"], rows)


def findings() -> str:
    """Return the findings of problems, and what to type; values that differ between hosts are `…`."""
    rows = [
        [f"`{name}`", outcome, f"`{message}`", f"`{advice}`" if advice else ""]
        for name, outcome, message, advice in verdicts()
        if outcome not in ("ok", "skipped")
    ]
    return table(["check", "outcome", "message", "hint"], rows)


def verdicts() -> Iterator[tuple[str, str, str, str]]:
    """Yield check, outcome, message and advice of every verdict in the source."""
    for check, facts in zip(CHECKS, FACTS, strict=True):
        function = ast.parse(textwrap.dedent(inspect.getsource(facts.verdict)))
        nodes = sorted(
            (node for node in ast.walk(function) if isinstance(node, ast.stmt)), key=lambda node: node.lineno
        )
        names: dict[str, ast.expr] = {
            name: ast.Constant(value) for name, value in facts.verdict.__globals__.items() if isinstance(value, str)
        }
        for node in nodes:
            match node:
                case ast.Assign([ast.Name(name)], value):
                    names[name] = value
                case ast.Return(ast.Call(ast.Name(outcome), arguments)):
                    for texts in itertools.product(
                        *(branches_of(names.get(ast.unparse(each), each)) for each in arguments)
                    ):
                        message, advice = (*(_shown(each, names) for each in texts), "")[:2]
                        yield check.name, outcome, message, advice


def _shown(node: ast.expr, names: dict[str, ast.expr]) -> str:
    """Return a text with the assigned texts put in, and `…` for other values."""
    match node:
        case ast.JoinedStr(values):
            return "".join(
                str(each.value) if isinstance(each, ast.Constant) else _shown(each, names) for each in values
            )
        case ast.FormattedValue(value):
            return _shown(value, names)
        case ast.Name(name) if isinstance(names.get(name), ast.JoinedStr | ast.Constant):
            return _shown(names[name], names)
        case ast.Call(ast.Name("hint_for"), [ast.Constant(case)]):
            return hint_for_any(str(case))
    return _PATHS.get(ast.unparse(node)) or shown(node)

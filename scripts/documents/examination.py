"""Checks and findings of `wald doctor` as tables, read from the source of the verdicts."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Iterator

from documents.errors import branches_of, hint_for_any, shown
from documents.tables import table
from wald.cli.doctor.examination import CHECKS, Check

_PATHS = {"paths.root": "ROOT", "paths.at": "ROOT", "paths.wald": "wald --root ROOT"}


def checks() -> str:
    """Return every check, its question, and the promises that depend on it."""
    rows = [[f"`{check.name}`", about(check), ", ".join(map(str, check.promises)) or "–"] for check in CHECKS]
    return table(["check", "what is examined", "promises"], rows)


def about(check: Check) -> str:
    """Return what a check examines, the first sentence about its facts."""
    return (inspect.getdoc(check.facts) or "").partition("\n")[0].rstrip(".")


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
    for check in CHECKS:
        function = ast.parse(textwrap.dedent(inspect.getsource(check.facts.verdict)))
        nodes = sorted(
            (node for node in ast.walk(function) if isinstance(node, ast.stmt)), key=lambda node: node.lineno
        )
        names: dict[str, ast.expr] = {
            name: ast.Constant(value)
            for name, value in check.facts.verdict.__globals__.items()
            if isinstance(value, str)
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

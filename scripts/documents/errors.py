"""Errors that the programs raise, with their hints, read from the source."""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from string import Formatter

import wald.hints
from documents.tables import table
from wald.hints import PROGRAMS, TEMPLATES

ROOT = Path(__file__).resolve().parents[2]
_WORD = re.compile(r"(?!offset)[A-Za-z]{3}")  # without one, all of a message is put in from elsewhere


def messages(name: str) -> str:
    """The messages of the errors of one class; what differs from call to call is `…`."""
    return table(["message", "hint"], [[*row] for row in sorted(errors_made()[name])])


@cache
def errors_made() -> dict[str, set[tuple[str, str]]]:
    """Return message and hint of each error that wald and its programs raise, by class."""
    found: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for folder in ("wald", "sidecars"):
        for path in (ROOT / folder).rglob("*.py"):
            for call in ast.walk(ast.parse(path.read_text())):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.args:
                    hints = [hint for each in call.keywords for hint in hints_of(each)] or [""]
                    for message in filter(_WORD.search, map(shown, branches_of(call.args[0]))):
                        rows = {(f"`{message}`", f"`{each}`" if _WORD.search(each) else "") for each in hints}
                        found[call.func.id] |= rows
    return found


def hints_of(given: ast.keyword) -> list[str]:
    """Return the hints that a keyword argument of an error gives, as a text or by its cases."""
    if given.arg == "hint":
        return [shown(given.value)]
    branches = branches_of(given.value) if given.arg == "case" else []
    return [hint_for_any(each.value) for each in branches if isinstance(each, ast.Constant)]


def branches_of(node: ast.expr) -> list[ast.expr]:
    """Return the values among which an expression selects."""
    return [*branches_of(node.body), *branches_of(node.orelse)] if isinstance(node, ast.IfExp) else [node]


def hint_for_any(case: str) -> str:
    """Return the hint of a case, with `…` for each fact but the root."""
    template = TEMPLATES[case]
    if not callable(template):
        programs = {name: f"{program} --root ROOT" for name, program in PROGRAMS.items()}
        fields = (field for _, field, _, _ in Formatter().parse(template) if field)
        return re.sub(r":04o(?=\})", "", template).format_map(dict.fromkeys(fields, "…") | programs)
    return shown(functions_of_cases()[case])


@cache
def functions_of_cases() -> dict[str, ast.expr]:
    """Return the last returned expression of the function of each case that has one."""
    tree = ast.parse(inspect.getsource(wald.hints))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    (cases,) = (
        node.value for node in tree.body if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict)
    )
    found = {}
    for case, value in zip(cases.keys, cases.values, strict=True):
        if isinstance(case, ast.Constant) and isinstance(value, ast.Lambda):
            found[case.value] = value.body
        elif isinstance(case, ast.Constant) and isinstance(value, ast.Name) and value.id in functions:
            returned = [node.value for node in ast.walk(functions[value.id]) if isinstance(node, ast.Return)]
            found[case.value] = returned[-1]
    return found


def shown(node: ast.expr) -> str:
    """A text as the code makes it, with `…` for each value that is put in."""
    if isinstance(node, ast.Constant):
        return " ".join(str(node.value).split())
    if isinstance(node, ast.JoinedStr):
        return "".join(str(each.value) if isinstance(each, ast.Constant) else shown(each) for each in node.values)
    if isinstance(node, ast.FormattedValue):
        return shown(node.value)
    if isinstance(node, ast.IfExp):
        return shown(node.body) or shown(node.orelse)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return shown(node.left) + shown(node.right)
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "command_line":
        program = next((shown(each.value) for each in node.keywords if each.arg == "program"), "wald")
        return f"{program} --root ROOT {shown(node.args[1]) if len(node.args) > 1 else ''}".rstrip()
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "room_commands":
        paths = " …" * len(node.args)
        return f"df -h{paths}; df -i{paths}"
    return "…"

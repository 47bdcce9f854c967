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
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
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
            tree = ast.parse(path.read_text())
            functions = [node for node in ast.walk(tree) if isinstance(node, _FUNCTION)]  # the outer ones first
            seen: set[ast.Call] = set()
            for scope in (*functions, tree):
                _add_errors(scope, seen, found)
    return found


def _add_errors(scope: ast.AST, seen: set[ast.Call], found: dict[str, set[tuple[str, str]]]) -> None:
    """Add the errors made in a function, whose texts may have a name, or elsewhere in a module."""
    names: dict[str, ast.expr] = {}
    nodes = (node for node in ast.walk(scope) if isinstance(node, ast.Assign | ast.Call))
    for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(scope, ast.FunctionDef)
        ):
            names[node.targets[0].id] = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args and node not in seen:
            seen.add(node)
            hints = [hint for each in node.keywords for hint in hints_of(each, names)] or [""]
            message = names.get(ast.unparse(node.args[0]), node.args[0])
            for text in filter(_WORD.search, map(shown, branches_of(message))):
                found[node.func.id] |= {(f"`{text}`", f"`{each}`" if _WORD.search(each) else "") for each in hints}


def hints_of(given: ast.keyword, names: dict[str, ast.expr]) -> list[str]:
    """Return the hints that a keyword argument of an error gives, as a text or by its cases."""
    if given.arg == "hint":
        return [shown(each) for each in branches_of(names.get(ast.unparse(given.value), given.value))]
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

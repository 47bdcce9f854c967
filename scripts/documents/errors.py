"""Every error that the programs report on purpose, with its hint, as it is written in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from documents.tables import table

ROOT = Path(__file__).resolve().parents[2]
_WORD = re.compile(r"(?!offset)[A-Za-z]{3}")  # without one, all of a message is put in from elsewhere


def messages(name: str) -> str:
    """The messages of the errors of one class; what differs from call to call is `…`."""
    rows = {tuple(row) for path in sources() for row in rows_of(ast.parse(path.read_text()), name)}
    return table(["message", "hint"], [[*row] for row in sorted(rows)])


def sources() -> list[Path]:
    """Every module of wald and of the programs beside it."""
    return sorted(path for folder in ("wald", "sidecars") for path in (ROOT / folder).rglob("*.py"))


def rows_of(tree: ast.Module, name: str) -> Iterator[list[str]]:
    """Message and hint of each error of class ``name`` that a module makes."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and ast.unparse(call.func).split(".")[-1] == name and call.args:
            message = shown(call.args[0])
            if _WORD.search(message):
                hint = next((shown(each.value) for each in call.keywords if each.arg == "hint"), "")
                yield [f"`{message}`", f"`{hint}`" if _WORD.search(hint) else ""]


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
    return "…"

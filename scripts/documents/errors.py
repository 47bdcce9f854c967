"""Every error that the programs report on purpose, with its hint, as it is written in the code."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

from documents.tables import table

ROOT = Path(__file__).resolve().parents[2]
_WORD = re.compile(r"(?!offset)[A-Za-z]{3}")  # without one, all of a message is put in from elsewhere


def messages(name: str) -> str:
    """The messages of the errors of one class; what differs from call to call is `…`."""
    return table(["message", "hint"], [[*row] for row in sorted(errors_made()[name])])


@cache
def errors_made() -> dict[str, set[tuple[str, str]]]:
    """By class, message and hint of each error that wald and the programs beside it make."""
    found: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for folder in ("wald", "sidecars"):
        for path in (ROOT / folder).rglob("*.py"):
            for call in ast.walk(ast.parse(path.read_text())):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.args:
                    name, message = call.func.id, shown(call.args[0])
                    hint = next((shown(each.value) for each in call.keywords if each.arg == "hint"), "")
                    if _WORD.search(message):
                        found[name].add((f"`{message}`", f"`{hint}`" if _WORD.search(hint) else ""))
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

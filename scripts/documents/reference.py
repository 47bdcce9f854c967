"""Reference of the Python API, from signatures and docstrings in the Google style."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator
from pydoc import locate
from typing import Any

_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields|Example):+")
_ENTRY = re.compile(r"(\*{0,2}[\w., *]+?): ")
_ROLE = re.compile(r":\w+:`~?([^`]+)`")
_WIDTH = 100  # of a signature, before it gets one line for each parameter


class _Annotation(str):
    """Annotation as it is in the source, without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def api(asked: str) -> str:
    """A function, a class with its methods, or the classes of a module, in Markdown; NAME or NAME except MEMBER..."""
    name, _, hidden = asked.partition(" except ")
    found = locate(name)
    if found is None:
        raise LookupError(name)
    if not inspect.ismodule(found):
        return _class(found, name, hidden.split()) if inspect.isclass(found) else _function(found, name)
    own = (each for each in vars(found).values() if inspect.isclass(each) and each.__module__ == name)
    classes = (each for each in own if not each.__name__.startswith("_"))
    parts = (_class(each, f"{name}.{each.__name__}", hidden.split()) for each in classes)
    return "\n\n".join((*_text(found.__doc__ or ""), *parts))


def _class(found: type, name: str, hidden: Collection[str]) -> str:
    short = name.rpartition(".")[2]
    is_error = issubclass(found, BaseException)
    parts = [f"### `{short if is_error else name}`"]
    if not is_error and "\n    Args:" in (found.__doc__ or ""):
        parts.append(_code(_signature(found, short)))
    if is_error:
        code = vars(found).get("exit_code", "the same")
        parts.append(f"A subclass of `{found.__mro__[1].__name__}`. Exit code: {code}.")
    parts += _text(found.__doc__ or "")
    for member, value in vars(found).items():
        if member in hidden or (member.startswith("_") and member not in ("__iter__", "__aiter__")):
            continue
        if isinstance(value, property):
            if value.fget is not None and value.fget.__doc__:
                parts += [f"#### `{short}.{member}`", *_text(value.fget.__doc__)]
        elif inspect.isfunction(function := inspect.unwrap(getattr(value, "__func__", value))) and function.__doc__:
            parts.append(_function(function, f"{short}.{member}"))
    return "\n\n".join(parts)


def _function(function: Any, name: str) -> str:
    heading = "####" if name[0].isupper() else "###"
    word = "async def" if inspect.iscoroutinefunction(function) else "def"
    return "\n\n".join(
        [f"{heading} `{name}`", _code(f"{word} {_signature(function, name)}"), *_text(function.__doc__ or "")]
    )


def _signature(found: Any, name: str) -> str:
    signature = inspect.signature(found)
    kept = [
        each.replace(annotation=_Annotation(each.annotation) if isinstance(each.annotation, str) else each.annotation)
        for each in signature.parameters.values()
        if each.name not in ("self", "cls")
    ]
    result = signature.return_annotation
    shown = "" if result is inspect.Signature.empty or inspect.isclass(found) else f" -> {result}"
    short = name.rpartition(".")[2]
    line = f"{short}{inspect.Signature(kept)}{shown}"
    if len(line) <= _WIDTH:
        return line
    parameters = "".join(f"    {text},\n" for text in _parameters(kept))
    return f"{short}(\n{parameters}){shown}"


def _parameters(kept: list[inspect.Parameter]) -> Iterator[str]:
    is_keyword = False
    for each in kept:
        if each.kind is inspect.Parameter.KEYWORD_ONLY and not is_keyword:
            is_keyword = True
            yield "*"
        yield str(each)


def _code(text: str) -> str:
    return f"```python not-run\n{text}\n```"


def _text(docstring: str) -> Iterator[str]:
    """Yield the paragraphs and sections of a docstring."""
    lines = [*inspect.cleandoc(docstring).splitlines(), "End:"]
    name, taken = "", list[str]()
    for line in lines:
        found = _SECTION.fullmatch(line)
        if found or line == "End:":
            if any(taken):
                yield from _section(name, taken)
            name, taken = found[1] if found else "", []
        else:
            taken.append(line)


def _section(name: str, lines: list[str]) -> Iterator[str]:
    body = inspect.cleandoc("\n" + "\n".join(lines))
    if name == "Example":
        yield _code(body)
    elif name in ("", "Returns", "Yields"):
        text = _plain(body)
        yield f"**{name}:** {text}" if name else text
    else:
        title = {"Args": "Arguments", "Attributes": "Attributes", "Raises": "Raises"}[name]
        entries = "\n".join(_entry(line) for line in body.splitlines() if line)
        yield f"**{title}:**\n\n{entries}"


def _entry(line: str) -> str:
    """Return a line of a list; a further line of an entry is indented."""
    if line.startswith(" "):
        return "  " + _plain(line.strip())
    found = _ENTRY.match(line)
    if found is None:
        return f"- {_plain(line)}"
    names = ", ".join(f"`{each}`" for each in found[1].split(", "))
    return f"- {names}: {_plain(line[found.end() :])}"


def _plain(text: str) -> str:
    """Return reStructuredText as Markdown."""
    text = _ROLE.sub(lambda found: f"`{found[1].removeprefix('wald.errors.')}`", text)
    return text.replace("``", "`")

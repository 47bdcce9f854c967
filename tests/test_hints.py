"""Hints are commands that work unchanged: they name the log, quoted."""

import ast
import inspect
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from string import Formatter

import pytest
from running import Daemon, output_of, refused, run, sidecar, wald
from running import command as line_of

from wald.cli.completion import ARGUMENTS
from wald.hints import PROGRAMS, TEMPLATES, hint_for

ROOT = Path(__file__).parents[1]
FILES = sorted(path for package in ("wald", "sidecars") for path in (ROOT / package).rglob("*.py"))
COMMANDS = "run|init|append|read|status|head|where|show|route|cursor|explain|top|hold|cut|history|repair|verify"
BARE = re.compile(rf"\bwald(-\w+ --root\b| --root\b| ({COMMANDS})\b(?! --help|:))")
OWN_HINTS = [ROOT / "wald" / part for part in ("status", "cli", "work")]
CORE = [path for path in FILES if ROOT / "wald" in path.parents and not any(map(path.is_relative_to, OWN_HINTS))]
TITLES = {"wald top", "wald cursor skip", *ARGUMENTS}


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def words_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and text of every string of a module, except docstrings, examples, and the help of options."""
    silent: set[int] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Expr):
            silent.add(id(node.value))
        if isinstance(node, ast.keyword) and node.arg == "help":
            silent.update(id(each) for each in ast.walk(node.value))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "examples":
            silent.update(map(id, node.args))
    for node in nodes_of(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent:
            yield node.lineno, node.value


def test_commands_in_words_come_from_where_the_root_is_added() -> None:
    """``wald.hints.command_line`` adds the root and quotes it."""
    assert len(FILES) > 100
    assert [
        (str(path), number, words)
        for path in FILES
        for number, words in words_of(path)
        if BARE.search(words) and words not in TITLES
    ] == []


@cache
def facts_given() -> list[tuple[set[str], set[str], str]]:
    """Return the possible cases of each error or hint, the names of its facts, and its place in the source."""
    found = []
    for path in FILES:
        for node in nodes_of(path):
            if not isinstance(node, ast.Call):
                continue
            given = {each.arg or "**": each.value for each in node.keywords}
            case = given.pop("case", node.args[0] if node.args and ast.unparse(node.func) == "hint_for" else None)
            cases = {str(each.value) for each in ast.walk(case) if isinstance(each, ast.Constant)} if case else set()
            if cases:
                found.append((cases, set(given), f"{path.relative_to(ROOT)}:{node.lineno}"))
    return found


def facts_needed(case: str) -> set[str]:
    template = TEMPLATES[case]
    if not isinstance(template, str):
        return set(inspect.signature(template).parameters)
    fields = {field for _, field, _, _ in Formatter().parse(template) if field}
    return fields - {*PROGRAMS} | ({"root"} if fields & {*PROGRAMS} else set())


def test_each_case_of_an_error_has_a_template_and_each_template_a_case() -> None:
    assert {case for cases, _, _ in facts_given() for case in cases} == {*TEMPLATES} - {""}


def test_each_template_is_given_the_facts_that_it_needs() -> None:
    assert [
        f"{place}: {given} instead of {needed} for {cases}"
        for cases, given, place in facts_given()
        if given != (needed := set[str]().union(*map(facts_needed, cases)))
    ] == []


def test_the_core_raises_errors_with_facts_and_leaves_the_hints_to_their_module() -> None:
    """Journal entries and statuses may reuse the hint of an error or call ``hint_for``."""
    assert [
        f"{path.relative_to(ROOT)}:{node.value.lineno}: {ast.unparse(node.value)}"
        for path in CORE
        for node in nodes_of(path)
        if isinstance(node, ast.keyword) and node.arg == "hint"
        if not re.fullmatch(r"[\w.]+\.hint(\(.*\))?|hint_for\(.*\)", ast.unparse(node.value))
    ] == []


def test_no_module_of_the_core_words_a_command() -> None:
    assert [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in CORE
        if path.name != "hints.py"
        for node in nodes_of(path)
        if isinstance(node, ast.ImportFrom) and node.module == "wald.hints"
        if {"command_line", "quote", "room_commands"} & {each.name for each in node.names}
    ] == []


def test_a_path_in_a_hint_is_quoted() -> None:
    lost = "or stop the daemon, and give up the lost records: wald --root /log repair --accept-loss"
    assert hint_for("lost-routes-unknown", root=Path("/log")).endswith(lost)
    assert hint_for("log-gone", root=Path("/srv/my log")).startswith("findmnt -T '/srv/my log'; ls -la '/srv/my log'; ")
    assert hint_for("cursor-is-a-directory", path=Path("/a b")) == "ls -lR '/a b'; as root: rm -r '/a b'"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Root whose path needs quoting, with a running daemon; route a has records 1 and 2, route b is retired."""
    root = tmp_path_factory.mktemp("hints") / "my log"
    with Daemon(root):
        for name in "ab":
            output_of("route", "add", name, "--root", root)
        output_of("append", "a", "--root", root, stdin=b"x\ny\n")
        output_of("cursor", "set", "a", 2, "--root", root)
        output_of("route", "retire", "b", "--root", root)
        yield root


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (line_of("append", "c"), ["route list", "route add c"]),
        (line_of("append", "b"), ["route add b"]),
        (line_of("read", "c"), ["route list", "route add c"]),
        (line_of("read", "--commit"), ["route list"]),
        (line_of("read", "a", "--from", 9), ["read a --from end --follow"]),
        (line_of("read", "--from", 9), ["read --from end --follow"]),
        (line_of("cursor", "get", "a", "--group", "g"), ["cursor set a SEQUENCE --group g"]),
        (line_of("cursor", "set", "a", 9), ["head"]),
        (line_of("cursor", "set", "a", 1), ["cursor set a 1 --group processed --rewind"]),
        (line_of("cursor", "remove", "a", "--group", "g"), ["cursor list a"]),
        (line_of("route", "add", "a", "--mode", "0600"), ["route add a --fifo --mode 0600"]),
        (line_of("hold"), ["hold --all"]),
        (line_of("hold", "a"), ["route add a --fifo"]),
        (line_of("run"), ["append ROUTE"]),
        (line_of("top", "--interval", "0"), ["top --interval 1s"]),
    ],
    ids=lambda given: " ".join(given[2:] if "-m" in given else given),
)
def test_a_hint_holds_the_root_it_was_asked_with(root: Path, line: list[str], wanted: list[str]) -> None:
    _, _, hint = refused(run([*line, "--root", str(root)], stdin=b"x\n"))

    there = f"wald --root {shlex.quote(str(root))} "
    assert [words for words in wanted if there + words not in hint] == [], hint
    assert not BARE.search(hint.replace(there, "")), hint


def test_a_hint_works_when_typed(root: Path) -> None:
    _, _, hint = refused(wald("append", "b", "--root", root, stdin=b"x\n"))
    typed = shlex.split(hint.partition("to reactivate the route: ")[2])
    try:
        assert run([*line_of(), *typed[1:]]).returncode == 0
        assert wald("append", "b", "--root", root, stdin=b"x\n").returncode == 0
    finally:
        output_of("route", "retire", "b", "--root", root)


def test_a_log_that_is_not_there_is_made_by_the_hint(tmp_path: Path) -> None:
    for line in (line_of("head"), sidecar("reclaim")):
        _, _, hint = refused(run([*line, "--root", str(tmp_path / "no log")]))
        assert hint == f"to create a log: wald --root '{tmp_path}/no log' run"

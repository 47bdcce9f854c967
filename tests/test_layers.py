"""Layers: format < store < daemon < cli; imports point downward, and heavy packages are imported late.

Most rules read the source (``ast``); for some, a process reports the modules that a command loads.
"""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from wald.files.disk import Disk
from wald.files.identity import create_root
from wald.files.layout import Root
from wald.format.head import Head, encode_head
from wald.writing.daemon_lock import Lock

ROOT = Path(__file__).parents[1]
PROGRAMS = ("wald_archive", "wald_drain", "wald_gate", "wald_reclaim", "wald_spark")  # in sidecars/
PACKAGES = ("wald", *PROGRAMS, "pyspark_wald")
SOURCES = sorted(path for folder in ("wald", "sidecars") for path in (ROOT / folder).rglob("*.py"))

# The longest matching prefix decides which wald modules a module may import.
PURE = ("wald.errors", "wald.hints", "wald.format")
FILES_ROOM = (*PURE, "wald.files")
SEGMENTS_ROOM = (*FILES_ROOM, "wald.segments")
RETENTION_ROOM = (*SEGMENTS_ROOM, "wald.retention")
READING_ROOM = (*RETENTION_ROOM, "wald.reading")
READING = (*READING_ROOM, "wald.checking")
CORE = tuple(
    f"wald.{room}" for room in ("files", "segments", "retention", "reading", "writing", "checking", "repairing")
)
COMMAND_LINE = ("wald.cli.command", "wald.cli.options", "wald.cli.output", "wald.setting_types")
SERVICES = ("wald.log", "wald.status", "wald.client", "wald.work", "wald.loop", "wald.exposition", "wald.systemd")
SIDECARS = (*PURE, *READING, *COMMAND_LINE, *SERVICES)
PUBLIC = ("consumer", "errors", "format.records", "log", "client.producer", "reading.assembler", "retention.cursors")
STATUS = ("writing.run_reports", "writing.daemon_lock", "client", "log", "work", "setting_types", "status")
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "wald": (*(f"wald.{name}" for name in PUBLIC), "wald.work.group"),
    "wald.__main__": ("wald.cli",),
    "wald.errors": ("wald.hints",),
    "wald.hints": (),
    "wald.setting_types": (),
    "wald.exposition": ("wald.errors",),
    "wald.systemd": (),
    "wald.settings": ("wald.errors", "wald.format.names", "wald.setting_types"),
    "wald.status": (*PURE, *READING, *(f"wald.{name}" for name in STATUS)),
    "wald.client": (*PURE, "wald.client"),
    "wald.log": (*PURE, *CORE, "wald.client"),
    "wald.consumer": (*PURE, *READING, "wald.log", "wald.work.ownership"),
    "wald.work": (*PURE, *READING, "wald.log", "wald.client", "wald.work"),
    "wald.logging": ("wald.errors", "wald.format.names", "wald.client"),
    "wald.aio": (*PURE, *READING, "wald.consumer", "wald.log", "wald.client", "wald.work"),
    "wald.loop": ("wald.hints",),
    "wald.format": PURE,
    "wald.files": FILES_ROOM,
    "wald.segments": SEGMENTS_ROOM,
    "wald.retention": RETENTION_ROOM,
    "wald.reading": READING_ROOM,
    "wald.writing": (*SEGMENTS_ROOM, "wald.writing"),
    "wald.checking": READING,
    "wald.repairing": (*READING, "wald.writing", "wald.repairing"),
    "wald.daemon": (*PURE, *CORE, "wald.settings", "wald.exposition", "wald.systemd", "wald.daemon"),
    "wald.cli": ("wald",),
    **dict.fromkeys(PROGRAMS, SIDECARS),
    "wald_gate": (*SIDECARS, "wald.aio", "wald.settings", "wald.systemd"),
    "wald_reclaim": (*SIDECARS, "wald.settings"),
    "wald_archive": (*SIDECARS, "wald.repairing"),  # creates logs, but never writes to existing ones
    "wald_spark": (*SIDECARS, "wald.cli.cursors", "wald_archive", "wald.reading.arrow"),
    "pyspark_wald": ("wald_spark.source",),
}

# Forbidden imports, by layer: format uses neither files nor clock, and the store does not print or log.
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "wald.format": ("os", "pathlib", "time", "threading", "socket", "logging", "structlog", "click"),
    **dict.fromkeys(CORE, ("logging", "structlog", "click", "argparse", "watchfiles")),
}

# Slow packages: only the listed modules may import them at the top; others import them inside a function.
HEAVY: dict[str, tuple[str, ...]] = {
    "numpy": ("wald.reading.arrow", "wald_spark"),
    "pyarrow": ("wald.reading.arrow", "wald_spark"),
    "pyspark": ("wald_spark",),
    **dict.fromkeys(("httptools", "jinja2", "markupsafe", "msgspec", "starlette", "uvloop"), ("wald_gate",)),
    "structlog": ("wald.daemon",),
    "watchfiles": (),
    "rich": ("wald.cli.top_screen",),
}


@dataclass(frozen=True)
class Import:
    name: str
    lazy: bool
    """Not done when the module is imported: inside a function, or for the type checker only."""


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "sidecars" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCES}


@cache
def imports_of(path: Path) -> list[Import]:
    """Return every import of a file; ``from a import b`` imports a.b if that is a wald module."""
    found: list[Import] = []
    for node, lazy in statements(ast.parse(path.read_text()), lazy=False):
        if isinstance(node, ast.Import):
            found += (Import(alias.name, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.append(Import(inner if inner in MODULES else node.module, lazy))
    return found


def statements(node: ast.AST, *, lazy: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Yield each statement, and True if it does not run when the module is imported."""
    lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    lazy = lazy or (isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING")
    yield node, lazy
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        for each in getattr(node, name, ()):
            yield from statements(each, lazy=lazy)


def under(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def rule(module: str, rules: dict[str, tuple[str, ...]]) -> tuple[str, ...] | None:
    """Return the rule of the longest matching prefix; ``wald`` itself is not a prefix of the others."""
    matching = [prefix for prefix in rules if module == prefix or (prefix != "wald" and under(module, (prefix,)))]
    return rules[max(matching, key=len)] if matching else None


def breaking(rule: Callable[[str], list[str]]) -> dict[str, list[str]]:
    """Return the forbidden imports of each module."""
    return {module: found for module in MODULES if (found := rule(module))}


def test_modules_import_only_what_their_layer_may() -> None:

    def too_much(module: str) -> list[str]:
        allowed = rule(module, MAY_IMPORT)
        assert allowed is not None, f"{module} is in no layer"
        if under(module, PROGRAMS):
            allowed = (*allowed, module.split(".", maxsplit=1)[0])  # its own modules, but not those of other sidecars
        ours = [found.name for found in imports_of(MODULES[module]) if under(found.name, PACKAGES)]
        if under(module, (*PROGRAMS, "wald.daemon")):
            ours = [name for name in ours if name != "wald"]  # only for its version; it loads nothing
        return [name for name in ours if not under(name, allowed)]

    assert len(MODULES) > 100
    assert breaking(too_much) == {}


def test_packages_of_others_stay_out_of_their_layers() -> None:
    """For example, format uses no clock and the store no logging."""

    def misplaced(module: str) -> list[str]:
        return [each.name for each in imports_of(MODULES[module]) if under(each.name, rule(module, FORBIDDEN) or ())]

    assert breaking(misplaced) == {}


def test_slow_imports_are_done_where_they_are_needed() -> None:
    """Short commands must not wait for slow imports."""

    def eager(module: str) -> list[str]:
        slow = tuple(package for package, homes in HEAVY.items() if not under(module, homes))
        return [each.name for each in imports_of(MODULES[module]) if under(each.name, slow) and not each.lazy]

    assert breaking(eager) == {}


def test_no_module_needs_itself_to_be_imported() -> None:
    """Imports never form a cycle, not even late ones."""
    graph = {
        module: {found.name for found in imports_of(path) if found.name in MODULES and found.name != "wald"}
        for module, path in MODULES.items()
    }
    graphlib.TopologicalSorter(graph).prepare()


def loaded_by(script: str, *words: str) -> tuple[list[str], str]:
    """Return the modules that a script has loaded at its end, and its errors."""
    script = f"import sys\ntry:\n    {script}\nfinally:\n    print('modules:', *sys.modules)"
    line = [sys.executable, "-c", script, *words]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    return done.stdout.rpartition("modules:")[2].split(), done.stderr


def test_short_commands_load_nothing_heavy() -> None:
    """Client commands load neither Arrow, log, metrics nor daemon."""
    modules, errors = loaded_by("from wald.cli import append, positions, service, cursors, read")
    assert errors == ""
    assert [name for name in modules if under(name, (*HEAVY, "wald.daemon", "wald.settings"))] == []


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Root:
    """A log with one route, whose head reports one durable record."""
    made = create_root(tmp_path_factory.mktemp("layers") / "log", Disk(), now="2026-11-21T10:00:00Z")
    made.head.write_bytes(encode_head(Head(1, 1, 100, 1, 10**18)))
    made.route("a").mkdir()
    return made


SEGMENTS = ("wald.segments.reader", "wald.segments.view", "wald.files.ledger_read", "wald.files.ledger_write")


@pytest.mark.parametrize("line", ["head", "append a --retry-for=0", "cursor list", "cursor get a"])
def test_short_commands_load_neither_segments_nor_ledgers(root: Root, line: str) -> None:
    """Scripts run these commands often, and each imported module costs time."""
    modules, errors = loaded_by("from wald.cli import main; main()", *line.split(), "--root", str(root.path))
    unneeded = ("zstandard", "tomllib", "email", "hashlib", "ctypes", "wald.reading", *SEGMENTS)
    assert [name for name in modules if under(name, unneeded)] == [], errors


def test_head_loads_no_compression_to_report_a_stopped_daemon(root: Root) -> None:
    """The command reads the report of the last run, which is stored in the format of a ledger."""
    Lock(root, Disk(), now="2026-11-21T10:00:00Z").release()
    modules, errors = loaded_by("from wald.cli import main; main()", "head", "--root", str(root.path))
    assert "no daemon runs" in errors
    assert "wald.writing.run_reports" in modules
    assert [name for name in modules if under(name, ("zstandard", "ctypes", "tomllib"))] == []


HELP_LINES = {
    "wald.cli:cli": None,  # of each command
    "wald_archive.command:command": ("", "pack", "verify", "restore"),
    "wald_drain.command:command": ("", "feed", "redrive"),
    "wald_gate.command:command": ("", "serve", "token", "token add"),
    "wald_reclaim.command:command": ("",),
    **{f"wald_spark.{name}.command:command": ("",) for name in ("audit", "compact", "export")},
}


@pytest.mark.parametrize("program", HELP_LINES)
def test_help_loads_nothing_that_reads_a_log(program: str) -> None:
    """The help of a command imports its options, not its implementation."""
    module, _, function = program.partition(":")
    lines = f"{HELP_LINES[program]!r} or program.list_commands(None)"
    modules, errors = loaded_by(f"""from {module} import {function} as program
    from wald.cli.command import run
    assert not any(run(program, "wald", [*line.split(), "--help"]) for line in {lines})""")
    assert errors == ""
    layers = ("wald.segments", "wald.reading", "wald.retention", "wald.writing", "wald.daemon", "wald.exposition")
    parts = ("wald.log", "wald.client", "wald.work", "wald.loop", "wald.systemd", *HEAVY)
    unneeded = (*layers, *parts, "zstandard", "email", "importlib.metadata", "tomllib", "logging", "socket")
    cursors = {"wald.retention", "wald.retention.cursors"}  # few modules, which almost every command needs
    assert [name for name in modules if under(name, unneeded) and name not in cursors] == []

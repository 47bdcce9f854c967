"""JSON output of the commands matches docs/json.md: every key and its type, and no other keys."""

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from archives import archive
from archives import command as archive_command
from command_tree import commands
from json_page import Table, require_documented, sections
from logs import Built
from owning import Owning
from running import Daemon, command, output_of, run, sidecar

from wald.cli import cli
from wald.format.work import Commit, DeadRecord, JournalLine, JournalStart, WorkerLease, encode_work
from wald_archive.command import command as wald_archive
from wald_reclaim.command import command as wald_reclaim
from wald_spark.audit.command import command as wald_audit
from wald_spark.compact.command import command as wald_compact
from wald_spark.export.command import command as wald_export

HELPING = ("wald group release", "wald group skip", "wald group remove")
APART = {"wald-audit", "wald-compact", "wald-export", "wald repair", *HELPING}  # separate tests check these
RARE = {("wald-reclaim", "taken-back")}  # only if a cursor is moved back during the grace period of a segment


def test_every_command_with_json_has_its_section() -> None:
    programs = {
        "wald": cli,
        "wald-archive": wald_archive,
        "wald-audit": wald_audit,
        "wald-compact": wald_compact,
        "wald-export": wald_export,
        "wald-reclaim": wald_reclaim,
    }
    found = {
        line
        for name, program in programs.items()
        for line, each in commands(program, name)
        if any(parameter.name == "as_json" for parameter in each.params)
    }

    assert (
        found
        | {
            "wald doctor --canary",
            "wald inspect --content",
            "wald status --latency",
            "wald status --settings",
            "wald where --since",
        }
        == sections().keys()
    )


def test_repair_prints_what_is_documented(tmp_path: Path) -> None:
    built = Built(tmp_path / "log")
    built.lines("a", [b"one"])
    built.cut()
    built.seal()
    (built.root.segments / f"{1:020d}.wal.zst").write_bytes(b"damaged")
    done = run(command("repair", "--dry-run", "--json", "--root", built.root.path))

    require_documented("wald repair", json.loads(done.stdout))


def test_what_helps_a_work_group_prints_what_is_documented(tmp_path: Path) -> None:
    built = Built(tmp_path / "log")
    built.lines("a", [b"one", b"two"])
    at = ("--json", "--root", built.root.path)
    with Owning(built.root.path, "a", "g") as owner:
        owner.lease("worker-1", 2)
        printed = [
            output_of("group", "release", "a", "g", "worker-1", *at),
            output_of("group", "skip", "a", "g", 1, *at),
        ]
    printed.append(output_of("group", "remove", "a", "g", *at))
    for name, line in zip(HELPING, printed, strict=True):
        require_documented(name, json.loads(line))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A log with a daemon: two sealed segments, partly read by one group, and a reclaimed segment.

    One route is over its quota.
    """
    directory = tmp_path_factory.mktemp("json")
    built = Built(directory / "log")
    for _ in range(3):
        built.lines("a", [b"one", b"two"])
        built.lines("b", [b"three"])
        built.cut()
        built.seal()
    built.lines("a", [b"four"])
    built.lines("d", [b"unread"])
    built.lines("a", [random.Random(0).randbytes(64 << 10).replace(b"\n", b"-")])  # makes its segment worth shrinking
    built.cut()
    built.seal()
    built.lines("a", [b"five"])
    archive(built, directory / "bags")
    output_of("cursor", "set", "b", 3, "--root", built.root.path)
    reclaimed = run(sidecar("reclaim", "--root", built.root.path, "--grace", 0))
    assert reclaimed.returncode == 0, reclaimed.stderr
    write_journal(built, "a", "workers")
    settings = directory / "wald.toml"
    settings.write_text("[routes.b]\npinned_max_bytes = 1\n")
    with Daemon(built.root.path, "--config", settings):
        yield built.root.path


def write_journal(built: Built, route: str, group: str) -> None:
    """Write the journal of a work group with records of every kind; its owner has ended."""
    later_ns = time.time_ns() + 3600 * 10**9
    lines: list[JournalLine] = [
        JournalStart(built.log_id, route, group, 0, 1),
        Commit(read=[(1, 2), (4, 5)], due=[(4, later_ns)], leased=[WorkerLease("worker-1", later_ns, [(1, 2)])]),
        Commit(dead=[DeadRecord(5, 3, "exit code 1", later_ns, "dead_letter", 5)]),
    ]
    (built.root.cursor_directory(route) / f"{group}.work").write_bytes(b"".join(encode_work(line, 0) for line in lines))


def words_of(root: Path) -> list[tuple[str, list[str]]]:
    """Return each section with the command lines that print its objects."""
    at, bags = ["--root", str(root)], root.parent / "bags"
    sealed, raw = (str(max((root / "segments").glob(f"*{end}"))) for end in (".wal.zst", ".wal"))
    files = [sealed, raw, *(str(root / name) for name in ("head", "log.json", "ledger/segments.jsonl"))]
    return [
        ("wald head", command("head", *at)),
        *(("wald where", command("where", number, *at)) for number in (1, 4, 99)),
        ("wald where --since", command("where", "--since", "2020-01-01", *at)),
        *(("wald show", command("show", number, *at)) for number in (4, 6)),
        *(
            (f"wald {name}", command(*name.split(), *at))
            for name in ("status --latency", "status", "status --settings", "route list")
        ),
        ("wald route add", command("route", "add", "c", "--fifo", *at)),
        ("wald route retire", command("route", "retire", "c", *at)),
        ("wald route add", command("route", "add", "d", *at)),
        ("wald status", command("status", *at)),
        ("wald cursor set", command("cursor", "set", "b", 3, "--group", "other", *at)),
        *((f"wald {name}", command(*name.split(), "a", *at)) for name in ("cursor get", "cursor show", "cursor list")),
        ("wald cursor remove", command("cursor", "remove", "b", "--group", "other", *at)),
        *((f"wald group {name}", command("group", name, "a", "workers", *at)) for name in ("show", "pending")),
        *((f"wald {name}", command(*name.split(), *at)) for name in ("group list", "explain")),
        ("wald cursor skip", command("cursor", "skip", "b", 6, *at)),
        *(("wald inspect", command("inspect", path)) for path in files),
        *(("wald inspect --content", command("inspect", "--content", "--records", path)) for path in files),
        *(
            (f"wald {name}", command(*name.split(), *at))
            for name in ("cut", "clock step", "history", "verify", "doctor", "doctor --canary")
        ),
        ("wald-reclaim", sidecar("reclaim", "--dry-run", "--shrink-pinned", *at)),
        ("wald-reclaim", sidecar("reclaim", "--shrink-pinned", *at)),
        ("wald-archive pack", archive_command("pack", "b", *at, "--dest", root.parent / "other")),
        ("wald-archive verify", archive_command("verify", bags)),
        ("wald-archive restore", archive_command("restore", bags, "--into", root.parent / "restored")),
    ]


def test_each_command_prints_what_is_documented(root: Path) -> None:
    """Every kind of object is printed by at least one of the command lines."""
    (root / "routes/b/in").write_text("a file, where a FIFO is expected")
    seen: dict[str, list[Table]] = {name: [] for name in sections()}
    for name, words in words_of(root):
        if name == "wald-reclaim":
            output_of("cursor", "set", "b", 6, "--root", root)
        done = run([*words, "--json"])
        lines = done.stdout.splitlines()
        assert lines, (words, done.stderr)
        seen[name] += [require_documented(name, json.loads(line)) for line in lines]

    for name in seen.keys() - APART:
        unseen = [table.values for table in sections()[name] if table not in seen[name]]
        assert [values for values in unseen if (name, values[0]) not in RARE] == [], name

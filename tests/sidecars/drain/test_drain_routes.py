"""scripts/drain-routes.sh acknowledges existing records on the selected routes."""

import os
import subprocess
import sys
from pathlib import Path

import programs
from running import TIMEOUT_SECONDS, Daemon

import wald
from wald.client.producer import Producer
from wald.format.names import ROUTE_MAX_LENGTH

SCRIPT = Path(__file__).parents[3] / "scripts" / "drain-routes.sh"


def drain_routes(*arguments: object, root: Path | None = None) -> subprocess.CompletedProcess[str]:
    programs.program("jq")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = os.environ | {"PATH": path} | ({} if root is None else {"WALD_ROOT": str(root)})
    line = [str(SCRIPT), *map(str, arguments)]
    return subprocess.run(line, env=env, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)


def fill(root: Path) -> None:
    """Write records 1 to 4, one per route; route idle is empty, and route old is retired."""
    with Producer(root) as producer:
        for route in ("a", "b", "dead_letter", "old"):
            producer.command("ROUTE", "ADD", route)
            producer.publish(route, b"one\n")
        producer.command("ROUTE", "ADD", "idle")
        producer.command("ROUTE", "RETIRE", "old")


def cursors(root: Path) -> dict[str, int]:
    log = wald.open(root)
    return {route: log.cursor(route).effective for route in log.routes()}


def test_named_routes_or_all_but_retired_and_dead_letter_routes_are_acknowledged(daemon: Daemon) -> None:
    """Dead letters are included if their route is named, and a route that fails does not stop the others."""
    fill(daemon.root)
    done = drain_routes("b", "dead_letter", root=daemon.root)
    assert (done.returncode, done.stdout, done.stderr) == (0, "b 2\ndead_letter 3\n", "")
    assert cursors(daemon.root) == {"a": 0, "b": 2, "dead_letter": 3, "idle": 0, "old": 0}

    done = drain_routes("--root", daemon.root, "nosuch", "a", "b")
    assert done.returncode == 3
    assert "there is no route 'nosuch'" in done.stderr
    assert done.stdout == "a 1\nb 2\n"

    longest = "a" * ROUTE_MAX_LENGTH
    with Producer(daemon.root) as producer:
        producer.command("ROUTE", "ADD", longest)
        producer.publish(longest, b"one\n")
        producer.flush()
    done = drain_routes("--root", daemon.root)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["a 1", f"{longest} 5", "b 2", "idle 0"]
    assert cursors(daemon.root) == {"a": 1, longest: 5, "b": 2, "dead_letter": 3, "idle": 0, "old": 0}


def test_it_makes_no_group_that_would_retain_records(daemon: Daemon) -> None:
    """The script skips a route of other groups unless one of these groups is named."""
    fill(daemon.root)
    wald.open(daemon.root).set_cursor("a", 0, "billing")
    done = drain_routes("--root", daemon.root, "a", "b")
    assert (done.returncode, done.stdout) == (1, "b 2\n")
    assert "a: left alone: its groups are billing; --group names one of them" in done.stderr
    assert wald.open(daemon.root).root.groups("a") == ["billing"]

    done = drain_routes("--root", daemon.root, "--group", "billing", "a")
    assert (done.returncode, done.stdout, done.stderr) == (0, "a 1\n", "")


def test_help_is_its_first_comment() -> None:
    done = drain_routes("--help")

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Acknowledge routes in full")
    assert "scripts/drain-routes.sh [--root DIR] [--group GROUP] [ROUTE...]" in done.stdout

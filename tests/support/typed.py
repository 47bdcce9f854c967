"""A page's commands, typed into one shell in the order of the page, with the wald of these tests on its path."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

import programs
from pages import Block, blocks

PLACES = ("/tmp/spool", "/var/spool/wald")  # where the pages put a log
_MARK = "@@ command {} @@"
# Differences between machines and runs: sizes, times, and padding of tables.
_AMOUNT = re.compile(r"\d+(?:\.\d+)? (?:[KMGT]i)?B\b|\d+(?:\.\d+)? (?:ms|s|min|h|d)\b| {2,}|-{4,}")


def type_page(page: str, *, at: Path, root: Path) -> None:
    """Run every executable block of ``page`` on this host."""
    shell = partial(typed, at=at, root=root)
    type_blocks(blocks(page), shell=shell, shown=partial(placed, root=root))


def type_blocks(
    chosen: Iterable[Block], *, shell: Callable[[str], str], shown: Callable[[str], str] = lambda text: text
) -> None:
    """Run executable blocks in one shell; the output of a `console` block must match the page.

    A `python` block gets a separate interpreter. Jobs started by the blocks end with the shell.
    """
    script = ["trap 'jobs -p | xargs -r kill; wait' EXIT", "set -eo pipefail"]
    wanted: list[tuple[str, str]] = []
    for block in chosen:
        if block.mode:
            continue
        if block.language == "sh":
            script.append(block.text)
        elif block.language == "python":
            script += [f"{sys.executable} - <<'END_OF_PYTHON'", block.text, "END_OF_PYTHON"]
        elif block.language == "console":
            for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block.text, re.MULTILINE):
                mark = _MARK.format(len(wanted))
                script += [f"echo '{mark}'", f"{{ {command}; }} 2>&1 || true", f"echo '{mark}'"]
                wanted.append((command, output))
    reported = shell("\n".join(script))
    for number, (command, output) in enumerate(wanted):
        said = reported.split(_MARK.format(number) + "\n")[1]
        assert fits(said, shown(output)), f"$ {command}\n{said}\nis not\n{output}"


def typed(script: str, *, at: Path, root: Path, settings: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the output of a shell for some lines of a page."""
    programs.require_of_shell(script)
    script = placed(script, root)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {name: value for name, value in os.environ.items() if not name.startswith("WALD_")}
    env |= {"WALD_ROOT": str(root), "PATH": path, **settings}
    done = subprocess.run(["bash", "-c", script], cwd=at, env=env, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, f"{script}: {done.stdout.decode(errors='replace')}{done.stderr.decode()}"
    return done.stdout.decode(errors="replace")


def placed(text: str, root: Path) -> str:
    """Return a text of a page with its log moved to ``root``, and workers that end soon."""
    for place in PLACES:
        text = text.replace(place, str(root))
    return text.replace("wait=5)", "wait=0.2)").replace("wait=1)", "wait=0.2)")


def fits(said: str, shown: str) -> bool:
    """Return True if ``said`` matches a page: `…` stands for any text, amounts and widths may differ."""
    said, shown = (_AMOUNT.sub(" ", text).strip() for text in (said, shown))
    return re.fullmatch(".*".join(map(re.escape, shown.split("…"))), said, re.DOTALL) is not None

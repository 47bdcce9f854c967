"""The documentation pages as tests read them: tables, blocks of code, headings, links."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PATHS = [
    *(ROOT / folder / "README.md" for folder in (".", "examples", "sidecars")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in _PATHS}
# A program, a process or a user has a name, and messages use "reported".
VAGUE = re.compile(r"\b(?:any|every|no|some)body\b|\bwho(?:ever|m)\b|\btold\b|\blest\b", re.IGNORECASE)
_BLOCK = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_SECTION = re.compile(r"^## (.*)$", re.MULTILINE)
_PUNCTUATION = re.compile(r"[^\w\- ]")


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code.

    Attributes:
        language: after the fence: sh, console, python, toml, text.
        mode: "": tests/docs executes it; "spark": a test with Spark executes it; "not-run": only its words are checked,
            because no test machine can run it; for toml, "gate": settings of the gate.
        line: of the page, at which the block starts.
        heading: of its section (`##`); "" above the first.
    """

    language: str
    mode: str
    text: str
    line: int
    heading: str


def blocks(page: str) -> list[Block]:
    """Return every block of a page, in order."""
    text = PAGES[page]
    found = []
    for match in _BLOCK.finditer(text):
        language, _, mode = match[2].partition(" ")
        body = re.sub(rf"^{match[1]}", "", match[3], flags=re.MULTILINE)
        heading = ["", *_SECTION.findall(_BLOCK.sub("", text[: match.start()]))][-1]
        found.append(Block(language, mode, body, text.count("\n", 0, match.start()) + 2, heading))
    return found


def headings(page: str) -> list[str]:
    """Return the section headings of a page (`##`), in order."""
    return _SECTION.findall(without_blocks(page))


def without_blocks(page: str) -> str:
    """Return a page's text outside its blocks of code."""
    return _BLOCK.sub("", PAGES[page])


def section(page: str, heading: str) -> str:
    """Return the text after ``heading``."""
    return f"\n{PAGES[page]}".split(f"\n{heading}\n", 1)[1]


def rows(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table below ``heading``, without its header."""
    found = re.search(r"(?:^\|.*\n)+", section(page, heading), re.MULTILINE)
    assert found is not None
    lines = found[0].splitlines()[2:]
    return [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def anchors(page: str) -> set[str]:
    """Return the anchors of a page's headings, as repository hosts and MyST make them."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(page), re.MULTILINE)
    return {_PUNCTUATION.sub("", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: str) -> list[str]:
    """Return the targets of a page's links."""
    return re.findall(r"\]\(([^)\s]+)\)", without_blocks(page))

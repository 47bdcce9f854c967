"""Counts and faults of a torture run as a table."""

from collections.abc import Iterable, Mapping


def table(counts: Mapping[str, int], wrong: Iterable[str]) -> str:
    """Return a line for each count, and one for each fault."""
    lines = [f"{name.replace('_', ' '):>30}  {count:,}" for name, count in counts.items()]
    return "\n".join([*lines, *(f"{'FAULT':>30}  {words}" for words in wrong)])

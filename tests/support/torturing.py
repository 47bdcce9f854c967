"""Counts, broken promises, faults and threads of a torture run."""

import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Faults = Mapping[str, tuple[int, Callable[[], object]]]
"""Each fault with its weight."""


@dataclass(slots=True)
class Tally:
    """Counts of a run, and in ``wrong`` the broken promises."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{name:>30}  {count:,}" for name, count in (*self.counts.items(), *sorted(self.faults.items()))]
        return "\n".join([*lines, *(f"{'FAULT':>30}  {words}" for words in self.wrong)])

    def disturb(self, chance: random.Random, faults: Faults) -> None:
        """Cause one of the faults."""
        name = chance.choices(list(faults), [weight for weight, _ in faults.values()])[0]
        self.faults[name] += 1
        faults[name][1]()


def started(
    name: str, work: Callable[[], object], wrong: list[str], *, hushed: threading.Event | None = None
) -> threading.Thread:
    """Start a thread that does ``work``; append its exception to ``wrong``, unless ``hushed`` is set by then."""

    def run() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  (nothing else would report it)
            if hushed is None or not hushed.is_set():
                wrong.append(f"{name}: {type(error).__name__}: {error}")

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread

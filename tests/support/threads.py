"""Threads of the tests' own tools, none of which fails silently."""

import threading
from collections.abc import Callable


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

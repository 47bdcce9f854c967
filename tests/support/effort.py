"""Cost of calls, counted instead of timed, so that quadratic work shows on a busy machine."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def steps(work: Callable[[], object]) -> int:
    """Return the number of Python instructions that ``work`` executes."""
    counted = 0

    def count(frame: FrameType, event: str, _argument: object) -> Any:  # itself
        nonlocal counted
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        counted += event == "opcode"
        return count

    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(None)
    return counted

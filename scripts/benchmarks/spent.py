"""Run a program, then print its duration in seconds and its peak memory in bytes.

A separate and small process: on Linux a child begins with the peak of its parent.

    spent PROGRAM [WORD …]     the last line is SECONDS BYTES
"""

from __future__ import annotations

import os
import sys
import time

if __name__ == "__main__":
    began = time.perf_counter()
    pid = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ)
    _, status, usage = os.wait4(pid, 0)
    print(time.perf_counter() - began, usage.ru_maxrss << 10)
    sys.exit(os.waitstatus_to_exitcode(status))

"""Programs run on small files that claim gigabytes: exit codes, and peak memory."""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

GIB = 1 << 30
MIB = 1 << 20
ZEROS = bytes(MIB)
MEMORY_MAX_BYTES = 200 * MIB  # an interpreter with all imports of our programs needs about 60
ADDRESS_SPACE_BYTES = 3 * GIB  # limit for a bomb on the test machine
# Not wait4(2): its peak includes the memory of the parent process.
_TELLING = """
import atexit, pathlib, re, runpy, sys
out, module, *sys.argv[1:] = sys.argv[1:]
status = pathlib.Path("/proc/self/status")
atexit.register(lambda: pathlib.Path(out).write_text(re.search(r"VmHWM:\\s+(\\d+)", status.read_text())[1]))
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def run(module: str, *arguments: object) -> tuple[int, str, int]:
    """Return exit code, output and peak memory in bytes of ``python -m module``."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "peak"
        line = ["prlimit", f"--as={ADDRESS_SPACE_BYTES}", sys.executable, "-c", _TELLING, out, module, *arguments]
        done = subprocess.run(list(map(str, line)), capture_output=True, text=True, errors="replace", check=False)
        return done.returncode, done.stdout + done.stderr, int(out.read_text()) << 10

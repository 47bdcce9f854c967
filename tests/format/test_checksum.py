"""CRC-32C: the extension is the one of the package, and loads nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import crc32c

from wald.format import checksum


def output_of(script: str) -> str:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout


def test_checksums_are_those_of_the_standard_and_of_the_package() -> None:
    """The check value of CRC-32C, and any bytes from any seed."""
    assert checksum.crc32c(b"123456789") == 0xE3069283
    for length, seed in ((0, 0), (1, 7), (64, 0xFFFFFFFF), (100_000, 0x12345678)):
        data = bytes(number * 31 % 256 for number in range(length))

        assert checksum.crc32c(data, seed) == crc32c.crc32c(data, seed)


def test_the_package_is_imported_if_it_has_another_layout() -> None:
    """A release without the extension of that name."""
    script = """if True:
        import sys
        sys.modules["crc32c"] = package = type(sys)("crc32c")
        package.crc32c = lambda data, seed=0: 7
        sys.path[:] = [each for each in sys.path if "site-packages" not in each]
        from wald.format.checksum import crc32c
        print(crc32c(b"any"))
    """
    assert output_of(script) == "7\n"


def test_the_package_is_imported_if_its_extension_is_absent_or_is_python(tmp_path: Path) -> None:
    (tmp_path / "crc32c").mkdir()
    (tmp_path / "crc32c/__init__.py").write_text("def crc32c(data, seed=0):\n    return 7\n")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from wald.format.checksum import crc32c"
    for _ in range(2):
        assert output_of(f"{script}; print(crc32c(b'any'))") == "7\n"
        (tmp_path / "crc32c/_crc32c.py").touch()

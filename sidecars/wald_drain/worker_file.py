"""The file of a worker, ``<group>.command-3``: which records its command has, and how that ended.

    {"run": 17…, "exit_code": 0, "error": 0, "crc": "…"}        512 bytes, by the keeper, when the command has ended
    {"run": 17…, "try": 1, "records": [11, 14, 20, 20], …}      by drain, before the command starts

The records of a lease need not be consecutive. They are processed if both lines are of one run and the exit code is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from wald.files.disk import Disk
from wald.files.layout import Root
from wald.format.ledger_lines import decode_line, encode_line
from wald.format.names import COMMAND_SUFFIX
from wald.work.window import runs_of
from wald_drain.command_file import LINE_BYTES, CommandFile, padded


class LastRun(NamedTuple):
    """What a command got, and how it ended.

    Attributes:
        number: of the try.
        outcome: exit code and error; None: nothing says that it ended.
    """

    sequences: list[int]
    number: int
    outcome: tuple[int, int] | None


def encode_given(run: int, sequences: Sequence[int], number: int) -> bytes:
    """The line about the records that a command gets, in order, and the number of the try."""
    pairs = [each for part in runs_of(list(sequences)) for each in part]
    return encode_line({"run": run, "try": number, "records": pairs})


def encode_outcome(run: int, exit_code: int, error: int) -> bytes:
    """The line about how a run ended, padded to its full length.

    Args:
        exit_code: as in :mod:`subprocess`: a negative number is the signal that ended the command.
        error: the error number with which the command could not be started; 0: it was started.
    """
    return padded({"run": run, "exit_code": exit_code, "error": error})


def decode_outcome(line: bytes, run: int) -> tuple[int, int] | None:
    """Exit code and error of a run; None if the line is about another one, or about none."""
    match decode_line(line):
        case {"run": int(number), "exit_code": int(exit_code), "error": int(error)} if number == run:
            return exit_code, error
    return None


def last_run_in(content: bytes) -> LastRun | None:
    """The last run, by the content of the file of a worker; None if it was settled, or there was none."""
    outcome, given = content[:LINE_BYTES], content[LINE_BYTES:].partition(b"\n")[0]
    match decode_line(given):
        case {"run": int(run), "try": int(number), "records": [*numbers]}:
            pairs = zip(numbers[::2], numbers[1::2], strict=True)
            sequences = [sequence for first, last in pairs for sequence in range(first, last + 1)]
            return LastRun(sequences, number, decode_outcome(outcome, run))
    return None


def processed_in(content: bytes) -> list[int]:
    """The records that a command has processed, by the content of the file of its worker."""
    last = last_run_in(content)
    return last.sequences if last is not None and last.outcome == (0, 0) else []


class WorkerFile(CommandFile):
    """The file of ``worker``, for the process that leases records for it.

    Raises:
        NotFound: there is no such route.
        NotPermitted: this user may not.
        OSError: the disk is full, or fails.
    """

    def __init__(self, root: Root, route: str, group: str, worker: int, disk: Disk) -> None:
        self.worker = worker
        super().__init__(root, route, group, f"{COMMAND_SUFFIX}-{worker}", disk)

    def begin(self, run: int, sequences: Sequence[int], number: int) -> None:
        """Write down which records the command is about to get, in which try.

        Not synced: no command survives a crash.
        """
        self.disk.write(self.descriptor, [encode_given(run, sequences, number)], LINE_BYTES)

    def outcome(self, run: int) -> tuple[int, int] | None:
        """Exit code and error of a run; None if it has not ended."""
        return decode_outcome(self.line(), run)

    def settle(self) -> None:
        """Take away what the command got, as what became of that is on disk by now, or is not to be known."""
        self.disk.truncate(self.descriptor, LINE_BYTES)

    def processed(self) -> list[int]:
        """The records that its last command has processed; to be asked while no command runs."""
        return processed_in(self.path.read_bytes())

    def last_run(self) -> LastRun | None:
        """What its last command got that was not settled; to be asked while no command runs."""
        return last_run_in(self.path.read_bytes())

    def remove(self) -> None:
        """Take it away, unless a command has its lock by now."""
        if self.lock():
            self.disk.unlink(self.path)

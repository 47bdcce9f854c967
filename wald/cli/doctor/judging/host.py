"""The host: pipes, limits, clock, the parts that are installed, Java, the service manager."""

from __future__ import annotations

from dataclasses import dataclass

from wald.cli.doctor.checks import Check, Outcome, Rule, otherwise
from wald.hints import hint_for
from wald.setting_types import format_bytes, format_seconds

PIPE_BYTES = 1 << 20  # what the daemon asks for
OLDEST_JAVA = 17
_DESCRIPTORS_KEPT = 32  # of the daemon, for segments and the like
_SPARE_PIPES = 2  # the daemon's own
_OFF_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Pipes:
    """Pipes of this user.

    Attributes:
        max_bytes, soft_pages, hard_pages: /proc/sys/fs/pipe-max-size, pipe-user-pages-soft, pipe-user-pages-hard.
        reached_bytes: what F_SETPIPE_SZ gave to a new one.
        is_limited: whether the limits hold for this user; they do not for root.
        fifos: of the log.
    """

    max_bytes: int
    soft_pages: int
    hard_pages: int
    page_bytes: int
    reached_bytes: int
    is_limited: bool
    fifos: int

    @property
    def needed_pages(self) -> int:
        """For every FIFO, and for what the daemon copies them into."""
        return (self.fifos + _SPARE_PIPES) * PIPE_BYTES // self.page_bytes

    @property
    def limit_pages(self) -> int:
        """The stricter limit; 0: none."""
        return min(filter(None, (self.soft_pages, self.hard_pages)), default=0)

    @property
    def reached(self) -> str:
        return format_bytes(self.reached_bytes)


PIPES: Check[Pipes] = Check(
    "pipes",
    "how large a pipe can be made, and whether that goes for each FIFO",
    (17,),
    (
        Rule(
            Outcome.WARN,
            lambda f: f.reached_bytes < PIPE_BYTES and f.max_bytes < PIPE_BYTES,
            "a pipe can be {f.reached}, not 1 MiB: writers wait sooner, and after a kill the daemon has to guess",
            "sysctl fs.pipe-max-size=1048576",
        ),
        Rule(
            Outcome.WARN,
            lambda f: f.reached_bytes < PIPE_BYTES,
            "a pipe of this user can be {f.reached}, not 1 MiB, as its others use up the limit",
            "sysctl fs.pipe-user-pages-soft={f.needed_pages}",
        ),
        Rule(
            Outcome.WARN,
            lambda f: f.is_limited and 0 < f.limit_pages < f.needed_pages,
            "{f.fifos} FIFOs need {f.needed_pages} pages, and this user may have {f.limit_pages}: some stay small",
            "sysctl fs.pipe-user-pages-soft={f.needed_pages} fs.pipe-user-pages-hard=0",
        ),
        Rule(Outcome.OK, otherwise, "a pipe can be {f.reached}; {f.fifos} FIFOs are in the log"),
    ),
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of the daemon, or of this process if none runs; None: unlimited.

    Attributes:
        needed_files: for every connection and every FIFO that may be open at once.
    """

    open_files: int | None
    needed_files: int
    file_bytes: int | None
    segment_bytes: int


LIMITS: Check[Limits] = Check(
    "limits",
    "limits of open files and of the size of a file: of the daemon, or which it would inherit",
    (9, 17),
    (
        Rule(
            Outcome.FAIL,
            lambda f: f.file_bytes is not None and f.file_bytes < f.segment_bytes,
            "a file may have {f.file_bytes} bytes, and a segment has {f.segment_bytes}",
            "ulimit -f unlimited; LimitFSIZE=infinity in a unit",
        ),
        Rule(
            Outcome.WARN,
            lambda f: f.open_files is not None and f.open_files < f.needed_files,
            "{f.open_files} files may be open, and {f.needed_files} may be needed: connections are refused then",
            "ulimit -Hn {f.needed_files}; LimitNOFILE={f.needed_files} in a unit",
        ),
        Rule(Outcome.OK, otherwise, "{f.open_files} files may be open, of which {f.needed_files} may be needed"),
    ),
)


def needed_files(connections_max: int, fifos: int) -> int:
    """How many descriptors a daemon may need."""
    return connections_max + fifos + _DESCRIPTORS_KEPT


@dataclass(frozen=True, slots=True)
class Clock:
    """The wall clock.

    Attributes:
        is_synchronised: as adjtimex(2) has it; None if it may not be asked.
        error_seconds: the largest error that the kernel assumes.
        is_past: whether it is before this version of wald was made.
        behind_seconds: how far it is behind the append times of the log.
    """

    is_synchronised: bool | None
    error_seconds: float
    is_past: bool
    behind_seconds: float = 0.0

    @property
    def behind(self) -> str:
        return format_seconds(self.behind_seconds)

    @property
    def error(self) -> str:
        return format_seconds(self.error_seconds)


CLOCK: Check[Clock] = Check(
    "clock",
    "whether the wall clock is synchronised; append times come from it",
    (),
    (
        Rule(
            Outcome.WARN,
            lambda f: f.is_past,
            "the clock is set to the past: append times are wrong until it has caught up",
            "timedatectl set-ntp true; date -u",
        ),
        Rule(
            Outcome.WARN,
            lambda f: f.behind_seconds,
            "the clock is {f.behind} behind the last append time; until it catches up, new records repeat that time",
            hint_for("append-times-ahead"),
        ),
        Rule(
            Outcome.WARN,
            lambda f: f.is_synchronised is False,
            "the clock is not synchronised: append times are as wrong as it is; ages and the order are not",
            "timedatectl set-ntp true, or apt install chrony",
        ),
        Rule(
            Outcome.UNKNOWN,
            lambda f: f.is_synchronised is None,
            "the kernel does not say whether the clock is synchronised; no promise rests on it",
            "date -u, beside another clock",
        ),
        Rule(
            Outcome.WARN,
            lambda f: f.error_seconds > _OFF_SECONDS,
            "the clock may be off by {f.error}; append times are, too",
            "chronyc tracking",
        ),
        Rule(Outcome.OK, otherwise, "the clock is synchronised, within {f.error}"),
    ),
)


@dataclass(frozen=True, slots=True)
class Uptime:
    """The clocks that cannot be set: the id of this boot, and how long the host has been up in it."""

    boot: str
    seconds: float

    @property
    def shown(self) -> str:
        return format_seconds(self.seconds)


UPTIME: Check[Uptime] = Check(
    "uptime",
    "whether ages can be measured without the wall clock",
    (12,),
    (
        Rule(
            Outcome.FAIL,
            lambda f: not f.boot,
            "the boot id or time-namespace offset is unavailable, so age limits never apply",
            "mount -t proc proc /proc; cat /proc/sys/kernel/random/boot_id /proc/self/timens_offsets",
        ),
        Rule(Outcome.OK, otherwise, "the kernel names this boot, and counts {f.shown} since"),
    ),
)


@dataclass(frozen=True, slots=True)
class Parts:
    """Versions of what wald is made of."""

    wald: str
    python: str
    crc32c: str
    zstandard: str
    has_crc32c_instruction: bool


PARTS: Check[Parts] = Check(
    "parts",
    "versions, and whether checksums are computed by the processor",
    (),
    (
        Rule(
            Outcome.WARN,
            lambda f: not f.has_crc32c_instruction,
            "checksums are computed without the processor's instruction, ten times slower",
            "a processor with SSE 4.2 or ARMv8 CRC; pip install --upgrade crc32c",
        ),
        Rule(
            Outcome.OK,
            otherwise,
            "wald {f.wald}, Python {f.python}, crc32c {f.crc32c} by the processor, zstandard {f.zstandard}",
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Spark:
    """What the commands on Spark need; "" and 0: not installed."""

    pyspark: str
    java: int


SPARK: Check[Spark] = Check(
    "spark",
    "PySpark and Java, for wald-export, wald-compact and wald-audit",
    (),
    (
        Rule(Outcome.SKIPPED, lambda f: not f.pyspark, "no PySpark; only the commands on Spark need it"),
        Rule(
            Outcome.WARN,
            lambda f: not f.java,
            "PySpark {f.pyspark} and no Java: the commands on Spark do not start",
            "apt install default-jre-headless; or set JAVA_HOME",
        ),
        Rule(
            Outcome.WARN,
            lambda f: f.java < OLDEST_JAVA,
            "Java {f.java} is too old for PySpark {f.pyspark}, which needs 17",
            "apt install default-jre-headless; or set JAVA_HOME",
        ),
        Rule(Outcome.OK, otherwise, "PySpark {f.pyspark}, Java {f.java}"),
    ),
)


@dataclass(frozen=True, slots=True)
class Service:
    """The unit of systemd that the running daemon belongs to.

    Attributes:
        unit: "" if no daemon runs, or not under systemd.
        type: its Type=; "" if systemd does not answer.
        store_max: FileDescriptorStoreMax=.
        fifos: of the log.
    """

    unit: str = ""
    type: str = ""
    store_max: int = 0
    has_watchdog: bool = False
    fifos: int = 0


SERVICE: Check[Service] = Check(
    "service",
    "the systemd unit of the running daemon: notification, descriptor store, watchdog",
    (17,),
    (
        Rule(Outcome.SKIPPED, lambda f: not f.unit, "no daemon of this root runs under systemd"),
        Rule(
            Outcome.UNKNOWN, lambda f: not f.type, "systemd does not answer about {f.unit}", "systemctl show {f.unit}"
        ),
        Rule(
            Outcome.WARN,
            lambda f: not f.type.startswith("notify"),
            "{f.unit} has Type={f.type}: pipes are not kept over a restart, and a daemon that hangs is not noticed",
            "systemctl edit {f.unit}: Type=notify, FileDescriptorStoreMax={f.fifos}, WatchdogSec=30",
        ),
        Rule(
            Outcome.WARN,
            lambda f: f.store_max < f.fifos,
            "{f.unit} keeps {f.store_max} descriptors over a restart, and the log has {f.fifos} FIFOs",
            "systemctl edit {f.unit}: FileDescriptorStoreMax={f.fifos}",
        ),
        Rule(
            Outcome.WARN,
            lambda f: not f.has_watchdog,
            "{f.unit} has no watchdog: a daemon that hangs is not started again",
            "systemctl edit {f.unit}: WatchdogSec=30",
        ),
        Rule(Outcome.OK, otherwise, "{f.unit} keeps {f.store_max} descriptors, with a watchdog"),
    ),
)

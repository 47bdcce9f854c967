"""A machine for tests: this system's systemd as the first process of separate namespaces, on a temporary copy.

The file system is this machine's with an overlay in memory, so changes disappear with the machine and stay invisible
outside. Processes, mounts, host name, network and control groups are separate; users, kernel and clock are this
machine's. Units run with their full sandbox.

It boots to basic.target in a second, which excludes the services of this machine.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from programs import missing
from running import eventually

SYSTEMD = Path("/lib/systemd/systemd")
_BOOT_SECONDS = 60.0
# These would act on the kernel or the disks, which belong to the host.
_MASKED = (
    "dev-hugepages.mount",
    "proc-sys-fs-binfmt_misc.automount",
    "sys-fs-fuse-connections.mount",
    "sys-kernel-config.mount",
    "sys-kernel-debug.mount",
    "sys-kernel-tracing.mount",
    "systemd-binfmt.service",
    "systemd-journal-flush.service",  # otherwise the journal is the host's, with years of entries
    "systemd-modules-load.service",
    "systemd-remount-fs.service",
    "systemd-sysctl.service",
    "systemd-udevd.service",
    "systemd-udev-trigger.service",
    "systemd-update-utmp.service",
)
_BOOT = """
set -eu
mount --make-rprivate /
mount -t tmpfs tmpfs "$WALD_MACHINE"
cd "$WALD_MACHINE"
mkdir upper work root
mount -t overlay overlay -o lowerdir=/,upperdir=upper,workdir=work root
mount -t proc proc root/proc
mount --rbind /dev root/dev
mount -t sysfs sysfs root/sys
for directory in run tmp var/tmp var/log/journal sys/fs/cgroup; do
    mkdir -p root/$directory
    mount -t tmpfs -o mode=1777 tmpfs root/$directory
done
chmod 755 root/run root/sys/fs/cgroup root/var/log/journal
for place in $WALD_PLACES; do  # what these mounts hide, or another file system of this machine holds
    if [ -z "$(ls -A root$place 2>/dev/null)" ]; then
        mkdir -p root$place upper-of$place work-of$place
        mount -t overlay overlay -o lowerdir=$place,upperdir=upper-of$place,workdir=work-of$place root$place
    fi
done
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
    umount root/sys/fs/cgroup
    mount -t cgroup2 cgroup2 root/sys/fs/cgroup
else
    mkdir root/sys/fs/cgroup/systemd root/sys/fs/cgroup/unified
    mount -t cgroup -o none,name=systemd cgroup root/sys/fs/cgroup/systemd
    mount -t cgroup2 cgroup2 root/sys/fs/cgroup/unified
fi
for unit in $WALD_MASKED; do ln -sf /dev/null root/etc/systemd/system/$unit; done
ip link set lo up
hostname machine
cd root
pivot_root . mnt  # not chroot: a process in one cannot create user namespaces (PrivateUsers=)
umount --lazy /mnt
exec env -i container=wald PATH="$PATH" "$WALD_SYSTEMD" --system --unit=basic.target
"""


def lack() -> str:
    """Return the reason why no machine can start here, or ""."""
    if os.geteuid() != 0:
        return "only root can start a machine"
    return missing("nsenter", "ip", "hostname", "systemd-analyze")


class Machine:
    """A booted machine."""

    def __init__(self, directory: Path) -> None:
        namespaces = ["--pid", "--fork", "--mount", "--uts", "--ipc", "--net", "--cgroup", "--kill-child"]
        env = os.environ | {
            "WALD_MACHINE": str(directory),
            "WALD_MASKED": " ".join(_MASKED),
            "WALD_PLACES": f"{Path(__file__).parents[2]} {sys.base_prefix}",
            "WALD_SYSTEMD": str(SYSTEMD),
        }
        self._log = (directory.parent / f"{directory.name}.log").open("wb")
        self._unshare = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", *namespaces, "sh", "-c", _BOOT],  # ends with these tests
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        try:
            eventually(self._has_booted, timeout=_BOOT_SECONDS)
        except BaseException:
            self.close()
            raise

    def run(
        self, *command: object, user: str = "", text: str = "", check: bool = True, seconds: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside, and capture its output."""
        argv = [*self._entering, *self._becoming(user), *map(str, command)]
        done = subprocess.run(argv, input=text, text=True, capture_output=True, timeout=seconds, check=False)
        if check and done.returncode != 0:
            line = " ".join(map(str, command))
            raise AssertionError(f"{line}: exit {done.returncode}\n{done.stdout[-4000:]}{done.stderr}")
        return done

    def sh(self, script: str, *, user: str = "", check: bool = True) -> str:
        """Return the output of a shell script inside."""
        return self.run("sh", "-euc", script, user=user, check=check).stdout

    def start(self, *command: object, user: str = "") -> subprocess.Popen[bytes]:
        """Start a command inside, with pipes to and from it."""
        argv = [*self._entering, *self._becoming(user), *map(str, command)]
        return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def path(self, inside: str | Path) -> Path:
        """Return a file's path from outside; symbolic links inside would lead elsewhere."""
        return Path(f"/proc/{self._first}/root") / str(inside).lstrip("/")

    def journal(self, unit: str) -> str:
        return self.run("journalctl", "--no-pager", "--output", "cat", "--unit", unit).stdout

    def value(self, unit: str, name: str) -> str:
        """Return a property of a unit."""
        return self.run("systemctl", "show", f"--property={name}", "--value", unit).stdout.strip()

    def is_active(self, unit: str = "wald.service") -> bool:
        return self.run("systemctl", "is-active", unit, check=False).returncode == 0

    def scraped(self, port: int) -> str:
        """Return the metrics that a program on the machine answers; "" if nothing listens."""
        fetch = f"import urllib.request as r; print(r.urlopen('http://127.0.0.1:{port}/metrics').read().decode())"
        return self.run("python3", "-c", fetch, check=False).stdout

    def close(self) -> None:
        """Stop it immediately, with every process inside."""
        if self._unshare.poll() is None:
            self._unshare.send_signal(signal.SIGKILL)  # and --kill-child does the rest
        self._unshare.wait()
        self._log.close()

    @property
    def _entering(self) -> Sequence[str]:
        # Without an activated virtual environment, which would hide the programs that are installed inside.
        places = [each for each in os.environ["PATH"].split(":") if not Path(each).is_relative_to(sys.prefix)]
        env = ["env", "-i", f"PATH={':'.join(places)}", "LANG=C.UTF-8"]
        flags = ["--mount", "--pid", "--uts", "--ipc", "--net", "--cgroup", "--root", "--wdns=/"]
        return ["nsenter", "--target", str(self._first), *flags, *env]

    def _becoming(self, user: str) -> Sequence[str]:
        return ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"] if user else []

    def _has_booted(self) -> bool:
        if self._unshare.poll() is not None:
            raise AssertionError(f"the machine has ended: {Path(self._log.name).read_text()[-2000:]}")
        first = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children").read_text().split()
        if not first or Path(f"/proc/{first[0]}/comm").read_text().strip() != "systemd":
            return False
        self._first = int(first[0])
        state = self.run("systemctl", "is-system-running", check=False).stdout.strip()
        return state in ("running", "degraded")

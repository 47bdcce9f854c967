"""The doctor on real file systems: it detects missing capabilities by trying them and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from examining import examine, scratch_directories
from full_disk import fill, small_file_system
from mounting import MIB, disk, mounted, overlay

from wald.cli.doctor.medium import Mount, parse_mounts

TRIED = {"replace", "links", "locks", "mapping", "fifo", "names", "events"}


def test_an_ext4_holds_every_promise(tmp_path: Path) -> None:
    with disk(tmp_path, "ext4") as at:
        found = examine(at / "log")

    assert found.failed == set()
    assert {found.outcome(check) for check in (*TRIED, "mount", "allocation", "sync")} == {"ok"}
    assert found.measured("mount")["type"] == "ext4"
    assert found.measured("device")["backing"] == str(tmp_path / "image")
    measured = found.measured("sync")
    assert 0 < measured["p50_seconds"] <= measured["p90_seconds"] <= measured["p99_seconds"] <= measured["max_seconds"]
    assert measured["device_writes"] >= measured["syncs"]


def test_an_ext4_without_barriers_is_found_by_its_name_and_by_what_it_does(tmp_path: Path) -> None:
    """The kernel counts no device flush during hundreds of syncs."""
    with disk(tmp_path, "ext4", "nobarrier") as at:
        found = examine(at / "log")

    assert (found.code, found.failed) == (13, {"mount", "sync"})
    assert "nobarrier" in found.message("mount")
    assert (found.measured("sync")["device_flushes"], found.measured("sync")["syncs"] > 100) == (0, True)


def test_options_that_only_cost_are_warnings(tmp_path: Path) -> None:
    with disk(tmp_path, "ext4", "data=writeback") as at:
        found = examine(at / "log")

    assert (found.failed, found.outcome("mount")) == (set(), "warn")
    assert "data=writeback" in found.message("mount")


def test_btrfs_does_not_reserve_space(tmp_path: Path) -> None:
    with disk(tmp_path, "btrfs") as at:
        found = examine(at / "log")
        left = os.listdir(at)

    assert (found.failed, found.outcome("allocation")) == (set(), "warn")
    assert "copies on write" in found.message("allocation")
    assert found.outcome("inodes") == "ok"
    assert left == []


def test_a_tmpfs_survives_no_crash_of_the_host(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "disk", 512 * MIB) as at:
        found = examine(at / "log")
        left = os.listdir(at)

    assert (found.code, found.failed) == (13, {"mount"})
    assert found.checks["mount"]["promises"] == [1, 2]
    assert found.outcome("sync") == "skipped"
    assert {found.outcome(check) for check in TRIED} == {"ok"}
    assert left == []


def test_the_layer_of_a_container_is_a_warning(tmp_path: Path) -> None:
    with overlay(tmp_path) as at:
        found = examine(at / "log")

    assert found.outcome("mount") == "warn"
    assert "container" in found.message("mount")
    assert {found.outcome(check) for check in TRIED} == {"ok"}


def test_nothing_is_tried_on_a_read_only_mount(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    with mounted(tmp_path / "disk", "--bind", there) as at:
        subprocess.run(["mount", "-o", "remount,bind,ro", at], check=True)
        found = examine(at)

    assert found.failed == {"mount"}
    assert "read-only" in found.message("mount")
    assert {found.outcome(check) for check in (*TRIED, "sync", "allocation", "user")} == {"skipped"}
    assert "because the file system is read-only" in found.message("replace")


def test_nothing_is_created_in_a_file_system_of_the_kernel() -> None:
    found = examine(Path("/proc/log"))

    assert found.outcome("mount") == "fail"
    assert "belongs to the kernel" in found.message("mount")
    assert {found.outcome(check) for check in TRIED} == {"skipped"}
    assert "the kernel stores no files here" in found.message("replace")


def test_a_full_disk_is_reported_and_given_no_more(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "disk", 4 * MIB) as at:
        fill(at / "filling")
        found = examine(at / "log")
        left = scratch_directories(at)

    assert found.failed == {"mount", "allocation", "space"}
    for check in ("sync", "replace", "links", "mapping"):
        assert (found.outcome(check), found.message(check)) == ("skipped", "not tested: No space left on device")
    assert found.measured("space")["free_bytes"] == 0
    assert left == []


def test_a_disk_without_inodes_is_reported(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=512m,nr_inodes=2", "tmpfs") as at:
        (at / "last").touch()
        found = examine(at / "log")

    assert found.failed == {"mount", "inodes"}
    assert found.outcome("replace") == "skipped"
    assert "No space left" in found.message("replace")


def test_what_a_mount_point_is_called_is_read_as_the_kernel_writes_it() -> None:
    """Spaces are octal escapes, the number of fields before the hyphen varies, and one read-only flag is enough."""
    line = "36 35 98:0 /a /disks/a\\040b ro,noatime shared:7 master:1 - ext4 /dev/sda1 rw,nobarrier\n"

    assert list(parse_mounts(line)) == [Mount("ext4", "/dev/sda1", "/disks/a b", ("ro", "noatime", "nobarrier"))]


def test_the_mount_that_hides_another_is_the_one_that_counts(tmp_path: Path) -> None:
    at = tmp_path / "disk"
    with small_file_system(at, MIB), mounted(at, "-t", "tmpfs", "-o", "size=7m", "tmpfs"):
        found = examine(at)

    assert "size=7168k" in found.measured("mount")["options"]

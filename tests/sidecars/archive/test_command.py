"""``wald-archive`` as its users run it: output, exit codes, and hints."""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from archives import bags, command, files, interrupt, ledger_lines, output_of, refusal_of, wald_archive
from damage import flipped
from logs import Built
from running import output_of as wald_output_of
from running import refused, run

from wald.files.disk import Disk
from wald.files.ledger_write import Ledger
from wald.format.names import Kind


@pytest.fixture
def root(mixed: Built) -> Path:
    return mixed.root.path


def test_it_packs_proves_and_restores(root: Path, dest: Path) -> None:
    """It restores the bytes of ``wald read``, in both formats."""
    packed = output_of("a", "b", "--root", root, "--dest", dest, "--records-per-bundle", 7).decode().splitlines()

    assert packed[0].startswith(f"a-{1:020d}.tar.zst: 7 records, 1 to 7, 49 B in ")
    assert packed[2] == f"bag a/{1:020d}-{17:020d}: 14 records in 2 bundles at {dest}"
    assert len(packed) == 5
    assert output_of("verify", dest) == b"OK: 3 bundles proven, 0 info, 0 errors\n"
    assert output_of("restore", dest, "a", "--format", "raw") == wald_output_of("read", "a", "--root", root)
    options = ["--format", "json", "--from", 3, "--to", 13]
    read = [json.loads(line) for line in wald_output_of("read", "a", "--root", root, *options).splitlines()]
    for record in read:
        del record["sender"]  # which an archive does not keep
    assert [json.loads(line) for line in output_of("restore", dest, "a", *options).splitlines()] == read


def test_where_damage_ends_a_run_the_hints_can_be_typed_until_all_the_rest_is_packed(
    built: Built, tmp_path: Path
) -> None:
    for word in (b"one", b"two", b"three", b"four"):
        built.lines("a", [word * 40])
    path = built.path(1, Kind.RAW)
    path.write_bytes(path.read_bytes().replace(b"twotwo", b"twoTWO").replace(b"threethree", b"threeTHREE"))
    dest = tmp_path / "in a place"
    line: list[object] = ["a", "--root", built.root.path, "--dest", dest, "--group", "g"]
    line += ["--records-per-bundle", 1, "--codec", "none"]
    typed = []
    for _ in range(2):
        typed.append(re.split(r" (?:packs the|skips it)", refused(wald_archive(*line))[2])[0])
        env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        subprocess.run(["bash", "-c", typed[-1]], check=True, env=env, capture_output=True)
    output_of(*line)

    words = "--records-per-bundle 1 --codec none --to 1"
    place = f"--root {built.root.path} --dest '{dest}' --group g"
    assert typed == [
        f"wald-archive pack a {place} {words}",
        f"wald --root {built.root.path} cursor set a 3 --group g",
    ]
    assert [manifest.name for manifest in bags(dest)] == [f"{1:020d}-{1:020d}", f"{4:020d}-{4:020d}"]


def test_what_is_asked_for_and_not_there_is_reported(mixed: Built, dest: Path) -> None:
    """Records 1 to 17 of route a are in bags up to 9 and 17; existing records are written anyway."""
    root = mixed.root.path
    output_of("a", "--root", root, "--dest", dest, "--to", 9)
    output_of("a", "--root", root, "--dest", dest)
    everything = output_of("restore", dest, "a")

    done = wald_archive("restore", dest, "a", "--to", 20)
    assert done.stdout == everything
    code, message, hint = refused(done)
    assert (code, message) == (3, f"{dest}: no bundle covers records 18 to 20 of route a")
    assert hint == "wald --root ROOT where 18 shows what happened to it in the log"
    assert wald_archive("restore", dest, "a", "--from", 18).returncode == 3
    shutil.rmtree(bags(dest)[-1])
    assert wald_archive("restore", dest, "a").returncode == 0  # no option says that more is expected
    for asked in (("--to", 17), ("--from", 12)):
        assert refused(wald_archive("restore", dest, "a", *asked))[0] == 3


def test_records_reclaimed_behind_an_older_segment_are_reported(built: Built, dest: Path) -> None:
    """Segment 1 is pinned by another route, so the hole is not at the start of the log."""
    for route, value in (("a", b"pins"), ("b", b"gone"), ("b", b"here")):
        built.lines(route, [value])
        built.cut()
    built.seal()
    built.reclaim(2)

    done = wald_archive("b", "--root", built.root.path, "--dest", dest, "--group", "late")
    message = "group late is new on route b and starts at record 3: record 2 was already reclaimed"
    assert (done.returncode, done.stderr.decode()) == (0, f"wald-archive: {message}\n")
    assert [line["after"] for line in ledger_lines(built.root) if line["event"] == "archived"] == [2]
    assert output_of("restore", dest, "b") == b"here\n"
    built.lines("b", [b"reported once"])
    assert wald_archive("b", "--root", built.root.path, "--dest", dest, "--group", "late").stderr == b""

    done = wald_archive("restore", dest, "b", "--from", 1)
    assert done.stdout == b"here\nreported once\n"
    assert refused(done)[:2] == (3, f"{dest}: no bundle covers records 1 to 2 of route b")
    assert output_of("restore", dest, "b", "--from", 3) == b"here\nreported once\n"


def test_told_a_log_what_its_ledger_tells_of_has_to_be_there(mixed: Built, dest: Path) -> None:
    root = mixed.root.path
    output_of("a", "--root", root, "--dest", dest, "--to", 9)
    output_of("a", "--root", root, "--dest", dest)
    assert output_of("--root", root, "restore", dest, "a") == output_of("restore", dest, "a")
    shutil.rmtree(bags(dest)[-1])
    code, message, _ = refused(wald_archive("--root", root, "restore", dest, "a"))

    assert code == 3
    assert message.endswith("no bundle covers records 10 to 17 of route a")


def test_with_json_it_prints_one_object_and_nothing_to_archive_is_no_failure(root: Path, dest: Path) -> None:
    reported = json.loads(output_of("a", "--root", root, "--dest", dest, "--json"))

    ((run,),) = (reported["runs"],)
    assert (run["route"], run["first"], run["last"], run["records"], run["resumed"]) == ("a", 1, 17, 14, False)
    assert [bundle["bundle"] for bundle in run["bundles"]] == [f"a-{1:020d}.tar.zst"]
    assert json.loads(output_of("a", "--root", root, "--dest", dest, "--json"))["runs"] == []

    before = files(dest)
    again = output_of("a", "--root", root, "--dest", dest)

    assert again == b"nothing to archive: group processed has read all of a\n"
    assert files(dest) == before


def test_options_stand_before_or_behind_the_route(root: Path, tmp_path: Path) -> None:
    forms = [
        ("a", "--root", root, "--codec", "gz"),
        ("--root", root, "a", "--codec", "gz"),
        ("--codec", "gz", "--root", root, "a"),
        (f"--root={root}", "pack", "a", "--codec", "gz"),
        ("pack", "--codec", "gz", "a", "--root", root),
    ]
    for number, form in enumerate(forms):
        output_of(*form, "--dest", tmp_path / f"{number}", "--group", f"g{number}")
        assert len(list((tmp_path / f"{number}").rglob("*.tar.gz"))) == 1


def test_a_route_may_be_called_like_a_command(built: Built, dest: Path) -> None:
    """``pack`` says that it is one."""
    for route in ("verify", "restore", "pack"):
        built.lines(route, [b"x"])

    output_of("pack", "verify", "restore", "pack", "--root", built.root.path, "--dest", dest)

    assert sorted(bag.parent.name for bag in bags(dest)) == ["pack", "restore", "verify"]


def test_the_environment_says_where(root: Path, dest: Path) -> None:
    env = {"WALD_ROOT": str(root), "ARCHIVE_DEST": str(dest)}
    output_of("a", env=env)
    assert len(bags(dest)) == 1

    output_of("b", env={"WALD_ROOT": str(root)})
    assert len(bags(root / "archive")) == 1


def test_a_time_where_a_sequence_is_taken_is_refused(root: Path, dest: Path) -> None:
    code, message, hint = refusal_of("a", "--root", root, "--dest", dest, "--to", "2026-01-01")

    assert (code, message) == (2, "--to 2026-01-01: must be a sequence, the number of a record")
    assert hint == "--to 250"


def test_an_interrupted_run_is_gone_on_with_and_said(root: Path, dest: Path) -> None:
    assert interrupt(root, dest)

    done = wald_archive("a", "--root", root, "--dest", dest, "--codec", "gz")

    assert done.returncode == 0
    words = f"continuing the interrupted run a/{1:020d}-{17:020d} with its own sizes and codec (none)"
    assert done.stderr.decode() == f"wald-archive: {words}\n"
    assert len(list(dest.rglob("*.tar"))) == 2


def test_damage_is_listed_and_the_exit_code_says_so(root: Path, dest: Path) -> None:
    output_of("a", "--root", root, "--dest", dest)
    path = bags(dest)[0] / "bagit.txt"
    path.write_bytes(flipped(path.read_bytes(), 8))

    done = wald_archive("verify", dest)
    as_json = wald_archive("verify", dest, "--json")

    assert (done.returncode, as_json.returncode) == (4, 4)
    assert done.stdout.decode().splitlines() == [
        f"error  {path}: offset 1: does not match manifest.json",
        "damaged: 1 bundle proven, 0 info, 1 error",
    ]
    *found, summary = [json.loads(line) for line in as_json.stdout.splitlines()]
    assert (summary["good"], summary["findings"]) == (False, {"ok": 1, "info": 0, "error": 1})
    assert [(each["level"], each["file"], each["offset"]) for each in found] == [
        ("error", "bagit.txt", 1),
        ("ok", f"data/a-{1:020d}.tar.zst", None),
    ]


def test_an_archive_needs_no_log_to_be_proven(root: Path, dest: Path, tmp_path: Path) -> None:
    """So the environment does not bring one in: it may be of another log, or of none any more."""
    output_of("a", "b", "--root", root, "--dest", dest)
    shutil.rmtree(dest / "b")

    for other in (root, tmp_path / "none"):
        env = {"WALD_ROOT": str(other)}
        assert output_of("verify", dest, env=env) == b"OK: 1 bundle proven, 0 info, 0 errors\n"


class TestRefusals:
    """One line, one hint, an exit code that means something."""

    def test_invalid_arguments(self, root: Path) -> None:
        code, message, hint = refusal_of("a")
        assert (code, message) == (2, "which log? no root was given")
        assert "WALD_ROOT" in hint
        for words, refused_code, said in (
            (("none",), 3, "there is no route 'none'"),
            (("a/b",), 2, ""),
            (("a", "--records-per-bundle", 1, "--bytes-per-bundle", "1MiB"), 2, "are mutually exclusive"),
            (("a", "--records-per-bundle", 0), 2, ""),
            (("a", "--bytes-per-bundle", 0), 2, ""),
            (("a", "--codec", "rar"), 2, ""),
            (("a", "--engine", "local", "--master", "local[2]"), 2, "takes no --master"),
        ):
            code, message, _ = refusal_of(*words, "--root", root)
            assert (code, said in message) == (refused_code, True), words

    @pytest.mark.parametrize(
        ("asking", "without", "words"),
        [
            (
                ("--engine", "spark"),
                "import wald_spark.session as java; java._homes = lambda: iter(())",
                "Spark needs Java 17 or newer",
            ),
            (
                ("--master", "spark://nowhere:7077"),
                "import sys; sys.modules['pyspark'] = None",
                "which --engine spark needs",
            ),
        ],
    )
    def test_spark_that_is_asked_for_and_not_there(
        self, root: Path, dest: Path, asking: tuple[str, str], without: str, words: str
    ) -> None:
        """Reported before a run begins; without the option the other engine is used."""
        script = f"{without}; from wald_archive.command import main; main()"
        line = [sys.executable, "-c", script, "a", "--root", str(root), "--dest", str(dest)]

        code, message, hint = refused(run([*line, *asking]))

        assert (code, words in message, "install" in hint) == (3, True, True)
        assert not dest.exists()
        assert run(line).returncode == 0

    def test_a_second_archivist(self, root: Path, dest: Path) -> None:
        ledger = Ledger(root / "ledger" / "archive.jsonl", Disk(), owner="wald-archive")
        try:
            code, message, hint = refusal_of("a", "--root", root, "--dest", dest)
        finally:
            ledger.close()
        assert (code, "another wald-archive" in message, "fuser" in hint) == (5, True, True)

    def test_a_destination_that_is_a_file(self, root: Path, dest: Path) -> None:
        dest.write_bytes(b"")

        code, message, hint = refusal_of("a", "--root", root, "--dest", dest)

        assert (code, message) == (2, f"{dest}: not a directory")
        assert hint == "name a directory that exists or can be created"
        assert wald_output_of("cursor", "set", "a", 1, "--root", root) == b"1\n"  # it had not moved

    def test_a_full_disk(self, built: Built, tmp_path: Path) -> None:
        """A real failure: the shell limits the size of a file."""
        built.lines("a", [os.urandom(30_000).replace(b"\n", b" ") for _ in range(20)])
        dest = tmp_path / "dest"
        line = command("a", "--root", built.root.path, "--dest", dest)
        limited = ["bash", "-c", 'ulimit -f 100; trap "" XFSZ; exec "$@"', "bash", *line]

        done = subprocess.run(limited, capture_output=True, text=True, check=False)

        assert done.returncode == 7
        assert "nothing is lost" in done.stderr
        assert wald_archive("a", "--root", built.root.path, "--dest", dest).returncode == 0
        assert output_of("verify", dest).startswith(b"OK: 1 bundle")

    def test_nothing_to_restore(self, root: Path, dest: Path) -> None:
        output_of("a", "--root", root, "--dest", dest)
        code, message, hint = refusal_of("restore", dest, "none")
        assert (code, "'none'" in message, hint.endswith("here: a")) == (3, True, True)


def test_people_who_wait_see_a_bar(root: Path, dest: Path) -> None:
    """On a terminal, and nowhere else."""
    for arguments in (["a", "--root", root, "--dest", dest], ["verify", dest], ["restore", dest, "a"]):
        ours, theirs = pty.openpty()
        done = subprocess.run(command(*arguments), stdout=subprocess.DEVNULL, stderr=theirs, check=True)
        os.close(theirs)
        assert done.returncode == 0
        assert b"100%" in os.read(ours, 100_000)
        os.close(ours)

"""The Containerfile: its steps build an image that runs, with the documented properties."""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import kubelet
import programs
import pytest
from containerfile import CONTEXT, Image, environment, instructions
from kustomize import containers, pods

import wald

PROJECT = tomllib.loads((CONTEXT / "pyproject.toml").read_text())
PROGRAMS: list[str] = sorted(PROJECT["project"]["scripts"])

PROGRAMS_AT = Path(environment()["PATH"].split(":")[0])


def arguments_of(name: str) -> list[str]:
    return [arguments for instruction, arguments in instructions() if instruction == name]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    if reason := kubelet.lack():
        programs.lack(reason)
    built = Image(tmp_path_factory.mktemp("image"))
    try:
        built.build()
        yield built
    finally:
        built.close()


def test_it_runs_as_the_user_of_the_manifests() -> None:
    (user,) = arguments_of("USER")
    security = [template["spec"]["securityContext"] for _, template in pods("node")]

    assert {f"{each['runAsUser']}:{each['runAsGroup']}" for each in security} == {user}
    assert arguments_of("STOPSIGNAL") == ["SIGTERM"]
    assert arguments_of("HEALTHCHECK") == []


def test_the_build_gets_what_it_copies_and_nothing_else() -> None:
    ignored, *allowed = [
        line for line in (CONTEXT / ".containerignore").read_text().splitlines() if line and line[0] != "#"
    ]
    copied = {name for each in arguments_of("COPY") if not each.startswith("--from") for name in each.split()[:-1]}

    assert ignored == "*"
    assert {line[1:] for line in allowed if line[0] == "!"} == copied


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_answers(image: Image, program: str) -> None:
    done = image.run(program, "--version")

    assert (done.returncode, done.stderr) == (0, "")
    assert wald.__version__ in done.stdout


@pytest.mark.slow
def test_a_log_is_made_written_and_read(image: Image) -> None:
    script = "printf 'one\\ntwo\\n' | wald run --stdin access && wald read access"
    done = image.run("sh", "-euc", script)

    assert done.stdout == "one\ntwo\n", done.stderr
    assert image.run("stat", "--format=%U:%G %a", "/var/lib/wald").stdout == "wald:wald 2750\n"


@pytest.mark.slow
def test_it_has_what_the_lock_has_and_no_installer(image: Image) -> None:
    ask = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    found: dict[str, str] = json.loads(image.run("python", "-c", ask).stdout)
    pinned = dict(
        re.findall(r"^([a-z0-9-]+)==([^ ]+)", (CONTEXT / "requirements-runtime.lock").read_text(), re.MULTILINE)
    )

    assert found.pop("wald") == wald.__version__
    assert {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found.items()}.items() <= pinned.items()
    assert {"s3fs", "rich"} <= set(found)


@pytest.mark.slow
def test_it_is_compiled_and_its_user_can_change_nothing(image: Image) -> None:
    ask = "import wald.cli, pathlib; print(pathlib.Path(wald.cli.__cached__).exists())"
    writable = image.run("find", str(PROGRAMS_AT.parent), "-writable", "-not", "-type", "l")

    assert image.run("python", "-c", ask).stdout == "True\n"
    assert (writable.returncode, writable.stdout) == (0, "")


def test_every_command_of_the_manifests_is_found_in_it() -> None:
    commands = {
        each["command"][0]
        for overlay in ("node", "pod", "single")
        for _, template in pods(overlay)
        for each in containers(template)
    }

    assert commands - {"sh"} <= set(PROGRAMS)
    assert f"COPY --from=build {PROGRAMS_AT.parent} {PROGRAMS_AT.parent}" in (CONTEXT / "Containerfile").read_text()

"""Clients generated from the OpenAPI document by openapi-generator compile and receive records and errors."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import openapi_generator_cli
import programs
import pytest
from gating import Gate, entry
from running import TIMEOUT_SECONDS, Daemon

from wald_gate.app import VERBS
from wald_gate.openapi import document
from wald_gate.shapes import encoded

CLIENTS = Path(__file__).with_name("clients")
JAR = Path(openapi_generator_cli.__file__).with_name("openapi-generator.jar")
PACKAGE = "openapi_client"
PROJECT = Path(__file__).parents[3] / "pyproject.toml"
GO_MODULE = """module generated

go 1.18

require gopkg.in/validator.v2 v2.0.1

replace gopkg.in/validator.v2 => ./validator
"""
NO_RULES = "package validator\n\nfunc Validate(any) error { return nil }\n"  # the client uses no validation rules
ANSWERS = {
    "stored": [1, 2, 2],
    "records": [[1, "one", "ann"], [2, "[2]", None]],
    "times": True,
    "cursor": [1, "valid"],
    "leased": [[2, 1, "[2]"]],
    "pending": [["out", "ann"]],
    "refused": [9],
    "problems": [[404, "not-found"], [403, "not-permitted"]],
}


@pytest.fixture
def guarded(daemon: Daemon, tmp_path: Path) -> Iterator[Gate]:
    """A gate that requires a token."""
    tokens = tmp_path / "tokens"
    tokens.write_text(entry("shop", read=["orders"], write=["orders"], work=["orders"]))
    with Gate(daemon.root, "--tokens", tokens) as running:
        yield running


def run(*command: object, at: Path, **environment: str) -> str:
    """Run a command that must succeed; return its output."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=at,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=10 * TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def generate(gate: Gate, generator: str, folder: Path, *options: str) -> None:
    """Generate a client from the gate's OpenAPI document."""
    at = folder.parent
    (at / "openapi.json").write_bytes(gate.get("/openapi.json").body)
    command = [programs.program("java"), "-jar", JAR, "generate", "-i", "openapi.json", "-g", generator]
    run(*command, "-o", folder, "--global-property", "apiTests=false,modelTests=false", *options, at=at)


def python(gate: Gate, at: Path) -> list[object]:
    generate(gate, "python", at / "generated", f"--package-name={PACKAGE}")
    (at / "generated" / PACKAGE).rename(at / PACKAGE)
    shutil.copy(CLIENTS / "client.py", at)
    run(sys.executable, "-W", "error", "-m", "compileall", "-q", PACKAGE, at=at)
    return [sys.executable, "client.py"]


def go(gate: Gate, at: Path) -> list[object]:
    compiler = programs.program("go")
    generate(gate, "go", at / PACKAGE, f"--package-name={PACKAGE}", "--additional-properties=withGoMod=false")
    (at / "validator").mkdir()
    (at / "validator" / "validator.go").write_text(NO_RULES)
    (at / "validator" / "go.mod").write_text("module gopkg.in/validator.v2\n\ngo 1.18\n")
    (at / "go.mod").write_text(GO_MODULE)
    shutil.copy(CLIENTS / "client.go", at)
    run(compiler, "build", "-o", "client", ".", at=at, GOCACHE=str(at / "cache"), GOPROXY="off", GOFLAGS="-mod=mod")
    return ["./client"]


def typescript(gate: Gate, at: Path) -> list[object]:
    compiler, node = programs.program("tsc"), programs.program("node")
    generate(gate, "typescript-fetch", at / PACKAGE)
    shutil.copy(CLIENTS / "client.ts", at)
    modern = ["--target", "es2020", "--lib", "es2020,dom", "--module", "commonjs"]
    # TypeScript before 4.9 infers an implicit `any` for properties that the generated code checks with `in`.
    run(compiler, "--strict", "--noImplicitAny", "false", *modern, "--outDir", "compiled", "client.ts", at=at)
    return [node, "compiled/client.js"]


@pytest.mark.slow
@pytest.mark.parametrize("language", [python, go, typescript])
def test_a_generated_client_appends_reads_works_and_tells_errors(
    guarded: Gate, tmp_path: Path, language: Callable[[Gate, Path], list[object]]
) -> None:
    at = tmp_path / "client"
    at.mkdir()
    command = language(guarded, at)

    assert json.loads(run(*command, guarded.origin, "shop-token", at=at)) == ANSWERS


def test_the_document_is_one_of_openapi() -> None:
    from openapi_spec_validator import OpenAPIV31SpecValidator  # slow to import, and each worker collects this file

    found = json.loads(encoded(document(VERBS)))

    assert list(OpenAPIV31SpecValidator(found).iter_errors()) == []
    assert found["servers"]
    assert found["info"]["license"]["identifier"] == tomllib.loads(PROJECT.read_text())["project"]["license"]
    assert found["security"]

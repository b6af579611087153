"""Programs for the published package run unchanged, with any host names."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import subprocess
import textwrap
from pathlib import Path
from typing import Iterator

import pytest
from agents import Agent
from published_programs import PROGRAMS, is_program, make_program
from host_proxy import HostProxy
from client_kit import list_leases, run_program

import gpu_worker_pool
from gpu_worker_pool import GPUWorkerPoolClient


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, str], list[Agent]]]:
    """Start agents that serve any host name, also over https; return them and the environment for programs."""
    folder = tmp_path_factory.mktemp("certificates")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
        + ["-subj", "/CN=test", "-addext", "subjectAltName=DNS:gpu-service.company.com"]
        + ["-addext", "basicConstraints=critical,CA:FALSE"]
        + ["-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )
    agents = [Agent("2xH100") for _ in range(3)]
    try:
        settings = folder / "gpupool.toml"
        settings.write_text('[server]\nallowed_hosts = ["gpu-service.company.com"]\n')
        secured = ("--config", str(settings), "--tls-cert", str(certificate), "--tls-key", str(key))
        agents.append(Agent("2xH100", *secured))
        ports: dict[str, int] = {}

        def port_of(host: str, is_encrypted: bool) -> int:
            # Each new name maps to the next agent, so that the hosts of one program are different servers.
            return agents[3].port if is_encrypted else ports.setdefault(host, agents[len(ports) % 3].port)

        with HostProxy(port_of) as proxy:
            named = {"GPU_SERVICE_ENDPOINT": agents[0].url, "GPUPOOL_CA": str(certificate)}
            yield {**proxy.environment, **named}, agents
    finally:
        for agent in agents:
            agent.stop()


def check_runs(program: str, servers: tuple[dict[str, str], list[Agent]]) -> str:
    environment, agents = servers
    output = run_program(program if is_program(program) else make_program(program), environment=environment)
    for agent in agents[:3]:
        assert list_leases(agent) == []
    return output


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_published_style_program_runs(name: str, servers) -> None:
    check_runs(PROGRAMS[name], servers)


def seed_blocks() -> list[str]:
    """Return the Python blocks of the published package's document, if the document is beside the repository."""
    root = Path(__file__).resolve().parents[3]
    found = sorted((root.parent / "shared" / "seeds").glob("001_*.txt"))
    texts = [path.read_text() for path in found]
    return [block for text in texts for block in re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)]


def is_signature(block: str) -> bool:
    try:
        compile(block, "block", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except SyntaxError:
        return True
    return False


BLOCKS = seed_blocks()


@pytest.mark.skipif(not BLOCKS, reason="the document is not beside the repository")
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_every_block_of_the_document_runs_as_written(number: int, servers) -> None:
    block = BLOCKS[number]
    if is_signature(block):
        return check_signature(block)
    if "@dataclass" in block:
        check_data_class(block)
    output = check_runs(block, servers)
    if re.search(r"print\(f.*ssigned GPU", block):
        assert re.search(r"ssigned GPU \S+", output), output


def check_signature(block: str) -> None:
    """Check that our signature has the names, order and defaults of a documented signature."""
    function = ast.parse(re.sub(r"^\w+\(", "def documented(", textwrap.dedent(block).rstrip()) + ": ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    names = [argument.arg for argument in function.args.args]
    parameters = inspect.signature(GPUWorkerPoolClient).parameters
    assert list(parameters)[: len(names)] == names
    defaults = [ast.literal_eval(default) for default in function.args.defaults]
    assert [parameters[name].default for name in names] == defaults


def check_data_class(block: str) -> None:
    """Check that our data class has the fields of a documented data class."""
    [documented] = [node for node in ast.parse(block).body if isinstance(node, ast.ClassDef)]
    ours = {field.name for field in dataclasses.fields(getattr(gpu_worker_pool, documented.name))}
    fields = [node.target.id for node in documented.body if isinstance(node, ast.AnnAssign)]  # type: ignore[union-attr]
    assert fields and set(fields) <= ours, (documented.name, fields, ours)

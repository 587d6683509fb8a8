"""Third-party tools work with both OpenAPI documents: client generators, and a client for resumable uploads.

`make test` puts the tools of tests/generators on the path, in separate environments.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.agent_service import Service
from support.api import SocketApi
from support.coordinator import ADMIN_TOKEN, Site, running
from support.databases import new_database
from support.plans import small_plan, update_body
from support.programs import needs

from client_agent.settings import ServeOptions
from shared.tensors.wire import digest

TOOLS = Path(__file__).parent.parent / "generators"
PLAN = small_plan(method={"name": "fedavg"}, rounds={"count": 20, "min_clients": 1})


def run(*command: str | Path, **environment: str) -> str:
    """Run a program that must succeed; return its output."""
    done = subprocess.run(
        list(map(str, command)),
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SocketApi]:
    with SocketApi(new_database("sqlite", request, tmp_path_factory.mktemp("clients"))) as api:
        yield api


@pytest.fixture(scope="module")
def documents(api: SocketApi) -> dict[str, Any]:
    agent = Service(ServeOptions(), None)
    found = {
        "coordinator": api.call("GET", "/openapi.json", token=None).json(),
        "agent": agent.http.get("/openapi.json").json(),
    }
    agent.queue.stop()
    return found


@pytest.fixture(scope="module")
def python_clients(documents: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Generate packages with openapi-python-client, which must not skip anything; return their folder."""
    generator, folder = Path(needs("openapi-python-client")), tmp_path_factory.mktemp("python")
    path = (
        f"{generator.parent}{os.pathsep}{os.environ['PATH']}"  # it formats its output with a program in the same folder
    )
    for program, document in documents.items():
        source, package = folder / f"{program}.json", folder / f"{program}_client"
        source.write_text(json.dumps(document))
        said = run(generator, "generate", "--path", source, "--output-path", package, "--meta", "none", PATH=path)
        assert "will not be generated" not in said, said
        assert "will be omitted" not in said, said
    return folder


def test_a_python_client_has_every_operation(documents: dict[str, Any], python_clients: Path) -> None:
    for program, document in documents.items():
        modules = {file.stem.replace("_", "") for file in (python_clients / f"{program}_client" / "api").rglob("*.py")}
        wanted = {
            operation["operationId"].lower() for item in document["paths"].values() for operation in item.values()
        }
        assert wanted <= modules, program


@pytest.mark.parametrize("empty_db_url", ["sqlite"], indirect=True)
def test_a_generated_python_client_can_do_a_whole_round(python_clients: Path, db_url: str, tmp_path: Path) -> None:
    python = Path(needs("openapi-python-client")).parent / "python"
    with running(db_url, tmp_path, forked=True) as coordinator:
        said = run(python, "-I", TOOLS / "one_round.py", python_clients, coordinator.url, ADMIN_TOKEN)
    assert said == "one round with a generated client\n"


def test_typescript_clients_have_every_operation_and_pass_the_type_check(
    documents: dict[str, Any], tmp_path: Path
) -> None:
    generator = needs("openapi-ts")
    for program, document in documents.items():
        source, folder = tmp_path / f"{program}.json", tmp_path / program
        source.write_text(json.dumps(document))
        run(generator, "--input", source, "--output", folder, "--no-log-file")
        functions = (folder / "sdk.gen.ts").read_text()
        for item in document["paths"].values():
            for operation in item.values():
                assert f"export const {operation['operationId']} = " in functions
    entries = [tmp_path / program / "index.ts" for program in documents]
    options = ["--noEmit", "--strict", "--skipLibCheck", "--target", "es2022", "--module", "esnext"]
    run(needs("tsc"), *options, "--moduleResolution", "bundler", "--lib", "es2022,dom,dom.iterable", *entries)


@pytest.fixture(scope="module")
def site(api: SocketApi) -> Site:
    api.create(PLAN)
    return api.join(PLAN, "north", {"cat": 1})


@pytest.mark.parametrize("protocol", ["ietf-draft-03", "ietf-draft-05"])
@pytest.mark.parametrize(("part_bytes", "stop_after"), [(0, 0), (5000, 0), (5000, 9000)])
def test_tus_js_client_uploads_without_any_help(
    api: SocketApi, site: Site, tmp_path: Path, protocol: str, part_bytes: int, stop_after: int
) -> None:
    """With just the URL and the token: in one request, in parts, and resumed by another client after an abort."""
    packages = Path(needs("openapi-ts")).parent.parent
    task = site.task()
    assert task.round is not None
    body = update_body(PLAN, {}, task.round.number)
    (tmp_path / "update").write_bytes(body)
    url = f"{api.url}{task.round.update_url}"
    script = ("node", TOOLS / "upload.cjs", url, site.token, tmp_path / "update", protocol, part_bytes, stop_after)
    status, _, receipt = run(*map(str, script), NODE_PATH=str(packages)).partition(" ")
    assert (status, json.loads(receipt)["digest"]) == ("200", digest(body))
    uploads = api.admin("GET", f"/v1/federations/{PLAN.name}/rounds?after={task.round.number - 1}&limit=1")
    assert [upload["digest"] for upload in uploads[0]["uploads"]] == [digest(body)]

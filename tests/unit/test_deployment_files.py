"""Dockerfile, compose.yaml and systemd units, checked without running them."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.programs import needs

from client_agent.errors import AgentEnded
from shared import __version__

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(sys.executable).parent
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = ("migrate", "coordinator-a", "coordinator-b", "agent")


def test_hadolint_accepts_the_dockerfile() -> None:
    done = subprocess.run([PROGRAMS / "hadolint", "--no-color", ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def stages() -> dict[str, str]:
    parts = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    return {part.split("\n")[0].rpartition(" AS ")[2]: part for part in parts}


def test_container_images_are_pinned_and_run_unprivileged() -> None:
    found = stages()
    assert list(found) == ["build", "base", "coordinator", "agent"]
    for name in ("build", "base"):
        assert re.match(r"python:3\.\d+\.\d+-slim-\w+ ", found[name]), "base images are pinned by version"
    for name in ("coordinator", "agent"):
        assert found[name].startswith("base AS "), "images contain neither compiler nor installer"
        assert "HEALTHCHECK" in found[name]
        assert "USER" not in found[name]
    assert re.search(r"^USER 10001:10001$", found["base"], re.MULTILINE)
    assert 'ARG TORCH_INDEX=""' in DOCKERFILE
    assert "://" not in DOCKERFILE.replace("http://127.0.0.1", ""), "no package index is hard-coded"


def test_images_contain_everything_the_wheel_is_built_from() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    copied = set(re.findall(r"^COPY (\S+) \S+$", stages()["build"], re.MULTILINE))
    assert copied == {*wheel["only-include"], *wheel["force-include"]}


def test_build_context_contains_everything_the_images_copy() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for line in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE):
        for source in line.split():
            assert (ROOT / source).exists()
            assert f"!{source}" in ignored


@pytest.mark.parametrize("name", SERVICES)
def test_compose_services_are_pinned_and_keep_secrets_in_files(name: str) -> None:
    service = SERVICES[name]
    image, _, tag = service["image"].partition(":")
    assert re.match(r"\d+\.\d+", tag), "images are pinned by version"
    if name in OURS:
        assert tag == __version__
        assert service["build"]["target"] in stages()
        assert image == f"distrans-{service['build']['target']}"
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["user"] == "10001:10001"
    else:
        assert service["healthcheck"]["test"][0] == "CMD"
    for secret in service.get("secrets", []):
        assert secret in COMPOSE["secrets"]
    for variable, value in service.get("environment", {}).items():
        if variable.endswith("_FILE"):
            assert value.removeprefix("/run/secrets/") in service["secrets"]
        assert not re.search(r"(TOKEN|PASSWORD)$", variable), "secrets are files"
    for volume in service.get("volumes", []):
        source = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", volume).split(":")[0]
        assert source in COMPOSE["volumes"] or source == "./images" or (ROOT / source).exists()
    for network in service.get("networks", []):
        assert network in COMPOSE["networks"]
    for other, wanted in service.get("depends_on", {}).items():
        condition = wanted["condition"]
        healthy = "healthcheck" in SERVICES[other] or "HEALTHCHECK" in stages()[SERVICES[other]["build"]["target"]]
        assert healthy or condition == "service_completed_successfully"


def test_compose_trusts_its_own_proxy_and_reads_secrets_from_files() -> None:
    upstreams = SERVICES["caddy"]["environment"]["DISTRANS_UPSTREAMS"].split()
    assert upstreams == ["coordinator-a:8400", "coordinator-b:8400"]
    subnet = COMPOSE["networks"]["inside"]["ipam"]["config"][0]["subnet"]
    assert SERVICES["coordinator-a"]["environment"]["DISTRANS_TRUSTED_PROXIES"] == subnet
    (device,) = SERVICES["agent"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert SERVICES["agent"]["profiles"] == ["agent"]
    # The image listens on all interfaces, which the agent refuses without a token.
    assert SERVICES["agent"]["environment"]["DISTRANS_PREDICT_TOKEN_FILE"] == "/run/secrets/predict_token"
    for secret in COMPOSE["secrets"].values():
        assert secret["file"].startswith("./secrets/")
    assert "secrets/" in (ROOT / ".gitignore").read_text()


@pytest.mark.parametrize("unit", ["distrans-server", "distrans-agent"])
def test_systemd_accepts_units_that_are_hardened(unit: str, tmp_path: Path) -> None:
    analyze = needs("systemd-analyze")
    text = (ROOT / "deploy" / "systemd" / f"{unit}.service").read_text()
    assert text.count("ExecStart=/opt/distrans/bin/") == 1
    copy = tmp_path / f"{unit}.service"
    copy.write_text(text.replace("/opt/distrans/bin", str(PROGRAMS)))
    done = subprocess.run(
        [analyze, "verify", "--man=no", "--generators=no", copy], capture_output=True, text=True, env=os.environ
    )
    assert (done.returncode, done.stderr) == (0, "")
    for setting in ("DynamicUser=yes", "NoNewPrivileges=yes", "ProtectSystem=strict", "CapabilityBoundingSet="):
        assert re.search(f"^{setting}$", text, re.MULTILINE)


def test_unit_in_the_site_guide_is_an_excerpt_of_the_real_one() -> None:
    guide = (ROOT / "docs" / "site-guide.md").read_text()
    (block,) = re.findall(r"```ini\n(.*?)```", guide, re.DOTALL)
    unit = (ROOT / "deploy" / "systemd" / "distrans-agent.service").read_text().splitlines()
    lines = [line for line in block.splitlines() if line]
    assert lines == [line for line in unit if line in lines]


def test_systemd_does_not_restart_an_agent_that_has_ended_for_good() -> None:
    unit = (ROOT / "deploy" / "systemd" / "distrans-agent.service").read_text().splitlines()
    assert f"RestartPreventExitStatus={AgentEnded.exit_code}" in unit
    assert "--no-serve" not in next(line for line in unit if line.startswith("ExecStart="))

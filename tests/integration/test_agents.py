"""Agents as processes against a real coordinator process."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from support.agents import CLASSES, AgentProcess, digits_plan, enrol, write_digits
from support.coordinator import CoordinatorProcess, running
from support.proxy import Cut, CuttingProxy

from client_agent import serving
from client_agent.data import open_data
from client_agent.export import export_program, standalone
from client_agent.images import PREDICT_FORMATS, decode, to_tensor
from client_agent.state import StateFolder
from lab.simulation import SimulatedClient, Simulation
from shared.methods import client_half
from shared.methods.base import ClientRecord, Predictor
from shared.plan import FederationPlan, ImagePlan
from shared.runtime import Runtime
from shared.wire import digest, encode

SITES = {"north": ("0", "1", "2"), "south": ("2", "3", "4"), "west": ("4", "5", "0")}


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorProcess]:
    """One process for all tests here; each has a federation of its own."""
    folder = tmp_path_factory.mktemp("coordinator")
    with running(f"sqlite:///{folder / 'coordinator.db'}", folder) as process:
        yield process


def simulated_model(plan: FederationPlan, states: dict[str, StateFolder]) -> str:
    """The digest of the model that an undisturbed run in memory ends with."""
    clients = []
    for name, state in states.items():
        data = open_data(state.identity().data, plan)
        record = ClientRecord(name, tuple(data.report.class_counts.values()))
        clients.append(SimulatedClient(record, data.train, data.test))
    simulation = Simulation(plan, clients)
    while simulation.round < plan.rounds.count:
        simulation.run_round(evaluate=False)
    return digest(encode(simulation.state.shared))


def final_model(state: StateFolder) -> str:
    return digest(encode(state.load_bundle(state.bundle_numbers()[-1]).shared))


def test_three_agents_train_digits_and_then_answer_with_their_offsets(
    coordinator: CoordinatorProcess, tmp_path: Path
) -> None:
    plan = digits_plan("three-sites", rounds=4, epochs=2)
    coordinator.create(plan)
    states = {
        name: enrol(
            coordinator, plan, name, write_digits(tmp_path / "data" / name, classes, every=2), tmp_path, coordinator.url
        )
        for name, classes in SITES.items()
    }
    options = ("--local-baseline", "--max-accuracy-drop", "1")
    agents = {name: AgentProcess(state, *options) for name, state in states.items()}
    try:
        for agent in agents.values():
            agent.wait_for_line("The federation has finished", timeout_s=240)
        right = total = changed = 0
        for name, agent in agents.items():
            unseen = write_digits(tmp_path / "unseen" / name, SITES[name], every=16, start=1)
            other = states["south" if name == "north" else "north"]
            with Site(agent.predict_url()) as site:
                for file in sorted(unseen.rglob("*.png")):
                    label = site.predict(file)["predictions"][0]["label"]
                    right += label == file.parent.name
                    changed += label != predict_with_offset_of(states[name], other, file)
                    total += 1
                info = site.http.get("/info").json()
        assert right / total > 0.85
        assert changed / total > 0.05  # the offset is not decoration
        last = info["history"][-1]
        assert last["model"] == 4
        assert all(last[key] is not None for key in ("with_offset", "without_offset", "local"))
        assert {final_model(state) for state in states.values()} == {simulated_model(plan, states)}
        assert [agent.stop() for agent in agents.values()] == [0, 0, 0]
    finally:
        for agent in agents.values():
            agent.kill()
    check_offline_use(states["north"], tmp_path)


class Site:
    """What an application at the site does."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, trust_env=False)

    def __enter__(self) -> "Site":
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def predict(self, file: Path) -> Any:
        return self.http.post("/predict", content=file.read_bytes(), headers={"content-type": "image/png"}).json()


@cache
def predictor_with_offset_of(own: Path, other: Path) -> tuple[Predictor, ImagePlan]:
    state = StateFolder(own)
    bundle, foreign = (one.load_bundle(one.bundle_numbers()[-1]) for one in (state, StateFolder(other)))
    plan = state.identity().plan
    return client_half(plan).predictor(bundle.task("x"), foreign.private, Runtime()), plan.image


def predict_with_offset_of(state: StateFolder, other: StateFolder, file: Path) -> str:
    """What this site's model would say with another site's offset."""
    predictor, image = predictor_with_offset_of(state.path, other.path)
    return CLASSES[int(predictor(to_tensor(decode(file, PREDICT_FORMATS), image)[None]).argmax())]


def check_offline_use(state: StateFolder, tmp_path: Path) -> None:
    """Without a coordinator in reach the agent serves its last model; pin and unpin roll it back and forth."""
    agent = AgentProcess(state, "--no-train")
    try:
        file = next((tmp_path / "unseen").rglob("*.png"))
        agent.wait_for_line("Application startup complete")
        with Site(agent.predict_url()) as site:

            def served_until(number: int) -> bool:
                return any(site.predict(file)["model"]["round"] == number for _ in range(2000))

            assert served_until(4)
            state.pin(2)
            assert served_until(2)
            state.pin(None)
            assert served_until(4)
    finally:
        agent.stop()
    identity, bundle = state.identity(), state.load_bundle(4)
    export_program(identity, bundle, tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    images = torch.rand(5, 1, 16, 16)
    model = serving.build(identity.plan, identity.name, bundle, Runtime())
    assert torch.allclose(program(images), model.own((images - 0.5) / 0.5), atol=1e-5)
    assert torch.equal(program(images), standalone(identity, bundle)(images))


@pytest.mark.parametrize("where", ["before-request", "half-request", "before-response"])
def test_killed_at_the_upload_it_resumes_and_nothing_counts_twice(
    coordinator: CoordinatorProcess, tmp_path: Path, where: Cut
) -> None:
    """kill -9 before, during and after the upload of round 2: the end is the same, to the bit, as without."""
    plan = digits_plan(f"cut-{where}", rounds=3, clients=1)
    coordinator.create(plan)
    proxy = CuttingProxy(int(coordinator.url.rsplit(":", 1)[1]))
    data = write_digits(tmp_path / "data", ("0", "1"), every=4)
    state = enrol(coordinator, plan, "north", data, tmp_path, proxy.url)
    second_round = coordinator.admin("GET", f"/v1/federations/{plan.name}/rounds")[0]["id"] + 1
    proxy.arm(f"PUT /v1/rounds/{second_round}/update".encode(), where)
    agent = AgentProcess(state, "--no-serve", "--max-accuracy-drop", "1")
    try:
        assert proxy.cut.wait(120), agent.lines
        offset_before = state.private()["offset"]
        agent.kill()
        assert torch.equal(state.private()["offset"], offset_before)
        second = AgentProcess(state, "--no-serve", "--max-accuracy-drop", "1")
        assert second.wait() == 0, second.lines
    finally:
        agent.kill()
        proxy.close()
    rounds = coordinator.admin("GET", f"/v1/federations/{plan.name}/rounds")
    assert [(row["state"], row["updates"]) for row in rounds] == [("done", 1)] * 3
    assert final_model(state) == simulated_model(plan, {"north": state})
    assert state.pending() is None


def test_killed_while_training_it_trains_the_round_again(coordinator: CoordinatorProcess, tmp_path: Path) -> None:
    plan = digits_plan("killed-in-training", rounds=2, clients=1)
    coordinator.create(plan)
    state = enrol(coordinator, plan, "north", write_digits(tmp_path / "data", ("0", "1")), tmp_path, coordinator.url)
    agent = AgentProcess(state, "--no-serve")
    agent.wait_for_line("received model 0")
    agent.kill()
    second = AgentProcess(state, "--no-serve")
    assert second.wait() == 0, second.lines
    assert final_model(state) == simulated_model(plan, {"north": state})

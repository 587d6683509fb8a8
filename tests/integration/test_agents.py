"""Agent processes and a coordinator process."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from support.agent_sites import App
from support.agents import CLASSES, AgentProcess, digits_plan, enroll, write_digits
from support.coordinator import CoordinatorProcess, running
from support.cutting_proxy import Cut, CuttingProxy
from support.simulating import run_all
from support.tensors import assert_same_tensors

from client_agent.data.dataset import open_data
from client_agent.data.images import PREDICT_FORMATS, decode, to_tensor
from client_agent.serving.export import build_standalone, export_program
from client_agent.serving.model import load_served
from client_agent.settings import SITE_PRIOR
from client_agent.state.folder import StateFolder
from lab.simulation.simulation import SimulatedClient, Simulation
from shared.contract.plan import FederationPlan, ImagePlan
from shared.learning.methods import client_half
from shared.learning.methods.base import ClientRecord, Predictor
from shared.learning.runtime import Runtime
from shared.tensors.wire import digest, encode

SITES = {"north": ("0", "1", "2"), "south": ("2", "3", "4"), "west": ("4", "5", "0")}


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorProcess]:
    """Run one process for all tests; each test has its own federation."""
    folder = tmp_path_factory.mktemp("coordinator")
    with running(f"sqlite:///{folder / 'coordinator.db'}", folder) as process:
        yield process


def simulated_model(plan: FederationPlan, states: dict[str, StateFolder]) -> str:
    """Return the digest of the final model of an undisturbed run in memory."""
    clients = []
    for name, state in states.items():
        data = open_data(state.identity().data, plan)
        record = ClientRecord(name, tuple(data.report.class_counts.values()))
        clients.append(SimulatedClient(record, data.train, data.test))
    simulation = Simulation(plan, clients)
    run_all(simulation)
    return digest(encode(simulation.state.shared))


def final_model(state: StateFolder) -> str:
    return digest(encode(state.models.load_number(state.models.numbers()[-1]).shared))


def test_three_agents_train_digits_and_then_answer_with_their_offsets(
    coordinator: CoordinatorProcess, tmp_path: Path
) -> None:
    plan = digits_plan("three-sites", rounds=4, epochs=2)
    coordinator.create(plan)
    states = {
        name: enroll(
            coordinator, plan, name, write_digits(tmp_path / "data" / name, classes, every=2), tmp_path, coordinator.url
        )
        for name, classes in SITES.items()
    }
    options = ("--local-baseline", "--max-accuracy-drop", "1")  # the former name of --alone
    agents = {name: AgentProcess(state, *options) for name, state in states.items()}
    try:
        for agent in agents.values():
            agent.wait_for_line("The federation has finished", timeout_s=240)
        right = total = changed = 0
        for name, agent in agents.items():
            unseen = write_digits(tmp_path / "unseen" / name, SITES[name], every=16, start=1)
            other = states["south" if name == "north" else "north"]
            with App(agent, unseen) as app:
                for file in sorted(unseen.rglob("*.png")):
                    label = app.predict(file.read_bytes())["predictions"][0]["label"]
                    right += label == file.parent.name
                    changed += label != predict_with_offset_of(states[name], other, file)
                    total += 1
                info = app.info()
        assert right / total > 0.85
        assert changed / total > 0.05  # the offset matters
        last = info["history"][-1]
        assert last["model"] == 4
        assert all(last[key] is not None for key in ("with_offset", "without_offset", "local", "candidate", "test"))
        assert info["scores"]["alone_steps"] == info["scores"]["alone_steps_due"]  # owed steps were caught up
        assert {final_model(state) for state in states.values()} == {simulated_model(plan, states)}
        assert [agent.stop() for agent in agents.values()] == [0, 0, 0]
    finally:
        for agent in agents.values():
            agent.kill()
    check_offline_use(states["north"], tmp_path)


@cache
def predictor_with_offset_of(own: Path, other: Path) -> tuple[Predictor, ImagePlan]:
    state = StateFolder(own)
    bundle, foreign = (one.models.load_number(one.models.numbers()[-1]) for one in (state, StateFolder(other)))
    plan = state.identity().plan
    return client_half(plan).predictor(bundle.task("x"), foreign.private, Runtime()), plan.image


def predict_with_offset_of(state: StateFolder, other: StateFolder, file: Path) -> str:
    """Return the label that this site's model predicts with another site's offset."""
    predictor, image = predictor_with_offset_of(state.path, other.path)
    return CLASSES[int(predictor(to_tensor(decode(file, PREDICT_FORMATS), image)[None]).argmax())]


def check_offline_use(state: StateFolder, tmp_path: Path) -> None:
    """Check that without a coordinator the agent serves its last model and follows pin and unpin."""
    agent = AgentProcess(state, "--no-train")
    try:
        agent.wait_for_line("Application startup complete")
        with App(agent, tmp_path / "unseen") as app:
            app.wait_until_served(4)
            state.models.pin(2)
            app.wait_until_served(2)
            state.models.pin(None)
            app.wait_until_served(4)
    finally:
        agent.stop()
    identity = state.identity()
    bundle, model = load_served(state, identity, Runtime(), SITE_PRIOR)
    assert bundle.number == 4
    export_program(identity, bundle, model, tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    images = torch.rand(5, 1, 16, 16)
    assert torch.allclose(program(images).softmax(dim=1), model.predict((images - 0.5) / 0.5), atol=1e-5)
    assert torch.equal(program(images), build_standalone(identity, model)(images))


@pytest.mark.parametrize("where", ["before-request", "half-request", "before-response"])
def test_killed_at_the_upload_it_resumes_and_nothing_counts_twice(
    coordinator: CoordinatorProcess, tmp_path: Path, where: Cut
) -> None:
    """kill -9 before, during and after the upload of round 2: the result is the same to the bit."""
    plan = digits_plan(f"cut-{where}", rounds=3, clients=1, update_compression="int8")
    coordinator.create(plan)
    proxy = CuttingProxy(int(coordinator.url.rsplit(":", 1)[1]))
    data = write_digits(tmp_path / "data", ("0", "1"), every=4)
    state = enroll(coordinator, plan, "north", data, tmp_path, proxy.url)
    second_round = coordinator.admin("GET", f"/v1/federations/{plan.name}/rounds")[0]["id"] + 1
    proxy.arm(f"PUT /v1/rounds/{second_round}/update".encode(), where)
    agent = AgentProcess(state, "--no-serve", "--max-accuracy-drop", "1")
    try:
        assert proxy.cut.wait(120), agent.lines
        kept_before = state.kept()
        agent.kill()
        assert_same_tensors(state.kept(), kept_before)
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
    state = enroll(coordinator, plan, "north", write_digits(tmp_path / "data", ("0", "1")), tmp_path, coordinator.url)
    agent = AgentProcess(state, "--no-serve")
    agent.wait_for_line("received model 0")
    agent.kill()
    second = AgentProcess(state, "--no-serve")
    assert second.wait() == 0, second.lines
    assert final_model(state) == simulated_model(plan, {"north": state})

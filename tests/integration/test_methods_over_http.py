"""Every method over the coordinator's API, with restarts on both sides between rounds, compared with the simulation."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from support.api import Api, open_api
from support.coordinator import Site
from support.simulating import run_all
from support.tensors import assert_same_tensors
from support.tiny import METHOD_CASES, NORMED, digits, method_plan, sites

from client_agent.serving.model import View, build
from client_agent.state.folder import PendingUpload, StateFolder
from client_agent.state.kept_models import Bundle
from lab.simulation.simulation import SimulatedClient, Simulation
from shared.contract.messages import TaskAnswer
from shared.contract.plan import FederationPlan
from shared.learning.methods import METHODS, client_half
from shared.learning.methods.base import RoundTask, TrainingContext
from shared.learning.runtime import Runtime
from shared.tensors.names import Tensors
from shared.tensors.wire import digest

ROUNDS = 2


def task_for(site: Site, action: str, number: int) -> TaskAnswer:
    """Wait for the task with this action and model `number`."""
    return site.wait_for_task(
        lambda task: task.action == action and task.model is not None and task.model.number == number
    )


def download(site: Site, task: TaskAnswer, folder: Path) -> Bundle:
    """Return the model with the site's tensors from the coordinator and from disk."""
    assert task.model is not None
    assert task.personal_url is not None
    shared, personal = site.tensors(task.model.url), site.tensors(task.personal_url)
    return Bundle(task.model.number, task.model.digest, shared, personal, StateFolder(folder).private(), task.facts)


def run_round(api: Api, number: int, joined: list[tuple[Site, SimulatedClient]], folder: Path) -> None:
    """Let each site start, train, upload and end."""
    for place, client in joined:
        site = place.on(api.http)
        state = StateFolder(folder / place.name)
        task = task_for(site, "train", number - 1)
        assert task.round is not None
        bundle = download(site, task, state.path)
        round_task = RoundTask(site.name, number, bundle.shared, bundle.personal, task.facts)
        update, private = client_half(site.plan).train(round_task, bundle.private, TrainingContext(client.train))
        body = update.encode()
        state.stage_upload(
            PendingUpload(round_id=task.round.id, round_number=number, digest=digest(body)), body, private
        )
        answer = site.put(task.round.id, body)
        assert answer.status_code == 200, answer.text
        state.commit_upload()


def named(plan: FederationPlan, counts: tuple[int, ...]) -> dict[str, int]:
    return dict(zip(plan.classes, counts, strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_two_rounds_with_restarts_equal_the_simulation_to_the_bit(name: str, sqlite_url: str, tmp_path: Path) -> None:
    backbone = "lenet" if name == "pfedhn" else NORMED  # with lenet pfedhn's clients share no tensor at all
    plan = method_plan(METHOD_CASES[name], backbone)
    plan = plan.model_copy(update={"name": name, "rounds": plan.rounds.model_copy(update={"min_clients": 2})})
    joined: list[tuple[Site, SimulatedClient]] = []
    for number in range(1, ROUNDS + 1):
        with open_api(sqlite_url) as api:  # a new coordinator for each round
            if not joined:
                api.create(plan)
                for client in sites(2):
                    joined.append((api.join(plan, client.record.id, named(plan, client.record.class_counts)), client))
                    (tmp_path / client.record.id).mkdir()
            run_round(api, number, joined, tmp_path)
            if number == ROUNDS:
                task = task_for(joined[0][0].on(api.http), "finished", ROUNDS)
                bundles = [download(place.on(api.http), task, tmp_path / place.name) for place, _ in joined]

    simulation = Simulation(plan, sites(2))
    run_all(simulation)
    images = digits(5).images
    for bundle, client in zip(bundles, simulation.clients, strict=True):
        assert_same_tensors(bundle.shared, simulation.state.shared)
        assert_same_tensors(bundle.private, _as_stored(client.private))
        expected = simulation.client.predictor(simulation.task(client), client.private, Runtime())(images)
        served = build(plan, client.record.id, bundle, Runtime())
        assert torch.equal(served.predict(images), expected.softmax(dim=1))
        assert bool(served.predict(images, View(use_offset=False)).isfinite().all())


def _as_stored(tensors: Tensors) -> Tensors:
    return dict(safetensors.torch.load(safetensors.torch.save(tensors)))

"""Every method over the coordinator's API, with restarts on both sides between two rounds, as in the simulation."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from support.api import Api, new_database, open_api
from support.coordinator import Site
from support.tiny import METHOD_CASES, NORMED, Tensors, assert_equal, digits, method_plan, sites

from client_agent import serving
from client_agent.kept_models import Bundle
from client_agent.state import PendingUpload, StateFolder
from lab.simulation import SimulatedClient, Simulation
from shared.methods import METHODS, client_half
from shared.methods.base import RoundTask, Workplace
from shared.plan import FederationPlan
from shared.runtime import Runtime
from shared.schemas import TaskAnswer
from shared.wire import digest

ROUNDS = 2


@pytest.fixture(scope="module")
def sqlite_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return new_database("sqlite", request, tmp_path_factory.mktemp("methods"))


def task_for(site: Site, action: str, number: int) -> TaskAnswer:
    """What the site is told once it is to do this with model `number`."""
    after = ""
    while True:
        task = site.task(after=after)
        if task.action == action and task.model is not None and task.model.number == number:
            return task
        after = task.ticket


def download(site: Site, task: TaskAnswer, folder: Path) -> Bundle:
    """The model with the site's own tensors, and what the site has kept on disk."""
    assert task.model is not None
    assert task.personal_url is not None
    shared, personal = site.tensors(task.model.url), site.tensors(task.personal_url)
    return Bundle(task.model.number, task.model.digest, shared, personal, StateFolder(folder).private(), task.facts)


def run_round(api: Api, number: int, joined: list[tuple[Site, SimulatedClient]], folder: Path) -> None:
    """Each site as a program that starts, trains, uploads and ends."""
    for place, client in joined:
        site = place.on(api.http)
        state = StateFolder(folder / place.name)
        task = task_for(site, "train", number - 1)
        assert task.round is not None
        bundle = download(site, task, state.path)
        round_task = RoundTask(site.name, number, bundle.shared, bundle.personal, task.facts)
        update, private = client_half(site.plan).train(round_task, bundle.private, Workplace(client.train))
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
def test_two_rounds_with_restarts_end_in_the_simulation_s_bits(name: str, sqlite_url: str, tmp_path: Path) -> None:
    backbone = "lenet" if name == "pfedhn" else NORMED  # with lenet pfedhn's clients share no tensor at all
    plan = method_plan(METHOD_CASES[name], backbone)
    plan = plan.model_copy(update={"name": name, "rounds": plan.rounds.model_copy(update={"min_clients": 2})})
    joined: list[tuple[Site, SimulatedClient]] = []
    for number in range(1, ROUNDS + 1):
        with open_api(sqlite_url) as api:  # a coordinator of its own for each round
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
    for _ in simulation.run():
        pass
    images = digits(5).images
    for bundle, client in zip(bundles, simulation.clients, strict=True):
        assert_equal(bundle.shared, simulation.state.shared)
        assert_equal(bundle.private, _as_stored(client.private))
        expected = simulation.client.predictor(simulation.task(client), client.private, Runtime())(images)
        served = serving.build(plan, client.record.id, bundle, Runtime())
        assert torch.equal(served.own(images), expected)
        assert bool(served.none(images).isfinite().all())


def _as_stored(tensors: Tensors) -> Tensors:
    return dict(safetensors.torch.load(safetensors.torch.save(tensors)))

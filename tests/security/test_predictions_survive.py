"""`/predict` outlives bad peers, a lost coordinator, lost rights, full disks and restarts: agents as real processes."""

import json
import resource
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.agents import AgentProcess, digits_plan, enrol, write_digits
from support.coordinator import CoordinatorProcess, running
from support.sites import App, Peer
from torch import Tensor

from client_agent import __main__ as command_line
from client_agent.data import open_data
from client_agent.history import HistoryLine
from client_agent.kept_models import Bundle
from client_agent.settings import Identity
from client_agent.state import StateFolder
from shared.evaluation import Evaluation
from shared.http.connection import Connection
from shared.methods import server_half
from shared.methods.base import ClientRecord
from shared.plan import FederationPlan

Command = Callable[..., str]


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorProcess]:
    folder = tmp_path_factory.mktemp("coordinator")
    with running(f"sqlite:///{folder / 'coordinator.db'}", folder, forked=True) as process:
        yield process


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("data"), ("0", "1"), every=6)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """A command of `distrans-agent` that must succeed; what it prints."""

    def run(state: StateFolder, *arguments: object) -> str:
        monkeypatch.setattr("sys.argv", ["distrans-agent", *map(str, arguments), "--state", str(state.path)])
        with pytest.raises(SystemExit) as ending:
            command_line.main()
        assert ending.value.code in (0, None)
        return capsys.readouterr().out

    return run


def join_peer(coordinator: CoordinatorProcess, plan: FederationPlan, data: Path) -> Peer:
    counts = open_data(str(data), plan).report.class_counts
    return Peer(coordinator.join(plan, "peer", counts), plan, data)


def absurd(name: str, value: Tensor) -> Tensor:
    """Finite weights: the mean of them and honest ones has logits of ±2.5e38, whose cross-entropy is infinite."""
    if name == "backbone.6.bias":
        return torch.full_like(value, 3e30)
    if name == "logits.weight":
        rows = torch.full_like(value, -2 * 2.5e38 / (value.shape[1] * 1.5e30))
        rows[0] *= -1
        return rows
    return value


def test_absurd_weights_of_one_site_do_not_end_another_agent(
    coordinator: CoordinatorProcess, data: Path, tmp_path: Path, command: Command
) -> None:
    plan = digits_plan("absurd", rounds=2, clients=2)
    coordinator.create(plan)
    state = enrol(coordinator, plan, "north", data, tmp_path, coordinator.url)
    peer = join_peer(coordinator, plan, data)
    agent = AgentProcess(state)
    try:
        with App(agent, data) as app:
            peer.send(1, absurd)
            agent.wait_for_line("model 1 is not served: The model's loss is not finite")
            agent.wait_for_line("Round 2 could not be trained here")
            assert app.served_round() == 0
            assert "loss is not finite" in app.info()["history"][-1]["reason"]
        assert "loss is not finite" in json.loads(command(state, "status", "--json"))["history"][-1]["reason"]
        agent.kill()
        agent = AgentProcess(state)
        with App(agent, data) as app:
            agent.wait_for_line("Round 2 could not be trained here")  # the loop is past the absurd model
            assert app.served_round() == 0
            assert agent.stop() == 0
    finally:
        agent.kill()


ENDINGS = {
    "revoked": ("clients/north/revoke", "pause"),
    "invalid-token": ("clients/north/rotate", "pause"),
    "cancelled": ("cancel",),
}


@pytest.mark.parametrize("reason", ENDINGS)
def test_an_agent_whose_part_is_over_goes_on_serving(
    coordinator: CoordinatorProcess, data: Path, tmp_path: Path, command: Command, reason: str
) -> None:
    """Also after a restart and with --no-train; without a web service it ends with a code that prevents a restart."""
    plan = digits_plan(f"over-{reason}", clients=2)
    coordinator.create(plan)
    state = enrol(coordinator, plan, "north", data, tmp_path, coordinator.url)
    agent = AgentProcess(state)
    try:
        agent.wait_for_line("received model 0")
        for call in ENDINGS[reason]:  # to pause is news: the long poll ends
            coordinator.admin("POST", f"/v1/federations/{plan.name}/{call}")
        for options in ((), ("--no-train",)):
            with App(agent, data) as app:
                said = agent.wait_for_line(f"ended: {reason}: .*")
                assert app.served_round() == 0
                about = app.info()["agent"]
                assert (about["ended"], about["phase"]) == (reason, "ended")
                assert about["outcome"] in said
                assert f"ended: {reason}. {about['outcome']}" in " ".join(command(state, "status").split())
                assert agent.stop() == 0
            agent = AgentProcess(state, *options)
        agent.kill()
        agent = AgentProcess(state, "--no-serve")
        assert agent.wait() == 3
    finally:
        agent.kill()


def test_a_full_disk_is_waited_out(coordinator: CoordinatorProcess, data: Path, tmp_path: Path) -> None:
    plan = digits_plan("full-disk", rounds=1, clients=2)
    coordinator.create(plan)
    state = enrol(coordinator, plan, "north", data, tmp_path, coordinator.url)
    peer = join_peer(coordinator, plan, data)
    agent = AgentProcess(state)
    try:
        with App(agent, data) as app:
            agent.wait_for_line("round 1: trained on")
            _, most = resource.prlimit(agent.process.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(agent.process.pid, resource.RLIMIT_FSIZE, (0, most))  # no file can grow
            peer.take_part(1)
            agent.wait_for_line("storage: The state folder .* cannot be used: .*File too large")
            assert app.served_round() == 0
            assert app.info()["agent"]["troubles"][0]["kind"] == "storage"
            resource.prlimit(agent.process.pid, resource.RLIMIT_FSIZE, (most, most))
            agent.wait_for_line("storage: recovered from")
            assert app.served_round() == 1
            assert app.info()["agent"]["trouble"] == ""
            assert agent.stop() == 0
    finally:
        agent.kill()


# Restarts without a coordinator


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@pytest.fixture
def site(data: Path, tmp_path: Path) -> StateFolder:
    """A site whose coordinator is away, with the models that `keep` adds."""
    plan = digits_plan("away", clients=1)
    state = StateFolder(tmp_path / "north")
    connection = Connection(server=f"http://127.0.0.1:{closed_port()}")
    state.create(
        Identity(
            client_id="1", name="north", token="t", federation="away", plan=plan, connection=connection, data=str(data)
        )
    )
    return state


def keep(state: StateFolder, number: int, correct: int | None, *, served: bool = True, limit: int = 9) -> None:
    """A model arrives; without a number of correct answers the agent crashes before it has decided."""
    plan, me = state.identity().plan, ClientRecord("north", (1,) * 6)
    half = server_half(plan)
    start, facts = half.initial_state(), half.facts([me])
    bundle = Bundle(number, f"{number:064x}", start.shared, half.personal(start, me, [me], facts), {}, facts)
    state.save_bundle(bundle, keep=limit)
    if correct is not None:
        score = Evaluation(samples=100, correct=correct, loss_sum=1.0)
        state.add_history(
            HistoryLine(
                model=number,
                digest=bundle.digest,
                fingerprint=bundle.fingerprint,
                with_offset=score,
                without_offset=None,
                served=served,
                reason="" if served else "worse",
            )
        )


def crash_before_the_decision(state: StateFolder) -> None:
    keep(state, 1, 90)
    keep(state, 2, None)


def many_rejections(state: StateFolder) -> None:
    keep(state, 1, 90, limit=2)
    for number in range(2, 8):
        keep(state, number, 20, served=False, limit=2)


def restored_coordinator(state: StateFolder) -> None:
    """Another model 1 than the approved one has arrived since, and was rejected."""
    keep(state, 1, 90)
    other = replace(state.load_bundle(1), digest="f" * 64)
    state.save_bundle(other, keep=9)
    score = Evaluation(samples=100, correct=20, loss_sum=1.0)
    line = state.history()[-1].model_copy(update={"with_offset": score, "served": False, "reason": "worse"})
    state.add_history(line.model_copy(update={"digest": other.digest, "fingerprint": other.fingerprint}))


def torn_line(state: StateFolder) -> None:
    """The line about the rejection of model 2 follows one that a crash cut off."""
    keep(state, 1, 90)
    with (state.path / "history.jsonl").open("ab") as handle:
        handle.write(b'{"model": 7, "with_off')
    keep(state, 2, 20, served=False)


@pytest.mark.parametrize(
    "before",
    [crash_before_the_decision, many_rejections, restored_coordinator, torn_line],
    ids=lambda one: one.__name__,
)
def test_a_restart_serves_the_model_that_was_approved(
    site: StateFolder, data: Path, tmp_path: Path, command: Command, before: Callable[[StateFolder], None]
) -> None:
    """And `predict` and `export` choose the same one."""
    before(site)
    agent = AgentProcess(site)
    try:
        agent.wait_for_line("trying again in")
        with App(agent, data) as app:
            assert app.served_round() == 1
            assert app.info()["serving"]["digest"] == f"{1:064x}"
            assert app.info()["coordinator"]["reachable"] is False
            assert "Connection refused" in app.info()["coordinator"]["problem"]
            assert [trouble["kind"] for trouble in app.info()["agent"]["troubles"]] == ["coordinator"]
        (trouble,) = json.loads(command(site, "status", "--json"))["troubles"]
        assert "The coordinator does not answer: " in trouble["message"]
        assert agent.stop() == 0
    finally:
        agent.kill()
    image = next(data.rglob("*.png"))
    assert json.loads(command(site, "predict", image, "--json"))["model"] == 1
    assert "Wrote model 1" in command(site, "export", tmp_path / "model.safetensors")


def damaged_description(state: StateFolder) -> None:
    keep(state, 1, 90)
    keep(state, 2, 95)
    (state.kept_models()[-1].folder / "about.json").write_text("null")


def unreadable_pin(state: StateFolder) -> None:
    keep(state, 1, 90)
    (state.path / "pin").mkdir()


@pytest.mark.parametrize("before", [damaged_description, unreadable_pin], ids=lambda one: one.__name__)
def test_a_damaged_state_folder_is_served_from(
    site: StateFolder, data: Path, command: Command, before: Callable[[StateFolder], None]
) -> None:
    before(site)
    agent = AgentProcess(site)
    try:
        with App(agent, data) as app:
            assert app.served_round() == 1
            if before is unreadable_pin:
                agent.wait_for_line("pin: .* cannot be read: Is a directory")
                assert "pin" in [trouble["kind"] for trouble in app.info()["agent"]["troubles"]]
        assert json.loads(command(site, "status", "--json"))["serving"] == 1
        assert agent.stop() == 0
    finally:
        agent.kill()


def test_status_names_the_model_that_answers(site: StateFolder, command: Command) -> None:
    keep(site, 1, 90)
    keep(site, 2, 95)
    (site.kept_models()[-1].folder / "model.safetensors").write_bytes(b"damaged")
    assert json.loads(command(site, "status", "--json"))["serving"] == 1


def test_without_its_images_an_agent_serves(site: StateFolder, data: Path, tmp_path: Path) -> None:
    keep(site, 1, 90)
    identity = site.identity()
    site.create(identity.model_copy(update={"data": str(tmp_path / "unmounted")}))
    agent = AgentProcess(site)
    try:
        agent.wait_for_line("data: There are no data at")
        with App(agent, data) as app:
            assert app.served_round() == 1
            assert app.info()["agent"]["troubles"][0]["kind"] == "data"
        assert agent.stop() == 0
    finally:
        agent.kill()

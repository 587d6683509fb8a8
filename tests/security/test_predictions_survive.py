"""`/predict` survives bad peers, a lost coordinator, revoked access, full disks and restarts of agent processes."""

import json
import resource
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.agent_sites import App, Peer
from support.agents import AgentProcess, digits_plan, enroll, write_digits
from support.coordinator import CoordinatorProcess, running
from support.halves import server_half
from torch import Tensor

from client_agent import __main__ as command_line
from client_agent.data.dataset import open_data
from client_agent.settings import Identity
from client_agent.state.decisions import GateDecision
from client_agent.state.folder import StateFolder
from client_agent.state.kept_models import Bundle
from shared.contract.measurements import Evaluation
from shared.contract.plan import FederationPlan
from shared.http.client_connection import Connection
from shared.learning.methods.base import ClientRecord, RoundContext

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
    """Run a command of `distrans-agent` that must succeed; return its output."""

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
    """Return finite weights whose mean with honest ones has logits of ±2.5e38 and an infinite cross-entropy."""
    if name == "backbone.6.bias":
        return torch.full_like(value, 3e30)
    if name == "logits.weight":
        rows = torch.full_like(value, -2 * 2.5e38 / (value.shape[1] * 1.5e30))
        rows[0] *= -1
        return rows
    return value


def test_absurd_weights_from_one_site_do_not_stop_another_agent(
    coordinator: CoordinatorProcess, data: Path, tmp_path: Path, command: Command
) -> None:
    plan = digits_plan("absurd", rounds=2, clients=2)
    coordinator.create(plan)
    state = enroll(coordinator, plan, "north", data, tmp_path, coordinator.url)
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
            agent.wait_for_line("Round 2 could not be trained here")  # the loop got past the absurd model
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
def test_an_agent_whose_part_is_over_keeps_serving(
    coordinator: CoordinatorProcess, data: Path, tmp_path: Path, command: Command, reason: str
) -> None:
    """Also after a restart and with --no-train; without a web service its exit code prevents a restart."""
    plan = digits_plan(f"over-{reason}", clients=2)
    coordinator.create(plan)
    state = enroll(coordinator, plan, "north", data, tmp_path, coordinator.url)
    agent = AgentProcess(state)
    try:
        agent.wait_for_line("received model 0")
        for call in ENDINGS[reason]:  # a pause is news, which ends the long poll
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
    state = enroll(coordinator, plan, "north", data, tmp_path, coordinator.url)
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
    """A site whose coordinator is down, with the models that `keep` adds."""
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
    """Store a model and a decision; without `correct`, as if the agent had crashed before deciding."""
    plan, me = state.identity().plan, ClientRecord("north", (1,) * 6)
    half = server_half(plan)
    start, facts = half.initial_state(), half.facts([me])
    bundle = Bundle(
        number, f"{number:064x}", start.shared, half.personal(start, me, RoundContext([me], facts)), {}, facts
    )
    state.models.save(bundle, keep=limit)
    if correct is not None:
        score = Evaluation(samples=100, correct=correct, loss_sum=1.0)
        state.models.add_decision(
            GateDecision(
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
    """Another model 1 arrived after the approved one, and was rejected."""
    keep(state, 1, 90)
    other = replace(state.models.load_number(1), digest="f" * 64)
    state.models.save(other, keep=9)
    score = Evaluation(samples=100, correct=20, loss_sum=1.0)
    line = state.models.history()[-1].model_copy(update={"with_offset": score, "served": False, "reason": "worse"})
    state.models.add_decision(line.model_copy(update={"digest": other.digest, "fingerprint": other.fingerprint}))


def torn_line(state: StateFolder) -> None:
    """The rejection of model 2 follows a line that a crash cut off."""
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
    """`predict` and `export` choose the same one."""
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
    (state.models.all()[-1].folder / "about.json").write_text("null")


def unreadable_pin(state: StateFolder) -> None:
    keep(state, 1, 90)
    (state.path / "pin").mkdir()


@pytest.mark.parametrize("before", [damaged_description, unreadable_pin], ids=lambda one: one.__name__)
def test_a_damaged_state_folder_still_serves(
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


def test_status_shows_the_model_that_answers_when_the_newest_is_damaged(site: StateFolder, command: Command) -> None:
    keep(site, 1, 90)
    keep(site, 2, 95)
    (site.models.all()[-1].folder / "model.safetensors").write_bytes(b"damaged")
    assert json.loads(command(site, "status", "--json"))["serving"] == 1


def test_an_agent_without_its_images_serves(site: StateFolder, data: Path, tmp_path: Path) -> None:
    keep(site, 1, 90)
    identity = site.identity()
    site.create(identity.model_copy(update={"data": str(tmp_path / "unmounted")}))
    agent = AgentProcess(site)
    try:
        agent.wait_for_line("data: There is no data at")
        with App(agent, data) as app:
            assert app.served_round() == 1
            assert app.info()["agent"]["troubles"][0]["kind"] == "data"
        assert agent.stop() == 0
    finally:
        agent.kill()

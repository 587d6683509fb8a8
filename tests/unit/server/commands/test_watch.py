"""`federation show --watch` in a pipe: one line per change, including the clients' trouble."""

from collections.abc import Iterator

import pytest

from server.commands.watch import watch
from shared.contract.messages import ClientView, FederationView, TroubleReport

FEDERATION = FederationView(
    name="pets", state="running", reason="", state_since=0, waiting_for=None, waiting_since=None, waiting_until=None,
    method="fedavg", rounds_done=0, rounds_total=2, round=None, latest_model=0, clients=1, dh=None,
    best_accuracy=None, best_model=None,
)  # fmt: skip
CLIENT = ClientView(
    id="c", name="north", state="active", federation="pets", class_counts={}, agent_version="", device="",
    joined_at=0, last_seen_at=0,
)  # fmt: skip
IN_TROUBLE = CLIENT.model_copy(update={"troubles": [TroubleReport(kind="data", message="The disk is full.")]})


class Scene:
    """A coordinator whose client reports trouble, recovers, and then sees the federation finish."""

    def __init__(self) -> None:
        self._clients: Iterator[ClientView] = iter([CLIENT, IN_TROUBLE, IN_TROUBLE, CLIENT, CLIENT])
        self._states: Iterator[str] = iter(["running", "running", "running", "running", "finished"])

    def federation(self, _name: str) -> FederationView:
        return FEDERATION.model_copy(update={"state": next(self._states)})

    def clients(self, _name: str) -> list[ClientView]:
        return [next(self._clients)]


def test_piped_output_reports_when_a_clients_trouble_starts_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    watch(Scene(), "pets", lambda _view: [], interval_s=0)  # type: ignore[arg-type]  # all that watch calls
    lines = [line.split(" ", 2)[2] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "pets: running, 0 of 2 rounds, 1 clients",
        "client north: The disk is full.",
        "client north: no more trouble",
        "pets: finished, 0 of 2 rounds, 1 clients",
    ]

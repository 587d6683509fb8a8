"""The tables of `federation show`."""

import pytest

from server.commands.federation import _sections
from shared.contract.messages import ClientView, FederationView, RoundView

FEDERATION = FederationView(
    name="pets", state="running", reason="", state_since=0, waiting_for=None, waiting_since=None, waiting_until=None,
    method="fedavg", rounds_done=0, rounds_total=99, round=None, latest_model=0, clients=0, dh=None,
    best_accuracy=None, best_model=None,
)  # fmt: skip


class Rounds:
    """A coordinator that has as many rounds as it is asked for, and no clients."""

    def now(self) -> float:
        return 0.0

    def clients(self, _name: str) -> list[ClientView]:
        return []

    def rounds(self, _name: str, _after: int, _limit: int) -> list[RoundView]:
        return []


@pytest.mark.parametrize(("rounds", "title"), [(10, None), (11, "The last 10 rounds; ")])
def test_a_shortened_list_of_rounds_says_so(rounds: int, title: str | None) -> None:
    view = FEDERATION.model_copy(update={"latest_model": rounds})
    _, table = _sections(Rounds(), view)  # type: ignore[arg-type]  # all that _sections calls
    assert table.title is None if title is None else str(table.title).startswith(title)

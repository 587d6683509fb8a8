"""Aggregators that can be interrupted between the stages of their work."""

from collections.abc import Callable

from typing_extensions import override

from server.core.folding import RoundFold
from server.service.aggregation import Aggregator
from server.service.context import Context
from shared.learning.methods.base import ClientRecord, ServerState

STAGES = ("before-fold", "after-fold", "before-store", "before-publish", "after-publish")


class Killed(BaseException):
    """kill -9: no more code of the program runs, not even `except Exception`."""


Hook = Callable[[str], None]


class InterruptibleAggregator(Aggregator):
    """Calls a hook between the stages of aggregation; the hook may raise, as if the process had died there."""

    def __init__(self, ctx: Context, hook: Hook) -> None:
        super().__init__(ctx)
        self._hook = hook

    @override
    def _fold(self, fold: RoundFold, client: ClientRecord, blob_id: str) -> None:
        self._hook("before-fold")
        super()._fold(fold, client, blob_id)
        self._hook("after-fold")

    @override
    def _store_model(self, state: ServerState, metadata: dict[str, str]) -> str:
        self._hook("before-store")
        return super()._store_model(state, metadata)

    @override
    def _publish(self, round_id: int, model_id: str, private_id: str | None) -> None:
        self._hook("before-publish")
        super()._publish(round_id, model_id, private_id)
        self._hook("after-publish")


def at(stage: str, act: Callable[[], object], times: int = 1) -> Hook:
    """Return a hook that acts once, when the stage is reached for the n-th time."""
    seen = 0

    def hook(reached: str) -> None:
        nonlocal seen
        seen += reached == stage
        if reached == stage and seen == times:
            act()

    return hook


def die() -> None:
    """Die like a killed process."""
    raise Killed

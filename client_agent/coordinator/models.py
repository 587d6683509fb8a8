"""Downloads a model with this site's tensors for it and checks them against the plan."""

import re
from functools import cached_property

import safetensors.torch

from client_agent.coordinator.client import Coordinator
from client_agent.coordinator.downloads import ExpectedDownload
from client_agent.errors import UnusableModel
from client_agent.state.folder import StateFolder
from client_agent.state.kept_models import Bundle
from shared.contract.messages import ModelPointer
from shared.contract.plan import FederationPlan
from shared.learning.methods import server_half
from shared.tensors.spec import Spec
from shared.tensors.wire import read_metadata

_MAX_NUMBER = 2**31
_DIGEST = re.compile("[0-9a-f]{64}")


class ModelFetcher:
    """Downloads of models into the state folder, where they can be resumed after a restart."""

    def __init__(self, state: StateFolder, plan: FederationPlan) -> None:
        self._state, self._plan = state, plan

    @cached_property
    def _model_spec(self) -> Spec:
        return server_half(self._plan).model_spec().of_model()

    def fetch(
        self,
        coordinator: Coordinator,
        pointer: ModelPointer,
        personal_url: str,
        facts: dict[str, str],
        newest: Bundle | None,
    ) -> Bundle:
        """Return a model with its personal tensors and the current private ones; reuse the weights of `newest`."""
        if not 0 <= pointer.number < _MAX_NUMBER:
            raise UnusableModel(f"{pointer.number} is not a valid model number.")
        if not _DIGEST.fullmatch(pointer.digest):
            raise UnusableModel(f"{pointer.digest[:100]!r} is not a valid digest.")
        if newest is not None and newest.digest == pointer.digest:
            shared, made_in = newest.shared, newest.made_in
        else:
            expected = ExpectedDownload([self._model_spec], pointer.size_bytes, pointer.digest)
            body = coordinator.download(pointer.url, self._state.path / "model.part", expected)
            shared, made_in = safetensors.torch.load(body), _made_in(body)
        expected = ExpectedDownload(server_half(self._plan).personal_specs(facts))
        body = coordinator.download(personal_url, self._state.path / "personal.part", expected)
        personal, private = safetensors.torch.load(body), self._state.private()
        return Bundle(pointer.number, pointer.digest, shared, personal, private, facts, made_in)


def _made_in(body: bytes) -> int | None:
    """Return the number of the round that made a model: its own, unless the federation was rolled back to it."""
    number = read_metadata(body).get("model", "")
    return int(number) if re.fullmatch("[0-9]{1,10}", number) else None

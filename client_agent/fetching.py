"""A model and this site's tensors for it, fetched and checked against the plan."""

import re
from functools import cached_property

import safetensors.torch

from client_agent.coordinator import Coordinator
from client_agent.downloads import Expected
from client_agent.errors import UnusableModel
from client_agent.kept_models import Bundle
from client_agent.state import StateFolder
from shared.methods import server_half
from shared.plan import FederationPlan
from shared.schemas import ModelPointer
from shared.wire import Spec

_MAX_NUMBER = 2**31
_DIGEST = re.compile("[0-9a-f]{64}")


class ModelFetcher:
    """Downloads into the state folder, where an interrupted transfer is resumed after a restart."""

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
        """The model with its personal and the current private tensors; weights that `newest` has are not fetched."""
        if not 0 <= pointer.number < _MAX_NUMBER:
            raise UnusableModel(f"{pointer.number} is not the number of a model.")
        if not _DIGEST.fullmatch(pointer.digest):
            raise UnusableModel(f"{pointer.digest[:100]!r} is not the digest of a model.")
        if newest is not None and newest.digest == pointer.digest:
            shared = newest.shared
        else:
            expected = Expected([self._model_spec], pointer.size_bytes, pointer.digest)
            body = coordinator.download(pointer.url, self._state.path / "model.part", expected)
            shared = safetensors.torch.load(body)
        expected = Expected(server_half(self._plan).personal_specs(facts))
        body = coordinator.download(personal_url, self._state.path / "personal.part", expected)
        return Bundle(
            pointer.number, pointer.digest, shared, safetensors.torch.load(body), self._state.private(), facts
        )

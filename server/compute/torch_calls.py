"""What services ask of a method if that needs torch. A process that has loaded torch, as the lab's, does it itself."""

import sys
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from server.compute import calls
from server.compute.calls import Held, Reply, Request
from server.compute.process import TorchProcess
from shared.learning.methods.base import ClientRecord, Facts, PersonalUploads, RoundContext, ServerState
from shared.tensors.arrays import Array
from shared.tensors.spec import Spec


class TorchCalls:
    """Calls of a plan's server half, as in `ServerHalf`. They may take seconds, so they do not belong in transactions.

    Raise TorchFailed, TorchMissing, or what the method raises.
    """

    def __init__(self, process: TorchProcess) -> None:
        self._process = process
        self._lock = threading.Lock()  # one call at a time here, too
        self._held: tuple[str, Mapping[str, Array]] = "", {}

    def initial_state(self, plan_json: str, weights: Path | None) -> ServerState:
        """Return θ⁰ and the rest of the initial state, from a file of weights if there is one."""
        file = None if weights is None else str(weights.absolute())
        shared, private = self._run(Request("initial_state", {"plan": plan_json, "weights": file})).sets
        return ServerState(shared, private)

    def update_spec(self, plan_json: str, facts: Facts) -> Spec:
        """Return the spec of an update."""
        return calls.read_spec(self._run(Request("update_spec", {"plan": plan_json, "facts": facts})).result)

    def model_spec(self, plan_json: str) -> Spec:
        """Return the spec of the published model."""
        return calls.read_spec(self._run(Request("model_spec", {"plan": plan_json})).result)

    def private_spec(self, plan_json: str, found: Spec) -> Spec:
        """Return the spec that stored private state must match."""
        arguments = {"plan": plan_json, "found": calls.dump_spec(found)}
        return calls.read_spec(self._run(Request("private_spec", arguments)).result)

    def personal(
        self, plan_json: str, private: Held, client: ClientRecord, round_: RoundContext
    ) -> Mapping[str, Array]:
        """Return the personal tensors to send to a client."""
        arguments = {"plan": plan_json, "client": calls.dump_client(client), "round": calls.dump_round(round_)}
        (tensors,) = self._run(Request("personal", arguments, private)).sets
        return tensors

    def next_private(
        self, plan_json: str, private: Held, uploads: PersonalUploads, round_: RoundContext
    ) -> Mapping[str, Array]:
        """Return the private state after a round; iterate over the uploads again if the process dies."""
        arguments = {"plan": plan_json, "round": calls.dump_round(round_)}
        (tensors,) = self._run(Request("next_private", arguments, private, uploads)).sets
        return tensors

    def _run(self, request: Request) -> Reply:
        if "torch" not in sys.modules:
            return self._process.run(request)
        with self._lock:
            if request.held is not None and request.held.key != self._held[0]:
                self._held = "", {}  # before the next ones arrive: they may be large
                self._held = request.held.key, request.held.load()
            uploads = ((client, dict(tensors)) for client, tensors in request.uploads)
            return calls.run(request.call, request.arguments, self._held[1] if request.held else {}, uploads)


@cache
def torch_calls() -> TorchCalls:
    """Return this process's calls; all of them share one torch process."""
    return TorchCalls(TorchProcess())

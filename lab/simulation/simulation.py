"""A federation in memory: both halves of the method in a loop, without HTTP or a database; its checkpoint on disk."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
from safetensors import SafetensorError

from server.core.folding import RoundFold
from server.core.sampling import choose_participants
from shared.contract.errors import DistransError
from shared.contract.measurements import TrainingReport
from shared.contract.plan import FederationPlan
from shared.learning.methods import client_half, server_half
from shared.learning.methods.base import (
    ClientRecord,
    LocalData,
    RoundContext,
    RoundTask,
    TrainingContext,
    Update,
)
from shared.learning.methods.tensor_half import TensorHalf, TensorState
from shared.learning.residuals import train_round
from shared.learning.runtime import Runtime
from shared.system.files import write_durably
from shared.tensors.arrays import as_arrays
from shared.tensors.names import SHARED, Tensors, add_prefix, strip_prefix

_PRIVATE = "private."
_UNUSABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError)


@dataclass
class SimulatedClient:
    """A site: its record, its data, and its private tensors, in memory or in a file."""

    record: ClientRecord
    train: LocalData
    test: LocalData
    _kept: Tensors | Path = field(default_factory=dict, repr=False)

    @property
    def private(self) -> Tensors:
        """The tensors it keeps between rounds; if they are in a file, each access reads it."""
        return safetensors.torch.load_file(self._kept) if isinstance(self._kept, Path) else self._kept

    @private.setter
    def private(self, tensors: Tensors) -> None:
        self._kept = tensors

    @property
    def file(self) -> Path | None:
        """The file with its private tensors; None while they are in memory."""
        return self._kept if isinstance(self._kept, Path) else None

    def leave_in(self, file: Path) -> None:
        """Drop the private tensors from memory; the file holds them and must stay until they are replaced."""
        self._kept = file

    @property
    def own_classes(self) -> set[int]:
        """The classes it has training images of."""
        return {label for label, count in enumerate(self.record.class_counts) if count}


@dataclass(frozen=True)
class RoundOutcome:
    """A finished round: its number, the facts in force, and the participants' reports by client id."""

    round: int
    facts: dict[str, str]
    reports: dict[str, TrainingReport]


class Simulation:
    """Runs a plan over clients, one round at a time. The same plan and data give the same bits."""

    def __init__(
        self,
        plan: FederationPlan,
        clients: Sequence[SimulatedClient],
        runtime: Runtime | None = None,
        pretrained: Tensors | None = None,
    ) -> None:
        self.plan = plan
        self.clients = sorted(clients, key=lambda client: client.record.id)
        self.runtime = runtime or Runtime()
        self.server, self.client = TensorHalf(server_half(plan)), client_half(plan)
        self.roster = [client.record for client in self.clients]
        self.state = self.server.initial_state(pretrained)
        self.round = 0

    def task(self, client: SimulatedClient) -> RoundTask:
        """Return what the client would download now."""
        context = self._context()
        personal = self.server.personal(self.state, client.record, context)
        return RoundTask(client.record.id, self.round + 1, self.state.shared, personal, context.facts)

    def participants(self) -> list[SimulatedClient]:
        """Return the clients that the coordinator would choose for the next round."""
        names = [record.id for record in self.roster]
        chosen = choose_participants(names, self.plan.rounds.sample_fraction, self.plan.seed, self.round + 1)
        return [client for client in self.clients if client.record.id in set(chosen)]

    def run_round(self) -> RoundOutcome:
        """Train at every participant and aggregate as the coordinator does."""
        context, fold = self._context(), RoundFold(self.server.half, as_arrays(self.state.shared))
        uploads: list[tuple[ClientRecord, Tensors]] = []
        reports: dict[str, TrainingReport] = {}
        for client in self.participants():
            update = self._train(client)
            fold.add(client.record, update.shared)
            uploads.append((client.record, update.personal))
            reports[client.record.id] = update.report
        self.state = self.server.finish(self.state, fold.mean(), uploads, context)
        self.round += 1
        return RoundOutcome(self.round, context.facts, reports)

    def _context(self) -> RoundContext:
        return RoundContext(self.roster, self.server.facts(self.roster))

    def _train(self, client: SimulatedClient) -> Update:
        context = TrainingContext(client.train, self.runtime)
        update, client.private = train_round(self.client, self.task(client), client.private, context)
        return update


class CheckpointBroken(DistransError):
    """A checkpoint that is unreadable or belongs to another simulation."""

    code = "checkpoint-broken"


class _Content(NamedTuple):
    round: int
    server: Path
    clients: dict[str, Path]
    notes: dict[str, Any]


class Checkpoint:
    """A simulation's state on disk, to resume from after an interruption, with private tensors out of memory.

    FOLDER/checkpoint.json           round, names of the files below, notes; written last, so it names complete files
    FOLDER/server-ROUND.safetensors  the coordinator's state
    FOLDER/CLIENT-ROUND.safetensors  a client's private tensors, written in the round in which they changed
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, simulation: Simulation, notes: dict[str, Any] | None = None) -> None:
        """Write what has changed. Clients then read their private tensors from the files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        state = simulation.state
        server = f"server-{simulation.round}.safetensors"
        self._write(server, add_prefix(state.shared, SHARED) | add_prefix(state.private, _PRIVATE))
        for client in simulation.clients:
            if client.file is None and client.private:
                file = f"{client.record.id}-{simulation.round}.safetensors"
                self._write(file, client.private)
                client.leave_in(self.folder / file)
        clients = {client.record.id: client.file.name for client in simulation.clients if client.file}
        content = {"round": simulation.round, "server": server, "clients": clients, "notes": notes or {}}
        write_durably(self.folder / "checkpoint.json", json.dumps(content).encode(), mode=0o644)
        for old in set(self.folder.glob("*.safetensors")) - {
            self.folder / file for file in (server, *clients.values())
        }:
            old.unlink()

    def exists(self) -> bool:
        """Return whether a checkpoint exists with all its files; does not read the tensors."""
        try:
            content = self._content()
        except _UNUSABLE:
            return False
        return all(file.is_file() for file in (content.server, *content.clients.values()))

    def restore(self, simulation: Simulation) -> dict[str, Any] | None:
        """Bring a new simulation to the saved state and return the saved notes; None without a checkpoint."""
        try:
            content = self._content()
            server = safetensors.torch.load_file(content.server)
            for file in content.clients.values():
                safetensors.torch.load_file(file)  # only to check it; its tensors are read again when needed
        except FileNotFoundError:
            return None
        except _UNUSABLE as error:
            raise CheckpointBroken(f"The checkpoint in {self.folder} is unusable: {error!r}.") from error
        files, shared = content.clients, strip_prefix(server, SHARED)
        if shared.keys() != simulation.state.shared.keys() or not files.keys() <= {r.id for r in simulation.roster}:
            raise CheckpointBroken(f"The checkpoint in {self.folder} belongs to another simulation.")
        simulation.state = TensorState(shared, strip_prefix(server, _PRIVATE))
        simulation.round = content.round
        for client in simulation.clients:
            if client.record.id in files:
                client.leave_in(files[client.record.id])
            else:
                client.private = {}
        return content.notes

    def _content(self) -> _Content:
        stored = json.loads((self.folder / "checkpoint.json").read_text())
        clients = {name: self.folder / file for name, file in stored["clients"].items()}
        return _Content(int(stored["round"]), self.folder / stored["server"], clients, dict(stored["notes"]))

    def _write(self, name: str, tensors: Tensors) -> None:
        # Clones, because safetensors rejects two names for one tensor.
        plain = {key: value.detach().cpu().clone().contiguous() for key, value in tensors.items()}
        write_durably(self.folder / name, safetensors.torch.save(plain), mode=0o644)

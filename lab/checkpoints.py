"""A simulation on the disk, to go on from after a stop, and to keep clients' private tensors out of memory.

FOLDER/checkpoint.json      round, names of the files below, notes; replaced last, so that it always names whole files
FOLDER/server-N.safetensors the coordinator's state after round N
FOLDER/site-N.safetensors   a client's private tensors, written in the round in which they changed
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
from safetensors import SafetensorError

from lab.simulation import Simulation
from shared.methods.base import SHARED, ServerState, Tensors
from shared.problems import DistransError

_PRIVATE = "private."
_UNUSABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError)


class CheckpointBroken(DistransError):
    """A checkpoint that cannot be read or is of another simulation."""

    code = "checkpoint-broken"


class _Content(NamedTuple):
    round: int
    server: Path
    clients: dict[str, Path]
    notes: dict[str, Any]


class Checkpoint:
    """One simulation's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, simulation: Simulation, notes: dict[str, Any] | None = None) -> None:
        """Write what has changed. Private tensors are then read from their files when they are wanted."""
        self.folder.mkdir(parents=True, exist_ok=True)
        state = simulation.state
        server = f"server-{simulation.round}.safetensors"
        self._write(server, _prefixed(SHARED, state.shared) | _prefixed(_PRIVATE, state.private))
        for client in simulation.clients:
            if client.file is None and client.private:
                file = f"{client.record.id}-{simulation.round}.safetensors"
                self._write(file, client.private)
                client.leave_in(self.folder / file)
        clients = {client.record.id: client.file.name for client in simulation.clients if client.file}
        content = {"round": simulation.round, "server": server, "clients": clients, "notes": notes or {}}
        replace_text(self.folder / "checkpoint.json", json.dumps(content))
        for old in set(self.folder.glob("*.safetensors")) - {
            self.folder / file for file in (server, *clients.values())
        }:
            old.unlink()

    def is_there(self) -> bool:
        """Whether there is a checkpoint with all its files; what they hold is not looked at."""
        try:
            content = self._content()
        except _UNUSABLE:
            return False
        return all(file.is_file() for file in (content.server, *content.clients.values()))

    def restore(self, simulation: Simulation) -> dict[str, Any] | None:
        """Bring a new simulation to where the saved one was; the notes saved with it, or None without a checkpoint."""
        try:
            content = self._content()
            server = safetensors.torch.load_file(content.server)
            for file in content.clients.values():
                safetensors.torch.load_file(file)  # whole and right; its tensors are read again when they are wanted
        except FileNotFoundError:
            return None
        except _UNUSABLE as error:
            raise CheckpointBroken(f"{self.folder} holds no usable checkpoint: {error!r}.") from error
        files, shared = content.clients, _without(SHARED, server)
        if shared.keys() != simulation.state.shared.keys() or not files.keys() <= {r.id for r in simulation.roster}:
            raise CheckpointBroken(f"The checkpoint in {self.folder} is of another simulation.")
        simulation.state = ServerState(shared, _without(_PRIVATE, server))
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
        # Clones, because the format does not take two names of one tensor.
        plain = {key: value.detach().cpu().clone().contiguous() for key, value in tensors.items()}
        unfinished = self.folder / f".{name}"
        safetensors.torch.save_file(plain, unfinished)
        unfinished.replace(self.folder / name)


def replace_text(file: Path, text: str) -> None:
    """Write a file so that a reader sees the old text or the new one, never a part."""
    unfinished = file.with_name(f".{file.name}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(file)


def _prefixed(prefix: str, tensors: Tensors) -> Tensors:
    return {prefix + name: value for name, value in tensors.items()}


def _without(prefix: str, tensors: Tensors) -> Tensors:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

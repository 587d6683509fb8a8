"""The models on the agent's disk, each with this site's tensors for it.

models/NUMBER-ORDER/   model, personal and private tensors; about.json with their digests; records.py has the rest
models/NUMBER/         the same, written by older agents: no order of arrival, no digests of the files
"""

import json
import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from client_agent.errors import StateError
from client_agent.model_key import ModelKey
from client_agent.state.records import CandidateFiles
from shared.learning.methods.base import RoundTask
from shared.system.files import sync_folder, write_durably
from shared.tensors.names import Tensors
from shared.tensors.wire import digest, encode

_FOLDER = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")
_PARTS = ("model", "personal", "private")


@dataclass(frozen=True)
class Bundle:
    """A global model with this site's tensors for it: what the gate measures and approves."""

    number: int
    digest: str
    shared: Tensors
    personal: Tensors
    private: Tensors
    facts: dict[str, str]
    made_in: int | None = None  # the round that made the model, if known; after a rollback, one before `number`

    @cached_property
    def fingerprint(self) -> str:
        """Digest that identifies this bundle; `digest` stands in for the weights."""
        own = [digest(encode(part)) for part in (self.personal, self.private)]
        return digest(json.dumps([self.number, self.digest, sorted(self.facts.items()), own]).encode())

    @property
    def key(self) -> ModelKey:
        """Identifies the bundle."""
        return ModelKey(self.number, self.digest, self.fingerprint)

    def task(self, name: str) -> RoundTask:
        """Return the bundle as input for a method's client half."""
        return RoundTask(name, self.number, self.shared, self.personal, self.facts)


@dataclass(frozen=True)
class KeptModel:
    """A model on disk."""

    key: ModelKey
    order: int  # of arrival
    folder: Path

    @property
    def candidates(self) -> CandidateFiles:
        """What the gate chose for it."""
        return CandidateFiles(self.folder)

    def holds(self, key: ModelKey) -> bool:
        """Return whether it is this bundle; for a model from an older agent, number and digest decide."""
        return self.key in (key, key._replace(fingerprint=""))


def load_tensors(file: Path) -> Tensors:
    """Return the tensors in a file, or none if there is no such file."""
    try:
        return decode_tensors(file, file.read_bytes())
    except FileNotFoundError:
        return {}


def decode_tensors(file: Path, data: bytes) -> Tensors:
    """Return the tensors in a file's content; raise StateError, which names the file, if it is damaged."""
    import safetensors.torch  # here, so that listing the kept models does not load torch
    from safetensors import SafetensorError

    try:
        return safetensors.torch.load(data)
    except SafetensorError as error:
        raise StateError(
            f"{file} is damaged: {error}.",
            next_step="Restore it from a backup, or delete it; docs/methods.md says what you lose then.",
        ) from error


class KeptModels:
    """The folder of kept models."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def all(self) -> list[KeptModel]:
        """Return the kept models in order of arrival; of a bundle that arrived twice, only the later copy."""
        found = {one.key.fingerprint or one.folder: one for one in self._on_disk()}
        return sorted(found.values(), key=_arrival)

    def _on_disk(self) -> list[KeptModel]:
        models = []
        for folder in self.path.iterdir() if self.path.is_dir() else ():
            match = _FOLDER.fullmatch(folder.name)
            if match is None:
                continue
            try:
                about = _read_about(folder)
                key = ModelKey(int(match[1]), str(about["digest"]), str(about.get("fingerprint", "")))
                models.append(KeptModel(key, int(match[2] or -1), folder))
            except (OSError, ValueError, KeyError, TypeError):  # damaged, or half removed when the agent crashed
                continue
        return sorted(models, key=_arrival)

    def save(self, bundle: Bundle) -> KeptModel:
        """Store a model and return its place on disk."""
        if not self.path.is_dir():
            self.path.mkdir(mode=0o700)
            sync_folder(self.path.parent)
        order = max((one.order for one in self._on_disk()), default=-1) + 1
        folder = self.path / f"{bundle.number}-{order}"
        for twin in self.all():
            if twin.key == bundle.key and not self.damage(twin):  # it has arrived before: keep what was chosen for it
                twin.folder.rename(folder)
                sync_folder(self.path)
                return KeptModel(bundle.key, order, folder)
        staging = self.path / "new"
        shutil.rmtree(staging, ignore_errors=True)
        tensors = {"model": bundle.shared, "personal": bundle.personal, "private": bundle.private}
        bodies = {name: encode(part) for name, part in tensors.items()}
        about = {
            "number": bundle.number,
            "digest": bundle.digest,
            "fingerprint": bundle.fingerprint,
            "facts": bundle.facts,
            "made_in": bundle.made_in,
            "files": {name: digest(body) for name, body in bodies.items()},
        }
        try:
            staging.mkdir(mode=0o700)
            for name, body in bodies.items():
                write_durably(staging / f"{name}.safetensors", body)
            write_durably(staging / "about.json", json.dumps(about).encode())
            shutil.rmtree(folder, ignore_errors=True)  # leftovers of a crash, without about.json
            staging.rename(folder)
        except OSError:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        sync_folder(self.path)
        return KeptModel(bundle.key, order, folder)

    def load(self, kept: KeptModel) -> Bundle:
        """Read a kept model; raise StateError if its files are missing or have changed."""
        about, bodies = self._read(kept)
        shared, personal, private = (decode_tensors(file, body) for file, body in bodies.items())
        return Bundle(kept.key.number, kept.key.digest, shared, personal, private, about["facts"], about.get("made_in"))

    def damage(self, kept: KeptModel) -> str:
        """Return why a kept model cannot be loaded, without loading torch; empty if its files are intact."""
        try:
            self._read(kept)
        except StateError as error:
            return error.message
        return ""

    def _read(self, kept: KeptModel) -> tuple[dict[str, Any], dict[Path, bytes]]:
        """Return what is known about a model, and its files, which match their digests; older agents stored none."""
        try:
            about = _read_about(kept.folder)
            expected, about["facts"] = dict(about.get("files", {})), dict(about["facts"])
            files = [kept.folder / f"{name}.safetensors" for name in _PARTS]
            bodies = {file: file.read_bytes() for file in files}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StateError(f"Model {kept.key.number} in {kept.folder} cannot be read: {error}.") from error
        for file, body in bodies.items():
            if digest(body) != expected.get(file.stem, digest(body)):
                raise StateError(f"{file} has changed since it was written.")
        return about, bodies

    def prune(self, keep: int, protected: Collection[KeptModel]) -> None:
        """Remove all but the last `keep` to arrive and the protected ones."""
        staying = {one.folder for one in [*self.all()[-keep:], *protected]}
        for one in self._on_disk():
            if one.folder not in staying:
                shutil.rmtree(one.folder, ignore_errors=True)


def _read_about(folder: Path) -> dict[str, Any]:
    about = json.loads((folder / "about.json").read_bytes())
    if not isinstance(about, dict):
        raise ValueError("about.json does not hold an object")
    return about


def _arrival(kept: KeptModel) -> tuple[int, int]:
    return kept.order, kept.key.number

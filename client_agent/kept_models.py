"""The models on the agent's disk, each with the tensors of this site that belong to it.

models/NUMBER-ORDER/   model, personal and private tensors; about.json with their digests
models/NUMBER/         the same, as older agents wrote it: without an order and without digests of the files

A number alone does not name a model: a coordinator restored from a backup reuses numbers. Nor does the digest of its
weights: with other tensors of this site it answers otherwise. What the gate approves is a bundle, by its fingerprint.
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
from shared.files import sync_folder, write_durably
from shared.methods.base import RoundTask, Tensors
from shared.wire import digest, encode

_FOLDER = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")
_PARTS = ("model", "personal", "private")


@dataclass(frozen=True)
class Bundle:
    """A global model with the tensors of this site that belong to it."""

    number: int
    digest: str
    shared: Tensors
    personal: Tensors
    private: Tensors
    facts: dict[str, str]

    @cached_property
    def fingerprint(self) -> str:
        """Names exactly this bundle; the weights stand for themselves by their digest."""
        own = [digest(encode(part)) for part in (self.personal, self.private)]
        return digest(json.dumps([self.number, self.digest, sorted(self.facts.items()), own]).encode())

    def task(self, name: str) -> RoundTask:
        """As a method's client half takes it."""
        return RoundTask(name, self.number, self.shared, self.personal, self.facts)


@dataclass(frozen=True)
class KeptModel:
    """A model on the disk."""

    number: int
    digest: str
    fingerprint: str  # of the bundle; empty: written by an older agent
    order: int  # of its arrival
    folder: Path

    def holds(self, number: int, digest: str, fingerprint: str) -> bool:
        """Whether it is this very bundle."""
        return (self.number, self.digest) == (number, digest) and self.fingerprint in ("", fingerprint)


def load_tensors(file: Path) -> Tensors:
    """The tensors of a file; none when there is no such file."""
    import safetensors.torch  # not above: whoever only looks what is kept need not load torch
    from safetensors import SafetensorError

    try:
        return safetensors.torch.load(file.read_bytes())
    except FileNotFoundError:
        return {}
    except SafetensorError as error:
        raise StateError(
            f"{file} is damaged: {error}.",
            next_step="Restore it from a backup, or delete it; docs/methods.md says what is then lost.",
        ) from error


class KeptModels:
    """The folder of kept models."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def all(self) -> list[KeptModel]:
        """What is kept, in the order of arrival. Of a bundle that arrived twice only the later copy counts."""
        found = {one.fingerprint or one.folder: one for one in self._on_disk()}
        return sorted(found.values(), key=_arrival)

    def _on_disk(self) -> list[KeptModel]:
        models = []
        for folder in self._path.iterdir() if self._path.is_dir() else ():
            match = _FOLDER.fullmatch(folder.name)
            if match is None:
                continue
            try:
                about = _read_about(folder)
                fingerprint = str(about.get("fingerprint", ""))
                models.append(KeptModel(int(match[1]), str(about["digest"]), fingerprint, int(match[2] or -1), folder))
            except (OSError, ValueError, KeyError, TypeError):  # damaged, or a crash while it was removed
                continue
        return sorted(models, key=_arrival)

    def save(self, bundle: Bundle) -> KeptModel:
        """Keep a model beside those that are there."""
        if not self._path.is_dir():
            self._path.mkdir(mode=0o700)
            sync_folder(self._path.parent)
        aside = self._path / "new"
        shutil.rmtree(aside, ignore_errors=True)
        tensors = {"model": bundle.shared, "personal": bundle.personal, "private": bundle.private}
        bodies = {name: encode(part) for name, part in tensors.items()}
        about = {
            "number": bundle.number,
            "digest": bundle.digest,
            "fingerprint": bundle.fingerprint,
            "facts": bundle.facts,
            "files": {name: digest(body) for name, body in bodies.items()},
        }
        try:
            aside.mkdir(mode=0o700)
            for name, body in bodies.items():
                write_durably(aside / f"{name}.safetensors", body)
            write_durably(aside / "about.json", json.dumps(about).encode())
            order = max((one.order for one in self._on_disk()), default=-1) + 1
            folder = self._path / f"{bundle.number}-{order}"
            kept = KeptModel(bundle.number, bundle.digest, bundle.fingerprint, order, folder)
            shutil.rmtree(kept.folder, ignore_errors=True)  # what a crash left there has no about.json
            aside.rename(kept.folder)
        except OSError:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        sync_folder(self._path)
        return kept

    def load(self, kept: KeptModel) -> Bundle:
        """Read a kept model; raises StateError when its files are gone or changed."""
        try:
            about = _read_about(kept.folder)
            expected, facts = about.get("files", {}), dict(about["facts"])
            tensors = {}
            for name in _PARTS:
                file = kept.folder / f"{name}.safetensors"
                if name in expected and digest(file.read_bytes()) != expected[name]:
                    raise StateError(f"{file} has changed since it was written.")
                tensors[name] = load_tensors(file)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StateError(f"Model {kept.number} in {kept.folder} cannot be read: {error}.") from error
        return Bundle(kept.number, kept.digest, tensors["model"], tensors["personal"], tensors["private"], facts)

    def is_intact(self, kept: KeptModel) -> bool:
        """Whether its files are as they were written; an older agent's, which has no digests, need only be there."""
        try:
            expected = dict(_read_about(kept.folder).get("files", {}))
            bodies = {name: (kept.folder / f"{name}.safetensors").read_bytes() for name in _PARTS}
        except (OSError, ValueError, TypeError):
            return False
        return all(digest(body) == expected.get(name, digest(body)) for name, body in bodies.items())

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
    return kept.order, kept.number

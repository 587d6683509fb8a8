"""The models that a site trains for itself: alone, without the federation, and adapted, from the newest model.

Both are safetensors files whose metadata says what they are, so that weights and description change together.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from client_agent.state.kept_models import decode_tensors
from shared.system.files import write_durably
from shared.tensors.names import Tensors
from shared.tensors.wire import digest, encode

logger = logging.getLogger(__name__)
_ALONE, _ADAPTED = "alone.safetensors", "adapted.safetensors"
_OLD_ALONE = "baseline.safetensors"  # of older agents, which did not count steps


@dataclass(frozen=True)
class OwnModel:
    """A model as stored: the file's bytes, and what its metadata say."""

    file: Path
    body: bytes
    metadata: dict[str, str]

    @property
    def digest(self) -> str:
        """Identifies the weights."""
        return digest(self.body)

    @property
    def tensors(self) -> Tensors:
        """The weights; raises StateError if the file is damaged."""
        return decode_tensors(self.file, self.body)

    def count(self, name: str) -> int:
        """Return a number from the metadata: `steps` of alone, `epochs` of adapted; 0 if it is not there."""
        text = self.metadata.get(name, "")
        return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else 0


class OwnModels:
    """The files of a site's own models. One that is damaged counts as missing: it is trained again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def alone(self) -> OwnModel | None:
        """Return the model trained on this site's images only; None before its first step."""
        return self._read(_ALONE) or self._read(_OLD_ALONE)

    def save_alone(self, weights: Tensors, steps: int) -> None:
        """Replace it; `steps` counts from its start."""
        write_durably(self._folder / _ALONE, encode(weights, {"steps": str(steps)}))

    def adapted(self, fingerprint: str, adaptation: str) -> OwnModel | None:
        """Return the model with this fingerprint, fine-tuned in this way; None if there is none."""
        found, wanted = self._read(_ADAPTED), {"model": fingerprint, "adaptation": adaptation}
        return found if found is not None and wanted.items() <= found.metadata.items() else None

    def save_adapted(self, weights: Tensors, fingerprint: str, adaptation: str, epochs: int) -> None:
        """Replace it."""
        metadata = {"model": fingerprint, "adaptation": adaptation, "epochs": str(epochs)}
        write_durably(self._folder / _ADAPTED, encode(weights, metadata))

    def _read(self, name: str) -> OwnModel | None:
        file = self._folder / name
        try:
            body = file.read_bytes()
            return OwnModel(file, body, _metadata(body))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be read: %s; it will be trained again", file, error)
            return None


def _metadata(body: bytes) -> dict[str, str]:
    """Return a safetensors body's metadata; raise ValueError if it has no valid header."""
    header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
    found = header.get("__metadata__", {}) if isinstance(header, dict) else None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ValueError("it is not a safetensors file")
    return found

"""Exports a site's model and offset as a single file: tensors, or a program that runs without an agent."""

import io
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from client_agent.serving.model import offset_digest
from client_agent.settings import Identity
from client_agent.state.kept_models import Bundle
from shared.contract.errors import DistransError
from shared.learning.methods import client_half
from shared.learning.methods.modules import ModulePredictor, detached_state
from shared.learning.runtime import Runtime
from shared.system.files import write_durably
from shared.tensors.wire import encode

ABOUT = "distrans.json"  # the file inside a .pt2 that describes how to use it


class StandaloneModel(nn.Module):
    """A module from images (B, C, H, W) in [0, 1] to logits: normalization, offset and network in one."""

    mean: Tensor
    std: Tensor

    def __init__(self, predictor: ModulePredictor, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.net = predictor.net
        for number, extra in enumerate(predictor.extras):
            self.register_buffer(f"extra_{number}", extra.clone())
        self._extras = len(predictor.extras)
        self.register_buffer("mean", torch.tensor(mean).reshape(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).reshape(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits behind the answers of `/predict`."""
        extras = [getattr(self, f"extra_{number}") for number in range(self._extras)]
        return self.net((images - self.mean) / self.std, *extras)  # type: ignore[no-any-return]


def build_standalone(identity: Identity, bundle: Bundle) -> StandaloneModel:
    """Return a bundle's model as a single module in eval mode; raise DistransError if its method has none."""
    predictor = client_half(identity.plan).predictor(bundle.task(identity.name), bundle.private, Runtime())
    if not isinstance(predictor, ModulePredictor):
        raise DistransError(f"Models of method {identity.plan.method.name} cannot be exported as a program.")
    return StandaloneModel(predictor, identity.plan.image.mean, identity.plan.image.std).eval()


def export_safetensors(identity: Identity, bundle: Bundle, target: Path) -> bool:
    """Write model and offset as named tensors, the plan as metadata; return whether there is an offset."""
    half, task = client_half(identity.plan), bundle.task(identity.name)
    predictor = half.predictor(task, bundle.private, Runtime())
    # The weights that predict here, which for some methods are not the global model's.
    weights = detached_state(predictor.net) if isinstance(predictor, ModulePredictor) else bundle.shared
    tensors = {f"model.{name}": value for name, value in weights.items()}
    offset = half.offset(task, bundle.private)
    if offset is not None:
        tensors["offset"] = offset
    metadata = {"plan": identity.plan.model_dump_json(), "round": str(bundle.number), "site": identity.name}
    write_durably(target, encode(tensors, metadata))
    return offset is not None


def export_program(identity: Identity, bundle: Bundle, target: Path) -> bool:
    """Write a torch.export program (.pt2) for any batch size, with ABOUT inside; return whether there is an offset."""
    module = build_standalone(identity, bundle)
    example = torch.rand(2, *identity.plan.image.shape)
    batch = torch.export.Dim("batch", min=1, max=1024)
    try:
        program = torch.export.export(module, (example,), dynamic_shapes=({0: batch},))
    except Exception as error:  # torch.export raises many kinds of errors
        raise DistransError(
            f"This network cannot be exported as a program: {str(error).splitlines()[0]}",
            next_step="Export it as .safetensors.",
        ) from error
    archive = io.BytesIO()
    about = export_metadata(identity, bundle)
    torch.export.save(program, archive, extra_files={ABOUT: json.dumps(about, indent=2)})
    write_durably(target, archive.getvalue())
    return about["offset"] is not None


def export_metadata(identity: Identity, bundle: Bundle) -> dict[str, Any]:
    """Return what callers of an exported program must know: its input, and what its logits mean."""
    plan, image = identity.plan, identity.plan.image
    offset = client_half(plan).offset(bundle.task(identity.name), bundle.private)
    return {
        "federation": identity.federation,
        "site": identity.name,
        "round": bundle.number,
        "model_digest": bundle.digest,
        "method": plan.method.name,
        "backbone": plan.model.backbone,
        "classes": list(plan.classes),
        "input": {
            "shape": ["batch", *image.shape],
            "dtype": "float32",
            "pixels": [0.0, 1.0],
            "mode": {1: "L", 3: "RGB"}.get(image.channels),
            "resize": {
                "size": [image.height, image.width],
                "interpolation": "bilinear",
                "antialias": False,
                "keeps_aspect_ratio": False,
            },
        },
        "normalization": {"mean": list(image.mean), "std": list(image.std), "inside_program": True},
        "offset": None
        if offset is None
        else {
            "digest": offset_digest(offset),
            "alpha": getattr(plan.method, "alpha", None),
            "inside_program": True,
        },
        "output": "logits",
    }

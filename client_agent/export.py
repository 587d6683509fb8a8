"""A site's model with its offset as one file that runs without an agent."""

import io
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from client_agent.kept_models import Bundle
from client_agent.settings import Identity
from shared.files import write_durably
from shared.methods import client_half
from shared.methods.serving import ModulePredictor, detached_state
from shared.problems import DistransError
from shared.runtime import Runtime
from shared.wire import digest, encode

ABOUT = "distrans.json"  # the file inside a .pt2 that says how to use it


class Standalone(nn.Module):
    """Images (B, C, H, W) with pixels in [0, 1] → logits: normalisation, offset and network in one."""

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
        """As `/predict` would, before the softmax."""
        extras = [getattr(self, f"extra_{number}") for number in range(self._extras)]
        return self.net((images - self.mean) / self.std, *extras)  # type: ignore[no-any-return]


def standalone(identity: Identity, bundle: Bundle) -> Standalone:
    """The model of a bundle as one module in eval mode."""
    predictor = client_half(identity.plan).predictor(bundle.task(identity.name), bundle.private, Runtime())
    if not isinstance(predictor, ModulePredictor):
        raise DistransError(f"Models of {identity.plan.method.name} cannot be exported as one module.")
    return Standalone(predictor, identity.plan.image.mean, identity.plan.image.std).eval()


def export_safetensors(identity: Identity, bundle: Bundle, target: Path) -> None:
    """Model and offset as named tensors, the plan in the metadata."""
    half, task = client_half(identity.plan), bundle.task(identity.name)
    predictor = half.predictor(task, bundle.private, Runtime())
    # What predicts here; with some methods it is not the global model.
    weights = detached_state(predictor.net) if isinstance(predictor, ModulePredictor) else bundle.shared
    tensors = {f"model.{name}": value for name, value in weights.items()}
    offset = half.offset(task, bundle.private)
    if offset is not None:
        tensors["offset"] = offset
    metadata = {"plan": identity.plan.model_dump_json(), "round": str(bundle.number), "site": identity.name}
    write_durably(target, encode(tensors, metadata))


def export_program(identity: Identity, bundle: Bundle, target: Path) -> None:
    """A torch.export program (.pt2) for any batch size, with ABOUT as an extra file."""
    module = standalone(identity, bundle)
    example = torch.rand(2, *identity.plan.image.shape)
    batch = torch.export.Dim("batch", min=1, max=1024)
    try:
        program = torch.export.export(module, (example,), dynamic_shapes=({0: batch},))
    except Exception as error:  # torch.export explains itself in many kinds of errors
        raise DistransError(
            f"This network cannot be exported as a program: {str(error).splitlines()[0]}",
            next_step="Export it as .safetensors.",
        ) from error
    archive = io.BytesIO()
    torch.export.save(program, archive, extra_files={ABOUT: json.dumps(describe(identity, bundle), indent=2)})
    write_durably(target, archive.getvalue())


def describe(identity: Identity, bundle: Bundle) -> dict[str, Any]:
    """What a program around an exported one must know: the images it takes, and what its logits stand for."""
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
            "digest": digest(encode({"offset": offset})),
            "alpha": getattr(plan.method, "alpha", None),
            "inside_program": True,
        },
        "output": "logits",
    }

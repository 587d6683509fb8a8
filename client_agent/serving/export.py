"""Exports what a site serves as a single file: tensors, or a program that runs without an agent."""

import io
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from client_agent.serving.calibration import log_probabilities
from client_agent.serving.candidates import Base, mix
from client_agent.serving.model import ServingModel
from client_agent.settings import Identity
from client_agent.state.kept_models import Bundle
from shared.contract.errors import DistransError
from shared.learning.methods import client_half
from shared.learning.methods.base import Predictor
from shared.learning.methods.modules import ModulePredictor, detached_state
from shared.system.files import write_durably
from shared.tensors.names import Tensors
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
        """Return the network's logits."""
        extras = [getattr(self, f"extra_{number}") for number in range(self._extras)]
        return self.net((images - self.mean) / self.std, *extras)  # type: ignore[no-any-return]


class StandaloneCandidate(nn.Module):
    """A candidate as a module: its members, their weights, the prior and the temperature.

    The softmax of its logits are the probabilities that `/predict` answers with.
    """

    shifts: Tensor

    def __init__(self, model: ServingModel, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        members = model.members()
        self.models = nn.ModuleList(
            [StandaloneModel(_module(model.predictors[member.base]), mean, std) for member, _ in members]
        )
        self._weights, self._temperature = [weight for _, weight in members], model.temperature
        self._mixed = model.candidate.mixed
        found = [model.counts.shift(member, model.prior) for member, _ in members]
        shifts = [torch.zeros(len(model.classes)) if shift is None else shift for shift in found]
        self.register_buffer("shifts", torch.stack(shifts))

    def forward(self, images: Tensor) -> Tensor:
        """Return logits whose softmax is the mixture, calibrated."""
        logits = [model(images) + shift for model, shift in zip(self.models, self.shifts, strict=True)]
        if len(logits) == 1:
            return torch.div(logits[0], self._temperature)
        parts = list(zip(logits, self._weights, strict=True))
        return log_probabilities(mix(parts, self._mixed)) / self._temperature


def _module(predictor: Predictor) -> ModulePredictor:
    if not isinstance(predictor, ModulePredictor):
        raise DistransError("Models of this method cannot be exported as a program.")
    return predictor


def build_standalone(identity: Identity, model: ServingModel) -> StandaloneCandidate:
    """Return what is served as a single module in eval mode; raise DistransError if its method has none."""
    return StandaloneCandidate(model, identity.plan.image.mean, identity.plan.image.std).eval()


def export_safetensors(identity: Identity, bundle: Bundle, model: ServingModel, target: Path) -> None:
    """Write the federation's model and offset as named tensors, and the weights of adapted and alone if it has them.

    The metadata says how they are combined.
    """
    half, task = client_half(identity.plan), bundle.task(identity.name)
    tensors: Tensors = {}
    for base, predictor in model.predictors.items():
        # The weights that predict here, which for some methods are not the global model's.
        prefix = base if base in (Base.ADAPTED, Base.ALONE) else "model"
        weights = detached_state(predictor.net) if isinstance(predictor, ModulePredictor) else bundle.shared
        tensors |= {f"{prefix}.{name}": value for name, value in weights.items()}
    offset = half.offset(task, bundle.private) if model.has_offset else None
    if offset is not None:
        tensors["offset"] = offset
    about = {"candidate": json.dumps(_describe_candidate(model)), "round": str(bundle.number), "site": identity.name}
    write_durably(target, encode(tensors, {"plan": identity.plan.model_dump_json(), **about}))


def export_program(identity: Identity, bundle: Bundle, model: ServingModel, target: Path) -> None:
    """Write a torch.export program (.pt2) for any batch size, with ABOUT inside."""
    module = build_standalone(identity, model)
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
    about = export_metadata(identity, bundle, model)
    torch.export.save(program, archive, extra_files={ABOUT: json.dumps(about, indent=2)})
    write_durably(target, archive.getvalue())


def export_metadata(identity: Identity, bundle: Bundle, model: ServingModel) -> dict[str, Any]:
    """Return what callers of an exported program must know: its input, and what its logits mean."""
    plan, image = identity.plan, identity.plan.image
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
        if model.offset_digest is None
        else {
            "digest": model.offset_digest,
            "alpha": getattr(plan.method, "alpha", None),
            "inside_program": True,
        },
        "candidate": {**_describe_candidate(model), "inside_program": True},
        "output": "logits",
        "probabilities": "softmax of the logits",
    }


def _describe_candidate(model: ServingModel) -> dict[str, Any]:
    return {
        "name": model.candidate.name,
        "digest": model.record or None,
        "members": [{"base": member.base, "weight": weight} for member, weight in model.members()],
        "mixed": model.candidate.mixed,
        "prior": model.applied_prior(),
        "only_own_classes": model.counts.only_own_classes,
        "temperature": model.temperature,
    }

"""Small plans and updates that fit them."""

from typing import Any

import torch

from shared.contract.measurements import TrainingReport
from shared.contract.plan import FederationPlan, validate_plan
from shared.learning.methods import server_half
from shared.learning.methods.base import Facts
from shared.tensors.wire import encode

CLASSES = ("cat", "dog")


def small_plan(name: str = "pets", **tables: Any) -> FederationPlan:
    """Return a plan for LeNet on 1×14×14 images of two classes, about 20 kB per model, changed by `tables`."""
    plan: dict[str, Any] = {
        "name": name,
        "preset": "paper",  # gives each client its own offset from the start
        "classes": CLASSES,
        "image": {"channels": 1, "height": 14, "width": 14},
        "rounds": {"count": 2, "deadline_s": 60, "quorum": 1.0},
    }
    for key, value in tables.items():
        plan[key] = {**plan[key], **value} if isinstance(value, dict) and key in plan else value
    return validate_plan(plan)


def update_tensors(plan: FederationPlan, facts: Facts, seed: int) -> dict[str, torch.Tensor]:
    """Return random tensors with the names and shapes of an update for this plan."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(entry.shape, generator=generator)
        if entry.dtype.kind == "f"
        else torch.full(entry.shape, seed % 7, dtype=getattr(torch, entry.dtype.name))
        for name, entry in server_half(plan).upload_spec(facts).entries.items()
    }


def report(samples: int = 10, **fields: Any) -> TrainingReport:
    """Return a plausible training report."""
    return TrainingReport.model_validate(
        {"samples": samples, "batches": 1, "loss": 0.5, "accuracy": 0.5, "seconds": 0.1} | fields
    )


def update_body(plan: FederationPlan, facts: Facts, seed: int = 0, samples: int = 10) -> bytes:
    """Return the bytes of a valid update with random tensors."""
    return encode(update_tensors(plan, facts, seed), {"report": report(samples).model_dump_json()})

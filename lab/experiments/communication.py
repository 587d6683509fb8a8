"""The table of communication overhead, computed from the models without training."""

import io

import numpy as np
import torch

from lab.experiments.paper import paper_results
from shared.contract.plan import validate_plan
from shared.learning.model import build_double, build_single
from shared.tensors.spec import Spec

_CLASSES = tuple(str(number) for number in range(10))


def communication_table() -> str:
    """Return a table of weight and offset bytes for 3×64×64 images and 10 classes, next to the paper's."""
    lines = [
        "Raw bytes of all tensors of a model for 10 classes and 3×64×64 images, and of the offset as an .npy file "
        "with its 128-byte header. The paper counts raw bytes for ResNet50 and file sizes for the others.\n",
        "| backbone | single | double | offset | overhead | paper: single | double | offset | overhead |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    offset = io.BytesIO()
    np.save(offset, np.zeros((3, 64, 64), dtype=np.float32))
    offset_bytes = len(offset.getvalue())
    overheads = []
    for paper in paper_results()["table7"]:
        single, double = model_bytes(paper["backbone"])
        overheads.append((double - single + offset_bytes) / single)
        lines.append(
            f"| {paper['backbone']} | {single:,} | {double:,} | {offset_bytes:,} | {overheads[-1]:.3%} "
            f"| {paper['single']:,} | {paper['double']:,} | {paper['offset']:,} | {paper['overhead_percent']:.3f}% |"
        )
    lines.append(f"\nMean overhead {sum(overheads) / len(overheads):.3%}; the paper reports 0.389%.\n")
    return "\n".join(lines)


def model_bytes(backbone: str) -> tuple[int, int]:
    """Return the tensor bytes of the single-channel and the double-channel model."""
    plan = validate_plan({"name": "bytes", "classes": _CLASSES, "model": {"backbone": backbone, "activation": "none"}})
    with torch.device("meta"):
        single, double = build_single(plan), build_double(plan, alpha=0.3)
    return Spec.of(single.state_dict()).data_bytes, Spec.of(double.state_dict()).data_bytes

"""A plan whose model has about a given size, and an update for it."""

import torch

from shared.contract.errors import DistransError
from shared.contract.measurements import TrainingReport
from shared.contract.plan import FederationPlan, validate_plan
from shared.learning.methods import server_half
from shared.tensors.wire import encode

_MB = 1_000_000
_CLOSE = 0.01  # a ResNet18 is preferred to a LeNet if its size is this close
_WEIGHTS_PER_POSITION = 100 * 16  # of LeNet's first linear layer
_SMALLEST_SIDE, _LARGEST_SIDE = 14, 4096


def plan_of_size(megabytes: float, clients: int, rounds: int) -> FederationPlan:
    """Return a plan for FedAvg with a model of about this many MB (10⁶ bytes).

    That is ResNet18 if it has this size, and else LeNet with images that give its linear layer the size.
    """
    resnet = _plan("resnet18", 32, 32, clients, rounds)
    if abs(model_bytes(resnet) / (megabytes * _MB) - 1) < _CLOSE:
        return resnet
    smallest = _plan("lenet", _SMALLEST_SIDE, _SMALLEST_SIDE, clients, rounds)  # with a single position
    positions = max(1.0, 1 + (megabytes * _MB - model_bytes(smallest)) / 4 / _WEIGHTS_PER_POSITION)
    rows = max(1, round(positions**0.5))
    height, width = (_SMALLEST_SIDE + 2 * (count - 1) for count in (rows, max(1, round(positions / rows))))
    if max(height, width) > _LARGEST_SIDE:
        raise DistransError(
            f"There is no network of {megabytes:g} MB to measure with.", next_step="Use a smaller size in --megabytes."
        )
    return _plan("lenet", height, width, clients, rounds)


def _plan(backbone: str, height: int, width: int, clients: int, rounds: int) -> FederationPlan:
    return validate_plan(
        {
            "name": "bench",
            "classes": [str(label) for label in range(10)],
            "image": {"height": height, "width": width},
            "model": {"backbone": backbone},
            "method": {"name": "fedavg"},
            "rounds": {"count": rounds, "min_clients": clients, "quorum": 1.0},
        }
    )


def model_bytes(plan: FederationPlan) -> int:
    """Return the bytes of the tensors that a client uploads."""
    return server_half(plan).update_spec({}).data_bytes


def update_body(plan: FederationPlan) -> bytes:
    """Return an update with random weights, as a client uploads it."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(entry.shape, generator=generator).numpy().astype(entry.dtype)
        for name, entry in server_half(plan).update_spec({}).entries.items()
    }
    report = TrainingReport(samples=100, batches=4, loss=1.0, accuracy=0.5, seconds=1.0)
    return encode(tensors, {"report": report.model_dump_json()})


def array_sizes(plan: FederationPlan) -> list[int]:
    """Return the size of each tensor of an update, in float32 values."""
    return [-(-entry.size_bytes // 4) for entry in server_half(plan).update_spec({}).entries.values()]

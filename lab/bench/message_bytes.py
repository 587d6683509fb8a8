"""Bytes per round and client of each method, from messages encoded as they are sent; nothing is trained.

The unit is the network's weights in plain float32, as in the paper's table 7: what FedAvg sends in each direction,
without headers.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import numpy as np
from rich.console import Console
from rich.table import Table

from lab.bench.outputs import check_outputs
from lab.experiments.communication import model_bytes
from shared.contract.measurements import TrainingReport
from shared.contract.method_options import METHOD_NAMES
from shared.contract.plan import BUILT_IN_BACKBONES, FederationPlan, UpdateCompression, validate_plan
from shared.learning.methods import server_half
from shared.learning.methods.base import Facts
from shared.learning.methods.pfedhn_server import MAX_HYPERNETWORK_BYTES, PFedHNServer
from shared.system.command_line import fold_cells
from shared.tensors.spec import Spec
from shared.tensors.wire import encode

_CLASSES = 10
_REPORT = TrainingReport(samples=1000, batches=32, loss=1.0, accuracy=0.5, seconds=10.0)
_OPTIONS = tuple(option for option in get_args(UpdateCompression) if option != "none")
_COMPRESSED = ("distrans", "fedavg")  # also shown with compressed updates
# What a round's facts can change about the messages: whether offsets travel.
_FORMS: dict[str, dict[str, Facts]] = {
    "distrans": {
        "distrans": {"offset_aggregation": "none"},
        "distrans, offsets aggregated": {"offset_aggregation": "network"},
    }
}


@dataclass(frozen=True)
class MethodBytes:
    """What one client receives and sends in a round: the global model, its personal tensors, its update."""

    backbone: str
    method: str
    weights: int  # of the network in float32, without a header
    model: int
    personal: int
    update: int

    @property
    def down_share(self) -> float:
        """Bytes received, relative to the weights."""
        return (self.model + self.personal) / self.weights

    @property
    def up_share(self) -> float:
        """Bytes sent, relative to the weights."""
        return self.update / self.weights


def measure(backbone: str) -> Iterator[MethodBytes]:
    """Yield the bytes of every method that can run with this backbone, and of two with compressed updates."""
    weights, _ = model_bytes(backbone)
    compressed = [(method, option) for method in _COMPRESSED for option in _OPTIONS]
    for method, option in [*((method, "none") for method in METHOD_NAMES), *compressed]:
        plan = _plan(backbone, method, option)
        half = server_half(plan)
        if isinstance(half, PFedHNServer) and half.hypernetwork.head_bytes > MAX_HYPERNETWORK_BYTES:
            continue  # the coordinator would refuse the plan
        model = _message_bytes(half.model_spec(), {"plan": plan.model_dump_json(), "model": "0"})
        for title, facts in _FORMS.get(method, {method: {}}).items():
            # The largest form is that of a client with all classes.
            personal = max(half.personal_specs(facts), key=lambda spec: spec.data_bytes)
            update = _message_bytes(half.upload_spec(facts), {"report": _REPORT.model_dump_json()})
            name = title if option == "none" else f"{title}, {option}"
            yield MethodBytes(backbone, name, weights, model, _message_bytes(personal), update)


def _plan(backbone: str, method: str, option: str) -> FederationPlan:
    classes = [str(label) for label in range(_CLASSES)]
    tables = {"model": {"backbone": backbone}, "method": {"name": method}, "training": {"update_compression": option}}
    return validate_plan({"name": "bytes", "classes": classes, **tables})


def _message_bytes(spec: Spec, metadata: Mapping[str, str] | None = None) -> int:
    """Return the size of a message with these tensors; their values do not matter."""
    tensors = {name: np.zeros(entry.shape, entry.dtype) for name, entry in spec.entries.items()}
    return len(encode(tensors, metadata))


def run_bench(console: Console, backbones: Sequence[str] | None, json_file: Path | None) -> None:
    """Measure and print a table."""
    check_outputs(json_file)
    rows: list[MethodBytes] = []
    table = Table(
        title="Bytes per round and client, 3×64×64 images, 10 classes",
        caption="Down: the model and the client's personal tensors. Up: the update. Shares of the network's float32 "
        "weights.",
    )
    for heading in ("backbone", "method", "down", "up", "down, share", "up, share"):
        table.add_column(heading, justify="left" if heading in ("backbone", "method") else "right")
    with console.status("encoding messages") as status:
        for backbone in backbones or list(BUILT_IN_BACKBONES):
            for row in measure(backbone):
                status.update(f"encoding messages: {backbone}, {row.method}")
                rows.append(row)
                sizes = f"{row.model + row.personal:,}", f"{row.update:,}"
                table.add_row(backbone, row.method, *sizes, f"{row.down_share:.2%}", f"{row.up_share:.2%}")
            table.add_section()
    console.print(fold_cells(table))
    if json_file is not None:
        content = [asdict(row) | {"down_share": row.down_share, "up_share": row.up_share} for row in rows]
        json_file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

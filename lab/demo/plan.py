"""The plan that a demo runs: a file in its folder that users can edit and pass back with --plan."""

import json
from dataclasses import dataclass
from pathlib import Path

from lab.datasets.clients import Shift
from shared.contract.errors import DistransError
from shared.contract.plan import FederationPlan, parse_plan

DIGITS = "sklearn:digits"


@dataclass(frozen=True)
class DemoOptions:
    """The options of the command."""

    folder: Path
    clients: int
    rounds: int
    dh: float
    shift: Shift
    images: int
    method: str
    backbone: str
    data: str
    seed: int
    plan: Path | None
    keep: bool


def plan_text(options: DemoOptions, classes: tuple[str, ...]) -> str:
    """Return a plan for images of these classes, as TOML."""
    digits = options.data == DIGITS
    side = {"lenet": 16 if digits else 32, "alexnet": 64}.get(options.backbone, 32)
    preset = 'preset = "offset-dropout"  # the default of plans\n' if options.method == "distrans" else ""
    names = ", ".join(json.dumps(name, ensure_ascii=False) for name in classes)
    return f"""\
# The demo's plan. To change it, edit a copy and run: distrans-lab demo --plan COPY
name = "demo"
{preset}classes = [{names}]
seed = {options.seed}

[image]
channels = {1 if digits else 3}
height = {side}
width = {side}

[model]
backbone = "{options.backbone}"
activation = "relu"

[method]
name = "{options.method}"

[training]
batch_size = 16
epochs = 4                  # sites have few images: more work per round, and fewer rounds

[rounds]
count = {options.rounds}
min_clients = {options.clients}
deadline_s = 86400          # everything is on one machine: if an agent ends, the demo ends
"""


def read_plan(file: Path, clients: int, classes: tuple[str, ...]) -> tuple[str, FederationPlan]:
    """Read a user's plan; return its text and the plan, which must fit the data."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise DistransError(f"Cannot read {file}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise DistransError(f"{file} is not UTF-8 text.") from error
    plan = parse_plan(text)
    if unknown := sorted(set(classes) - set(plan.classes)):
        raise DistransError(f"The plan lacks classes of the data: {', '.join(unknown[:10])}.")
    if plan.rounds.min_clients > clients:
        raise DistransError(
            f"The plan waits for {plan.rounds.min_clients} clients, but there are only {clients}.",
            next_step="Change rounds.min_clients or --clients.",
        )
    return text, plan

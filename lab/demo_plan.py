"""The plan that a demo runs: a file in its folder that a person can read, change and give back with --plan."""

import json
from dataclasses import dataclass
from pathlib import Path

from shared.plan import FederationPlan, parse_plan
from shared.problems import DistransError

DIGITS = "sklearn:digits"


@dataclass(frozen=True)
class DemoOptions:
    """What a person may change."""

    folder: Path
    clients: int
    rounds: int
    dh: float
    method: str
    backbone: str
    data: str
    seed: int
    plan: Path | None
    keep: bool


def plan_text(options: DemoOptions, classes: tuple[str, ...]) -> str:
    """A plan for images of these classes, as TOML."""
    digits = options.data == DIGITS
    side = {"lenet": 16 if digits else 32, "alexnet": 64}.get(options.backbone, 32)
    preset = (
        'preset = "learned-offset"  # Adam on the offset, so that it really moves\n'
        if options.method == "distrans"
        else ""
    )
    names = ", ".join(json.dumps(name, ensure_ascii=False) for name in classes)
    return f"""\
# The demo's plan. Change a copy of it and run that: distrans-lab demo --plan COPY
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
lr = 0.05
batch_size = 16

[rounds]
count = {options.rounds}
min_clients = {options.clients}
deadline_s = 86400          # everything is on one machine: when an agent ends, the demo does
"""


def read_plan(file: Path, clients: int, classes: tuple[str, ...]) -> tuple[str, FederationPlan]:
    """A person's own plan, as it is written and as it is understood; it must fit these data."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise DistransError(f"{file} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise DistransError(f"{file} is not a text in UTF-8.") from error
    plan = parse_plan(text)
    if unknown := sorted(set(classes) - set(plan.classes)):
        raise DistransError(f"The plan has not all classes of the data: {', '.join(unknown[:10])} are missing.")
    if plan.rounds.min_clients > clients:
        raise DistransError(
            f"The plan waits for {plan.rounds.min_clients} clients, and there are {clients}.",
            next_step="Change min_clients, or --clients.",
        )
    return text, plan

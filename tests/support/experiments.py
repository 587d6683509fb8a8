"""A small experiment on a few digits, run for real."""

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from lab.experiments.experiment import load_experiment
from lab.experiments.results import Results
from lab.experiments.runs import ExperimentOptions, run_experiment

TEXT = """
name = "try"
title = "A try"
paper = "table1"
rounds = 3
seeds = [0, 1]
reach = [0.0, 1.0]
figure = "FIGURE"
[plan]
model = { activation = "relu" }
training = { lr = 0.1 }
[[data]]
name = "digits"
stands_for = "cifar10"
train_per_class = 16
test_per_class = 6
clients = [10]
dh = [1.0]
[[methods]]
label = "DisTrans"
method = { name = "distrans" }
[[methods]]
label = "FedAvg"
method = { name = "fedavg" }
controls = true
"""

# With clients alone, fine-tuned models and models that agents would serve.
BASELINES = """
name = "try"
title = "A try"
rounds = 3
seeds = [0]
foreign_classes = true
compare = "DisTrans"
figure = ["dots", "offsets", "foreign-offsets"]
[plan]
model = { activation = "relu", initialization = "torch" }
training = { lr = 0.1 }
[[data]]
name = "digits"
shift = ["none", "rotated"]
train_per_class = 24
test_per_class = 8
clients = [5]
dh = [0.6]
[[methods]]
label = "Alone"
alone = true
[[methods]]
label = "FedAvg"
method = { name = "fedavg" }
prior = true
fine_tuned = true
[[methods]]
label = "DisTrans"
preset = "learned-offset"
method = { name = "distrans" }
served = true
"""


def run(file: Path, out: Path, **options: Any) -> tuple[int, str]:
    """Run an experiment; return the number of failures and the output."""
    printed = io.StringIO()
    console = Console(file=printed, force_terminal=False)
    chosen = ExperimentOptions(out=out, data_root=file.parent / "data", **options)
    return run_experiment(console, file, load_experiment(file), chosen), printed.getvalue()


def measured(folder: Path) -> dict[str, Any]:
    """Return all results by id, without how long they took."""
    return {r["id"]: {key: value for key, value in r.items() if key != "seconds"} for r in Results(folder).load()}

"""A small federation on real digits, with progress and a table of what was measured."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from lab.datasets import DIGIT_CLASSES, load_digits, make_clients
from lab.simulation import SimulatedClient, Simulation
from shared.evaluation import Evaluation
from shared.heterogeneity import classes_per_client, distributional_heterogeneity, paper_shares
from shared.plan import FederationPlan, validate_plan


def demo_plan(method: str, rounds: int, seed: int) -> FederationPlan:
    """LeNet on digits enlarged to 16×16, with the learned offset where the method is DisTrans."""
    return validate_plan(
        {
            "name": f"demo-{method}",
            "preset": "learned-offset",
            "classes": DIGIT_CLASSES,
            "seed": seed,
            "image": {"channels": 1, "height": 16, "width": 16},
            "method": {"name": method},
            "training": {"lr": 0.05, "batch_size": 16},
            "rounds": {"count": rounds},
        }
    )


def run_demo(console: Console, clients: int, rounds: int, dh: float, seed: int) -> None:
    """Train DisTrans and FedAvg from the same start on the same sites, then print what each site got."""
    plans = {method: demo_plan(method, rounds, seed) for method in ("distrans", "fedavg")}
    each = classes_per_client(dh, len(DIGIT_CLASSES), clients)
    shares = paper_shares(len(DIGIT_CLASSES), clients, each, seed)
    train, test = load_digits(plans["distrans"].image, seed)
    sites = make_clients(train, test, shares, seed)
    measured_dh = distributional_heterogeneity([site.record.class_counts for site in sites])
    console.print(f"{clients} sites, {each} digits each, {train.samples} training images, DH {measured_dh:.0%}")
    results: dict[str, dict[str, Evaluation]] = {}
    motions: dict[str, float | None] = {}
    for method, plan in plans.items():
        fresh = [SimulatedClient(site.record, site.train, site.test) for site in sites]
        simulation = Simulation(plan, fresh)
        with _progress(console) as progress:
            bar = progress.add_task(method, total=rounds, accuracy="")
            for outcome in simulation.run():
                accuracy = outcome.pooled.accuracy or 0
                progress.update(bar, advance=1, accuracy=f"accuracy {accuracy:.1%}")
                if not console.is_terminal:
                    console.print(f"{method}: round {outcome.round} of {rounds}, accuracy {accuracy:.1%}")
        results[method] = outcome.evaluations
        motions |= {name: report.offset_motion for name, report in outcome.reports.items() if method == "distrans"}
    console.print(_table(sites, results, motions))


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description:9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[accuracy]}"),
    )
    return Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal)


def _table(
    sites: list[SimulatedClient], results: dict[str, dict[str, Evaluation]], motions: dict[str, float | None]
) -> Table:
    table = Table(title="Accuracy of the global model on each site's held-out digits")
    for heading in ("site", "digits", "images", "DisTrans, own offset", "FedAvg", "offset motion"):
        table.add_column(heading, justify="left" if heading in ("site", "digits") else "right")
    for site in sites:
        name = site.record.id
        own = " ".join(DIGIT_CLASSES[label] for label in sorted(site.own_classes))
        accuracies = [_percent(results[method][name]) for method in ("distrans", "fedavg")]
        motion = motions[name]
        table.add_row(name, own, str(site.train.samples), *accuracies, "–" if motion is None else f"{motion:.2f}")
    none = Evaluation(samples=0, correct=0, loss_sum=0.0)
    pooled = [_percent(sum(results[method].values(), none)) for method in ("distrans", "fedavg")]
    table.add_section()
    table.add_row("all", "", str(sum(site.train.samples for site in sites)), *pooled, "")
    return table


def _percent(evaluation: Evaluation) -> str:
    return "–" if evaluation.accuracy is None else f"{evaluation.accuracy:.1%}"

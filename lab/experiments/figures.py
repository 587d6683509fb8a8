"""The figures of reports by their kind; needs the extra `figures`."""

from collections.abc import Sequence
from pathlib import Path

from lab.experiments import comparison_plots, plots
from lab.experiments.cells import Workspace
from lab.experiments.experiment import Experiment
from lab.experiments.results import Result


def draw(
    kind: str, experiment: Experiment, results: Sequence[Result], stem: Path, workspace: Workspace | None = None
) -> None:
    """Draw a figure into STEM.svg and STEM.png; some kinds read trained models and images from the workspace."""
    match kind, workspace:
        case "curves", _:
            plots.curves(experiment, results, stem)
        case "lines", _:
            plots.lines(experiment, results, stem)
        case "distribution", _:
            plots.distribution(experiment, stem)
        case "motivation", _:
            plots.motivation(stem)
        case "dots", _:
            comparison_plots.dots(experiment, results, stem)
        case "foreign-offsets", _:
            comparison_plots.foreign_offsets(experiment, results, stem)
        case "umap", Workspace() as place:
            plots.umap(experiment, results, stem, place)
        case "offsets", Workspace() as place:
            comparison_plots.offsets(experiment, results, stem, place)
        case _:
            raise ValueError(f"cannot draw {kind!r}")

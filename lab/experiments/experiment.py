"""Experiment files: data sets × clients × DH × seeds × methods, with a [small] form for an ordinary computer."""

import functools
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, ValidationError

from lab.datasets.clients import Negatives
from lab.datasets.registry import DataSettings, dataset_info
from lab.datasets.splitters import classes_per_client
from lab.experiments import Scale
from lab.experiments.cells import PLACEHOLDER_CLASSES, Cell
from lab.experiments.validation import find_errors
from lab.simulation.final import FinalPart
from shared.contract.error_collection import error_lines
from shared.contract.errors import DistransError
from shared.contract.frozen import Frozen
from shared.contract.plan import FederationPlan, Name, describe_toml_error
from shared.contract.presets import Preset, merge

_LAB = Path(__file__).parents[1]
_PAPER_FOLDERS = (_LAB / "_paper", _LAB.parent / "paper")  # in an installed package, in a clone
Overrides = dict[str, Any]
Share = Annotated[float, Field(ge=0, le=1)]
Label = Annotated[str, StringConstraints(min_length=1, max_length=64)]


class ExperimentError(DistransError):
    """An invalid experiment."""

    code = "invalid-experiment"


class DataEntry(DataSettings):
    """A data set, with the numbers of clients and the values of DH to run on it."""

    clients: tuple[Annotated[int, Field(ge=1, le=10_000)], ...] = Field(min_length=1)
    dh: tuple[Share, ...] = Field(min_length=1, description="Distributional heterogeneity, 0 … 1.")
    stands_for: str | None = Field(None, description="The paper's data set to compare with.")
    rounds: int | None = Field(None, ge=1, description="Rounds on this data set. Default: the experiment's.")
    plan: Overrides = Field({}, description="Plan settings for this data set, such as its backbone.")

    @property
    def settings(self) -> DataSettings:
        """The images alone, without the runs on them."""
        return DataSettings(**{name: getattr(self, name) for name in DataSettings.model_fields})


def _one_per_shift(entries: Any) -> Any:
    """Replace each entry whose shift is a list by one entry per shift; anything invalid is left to the validation."""
    if not isinstance(entries, list | tuple):
        return entries
    return [one for entry in entries for one in _shifts_of(entry)]


def _shifts_of(entry: Any) -> list[Any]:
    shifts = entry.get("shift") if isinstance(entry, dict) else None
    return [entry | {"shift": shift} for shift in shifts] if isinstance(shifts, list) and shifts else [entry]


DataEntries = Annotated[tuple[DataEntry, ...], BeforeValidator(_one_per_shift)]


class MethodEntry(Frozen):
    """A method to compare: a label and its plan settings."""

    label: Label
    alone: bool = Field(False, description="No method: every client trains by itself, without averaging.")
    preset: Preset = Field("paper", description="The plan's preset. Unlike in a plan, the default is paper.")
    method: Overrides = Field({}, description="The plan's [method] table.")
    plan: Overrides = Field({}, description="More plan settings for this method.")
    small: Overrides = Field({}, description="More [method] settings with `--scale small`.")
    on: dict[str, Overrides] = Field({}, description="More [method] settings by data set.")
    dh: tuple[Share, ...] | None = Field(None, description="Run only at these values. Default: all.")
    vary: tuple[float | int | str, ...] | None = Field(
        None, description="Run only at these values of the varied setting; [] means once, without it. Default: all."
    )
    prior: bool = Field(False, description="Add a row for logits shifted by each client's own class frequencies.")
    controls: bool = Field(
        False, description="Add the row of `prior`, and one for logits masked to each client's own classes."
    )
    fine_tuned: bool = Field(False, description="Add a row for the final model, fine-tuned at each client.")
    served: bool = Field(False, description="Add rows for what agents would serve, and for the model without offset.")

    def values(self, vary: "Vary | None") -> tuple[float | int | str | None, ...]:
        """Return the values of the varied setting that the method runs at; None stands for a run without one."""
        if vary is None or self.vary == ():
            return (None,)
        return tuple(value for value in vary.values if self.vary is None or value in self.vary)

    @property
    def final(self) -> tuple[FinalPart, ...]:
        """What the method's rows need after the last round."""
        parts: dict[FinalPart, bool] = {"fine-tuned": self.fine_tuned, "served": self.served}
        return tuple(part for part, wanted in parts.items() if wanted)


class Vary(Frozen):
    """A plan setting that takes several values: the x axis."""

    key: str = Field(pattern=r"^[a-z_]+(\.[a-z_]+)+$", description="For example method.alpha.")
    values: tuple[float | int | str, ...] = Field(min_length=1)


class Small(Frozen):
    """Settings that `--scale small` replaces; its plan overrides all others."""

    rounds: int | None = Field(None, ge=1)
    seeds: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(None, min_length=1)
    evaluate_every: int | None = Field(None, ge=1)
    train_per_class: int | None = Field(None, ge=1)
    test_per_class: int | None = Field(None, ge=1)
    data: DataEntries | None = Field(None, min_length=1)
    vary: Vary | None = None
    reach: tuple[Share, ...] | None = None
    plan: Overrides = Field({}, description="For example a smaller network and smaller images.")


FigureKind = Literal["curves", "lines", "umap", "dots", "offsets", "foreign-offsets"]


def _listed(kinds: Any) -> Any:
    """Return the kinds of figures as a list: none, one or several."""
    if isinstance(kinds, str):
        return [] if kinds == "none" else [kinds]
    return kinds


class Experiment(Frozen):
    """A complete experiment."""

    name: Name
    title: str
    paper: str | None = Field(None, description="The table of paper_results.toml with the paper's numbers.")
    kind: Literal["federations", "communication", "motivation", "distribution"] = "federations"
    figure: Annotated[tuple[FigureKind, ...], BeforeValidator(_listed)] = Field(
        (), description="A kind of figure, several, or none."
    )
    rounds: int = Field(100, ge=1)
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field((0, 1, 2), min_length=1)
    evaluate_every: int = Field(1, ge=1, description="Evaluate every N rounds, and after the last one.")
    accuracy: Literal["last", "best"] = Field("last", description="The round whose accuracy the table shows.")
    reach: tuple[Share, ...] = Field((), description="Report the rounds needed to exceed these accuracies.")
    negatives: Negatives = "auto"
    compare: Label | None = Field(None, description="Compare what this method serves with all other methods.")
    foreign_classes: bool = Field(False, description="Report the accuracy on classes that a client does not have.")
    plan: Overrides = Field({}, description="Plan settings for all cells.")
    data: DataEntries = ()
    methods: tuple[MethodEntry, ...] = ()
    vary: Vary | None = None
    small: Small = Small()

    def scaled(self, scale: Scale) -> "Experiment":
        """Return the experiment at this scale: unchanged, or with the settings of its small form."""
        if scale == "full":
            return self
        small = self.small
        sizes = {
            name: getattr(small, name)
            for name in ("train_per_class", "test_per_class")
            if getattr(small, name) is not None
        }
        whole = self.data if small.rounds is None else [e.model_copy(update={"rounds": None}) for e in self.data]
        data = [
            entry.model_copy(update={k: v for k, v in sizes.items() if getattr(entry, k) is None})
            for entry in small.data or whole
        ]
        replaced = {
            name: getattr(small, name)
            for name in ("rounds", "seeds", "evaluate_every", "vary", "reach")
            if getattr(small, name) is not None
        }
        methods = [entry.model_copy(update={"method": merge(entry.method, entry.small)}) for entry in self.methods]
        return self.model_copy(update={**replaced, "data": tuple(data), "methods": tuple(methods)})

    def cells(self, scale: Scale) -> list[Cell]:
        """Return every federation to run; an ExperimentError lists all invalid settings."""
        experiment = self.scaled(scale)
        last_word = self.small.plan if scale == "small" else {}
        errors: dict[str, list[str]] = {}
        cells: list[Cell] = []
        for entry, clients, seed, dh, value, method in experiment._combinations():
            where = f"{method.label} on {entry.name}"
            try:
                plan = _complete_plan(experiment, entry, method, value, seed, last_word)
                _check_split(entry, clients, dh)
            except ValidationError as error:
                for line in error_lines(error):
                    errors.setdefault(line.strip(), []).append(where)
                continue
            except DistransError as error:
                errors.setdefault(f"data: {error}", []).append(where)
                continue
            cells.append(
                Cell(
                    experiment=self.name,
                    scale=scale,
                    label=method.label,
                    data=entry.settings,
                    stands_for=entry.stands_for,
                    clients=clients,
                    dh=dh,
                    seed=seed,
                    varied=value,
                    plan=plan,
                    evaluate_every=experiment.evaluate_every,
                    negatives=self.negatives,
                    keep_model=_needs_model(experiment, method, seed),
                    alone=method.alone,
                    final=(*method.final, *(("foreign-classes",) if self.foreign_classes else ())),
                )
            )
        if errors:
            raise ExperimentError(
                _all_errors(self.name, [f"{line} ({_some(where)})" for line, where in errors.items()])
            )
        return cells

    def _combinations(
        self,
    ) -> Iterator[tuple[DataEntry, int, int, float, float | int | str | None, MethodEntry]]:
        values = (*self.vary.values, None) if self.vary else (None,)
        for entry in self.data:
            for clients in entry.clients:
                for seed in self.seeds:
                    for dh in entry.dh:
                        for value in values:
                            for method in self.methods:
                                if (method.dh is None or dh in method.dh) and value in method.values(self.vary):
                                    yield entry, clients, seed, dh, value, method


def experiment_files() -> list[Path]:
    """Return the experiment files of the project."""
    return next((sorted(folder.glob("*.toml")) for folder in _PAPER_FOLDERS if folder.is_dir()), [])


def find_experiment(given: Path) -> Path:
    """Return the given file, or the project's file for `table1`, `table1.toml` or `paper/table1.toml`."""
    if given.is_file():
        return given
    files = experiment_files()
    for file in files:
        if given in (Path(file.stem), Path(file.name), Path("paper", file.name)):
            return file
    what = "experiment" if given == Path(given.name) else "file"
    names = ", ".join(file.stem for file in files)
    raise DistransError(f"There is no {what} {given}.", next_step=f"Use a TOML file or one of {names}.")


def load_experiment(file: Path) -> Experiment:
    """Read an experiment from a TOML file; an ExperimentError lists every error with its field."""
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ExperimentError(f"Cannot read {file}: {error}.") from error
    except tomllib.TOMLDecodeError as error:
        raise ExperimentError(f"{file} is not valid TOML: {describe_toml_error(error)}.") from error
    try:
        experiment = Experiment.model_validate(data)
    except ValidationError as error:
        raise ExperimentError(_all_errors(file.name, _causes(error_lines(error, Experiment)))) from error
    if errors := find_errors(experiment):
        raise ExperimentError(_all_errors(file.name, errors))
    return experiment


def _nested(key: str, value: Any) -> dict[str, Any]:
    first, _, rest = key.partition(".")
    return {first: _nested(rest, value) if rest else value}


def _complete_plan(
    experiment: Experiment,
    entry: DataEntry,
    method: MethodEntry,
    value: float | int | str | None,
    seed: int,
    last_word: Overrides,
) -> dict[str, Any]:
    """Return the plan with all defaults filled in, without the class names."""
    tables: tuple[Overrides, ...] = (
        {"image": dataset_info(entry.name).image.model_dump()},
        experiment.plan,
        entry.plan,
        {"preset": method.preset, "method": merge(method.method, method.on.get(entry.name, {}))},
        method.plan,
        last_word,
        _nested(experiment.vary.key, value) if experiment.vary and value is not None else {},
        {"name": "lab", "seed": seed, "classes": PLACEHOLDER_CLASSES},
        {"rounds": {"count": entry.rounds or experiment.rounds}},
    )
    merged = functools.reduce(merge, tables) | ({"method": {"name": "fedavg"}} if method.alone else {})
    plan = FederationPlan.model_validate(merged)
    return plan.model_dump(mode="json", exclude={"classes"})


def _needs_model(experiment: Experiment, method: MethodEntry, seed: int) -> bool:
    """Return whether figures show the trained model: its features, or its offsets with the first seed."""
    return ("umap" in experiment.figure and not method.alone) or (method.served and seed == experiment.seeds[0])


def _check_split(entry: DataEntry, clients: int, dh: float) -> None:
    available = dataset_info(entry.name).classes
    classes = entry.classes or available
    if available and classes > available:
        raise DistransError(f"{entry.name} has {available} classes, not {classes}.")
    if classes:
        classes_per_client(dh, classes, clients)


def _causes(lines: list[str]) -> list[str]:
    """Drop errors of lists that only repeat an error of one of their entries."""
    fields = [line.strip().partition(":")[0] for line in lines]
    inside = [any(other.startswith(f"{field}.") for other in fields) for field in fields]
    return [line for line, has_cause in zip(lines, inside, strict=True) if not has_cause]


def _some(where: list[str]) -> str:
    distinct = list(dict.fromkeys(where))
    return ", ".join(distinct[:3]) + (f" and {len(distinct) - 3} more" if len(distinct) > 3 else "")


def _all_errors(name: str, lines: list[str]) -> str:
    count = "1 error" if len(lines) == 1 else f"{len(lines)} errors"
    return f"{name} has {count}:\n" + "\n".join(f"  {line.strip()}" for line in lines)

"""An experiment file: data sets × clients × DH × seeds × methods, and a [small] form of it for an ordinary computer."""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError

from lab.cells import Cell
from lab.datasets.clients import Negatives
from lab.datasets.registry import DataSettings, known
from lab.experiment_faults import faults_of
from shared.heterogeneity import classes_per_client
from shared.method_options import Frozen
from shared.plan import FederationPlan, Name, Preset, toml_fault
from shared.plan_faults import fault_lines
from shared.problems import DistransError

Scale = Literal["full", "small"]
Overrides = dict[str, Any]
Share = Annotated[float, Field(ge=0, le=1)]
Label = Annotated[str, StringConstraints(min_length=1, max_length=64)]
_PLACEHOLDER_CLASSES = ("a", "b")  # the real ones are known when the images are opened


class ExperimentError(DistransError):
    """An experiment that cannot be run as it is written."""

    code = "invalid-experiment"


class DataEntry(DataSettings):
    """A data set with the numbers of clients and degrees of heterogeneity to try on it."""

    clients: tuple[Annotated[int, Field(ge=1, le=10_000)], ...] = Field(min_length=1)
    dh: tuple[Share, ...] = Field(min_length=1, description="Distributional heterogeneity, 0 … 1.")
    stands_for: str | None = Field(None, description="The paper's set whose numbers are set beside this one's.")
    rounds: int | None = Field(None, ge=1, description="Rounds for this set; unset: the experiment's.")
    plan: Overrides = Field({}, description="Plan settings for this set, such as its backbone.")

    @property
    def settings(self) -> DataSettings:
        """Which images, without what is done with them."""
        return DataSettings(**{name: getattr(self, name) for name in DataSettings.model_fields})


class MethodEntry(Frozen):
    """A column: a label and what the plan says for it."""

    label: Label
    preset: Preset = Field("paper", description="Of the plan; unlike in a plan, the paper's is the default.")
    method: Overrides = Field(description="The plan's [method] table.")
    plan: Overrides = Field({}, description="Further plan settings for this column.")
    small: Overrides = Field({}, description="What the [method] table says besides under `--scale small`.")
    on: dict[str, Overrides] = Field({}, description="What it says besides on the data sets of these names.")
    dh: tuple[Share, ...] | None = Field(None, description="Only at these; unset: at all.")
    vary: tuple[float | int | str, ...] | None = Field(
        None, description="Only at these values of the varied setting; unset: at all."
    )
    controls: bool = Field(
        False, description="Also rows for its logits masked to, and re-weighted by, each client's own classes."
    )

    def runs_at(self, dh: float, value: float | int | str | None) -> bool:
        """Whether the column has a federation here."""
        return (self.dh is None or dh in self.dh) and (self.vary is None or value in self.vary)


class Vary(Frozen):
    """One setting of the plan that takes several values: the x axis."""

    key: str = Field(pattern=r"^[a-z_]+(\.[a-z_]+)+$", description="Such as method.alpha.")
    values: tuple[float | int | str, ...] = Field(min_length=1)


class Small(Frozen):
    """What `--scale small` puts in the place of the settings of the same name; its plan wins over all others."""

    rounds: int | None = Field(None, ge=1)
    seeds: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(None, min_length=1)
    evaluate_every: int | None = Field(None, ge=1)
    train_per_class: int | None = Field(None, ge=1)
    test_per_class: int | None = Field(None, ge=1)
    data: tuple[DataEntry, ...] | None = Field(None, min_length=1)
    vary: Vary | None = None
    reach: tuple[Share, ...] | None = None
    plan: Overrides = Field({}, description="Such as a smaller network and smaller images.")


class Experiment(Frozen):
    """A whole experiment at one scale."""

    name: Name
    title: str
    paper: str | None = Field(None, description="The table of lab/paper_results.toml with the paper's numbers.")
    kind: Literal["federations", "communication", "motivation", "distribution"] = "federations"
    figure: Literal["none", "curves", "lines", "umap"] = "none"
    rounds: int = Field(100, ge=1)
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field((0, 1, 2), min_length=1)
    evaluate_every: int = Field(1, ge=1, description="The last round is evaluated in any case.")
    accuracy: Literal["last", "best"] = Field("last", description="The round whose accuracy stands in the table.")
    reach: tuple[Share, ...] = Field((), description="Rounds until these accuracies are reported.")
    negatives: Negatives = "auto"
    plan: Overrides = Field({}, description="Plan settings for all cells.")
    data: tuple[DataEntry, ...] = ()
    methods: tuple[MethodEntry, ...] = ()
    vary: Vary | None = None
    small: Small = Small()

    def scaled(self, scale: Scale) -> "Experiment":
        """The experiment with its small form's settings in place, or as it is."""
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
        """Every federation to run; an ExperimentError names all settings that cannot be run."""
        experiment = self.scaled(scale)
        last_word = self.small.plan if scale == "small" else {}
        faults: dict[str, list[str]] = {}
        cells: list[Cell] = []
        for entry, clients, seed, dh, value, method in experiment._combinations():
            where = f"{method.label} on {entry.name}"
            try:
                plan = _complete_plan(experiment, entry, method, value, seed, last_word)
                _check_split(entry, clients, dh)
            except ValidationError as error:
                for line in fault_lines(error):
                    faults.setdefault(line.strip(), []).append(where)
                continue
            except DistransError as error:
                faults.setdefault(f"data: {error}", []).append(where)
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
                    keep_model=self.figure == "umap",
                )
            )
        if faults:
            raise ExperimentError(
                _all_faults(self.name, [f"{line} ({_some(where)})" for line, where in faults.items()])
            )
        return cells

    def _combinations(
        self,
    ) -> Iterator[tuple[DataEntry, int, int, float, float | int | str | None, MethodEntry]]:
        values = self.vary.values if self.vary else (None,)
        for entry in self.data:
            for clients in entry.clients:
                for seed in self.seeds:
                    for dh in entry.dh:
                        for value in values:
                            for method in self.methods:
                                if method.runs_at(dh, value):
                                    yield entry, clients, seed, dh, value, method


def load_experiment(file: Path) -> Experiment:
    """The experiment in a TOML file; an ExperimentError names every fault with its field."""
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ExperimentError(f"{file} cannot be read: {error}.") from error
    except tomllib.TOMLDecodeError as error:
        raise ExperimentError(f"{file} is not valid TOML: {toml_fault(error)}.") from error
    try:
        experiment = Experiment.model_validate(data)
    except ValidationError as error:
        raise ExperimentError(_all_faults(file.name, _causes(fault_lines(error, Experiment)))) from error
    if faults := faults_of(experiment):
        raise ExperimentError(_all_faults(file.name, faults))
    return experiment


def merge(*tables: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables laid over each other; the later one wins."""
    merged: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
            merged[key] = merge(merged[key], value) if both else value
    return merged


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
    """Everything the plan says but the classes' names, with all defaults written out."""
    data = merge(
        {"image": known(entry.name).image.model_dump()},
        experiment.plan,
        entry.plan,
        {"preset": method.preset, "method": merge(method.method, method.on.get(entry.name, {}))},
        method.plan,
        last_word,
        _nested(experiment.vary.key, value) if experiment.vary else {},
        {"name": "lab", "seed": seed, "classes": _PLACEHOLDER_CLASSES},
        {"rounds": {"count": entry.rounds or experiment.rounds}},
    )
    return FederationPlan.model_validate(data).model_dump(mode="json", exclude={"classes"})


def _check_split(entry: DataEntry, clients: int, dh: float) -> None:
    available = known(entry.name).classes
    classes = entry.classes or available
    if available and classes > available:
        raise DistransError(f"{entry.name} has {available} classes, not {classes}.")
    if classes:
        classes_per_client(dh, classes, clients)


def _causes(lines: list[str]) -> list[str]:
    """Without the faults of a list that are there only because of a fault of one of its entries."""
    fields = [line.strip().partition(":")[0] for line in lines]
    inside = [any(other.startswith(f"{field}.") for other in fields) for field in fields]
    return [line for line, has_cause in zip(lines, inside, strict=True) if not has_cause]


def _some(where: list[str]) -> str:
    distinct = list(dict.fromkeys(where))
    return ", ".join(distinct[:3]) + (f" and {len(distinct) - 3} more" if len(distinct) > 3 else "")


def _all_faults(name: str, lines: list[str]) -> str:
    count = "a fault" if len(lines) == 1 else f"{len(lines)} faults"
    return f"{name} has {count}:\n" + "\n".join(f"  {line.strip()}" for line in lines)

"""Checks of an experiment across its fields."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lab.datasets.registry import KNOWN, dataset_info
from lab.experiments.paper import paper_results
from shared.contract.presets import flatten, merge

if TYPE_CHECKING:
    from lab.experiments.experiment import Experiment, MethodEntry

_SET_ELSEWHERE = {
    "name": "the experiment sets it",
    "seed": "use seeds",
    "classes": "the data set defines them; use classes in [[data]] for fewer",
    "rounds.count": "use rounds in the experiment or in [[data]]",
    "rounds.target_accuracy": "every federation runs all its rounds; use reach to report when it exceeds an accuracy",
    "rounds.patience": "every federation runs all its rounds",
}


def find_errors(experiment: "Experiment") -> list[str]:
    """Return one line per error; an experiment without errors can be expanded into cells."""
    return [
        *_missing(experiment),
        *_repeated(experiment),
        *_unknown(experiment),
        *_unsuitable(experiment),
        *_set_elsewhere(experiment),
    ]


def _missing(experiment: "Experiment") -> Iterator[str]:
    wanted = {"federations": ("data", "methods"), "distribution": ("data",)}.get(experiment.kind, ())
    for name in wanted:
        if not getattr(experiment, name):
            yield f"{name}: at least one is required"
    for method in experiment.methods:
        if not (method.alone or _name_of(method, experiment)):
            yield f"methods: {method.label!r} has no method name; use method = {{ name = … }}"
    for entry in experiment.data if experiment.kind == "distribution" else ():
        if not (entry.classes or dataset_info(entry.name).classes):
            yield f"data: set classes for {entry.name}; its images are not opened"


def _repeated(experiment: "Experiment") -> Iterator[str]:
    small = experiment.small
    for label in _twice([method.label for method in experiment.methods]):
        yield f"methods: duplicate label {label!r}"
    for field, seeds in (("seeds", experiment.seeds), ("small.seeds", small.seeds or ())):
        for seed in _twice(seeds):
            yield f"{field}: duplicate seed {seed}"
    for field, entries in (("data", experiment.data), ("small.data", small.data or ())):
        places = [
            (entry.title, clients, dh) for entry in entries for clients in set(entry.clients) for dh in set(entry.dh)
        ]
        for title in dict.fromkeys(title for title, _, _ in _twice(places)):
            # These identify results: two entries alike would be counted as seeds of one.
            yield f"{field}: two entries for {title} have the same clients and DH; use two files or [vary]"
        for entry in entries:
            for name in ("clients", "dh"):
                for value in _twice(getattr(entry, name)):
                    yield f"{field}: {entry.title} has a duplicate {name} {value:g}"


def _unknown(experiment: "Experiment") -> Iterator[str]:
    entries = [*experiment.data, *(experiment.small.data or ())]
    varied = {value for vary in (experiment.vary, experiment.small.vary) if vary for value in vary.values}
    for method in experiment.methods:
        for value in method.vary or ():
            if value not in varied:
                yield f"methods: {method.label!r} is for {value!r}, which [vary] does not have"
        for dh in method.dh or ():
            if all(dh not in entry.dh for entry in entries):
                yield f"methods: {method.label!r} is for DH {dh:g}, which no [[data]] has"
        for name in method.on:
            if all(name != entry.name for entry in entries):
                yield f"methods: {method.label!r} has settings for {name!r}, which no [[data]] names"
    tables = [name for name, rows in paper_results().items() if rows and "values" in rows[0]]
    if experiment.paper is not None and experiment.paper not in tables:
        yield f"paper: unknown table {experiment.paper!r}; use one of {', '.join(tables)}"
    for entry in entries:
        if entry.stands_for is not None and entry.stands_for not in KNOWN:
            yield f"data: {entry.title} stands for unknown {entry.stands_for!r}; use one of {', '.join(KNOWN)}"


def _unsuitable(experiment: "Experiment") -> Iterator[str]:
    for method in experiment.methods:
        if method.alone and (method.method or method.fine_tuned):
            yield f"methods: {method.label!r} trains every client alone; remove method and fine_tuned"
        if method.served and _name_of(method, experiment) != "distrans":
            yield f"methods: {method.label!r} has no offset; served is for distrans"
    if experiment.compare is not None and experiment.compare not in [m.label for m in experiment.methods if m.served]:
        yield f"compare: no method with served = true has the label {experiment.compare!r}"


def _name_of(method: "MethodEntry", experiment: "Experiment") -> Any:
    return dict(flatten(merge(experiment.plan, {"method": method.method}))).get("method.name")


def _set_elsewhere(experiment: "Experiment") -> Iterator[str]:
    tables = [("plan", experiment.plan), ("small.plan", experiment.small.plan)]
    for kind in ("data", "methods"):
        tables += [(f"{kind}.plan", entry.plan) for entry in getattr(experiment, kind)]
    tables += [("small.data.plan", entry.plan) for entry in experiment.small.data or ()]
    for field, table in tables:
        for key in _keys(table):
            if key in _SET_ELSEWHERE:
                yield f"{field}: {key} has no effect here: {_SET_ELSEWHERE[key]}"
    for field, vary in (("vary", experiment.vary), ("small.vary", experiment.small.vary)):
        if vary and vary.key in _SET_ELSEWHERE:
            yield f"{field}: {vary.key} cannot be varied: {_SET_ELSEWHERE[vary.key]}"


def _keys(table: Mapping[str, Any]) -> list[str]:
    return [key for key, _ in flatten(table)]


def _twice(values: Sequence[Any]) -> list[Any]:
    return [value for value in dict.fromkeys(values) if values.count(value) > 1]

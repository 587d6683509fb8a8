"""What is wrong with an experiment beyond its single fields: every fault in a line of words."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lab.datasets.registry import KNOWN, known
from lab.paper import paper_results

if TYPE_CHECKING:
    from lab.experiment import Experiment

_SET_ELSEWHERE = {
    "name": "the experiment's own is used",
    "seed": "use seeds",
    "classes": "they are the data set's; use classes of [[data]] to take fewer",
    "rounds.count": "use rounds of the experiment or of [[data]]",
    "rounds.target_accuracy": "every federation runs all of its rounds; reach reports when an accuracy is exceeded",
    "rounds.patience": "every federation runs all of its rounds",
}


def faults_of(experiment: "Experiment") -> list[str]:
    """All of them; an experiment without any can be expanded."""
    return [*_missing(experiment), *_repeated(experiment), *_unknown(experiment), *_set_elsewhere(experiment)]


def _missing(experiment: "Experiment") -> Iterator[str]:
    wanted = {"federations": ("data", "methods"), "distribution": ("data",)}.get(experiment.kind, ())
    for name in wanted:
        if not getattr(experiment, name):
            yield f"{name}: at least one is needed"
    for method in experiment.methods:
        if "method.name" not in {*_keys(experiment.plan), *_keys({"method": method.method})}:
            yield f"methods: {method.label!r} names no method; use method = {{ name = … }}"
    for entry in experiment.data if experiment.kind == "distribution" else ():
        if not (entry.classes or known(entry.name).classes):
            yield f"data: say how many classes {entry.name} has; its images are not looked at"


def _repeated(experiment: "Experiment") -> Iterator[str]:
    small = experiment.small
    for label in _twice([method.label for method in experiment.methods]):
        yield f"methods: two have the label {label!r}"
    for field, seeds in (("seeds", experiment.seeds), ("small.seeds", small.seeds or ())):
        for seed in _twice(seeds):
            yield f"{field}: {seed} is there twice"
    for field, entries in (("data", experiment.data), ("small.data", small.data or ())):
        places = [
            (entry.title, clients, dh) for entry in entries for clients in set(entry.clients) for dh in set(entry.dh)
        ]
        for title in dict.fromkeys(title for title, _, _ in _twice(places)):
            # Results are told apart by these: two of one place would count as seeds of one.
            yield f"{field}: two are {title} with the same clients and DH; use two files, or [vary] for what differs"
        for entry in entries:
            for name in ("clients", "dh"):
                for value in _twice(getattr(entry, name)):
                    yield f"{field}: {entry.title} has {name} {value:g} twice"


def _unknown(experiment: "Experiment") -> Iterator[str]:
    entries = [*experiment.data, *(experiment.small.data or ())]
    varied = {value for vary in (experiment.vary, experiment.small.vary) if vary for value in vary.values}
    for method in experiment.methods:
        for value in method.vary or ():
            if value not in varied:
                yield f"methods: {method.label!r} is for {value!r}, which is no value of [vary]"
        for dh in method.dh or ():
            if all(dh not in entry.dh for entry in entries):
                yield f"methods: {method.label!r} is for DH {dh:g}, which no [[data]] has"
        for name in method.on:
            if all(name != entry.name for entry in entries):
                yield f"methods: {method.label!r} has settings on {name!r}, which no [[data]] is"
    tables = [name for name, rows in paper_results().items() if rows and "values" in rows[0]]
    if experiment.paper is not None and experiment.paper not in tables:
        yield f"paper: there is no {experiment.paper!r}; there are {', '.join(tables)}"
    for entry in entries:
        if entry.stands_for is not None and entry.stands_for not in KNOWN:
            yield f"data: {entry.title} stands for {entry.stands_for!r}, which is none of {', '.join(KNOWN)}"


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


def _keys(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def _twice(values: Sequence[Any]) -> list[Any]:
    return [value for value in dict.fromkeys(values) if values.count(value) > 1]

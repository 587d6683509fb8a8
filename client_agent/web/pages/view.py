"""The texts and figures of the page, from the body of `/info`. Pure functions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from client_agent.errors import Ending
from client_agent.status import Phase
from client_agent.web.pages.alerts import Alert, alerts
from shared.charts.formats import count, percent
from shared.contract.plan import FederationPlan

_MAX_ROWS = 30  # of models and classes; the charts and `status` have all
Info = Mapping[str, Any]

_PHASE_KINDS = {Phase.WAITING: "good", Phase.STARTING: "neutral", Phase.PAUSING: "warn", Phase.ENDED: "neutral"}
_OUTCOMES = {
    "pays-off": ("good", "joining pays off"),
    "no-difference": ("neutral", "no difference shown"),
    "better-alone": ("warn", "better alone"),
}


@dataclass(frozen=True)
class Empty:
    """What is shown instead of something that is not there yet."""

    title: str
    text: str
    command: str = ""


@dataclass(frozen=True)
class ModelRow:
    """A model that the gate decided about."""

    number: int
    candidate: str
    accuracy: float | None
    outcome: str
    is_served: bool
    is_kept: bool
    is_pinned: bool


@dataclass(frozen=True)
class Page:
    """The words of the page."""

    name: str
    federation: str
    activity: str
    activity_kind: str
    round: str
    progress: Mapping[str, int] | None
    coordinator: str
    coordinator_kind: str
    facts: Sequence[tuple[str, str, str]]
    alerts: Sequence[Alert]
    serving: Mapping[str, Any] | None
    serving_since: float | None
    members: str
    prior: str
    verdict: str
    verdict_kind: str
    verdict_word: str
    scores: Sequence[tuple[str, str, str]]
    no_verdict: Empty | None
    no_measurements: Empty | None
    no_offset: Empty
    offset_note: str
    drift: str
    drift_kind: str
    drift_word: str
    classes: Sequence[Mapping[str, Any]]
    classes_left_out: int
    models: Sequence[ModelRow]
    pinned: int | None
    may_pin: bool
    no_model: Empty
    no_details: Empty


def describe(info: Info, plan: FederationPlan, *, may_pin: bool) -> Page:
    """Return what the page says."""
    agent, serving, verdict = info["agent"], info["serving"], info["verdict"]
    coordinator, coordinator_kind = _coordinator(info)
    outcome = ("neutral", "") if verdict is None else _OUTCOMES[verdict["outcome"]]
    drift, drift_kind, drift_word = _drift(info["classes_here"])
    return Page(
        name=agent["name"],
        federation=info["federation"],
        activity=agent["doing"],
        activity_kind=_PHASE_KINDS.get(agent["phase"], "info"),
        round=_round(info, plan),
        progress=agent["progress"],
        coordinator=coordinator,
        coordinator_kind=coordinator_kind,
        facts=list(_facts(info, plan)),
        alerts=list(alerts(info)),
        serving=serving,
        serving_since=info["serving_since"],
        members=_members(serving),
        prior=_prior(serving),
        verdict=info["verdict_so_far"],
        verdict_kind=outcome[0],
        verdict_word=outcome[1],
        scores=list(_scores(info["scores"])),
        no_verdict=_no_verdict(info),
        no_measurements=_no_measurements(info),
        no_offset=_no_offset(info),
        offset_note="" if serving is None or serving["offset_digest"] else "What is served now does without it.",
        drift=drift,
        drift_kind=drift_kind,
        drift_word=drift_word,
        classes=info["classes"][:_MAX_ROWS],
        classes_left_out=max(0, len(info["classes"]) - _MAX_ROWS),
        models=_models(info),
        pinned=info["pinned"],
        may_pin=may_pin,
        no_details=_no_measurements(info)
        or Empty("Not known", "Older agents did not keep this; the next model has it."),
        no_model=Empty(
            "No model yet",
            "The agent serves the first model that the coordinator publishes. Its operator starts the federation with",
            f"distrans-server federation start {info['federation']}",
        ),
    )


def _round(info: Info, plan: FederationPlan) -> str:
    agent, total = info["agent"], plan.rounds.count
    if agent["ended"] or agent["outcome"]:
        return "over"
    newest = max((int(row["model"]) for row in info["history"]), default=None)
    number = agent["round"] if agent["phase"] in (Phase.TRAINING, Phase.UPLOADING) else newest
    return "none yet" if number is None else f"{number} of {total}"


def _coordinator(info: Info) -> tuple[str, str]:
    if info["agent"]["ended"] == Ending.LEFT:
        return "left", "neutral"
    reachable = info["coordinator"]["reachable"]
    if reachable is None:
        return "not asked yet", "neutral"
    return ("coordinator reachable", "good") if reachable else ("coordinator not reachable", "bad")


def _facts(info: Info, plan: FederationPlan) -> Iterator[tuple[str, str, str]]:
    held_out = info["held_out"]
    yield "Round", _round(info, plan), ""
    yield "Held-out images", "unknown" if held_out is None else count(_images(held_out)), _holdout_note(held_out)
    yield "Method", info["method"], ""
    yield "Device", info["agent"]["device"], ""
    yield "Coordinator", "reachable" if info["coordinator"]["reachable"] else "–", info["coordinator"]["address"]


def _images(held_out: Info) -> int:
    return int(held_out["validation"] + held_out["test"] if held_out["is_split"] else held_out["test"])


def _holdout_note(held_out: Info | None) -> str:
    if held_out is None:
        return "until the images have been opened"
    if not _images(held_out):
        return "nothing can be measured"
    if held_out["is_split"]:
        return f"{held_out['validation']} choose, {held_out['test']} test"
    return "too few to split"


def _members(serving: Info | None) -> str:
    if serving is None or len(serving["members"]) < 2:
        return ""
    parts = (f"{member['base']} × {member['weight']:.2f}" for member in serving["members"])
    return f"{', '.join(parts)}; weights of {serving['mixed']}"


def _prior(serving: Info | None) -> str:
    names = {"site": "this site's", "none": "the federation's", "deployment": "a deployment's"}
    return names.get("" if serving is None else serving["prior"], "not adjusted")


def _scores(scores: Info | None) -> Iterator[tuple[str, str, str]]:
    if scores is None:
        return
    for name, key in (("Served", "served"), ("This site alone", "alone"), ("Global model", "federation")):
        score = scores[key]
        if score is not None and score["accuracy"] is not None:
            interval = score["interval"]
            yield name, percent(score["accuracy"]), f"95 %: {percent(interval['low'])} to {percent(interval['high'])}"


def _no_measurements(info: Info) -> Empty | None:
    """Return why there is no accuracy yet; None if there is."""
    held_out = info["held_out"]
    if info["scores"] is not None:
        return None
    if held_out is not None and not _images(held_out):
        return Empty(
            "No held-out images",
            "Models are served without being measured. Put images into test/CLASS of the data folder, or list them as "
            "“test”, then restart the agent:",
            "distrans-agent run",
        )
    if info["serving"] is None:
        return Empty("Nothing measured yet", "The first model is measured as soon as it arrives.")
    return Empty(
        "Not measured",
        "The served model was not measured here: the agent runs with --no-train, or could not open its images. See",
        "distrans-agent status",
    )


def _no_verdict(info: Info) -> Empty | None:
    if info["verdict"] is not None:
        return None
    return _no_measurements(info) or Empty(
        "No verdict yet",
        "The served model is compared with one trained on this site's images only. That one is trained after the next "
        "round, unless the agent runs with --no-alone.",
    )


def _no_offset(info: Info) -> Empty:
    if info["serving"] is None:
        return Empty("No offset yet", "It comes with the first model.")
    return Empty("No offset", f"The method {info['method']} describes a site without one.")


def _drift(classes: Info) -> tuple[str, str, str]:
    predictions = sum(classes["predicted"].values())
    if classes["training"] is None:
        return "The training mix is unknown until the agent has opened its images.", "neutral", "unknown"
    if classes["distance"] is None:
        return f"{count(predictions)} predictions so far; from 30 on, they can be compared.", "neutral", "too few"
    distance = f"{percent(classes['distance'])} of the last {count(predictions)} predictions"
    if classes["drifts"]:
        text = f"{distance} would have to be of another class to match the training images. If the patients have not "
        return text + "changed, look at the images: device, protocol, resizing.", "warn", "drifts"
    return f"{distance} differ from the training mix, which chance or a few cases explain.", "good", "as trained"


def _models(info: Info) -> list[ModelRow]:
    kept, serving = set(info["kept_models"]), info["serving"]
    rows = {int(row["model"]): row for row in info["history"]}
    shown = sorted({*kept, *list(rows)[-_MAX_ROWS:]}, reverse=True)[: _MAX_ROWS + len(kept)]
    found = []
    for number in shown:
        row = rows.get(number)
        is_served = serving is not None and serving["round"] == number
        outcome = "" if row is None or row["served"] else row["reason"]
        found.append(
            ModelRow(
                number,
                "" if row is None else row["candidate"],
                None if row is None else row["test"],
                outcome,
                is_served,
                number in kept,
                number == info["pinned"],
            )
        )
    return found

"""The body of `/info`."""

import time
from collections.abc import Hashable
from typing import Any

from client_agent.coordinator.client import Coordinator
from client_agent.serving.class_mix import PredictedClasses, compare_mixes
from client_agent.serving.gate import ModelGate
from client_agent.serving.model import ServingModel
from client_agent.settings import Identity
from client_agent.state.folder import StateFolder
from client_agent.state.records import describe_findings
from client_agent.status import AgentStatus
from client_agent.web.responses import describe_model
from shared import __version__
from shared.learning.runtime import Runtime


def describe_agent(
    state: StateFolder,
    identity: Identity,
    runtime: Runtime,
    gate: ModelGate,
    status: AgentStatus,
    coordinator: Coordinator | None,
    predicted: PredictedClasses | None = None,
) -> dict[str, Any]:
    """Return the agent's status, its coordinator, the served model, and what each model scored here."""
    model, report, progress = gate.served, status.report, status.progress
    return {
        "agent": {
            "name": identity.name,
            "version": __version__,
            "device": str(runtime.device),
            "phase": status.activity.phase,
            "doing": str(status.activity),
            "round": status.activity.number,
            "progress": None if progress is None else {"batch": progress.batch, "batches": progress.batches},
            "trouble": " ".join(trouble.message for trouble in report.troubles),
            "troubles": [trouble.model_dump() for trouble in report.troubles],
            "ended": report.ended,
            "outcome": report.outcome,
        },
        "federation": identity.federation,
        "coordinator": {
            "address": identity.connection.server,
            "reachable": None if coordinator is None else coordinator.reachable,
            "problem": "" if coordinator is None else coordinator.problem,
        },
        "bytes": {
            "sent": 0 if coordinator is None else coordinator.bytes_sent,
            "received": 0 if coordinator is None else coordinator.bytes_received,
        },
        "method": identity.plan.method.name,
        "serving": None if model is None else describe_model(model).model_dump(exclude={"federation"}),
        "serving_since": None if model is None or report.serving is None else report.serving.since,
        "held_out": None if report.holdout is None else report.holdout.model_dump(),
        **describe_findings(None if model is None else state.models.report(model.key, model.record)),
        "pinned": state.models.pinned(),
        "kept_models": state.models.numbers(),
        "classes_here": describe_classes(identity.plan.classes, model, predicted or PredictedClasses()),
        "history": [line.row() for line in state.models.history()],
        "time": time.time(),
    }


def describe_classes(
    classes: tuple[str, ...], model: ServingModel | None, predicted: PredictedClasses
) -> dict[str, Any]:
    """Return how often each class was trained on and recently predicted; classes with neither are left out."""
    recent = predicted.recent()
    trained = None if model is None else model.counts.site
    drift = None
    if trained is not None:
        drift = compare_mixes(trained, [recent.get(place, 0) for place in range(len(classes))])
    return {
        "training": None
        if trained is None
        else {name: count for name, count in zip(classes, trained, strict=True) if count},
        "predicted": {classes[place]: count for place, count in sorted(recent.items())},
        "distance": None if drift is None else drift.distance,
        "drifts": False if drift is None else drift.is_notable,
    }


def agent_version(
    state: StateFolder, gate: ModelGate, status: AgentStatus, coordinator: Coordinator | None, predicted: int
) -> Hashable:
    """Return a value that differs when the body of `/info` does, apart from its time and bytes. Reads no file."""
    model = gate.served
    return (
        status.revision,
        status.progress,
        None if model is None else (model.key, model.record),
        state.models.version(),
        None if coordinator is None else (coordinator.reachable, coordinator.problem),
        predicted,
    )

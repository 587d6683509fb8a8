"""The body of `/info`."""

import time
from typing import Any

from client_agent.coordinator.client import Coordinator
from client_agent.serving.gate import ModelGate
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
) -> dict[str, Any]:
    """Return the agent's status, its coordinator, the served model, and what each model scored here."""
    model, report = gate.served, status.report
    return {
        "agent": {
            "name": identity.name,
            "version": __version__,
            "device": str(runtime.device),
            "phase": status.activity.phase,
            "doing": str(status.activity),
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
        "held_out": None if report.holdout is None else report.holdout.model_dump(),
        **describe_findings(None if model is None else state.models.report(model.key, model.record)),
        "pinned": state.models.pinned(),
        "kept_models": state.models.numbers(),
        "history": [line.row() for line in state.models.history()],
        "time": time.time(),
    }

"""What an agent says about itself on `/info`."""

import time
from typing import Any

from client_agent.condition import Condition
from client_agent.coordinator import Coordinator
from client_agent.model_gate import ModelGate
from client_agent.settings import Identity
from client_agent.state import StateFolder
from shared import __version__
from shared.runtime import Runtime


def describe_agent(
    state: StateFolder,
    identity: Identity,
    runtime: Runtime,
    gate: ModelGate,
    condition: Condition,
    coordinator: Coordinator | None,
) -> dict[str, Any]:
    """The agent, its coordinator, the served model, and what each model scored here."""
    model, report = gate.served, condition.report
    return {
        "agent": {
            "name": identity.name,
            "version": __version__,
            "device": str(runtime.device),
            "phase": condition.activity.phase,
            "doing": str(condition.activity),
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
        "serving": None
        if model is None
        else {"round": model.number, "digest": model.digest, "offset_digest": model.offset_digest},
        "pinned": state.pinned(),
        "kept_models": state.bundle_numbers(),
        "history": [line.row() for line in state.history()],
        "time": time.time(),
    }

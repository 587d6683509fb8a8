"""The body of `/info`."""

import threading
from pathlib import Path

from client_agent.coordinator.client import Coordinator
from client_agent.coordinator.connection import open_http
from client_agent.serving.gate import ModelGate
from client_agent.settings import Identity, RunOptions
from client_agent.state.decisions import GateDecision
from client_agent.state.folder import StateFolder
from client_agent.status import AgentStatus
from client_agent.web.info import describe_agent
from shared.contract.measurements import Evaluation
from shared.contract.plan import validate_plan
from shared.http.client_connection import Connection
from shared.learning.runtime import Runtime


def score(correct: int) -> Evaluation:
    return Evaluation(samples=100, correct=correct, loss_sum=1.0)


def test_info_reports_what_each_model_scored(tmp_path: Path) -> None:
    state = StateFolder(tmp_path)
    plan = validate_plan({"name": "pets", "classes": ["cat", "dog"], "image": {"height": 16, "width": 16}})
    connection = Connection(server="http://127.0.0.1:9")
    state.create(
        Identity(client_id="1", name="north", token="t", federation="pets", plan=plan, connection=connection, data="x")
    )
    state.models.add_decision(GateDecision(model=1, with_offset=score(91), without_offset=score(80), local=score(85)))
    identity, runtime = state.identity(), Runtime()
    gate, status = ModelGate(state, identity, runtime, RunOptions(), None), AgentStatus()
    with open_http(connection) as http:
        coordinator = Coordinator(http, threading.Event())
        info = describe_agent(state, identity, runtime, gate, status, coordinator)
    assert info["history"] == [
        {
            "model": 1,
            "with_offset": 0.91,
            "without_offset": 0.8,
            "local": 0.85,
            "candidate": "",
            "validation": None,
            "test": None,
            "served": True,
            "reason": "",
        }
    ]
    assert info["serving"] is None
    assert (info["agent"]["name"], info["agent"]["trouble"]) == ("north", "")


def test_info_is_complete_before_the_coordinator_was_reached(tmp_path: Path) -> None:
    state = StateFolder(tmp_path)
    plan = validate_plan({"name": "pets", "classes": ["cat", "dog"], "image": {"height": 16, "width": 16}})
    connection = Connection(server="http://127.0.0.1:9")
    identity = Identity(
        client_id="1", name="north", token="t", federation="pets", plan=plan, connection=connection, data="x"
    )
    gate = ModelGate(state, identity, Runtime(), RunOptions(), None)
    info = describe_agent(state, identity, Runtime(), gate, AgentStatus(), None)
    assert info["coordinator"] == {"address": "http://127.0.0.1:9", "reachable": None, "problem": ""}
    assert info["bytes"] == {"sent": 0, "received": 0}

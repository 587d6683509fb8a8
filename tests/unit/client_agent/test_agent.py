"""What an agent tells about itself."""

import threading
from pathlib import Path

from rich.console import Console

from client_agent.agent import Agent, Parts
from client_agent.condition import Condition
from client_agent.coordinator import Coordinator
from client_agent.data import SiteData
from client_agent.history import HistoryLine
from client_agent.model_gate import ModelGate
from client_agent.network import open_http
from client_agent.settings import Identity, RunOptions
from client_agent.state import StateFolder
from shared.evaluation import Evaluation
from shared.http.connection import Connection
from shared.plan import validate_plan
from shared.runtime import Runtime


def score(correct: int) -> Evaluation:
    return Evaluation(samples=100, correct=correct, loss_sum=1.0)


def test_info_tells_what_each_model_scored(tmp_path: Path) -> None:
    state = StateFolder(tmp_path)
    plan = validate_plan({"name": "pets", "classes": ["cat", "dog"], "image": {"height": 16, "width": 16}})
    connection = Connection(server="http://127.0.0.1:9")
    state.create(
        Identity(client_id="1", name="north", token="t", federation="pets", plan=plan, connection=connection, data="x")
    )
    state.add_history(HistoryLine(model=1, with_offset=score(91), without_offset=score(80), local=score(85)))
    identity, options, stopping = state.identity(), RunOptions(), threading.Event()
    gate, condition = ModelGate(state, identity, Runtime(), options, None), Condition()

    def no_data() -> SiteData:
        raise AssertionError

    with open_http(connection) as http:
        connected = Coordinator(http, stopping)
        agent = Agent(
            Parts(state, identity, options, Runtime(), gate, condition, Console(), stopping, lambda: connected, no_data)
        )
        info = agent.info()
    assert info["history"] == [
        {"model": 1, "with_offset": 0.91, "without_offset": 0.8, "local": 0.85, "served": True, "reason": ""}
    ]
    assert info["serving"] is None
    assert (info["agent"]["name"], info["agent"]["trouble"]) == ("north", "")

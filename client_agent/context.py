"""The context of the agent's loop."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console

from client_agent.coordinator.client import Coordinator
from client_agent.data.dataset import SiteData
from client_agent.serving.gate import ModelGate
from client_agent.settings import Identity, RunOptions
from client_agent.state.folder import StateFolder
from client_agent.status import AgentStatus
from shared.learning.runtime import Runtime


@dataclass(frozen=True)
class AgentContext:
    """What the loop needs; `connect` and `open_data` may fail and are then tried again."""

    state: StateFolder
    identity: Identity
    options: RunOptions
    runtime: Runtime
    gate: ModelGate
    status: AgentStatus
    console: Console
    stopping: threading.Event
    connect: Callable[[], Coordinator]
    open_data: Callable[[], SiteData]

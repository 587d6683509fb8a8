"""State folders of agents that have joined, with small models."""

from pathlib import Path

import torch

from client_agent.settings import Identity
from client_agent.state.decisions import GateDecision
from client_agent.state.folder import StateFolder
from client_agent.state.kept_models import Bundle
from shared.contract.plan import validate_plan
from shared.http.client_connection import Connection


def new_state(path: Path) -> StateFolder:
    """Create the folder of a site that has joined."""
    folder = StateFolder(path)
    plan = validate_plan({"name": "pets", "classes": ["cat", "dog"]})
    folder.create(
        Identity(
            client_id="1", name="north", token="secret", federation="pets", plan=plan,
            connection=Connection(server="http://127.0.0.1"), data="sklearn:digits",
        )
    )  # fmt: skip
    return folder


def bundle(number: int, value: float = 0.0) -> Bundle:
    """Return a model with three weights."""
    one = {"w": torch.full((3,), value)}
    return Bundle(number, f"digest-{number}", one, {"offset": torch.ones(2)}, {}, {"offset_aggregation": "mean"})


def approve(state: StateFolder, number: int, *, approved: bool = True) -> None:
    """Record the gate's decision about a model."""
    state.models.add_decision(
        GateDecision(
            model=number,
            digest=f"digest-{number}",
            fingerprint=bundle(number).fingerprint,
            with_offset=None,
            without_offset=None,
            served=approved,
        )
    )

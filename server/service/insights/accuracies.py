"""Accuracy and loss over rounds: pooled, and of each site."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json
from sqlalchemy import func, select

from server.service.context import Context
from server.service.queries import load_federation
from server.store.tables import Client, Evaluation, Model

MOST_MODELS = 120
_LEAST_MODELS = 40
_MOST_ROWS = 20_000


@dataclass(frozen=True)
class History:
    """What models scored, by their numbers. Of many models, some are left out; the newest is always there."""

    numbers: Sequence[int]
    models: int  # in all
    accuracy: Mapping[int, float]
    loss: Mapping[int, float]
    sites: Mapping[str, Mapping[int, float]]  # accuracy by site and model


def history(ctx: Context, name: str) -> History:
    """Return the accuracies of at most MOST_MODELS models, evenly spaced."""
    with ctx.db.read() as session:
        federation = load_federation(session, name)
        clients = session.execute(select(func.count()).where(Client.federation_id == federation.id)).scalar_one()
        most = max(_LEAST_MODELS, min(MOST_MODELS, _MOST_ROWS // max(1, clients)))
        models = select(Model.number).where(Model.federation_id == federation.id).order_by(Model.number)
        existing = list(session.execute(models).scalars())
        step = -(-len(existing) // most)
        numbers = existing[::-1][::step][::-1]
        query = select(Evaluation.model_number, Evaluation.result, Client.name, Client.counted)
        query = query.join(Client, Client.id == Evaluation.client_id).where(
            Evaluation.federation_id == federation.id, Evaluation.model_number.in_(numbers)
        )
        rows = session.execute(query).all()
    correct, samples, losses = defaultdict[int, int](int), defaultdict[int, int](int), defaultdict[int, float](float)
    sites: dict[str, dict[int, float]] = defaultdict(dict)
    for number, text, client, counted in rows:
        score = read_score(text)
        if score is None:
            continue
        sites[client][number] = score.accuracy
        if counted:
            correct[number] += score.correct
            samples[number] += score.samples
            losses[number] += score.loss_sum
    return History(
        numbers=numbers,
        models=len(existing),
        accuracy={number: correct[number] / samples[number] for number in numbers if samples[number]},
        loss={number: losses[number] / samples[number] for number in numbers if samples[number]},
        sites=sites,
    )


@dataclass(frozen=True)
class Score:
    """The counts of one evaluation."""

    samples: int
    correct: int
    loss_sum: float

    @property
    def accuracy(self) -> float:
        """The share of right answers."""
        return self.correct / self.samples


def read_score(text: str) -> Score | None:
    """Return the counts of a stored evaluation; None without images, or for impossible numbers of older releases.

    Reads three fields only: validating thousands of reports again would take most of a page's time.
    """
    fields: dict[str, Any] = from_json(text)
    samples, correct, loss_sum = (fields.get(name, 0) for name in ("samples", "correct", "loss_sum"))
    return Score(samples, correct, loss_sum) if samples > 0 and 0 <= correct <= samples else None

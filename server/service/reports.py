"""History and heterogeneity, as the operator sees them or cut down to what one client may see."""

import json
from collections.abc import Callable, Iterator
from typing import TypeVar

from sqlalchemy.orm import Session

from server.service import history
from server.service.context import Context, plan_of
from server.service.federations import load, roster, summarise
from server.service.history import RoundRecord
from shared.heterogeneity import class_embeddings
from shared.schemas import HeterogeneityView, RoundView

T = TypeVar("T")


def rounds(ctx: Context, name: str, only_client: str | None, after: int, limit: int) -> list[RoundView]:
    """The rounds after a number, oldest first, each with the measurements of the model that it made."""
    return [view for page in round_pages(ctx, name, only_client, after, limit) for view in page]


def round_pages(ctx: Context, name: str, only_client: str | None, after: int, limit: int) -> Iterator[list[RoundView]]:
    """The same, a page in memory at a time and a short transaction for each."""
    operator = only_client is None

    def view(session: Session, record: RoundRecord) -> RoundView:
        shown = {record.names[key]: history.describe_evaluation(value) for key, value in record.evaluations.items()}
        pooled = record.pooled if operator else None
        summary = summarise(session, ctx, record.round, (record.participants, record.landed), for_operator=operator)
        return RoundView(
            **summary.model_dump(),
            uploads=record.updates,
            missing=record.missing,
            evaluation=history.describe_evaluation(pooled) if pooled is not None and pooled.samples else None,
            client_evaluations=shown,
        )

    return _paged(ctx, name, only_client, after, limit, lambda session, found: [view(session, row) for row in found])


def metrics_csv(ctx: Context, name: str, only_client: str | None) -> Iterator[str]:
    """One row per round and client, as CSV, in pages like those of `round_pages`."""
    header = history.csv_text([], header=True)
    for page in _paged(ctx, name, only_client, 0, None, lambda _, found: history.csv_text(found, only_client)):
        yield header + page
        header = ""
    if header:
        yield header


def _paged(
    ctx: Context,
    name: str,
    only_client: str | None,
    after: int,
    limit: int | None,
    read: Callable[[Session, list[RoundRecord]], T],
) -> Iterator[T]:
    """What `read` makes of each page. Rounds are only ever added, so pages of different moments fit together."""
    while limit is None or limit > 0:
        with ctx.db.read() as session:
            federation = load(session, name)
            size = history.page_size(session, federation, only_client)
            size = size if limit is None else min(size, limit)
            found = history.records(session, federation, only_client, after, size)
            page = read(session, found)
        if found:
            yield page
        if len(found) < size:
            return
        after, limit = found[-1].round.number, None if limit is None else limit - size


def heterogeneity(ctx: Context, name: str, only_client: str | None) -> HeterogeneityView:
    """DH, class counts and embeddings of the active clients."""
    with ctx.db.read() as session:
        federation = load(session, name)
        members = roster(session, federation)
        counts = {client.id: json.loads(client.class_counts) for client in members.clients}
        shares = class_embeddings(list(counts.values())).tolist() if counts else []
        shown = [
            (client, share)
            for client, share in zip(members.clients, shares, strict=True)
            if only_client in (None, client.id)
        ]
        return HeterogeneityView(
            dh=members.dh,
            classes=list(plan_of(federation.plan).classes),
            clients={client.name: counts[client.id] for client, _ in shown},
            embeddings={client.name: share for client, share in shown},
        )

"""Views of rounds and heterogeneity, for the operator or reduced to what one client may see."""

import json
from collections.abc import Iterator

from sqlalchemy.orm import Session

from server.service.context import Context, plan_of
from server.service.federations import active_members, summarize_round
from server.service.measurements.history import RoundRecord, Selection, pages
from server.service.measurements.pooling import describe_evaluation
from server.service.queries import load_federation
from shared.contract.messages import HeterogeneityView, RoundView
from shared.learning.heterogeneity import class_embeddings


def rounds(ctx: Context, name: str, only_client: str | None, after: int, limit: int) -> list[RoundView]:
    """Return the rounds after a number, oldest first, each with the measurements of its result."""
    return [view for page in round_pages(ctx, name, only_client, after, limit) for view in page]


def round_pages(ctx: Context, name: str, only_client: str | None, after: int, limit: int) -> Iterator[list[RoundView]]:
    """Yield what `rounds` returns, page by page."""
    is_operator = only_client is None

    def view(session: Session, record: RoundRecord) -> RoundView:
        shown = {record.names[key]: describe_evaluation(value) for key, value in record.evaluations.items()}
        pooled = record.pooled if is_operator else None
        summary = summarize_round(
            session, ctx, record.round, (record.participants, record.landed), for_operator=is_operator
        )
        return RoundView(
            **summary.model_dump(),
            uploads=record.updates,
            missing=record.missing,
            evaluation=describe_evaluation(pooled) if pooled is not None and pooled.samples else None,
            client_evaluations=shown,
        )

    wanted = Selection(name, only_client, after, limit)
    return pages(ctx, wanted, lambda session, found: [view(session, record) for record in found])


def heterogeneity(ctx: Context, name: str, only_client: str | None) -> HeterogeneityView:
    """Return DH, class counts and embeddings of the active clients."""
    with ctx.db.read() as session:
        federation = load_federation(session, name)
        members = active_members(session, federation)
        counts = {client.id: json.loads(client.class_counts) for client in members.clients}
        told = [client for client in members.clients if any(counts[client.id])]
        withheld = [client for client in members.clients if client not in told and only_client in (None, client.id)]
        shares = class_embeddings([counts[client.id] for client in told]).tolist() if told else []
        shown = [
            (client, share) for client, share in zip(told, shares, strict=True) if only_client in (None, client.id)
        ]
        return HeterogeneityView(
            dh=members.dh,
            classes=list(plan_of(federation.plan).classes),
            clients={client.name: counts[client.id] for client, _ in shown},
            embeddings={client.name: share for client, share in shown},
            withheld=[client.name for client in withheld],
        )

"""History and heterogeneity, as the operator sees them or cut down to what one client may see."""

import json

from sqlalchemy import select

from server.service import history
from server.service.context import Context, plan_of
from server.service.federations import load, roster, summarise
from server.store.tables import Client, Round
from shared.heterogeneity import class_embeddings
from shared.schemas import HeterogeneityView, RoundView


def rounds(ctx: Context, name: str, only_client: str | None, after: int, limit: int) -> list[RoundView]:
    """The rounds after a number, oldest first, each with the measurements of the model that it made."""
    with ctx.db.read() as session:
        federation = load(session, name)
        query = select(Round).where(Round.federation_id == federation.id, Round.number > after)
        names = {
            client.id: client.name
            for client in session.execute(select(Client).where(Client.federation_id == federation.id)).scalars()
        }
        views = []
        for round_ in session.execute(query.order_by(Round.number).limit(limit)).scalars().all():
            measured = history.evaluations(session, federation, round_.number)
            pooled = history.pooled(session, federation, round_.number)
            shown = {key: value for key, value in measured.items() if only_client in (None, key)}
            views.append(
                RoundView(
                    **summarise(session, ctx, round_, for_operator=only_client is None).model_dump(),
                    uploads=history.updates(session, round_, only_client),
                    evaluation=history.describe_evaluation(pooled) if pooled.samples and not only_client else None,
                    client_evaluations={names[key]: history.describe_evaluation(value) for key, value in shown.items()},
                )
            )
        return views


def metrics_csv(ctx: Context, name: str, only_client: str | None) -> str:
    """One row a round and client."""
    with ctx.db.read() as session:
        return history.metrics_csv(session, load(session, name), only_client)


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

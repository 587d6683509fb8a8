"""Clients of a federation: list them, change their records, and end their access."""

import json

from sqlalchemy import select
from sqlalchemy.orm import Session

from server.core.lifecycle import ENDED
from server.service.audit import limit_changes, record_action
from server.service.best_model import exclude_measurements
from server.service.context import Actor, Context, Identity, notify_agents, plan_of
from server.service.enrollment import ordered_counts
from server.service.queries import find_client_id, load_federation
from server.service.tasks import pause_key
from server.service.transitions import advance
from server.store.database import LOCK, after_commit
from server.store.tables import Client, Federation
from shared.contract.messages import ClientView


def clients_of(ctx: Context, federation_name: str, only_client: str | None = None) -> list[ClientView]:
    """List the clients of a federation, or just the one that asks."""
    with ctx.db.read() as session:
        federation = load_federation(session, federation_name)
        query = select(Client).where(Client.federation_id == federation.id).order_by(Client.name, Client.joined_at)
        if only_client is not None:
            query = query.where(Client.id == only_client)
        return [_view(session, client) for client in session.execute(query).scalars()]


def own_record(ctx: Context, identity: Identity) -> ClientView:
    """Return the client's own record."""
    with ctx.db.read() as session:
        return _view(session, session.get_one(Client, identity.client_id))


def _view(session: Session, client: Client) -> ClientView:
    federation = session.get_one(Federation, client.federation_id)
    counts = dict(zip(plan_of(federation.plan).classes, json.loads(client.class_counts), strict=True))
    withholds = not any(counts.values())
    return ClientView(
        id=client.id,
        name=client.name,
        state=client.state,
        federation=federation.name,
        class_counts={} if withholds else counts,
        held_out_images=client.held_out_images,
        agent_version=client.agent_version,
        device=client.device,
        joined_at=client.joined_at,
        last_seen_at=client.last_seen_at,
        activity=client.activity,
        activity_detail=client.activity_detail,
        troubles=json.loads(client.troubles),
        status_at=client.status_at,
    )


def update_counts(
    ctx: Context, identity: Identity, actor: Actor, counts: dict[str, int], held_out_images: int | None = None
) -> ClientView:
    """Register new class counts, used from the next round on, and the number of held-out images if given.

    The same numbers again change nothing.
    """
    with ctx.db.read() as session:
        client = session.get_one(Client, identity.client_id)
        federation = session.get_one(Federation, client.federation_id)
        ordered = ordered_counts(federation, counts)
        held_out = client.held_out_images if held_out_images is None else held_out_images
        if (client.class_counts, client.held_out_images) == (ordered, held_out):
            return _view(session, client)
    with ctx.db.write() as session:
        client = session.get_one(Client, identity.client_id, with_for_update=LOCK)
        limit_changes(session, ctx, actor, federation.name)
        client.class_counts, client.held_out_images = ordered, held_out
        record_action(session, ctx, actor, "client.update", federation.name)
        waiting = pause_key(federation.id)  # told of the new totals, but not woken for them
        after_commit(session, lambda _db: ctx.answers.forget(waiting))
        return _view(session, client)


def leave(ctx: Context, identity: Identity, actor: Actor) -> None:
    """End the client's access at its own request. Its uploads still count; rounds no longer wait for it."""
    _end(ctx, actor, identity.client_id, "left", "client.leave")


def revoke(ctx: Context, actor: Actor, federation_name: str, client: str) -> None:
    """End the access of a client, given by name or id. Idempotent."""
    with ctx.db.read() as session:
        client_id = find_client_id(session, load_federation(session, federation_name), client)
    _end(ctx, actor, client_id, "revoked", "client.revoke")


def _end(ctx: Context, actor: Actor, client_id: str, state: str, action: str) -> None:
    with ctx.db.write() as session:
        federation_id = session.get_one(Client, client_id).federation_id
        federation = session.get_one(Federation, federation_id, with_for_update=LOCK)  # always before its clients
        client = session.get_one(Client, client_id, with_for_update=LOCK, populate_existing=True)
        if client.state != "active":
            return
        client.state = state
        if state == "revoked" or federation.state not in ENDED:  # sites may leave once it has ended
            exclude_measurements(session, federation, client)
        notify_agents(federation)  # ends the client's long poll
        record_action(session, ctx, actor, action, federation.name, client=client.name)
        advance(session, ctx, federation)

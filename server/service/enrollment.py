"""Joining a federation with an invite."""

import json
import uuid
from dataclasses import replace

from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from server.core.errors import Conflict, InvalidInput, short_list
from server.service import token_format
from server.service.audit import record_action
from server.service.context import Actor, Context, dump_context, plan_of, round_context
from server.service.invites import check_invite, require_not_ended, require_same_attempt
from server.service.queries import round_under_way
from server.service.tasks import pause_key
from server.service.transitions import advance
from server.service.uptime import uptime
from server.store.database import LOCK, after_commit
from server.store.tables import Client, Federation, Invite
from shared.contract.limits import MAX_IMAGES
from shared.contract.messages import FederationPlanAnswer, JoinAnswer, JoinRequest


def preview(ctx: Context, invite_token: str, attempt: str | None = None) -> FederationPlanAnswer:
    """Return the plan behind an invite, so that a site can check its data first. Does not use up the invite."""
    with ctx.db.read() as session:
        _, federation, client = check_invite(session, ctx, invite_token)
        require_same_attempt(client, attempt)
        return FederationPlanAnswer(federation=federation.name, plan=plan_of(federation.plan))


def join(
    ctx: Context, invite_token: str, request: JoinRequest, address: str = "", certificate: str | None = None
) -> JoinAnswer:
    """Enroll a site and use up the invite. A certificate the site presents is bound to the client.

    Until the client first authenticates, the same attempt with the same invite updates its record and gets a new token:
    the answer to the first request may have been lost.
    """
    try:
        with ctx.db.write() as session:
            found, federation, client = _lock_invite(session, ctx, invite_token)
            require_same_attempt(client, request.attempt)
            require_not_ended(federation)
            counts, is_repeat = ordered_counts(federation, request.class_counts), client is not None
            heard_uptime = uptime(session)
            if client is None:
                client = _new_client(ctx, federation, request.attempt)
                session.add(client)
            elif client.name != request.name:
                _rename_in_open_round(session, federation, client.name, request.name)
            token = token_format.new_token("client", client.id)
            client.name, client.token_hash, client.certificate = request.name, token.hash, certificate
            client.class_counts, client.held_out_images = counts, request.held_out_images
            client.agent_version, client.device = request.agent_version, request.device
            client.last_seen_at, client.heard_uptime = ctx.clock(), heard_uptime
            session.flush()
            found.used_at, found.used_by = found.used_at or ctx.clock(), client.id
            detail = {"id": client.id} | ({"repeated": True} if is_repeat else {})
            record_action(
                session, ctx, Actor(f"client:{request.name}", address), "client.join", federation.name, **detail
            )
            advance(session, ctx, federation)
            # The clients that wait are told of the new totals, but not woken for them.
            waiting = pause_key(federation.id)
            after_commit(session, lambda _db: ctx.answers.forget(waiting))
            return JoinAnswer(
                client_id=client.id, token=token.text, federation=federation.name, plan=plan_of(federation.plan)
            )
    except IntegrityError as error:
        raise Conflict(
            "client-name-taken",
            f"An active client is already called {request.name!r}.",
            next_step="Choose another --name, or ask the operator to revoke the old client.",
        ) from error


def _lock_invite(session: Session, ctx: Context, text: str) -> tuple[Invite, Federation, Client | None]:
    """Return what `check_invite` does, checked again once all rows are locked, the federation before its client.

    The federation may have been deleted, or the client revoked, while this waited for the locks.
    """
    _, federation, client = check_invite(session, ctx, text)
    for row in filter(None, (federation, client)):
        session.refresh(row, with_for_update=LOCK)
    return check_invite(session, ctx, text)


def _new_client(ctx: Context, federation: Federation, attempt: str | None) -> Client:
    """Return a client without the fields that its site provides."""
    return Client(
        id=uuid.uuid4().hex,
        federation_id=federation.id,
        attempt_hash=None if attempt is None else token_format.hash_secret(attempt),
        state="active",
        joined_at=ctx.clock(),
    )


def _rename_in_open_round(session: Session, federation: Federation, old: str, new: str) -> None:
    """Update the roster of a round that opened between two attempts of one join; the client has uploaded nothing."""
    round_ = round_under_way(session, federation)
    if round_ is not None:
        context = round_context(round_)
        roster = [replace(client, id=new) if client.id == old else client for client in context.roster]
        round_.roster = dump_context(replace(context, roster=roster))["roster"]


def ordered_counts(federation: Federation, counts: dict[str, int]) -> str:
    """Return class counts as stored, in the order of the plan's classes; raise InvalidInput if they do not fit.

    A site that withholds its counts is stored with zeros, which no other site has.
    """
    plan = plan_of(federation.plan)
    classes = plan.classes
    if not counts and plan.counts_needed_by:
        raise InvalidInput(
            "counts-required",
            f"Sites cannot withhold their class counts in this federation: {plan.counts_needed_by} needs them.",
            next_step="Send class_counts; with the agent, join without --withhold-class-counts.",
        )
    unknown = sorted(set(counts) - set(classes))
    if unknown:
        raise InvalidInput(
            "unknown-class",
            f"The plan has no class {short_list([repr(name) for name in unknown], 5)}.",
            next_step=f"Its classes are {short_list(classes, 20)}.",
        )
    ordered = [counts.get(name, 0) for name in classes]
    if counts and not sum(ordered):
        raise InvalidInput("no-data", "A client needs at least one training image.")
    if sum(ordered) > MAX_IMAGES:
        raise InvalidInput("too-much-data", f"{sum(ordered)} training images exceed the limit of {MAX_IMAGES}.")
    return json.dumps(ordered, separators=(",", ":"))

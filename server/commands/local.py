"""The coordinator as commands without --server see it: its database."""

from collections.abc import Iterable
from pathlib import Path

from typing_extensions import override

from server.commands.coordinator import Coordinator
from server.service import audit, client_tokens, clients, deletion, federations, invites, rollback
from server.service.context import Actor, Context
from server.service.measurements import reports
from shared.contract.messages import (
    AuditView,
    ClientView,
    FederationView,
    InviteAnswer,
    InviteView,
    RoundView,
    TokenAnswer,
)
from shared.contract.plan import FederationPlan


class LocalCoordinator(Coordinator):
    """Calls the use cases on the database."""

    def __init__(self, ctx: Context, actor: Actor) -> None:
        self._ctx, self._actor = ctx, actor

    @override
    def now(self) -> float:
        return self._ctx.clock()

    @override
    def create(self, plan: FederationPlan, weights: Path | None) -> None:
        federations.create(self._ctx, self._actor, plan, weights)

    @override
    def federations(self) -> list[FederationView]:
        return federations.list_all(self._ctx)

    @override
    def federation(self, name: str) -> FederationView:
        return federations.show(self._ctx, name)

    @override
    def clients(self, name: str) -> list[ClientView]:
        return clients.clients_of(self._ctx, name)

    @override
    def rounds(self, name: str, after: int, limit: int) -> list[RoundView]:
        return reports.rounds(self._ctx, name, None, after, limit)

    @override
    def change(self, name: str, action: str) -> FederationView:
        getattr(federations, action)(self._ctx, self._actor, name)
        return federations.show(self._ctx, name)

    @override
    def rollback(self, name: str, to: int) -> FederationView:
        rollback.roll_back(self._ctx, self._actor, name, to)
        return federations.show(self._ctx, name)

    @override
    def delete(self, name: str) -> None:
        deletion.delete_federation(self._ctx, self._actor, name, name)
        deletion.finish(self._ctx)  # in case no coordinator is running

    @override
    def invite(self, name: str, expires_in_s: float, note: str) -> InviteAnswer:
        return invites.create(self._ctx, self._actor, name, expires_in_s, note)

    @override
    def invites(self, name: str) -> list[InviteView]:
        return invites.invites_of(self._ctx, name)

    @override
    def revoke_invite(self, name: str, invite: str) -> None:
        invites.revoke(self._ctx, self._actor, name, invite)

    @override
    def revoke_client(self, name: str, client: str) -> None:
        clients.revoke(self._ctx, self._actor, name, client)

    @override
    def rotate_client(self, name: str, client: str) -> TokenAnswer:
        return client_tokens.rotate(self._ctx, self._actor, name, client)

    @override
    def audit(self, federation: str | None = None) -> Iterable[AuditView]:
        return audit.all_entries(self._ctx, federation)

"""What commands need from a coordinator; `local` implements it on the database, `remote` on the REST API."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
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


class Coordinator(Protocol):
    """The operator's view of a coordinator. Errors are DistransErrors with the same codes and messages everywhere."""

    def now(self) -> float:
        """Return the coordinator's time."""

    def create(self, plan: "FederationPlan", weights: Path | None) -> None:
        """Create a federation."""

    def federations(self) -> "list[FederationView]":
        """Return all federations."""

    def federation(self, name: str) -> "FederationView":
        """Return one federation with its plan."""

    def clients(self, name: str) -> "list[ClientView]":
        """Return the clients of a federation."""

    def rounds(self, name: str, after: int, limit: int) -> "list[RoundView]":
        """Return up to `limit` rounds with a number above `after`, oldest first."""

    def change(self, name: str, action: str) -> "FederationView":
        """Start, pause, resume or cancel a federation, as `action` says; return it."""

    def rollback(self, name: str, to: int) -> "FederationView":
        """Publish an older model again; return the federation."""

    def delete(self, name: str) -> None:
        """Delete a federation."""

    def invite(self, name: str, expires_in_s: float, note: str) -> "InviteAnswer":
        """Create an invite."""

    def invites(self, name: str) -> "list[InviteView]":
        """Return the invites of a federation."""

    def revoke_invite(self, name: str, invite: str) -> None:
        """Revoke an unused invite."""

    def revoke_client(self, name: str, client: str) -> None:
        """Revoke a client's access."""

    def rotate_client(self, name: str, client: str) -> "TokenAnswer":
        """Return a new token for a client."""

    def audit(self, federation: str | None = None) -> "Iterable[AuditView]":
        """Return the audit log, oldest entry first."""

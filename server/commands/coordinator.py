"""What a command can do with a coordinator, wherever that is: `local` works on its database, `remote` on its API."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from shared.plan import FederationPlan
    from shared.schemas import (
        AuditView,
        ClientView,
        FederationView,
        InviteAnswer,
        InviteView,
        RoundView,
        TokenAnswer,
    )

CHANGES = ("start", "pause", "resume", "cancel")


class Coordinator(Protocol):
    """The operator's side of a coordinator. Errors are DistransErrors with the same codes and words everywhere."""

    def now(self) -> float:
        """The coordinator's time."""

    def create(self, plan: "FederationPlan", weights: Path | None) -> None:
        """Create a federation."""

    def federations(self) -> "list[FederationView]":
        """All federations."""

    def federation(self, name: str) -> "FederationView":
        """One federation with its plan."""

    def clients(self, name: str) -> "list[ClientView]":
        """The clients of a federation."""

    def rounds(self, name: str, after: int, limit: int) -> "list[RoundView]":
        """The rounds after a number, oldest first."""

    def change(self, name: str, action: str) -> "FederationView":
        """One of CHANGES; the federation as it is then."""

    def rollback(self, name: str, to: int) -> "FederationView":
        """Publish an older model again."""

    def delete(self, name: str) -> None:
        """Delete a federation."""

    def invite(self, name: str, expires_in_s: float, note: str) -> "InviteAnswer":
        """Create an invite."""

    def invites(self, name: str) -> "list[InviteView]":
        """The invites of a federation."""

    def revoke_invite(self, name: str, invite: str) -> None:
        """Revoke an unused invite."""

    def revoke_client(self, name: str, client: str) -> None:
        """End a client's access."""

    def rotate_client(self, name: str, client: str) -> "TokenAnswer":
        """A new token for a client."""

    def audit(self, federation: str | None = None) -> "Iterable[AuditView]":
        """The audit log, oldest first."""

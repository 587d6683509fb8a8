"""Bind clients to certificates."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from alembic.util import CommandError

revision: str = "0002"
down_revision: str | Sequence[str] | None = "0001"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    """Upgrade to this revision."""
    op.add_column("clients", sa.Column("certificate", sa.String(length=64), nullable=True))


def downgrade() -> None:
    """Undo it; refused while clients are bound to certificates, because then their tokens alone would suffice."""
    if count := op.get_bind().execute(sa.text("SELECT count(certificate) FROM clients")).scalar():
        raise CommandError(
            f"The downgrade would release {count} clients from their certificates. "
            "If that is intended, set clients.certificate to NULL, then downgrade again."
        )
    op.drop_column("clients", "certificate")

"""The certificate that a client is bound to."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0002"
down_revision: str | Sequence[str] | None = "0001"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    """Bring the schema up to this revision."""
    op.add_column("clients", sa.Column("certificate", sa.String(length=64), nullable=True))


def downgrade() -> None:
    """Take it back."""
    op.drop_column("clients", "certificate")

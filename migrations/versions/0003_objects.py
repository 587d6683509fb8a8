"""Chunks whose bytes are kept in an object store."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0003"
down_revision: str | Sequence[str] | None = "0002"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    """Bring the schema up to this revision."""
    op.add_column("blob_chunks", sa.Column("object_key", sa.String(length=80), nullable=True))


def downgrade() -> None:
    """Take it back; bytes that are in an object store stay there."""
    op.drop_column("blob_chunks", "object_key")

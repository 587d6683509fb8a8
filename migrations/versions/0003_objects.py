"""Allow chunk bytes in an object store."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from alembic.util import CommandError

revision: str = "0003"
down_revision: str | Sequence[str] | None = "0002"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    """Upgrade to this revision."""
    op.add_column("blob_chunks", sa.Column("object_key", sa.String(length=80), nullable=True))


def downgrade() -> None:
    """Undo it; refused while tensors are in an object store, because nothing would refer to them anymore."""
    chunks = "SELECT count(*) FROM blob_chunks WHERE object_key IS NOT NULL"
    if count := op.get_bind().execute(sa.text(chunks)).scalar():
        raise CommandError(
            f"The downgrade would lose {count} chunks of tensors that are in an object store. Restore a backup of the "
            "older release instead."
        )
    op.drop_column("blob_chunks", "object_key")

"""Index blob references, drop the date of blobs, and add the identity that marks an object store prefix."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from alembic.util import CommandError

revision: str = "0006"
down_revision: str | Sequence[str] | None = "0005"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_REFERENCES = (
    ("models", "blob_id"),
    ("models", "private_blob_id"),
    ("updates", "blob_id"),
    ("transfers", "blob_id"),
    ("personals", "blob_id"),
)


def upgrade() -> None:
    """Upgrade to this revision."""
    for table, column in _REFERENCES:
        op.create_index(f"ix_{table}_{column}", table, [column])
    op.drop_column("blobs", "created_at")
    op.create_table(
        "coordinator",
        sa.Column("place", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.CheckConstraint("place = 1", name=op.f("ck_coordinator_one_row")),
        sa.PrimaryKeyConstraint("place", name=op.f("pk_coordinator")),
    )


def downgrade() -> None:
    """Undo it; refused once an object store prefix is marked with the identity."""
    if op.get_bind().execute(sa.text("SELECT count(*) FROM coordinator")).scalar_one():
        raise CommandError(
            "The downgrade would forget the identity that marks the prefix in the object store, and the prefix would "
            "be refused after the next upgrade. If that is intended, delete the row of the table coordinator and the "
            "object .distrans-owner in the prefix, then downgrade again."
        )
    op.drop_table("coordinator")
    op.add_column("blobs", sa.Column("created_at", sa.Float(), nullable=False, server_default="0"))
    for table, column in reversed(_REFERENCES):
        op.drop_index(f"ix_{table}_{column}", table)

"""Support renewed tokens, repeated joins, revoked invites, deleted federations, and models without bytes."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from alembic.util import CommandError

revision: str = "0007"
down_revision: str | Sequence[str] | None = "0006"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_LOSSES = {
    "federations WHERE deleted_at IS NOT NULL": "bring back {} federations whose deletion is under way",
    "invites WHERE revoked_at IS NOT NULL AND used_at IS NULL": "make {} revoked invites valid again",
    "models WHERE blob_id IS NULL": "need the bytes of {} models that are no longer kept",
}


def upgrade() -> None:
    """Upgrade to this revision."""
    op.add_column("federations", sa.Column("deleted_at", sa.Float(), nullable=True))
    op.add_column("clients", sa.Column("next_token_hash", sa.String(length=64), nullable=True))
    op.add_column("clients", sa.Column("token_generation", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("clients", sa.Column("attempt_hash", sa.String(length=64), nullable=True))
    op.add_column("invites", sa.Column("note", sa.String(length=200), nullable=False, server_default=""))
    op.add_column("invites", sa.Column("revoked_at", sa.Float(), nullable=True))
    with op.batch_alter_table("models") as batch_op:
        batch_op.alter_column("blob_id", existing_type=sa.String(length=32), nullable=True)


def downgrade() -> None:
    """Undo it; refused if the older release would undo a deletion or revocation, or miss the bytes of a model."""
    for rows, words in _LOSSES.items():
        if count := op.get_bind().execute(sa.text(f"SELECT count(*) FROM {rows}")).scalar_one():  # noqa: S608 - ours
            raise CommandError(f"The downgrade would {words.format(count)}. Remove them first, then downgrade again.")
    with op.batch_alter_table("models") as batch_op:
        batch_op.alter_column("blob_id", existing_type=sa.String(length=32), nullable=False)
    for table, columns in (
        ("invites", ("revoked_at", "note")),
        ("clients", ("attempt_hash", "token_generation", "next_token_hash")),
        ("federations", ("deleted_at",)),
    ):
        for column in columns:
            op.drop_column(table, column)

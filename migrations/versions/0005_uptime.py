"""Measure deadlines in uptime, let rounds wait for their clients, and support rollbacks."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from alembic.util import CommandError

revision: str = "0005"
down_revision: str | Sequence[str] | None = "0004"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    """Upgrade to this revision; an open round gets its full time once its clients are back."""
    op.create_table(
        "clock",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("uptime", sa.Float(), nullable=False),
        sa.Column("counted_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_clock")),
    )
    op.execute("INSERT INTO clock (id, uptime, counted_at) VALUES (1, 0, 0)")
    # Columns are added and dropped in place: copying `rounds` on SQLite would cascade to participants and updates.
    op.add_column("federations", sa.Column("due_uptime", sa.Float(), nullable=True))
    op.create_index(op.f("ix_federations_due_uptime"), "federations", ["due_uptime"])
    op.add_column("federations", sa.Column("held_s", sa.Float(), nullable=True))
    op.add_column("clients", sa.Column("held_out_images", sa.Integer(), nullable=True))
    op.add_column("models", _flag("private_dropped"))
    op.add_column("models", sa.Column("rounds_done", sa.Integer(), nullable=False, server_default="0"))
    _describe_models()
    op.add_column("rounds", _flag("clock_started"))
    op.drop_column("rounds", "deadline_at")
    op.add_column("participants", _flag("seen"))
    op.add_column("participants", sa.Column("most_bytes", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("transfers", sa.Column("touched_uptime", sa.Float(), nullable=False, server_default="0"))
    op.add_column("transfers", sa.Column("grown_uptime", sa.Float(), nullable=True))
    op.drop_column("transfers", "last_byte_at")


def _flag(name: str) -> sa.Column[bool]:
    return sa.Column(name, sa.Boolean(), nullable=False, server_default=sa.false())


def _describe_models() -> None:
    """Fill in the new columns: so far, each model meant one more round, and only the newest kept its state."""
    models = sa.table(
        "models",
        *map(sa.column, ("federation_id", "number", "private_blob_id", "private_dropped", "rounds_done")),
    )
    federations = sa.table("federations", *map(sa.column, ("id", "completed_rounds")))
    other = models.alias("other")
    newer = sa.select(sa.func.count()).where(
        other.c.federation_id == models.c.federation_id, other.c.number > models.c.number
    )
    completed = sa.select(federations.c.completed_rounds).where(federations.c.id == models.c.federation_id)
    op.execute(models.update().values(rounds_done=completed.scalar_subquery() - newer.scalar_subquery()))
    has_private = sa.exists().where(
        other.c.federation_id == models.c.federation_id, other.c.private_blob_id.is_not(None)
    )
    op.execute(models.update().where(models.c.private_blob_id.is_(None), has_private).values(private_dropped=sa.true()))


def downgrade() -> None:
    """Undo it; refused while a round is under way. Agents will register their held-out images again."""
    under_way = "SELECT count(*) FROM rounds WHERE state IN ('open', 'aggregating')"
    if count := op.get_bind().execute(sa.text(under_way)).scalar_one():
        raise CommandError(
            f"The downgrade would lose the deadlines of {count} rounds under way, and the older release would close "
            "them at once. Let them finish, or cancel their federations, then downgrade again."
        )
    op.add_column("transfers", sa.Column("last_byte_at", sa.Float(), nullable=False, server_default="0"))
    op.drop_column("transfers", "grown_uptime")
    op.drop_column("transfers", "touched_uptime")
    op.drop_column("participants", "most_bytes")
    op.drop_column("participants", "seen")
    op.add_column("rounds", sa.Column("deadline_at", sa.Float(), nullable=False, server_default="0"))
    op.drop_column("rounds", "clock_started")
    op.drop_column("models", "rounds_done")
    op.drop_column("models", "private_dropped")
    op.drop_column("clients", "held_out_images")
    op.drop_column("federations", "held_s")
    op.drop_index(op.f("ix_federations_due_uptime"), "federations")
    op.drop_column("federations", "due_uptime")
    op.drop_table("clock")

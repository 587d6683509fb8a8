"""Store agents' reports, why participants were missing, and whose measurements are pooled."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0008"
down_revision: str | Sequence[str] | None = "0007"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    """Upgrade to this revision; time before the upgrade does not count as absence."""
    op.add_column("federations", sa.Column("look_uptime", sa.Float(), nullable=True))
    op.create_index(op.f("ix_federations_look_uptime"), "federations", ["look_uptime"])
    op.add_column("clients", sa.Column("heard_uptime", sa.Float(), nullable=False, server_default="0"))
    op.execute("UPDATE clients SET heard_uptime = (SELECT uptime FROM clock)")
    op.add_column("clients", sa.Column("activity", sa.String(length=16), nullable=False, server_default=""))
    op.add_column("clients", sa.Column("activity_detail", sa.Text(), nullable=False, server_default=""))
    op.add_column("clients", sa.Column("troubles", sa.Text(), nullable=False, server_default="[]"))
    op.add_column("clients", sa.Column("status_at", sa.Float(), nullable=True))
    op.add_column("clients", sa.Column("counted", sa.Boolean(), nullable=False, server_default=sa.true()))
    _set_counted()
    op.create_table(
        "absences",
        sa.Column("round_id", sa.Integer(), nullable=False),
        sa.Column("client_id", sa.String(length=32), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["client_id"], ["clients.id"], name=op.f("fk_absences_client_id"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.id"], name=op.f("fk_absences_round_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("round_id", "client_id", name=op.f("pk_absences")),
    )


def _set_counted() -> None:
    """Set `counted`. Clients that left an ended federation count: whether they left before its end is unknown."""
    clients = sa.table("clients", *map(sa.column, ("federation_id", "state", "counted")))
    federations = sa.table("federations", *map(sa.column, ("id", "state")))
    ended = sa.select(federations.c.id).where(federations.c.state.in_(["finished", "cancelled"]))
    stayed = (clients.c.state == "left") & clients.c.federation_id.in_(ended)
    op.execute(clients.update().where(clients.c.state != "active", ~stayed).values(counted=sa.false()))


def downgrade() -> None:
    """Undo it; agents will report again after the next upgrade."""
    op.drop_table("absences")
    for column in ("counted", "status_at", "troubles", "activity_detail", "activity", "heard_uptime"):
        op.drop_column("clients", column)
    op.drop_index(op.f("ix_federations_look_uptime"), "federations")
    op.drop_column("federations", "look_uptime")

"""Keep site names apart from reasons, which clients can read; prevent overwriting audit entries on SQLite."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from alembic.util import CommandError

revision: str = "0004"
down_revision: str | Sequence[str] | None = "0003"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_NAMES = "; missing: "  # reasons ended with this until now


def upgrade() -> None:
    """Upgrade to this revision."""
    for name in ("federations", "rounds"):
        op.add_column(name, sa.Column("reason_detail", sa.Text(), nullable=False, server_default=""))
        table = sa.table(name, sa.column("id"), sa.column("reason"), sa.column("reason_detail"))
        connection = op.get_bind()
        for row in connection.execute(sa.select(table).where(table.c.reason.contains(_NAMES))).all():
            reason, _, names = row.reason.partition(_NAMES)
            values = {"reason": reason, "reason_detail": _NAMES.removeprefix("; ") + names}
            connection.execute(sa.update(table).where(table.c.id == row.id).values(values))
    if op.get_bind().dialect.name == "sqlite":
        # INSERT OR REPLACE deletes the old row without firing the delete trigger.
        op.execute(
            "CREATE TRIGGER audit_no_replace BEFORE INSERT ON audit "
            "WHEN EXISTS (SELECT 1 FROM audit WHERE id = NEW.id) "
            "BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END"
        )


def downgrade() -> None:
    """Undo it; refused while there are details that only this revision can store."""
    for name in ("federations", "rounds"):
        detail = sa.table(name, sa.column("reason_detail")).c.reason_detail
        if count := op.get_bind().execute(sa.select(sa.func.count(detail)).where(detail != "")).scalar():
            raise CommandError(
                f"The downgrade would delete {count} values of {name}.reason_detail, such as the names of sites that a "
                "round lacked. If that is intended, set them to '', then downgrade again."
            )
    if op.get_bind().dialect.name == "sqlite":
        op.execute("DROP TRIGGER audit_no_replace")
    for name in ("federations", "rounds"):
        op.drop_column(name, "reason_detail")

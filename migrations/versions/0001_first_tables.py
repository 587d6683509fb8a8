"""Create the first tables."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0001"
down_revision: str | Sequence[str] | None = None
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    """Upgrade to this revision."""
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("actor", sa.String(length=128), nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("federation", sa.String(length=64), nullable=False),
        sa.Column("address", sa.String(length=64), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
    )
    with op.batch_alter_table("audit", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_audit_at"), ["at"], unique=False)

    op.create_table(
        "blobs",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_blobs")),
    )
    op.create_table(
        "federations",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("plan", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("state_since", sa.Float(), nullable=False),
        sa.Column("completed_rounds", sa.Integer(), nullable=False),
        sa.Column("best_accuracy", sa.Float(), nullable=True),
        sa.Column("best_model", sa.Integer(), nullable=True),
        sa.Column("stale_rounds", sa.Integer(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "state IN ('created', 'running', 'paused', 'finished', 'cancelled')", name=op.f("ck_federations_state")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_federations")),
        sa.UniqueConstraint("name", name=op.f("uq_federations_name")),
    )
    op.create_table(
        "blob_chunks",
        sa.Column("blob_id", sa.String(length=32), nullable=False),
        sa.Column("start", sa.BigInteger(), nullable=False),
        sa.Column("size_bytes", sa.Integer(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["blob_id"], ["blobs.id"], name=op.f("fk_blob_chunks_blob_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("blob_id", "start", name=op.f("pk_blob_chunks")),
    )
    op.create_table(
        "clients",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("federation_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("token_hash", sa.String(length=64), nullable=False),
        sa.Column("class_counts", sa.Text(), nullable=False),
        sa.Column("agent_version", sa.String(length=64), nullable=False),
        sa.Column("device", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("joined_at", sa.Float(), nullable=False),
        sa.Column("last_seen_at", sa.Float(), nullable=False),
        sa.CheckConstraint("state IN ('active', 'left', 'revoked')", name=op.f("ck_clients_state")),
        sa.ForeignKeyConstraint(
            ["federation_id"], ["federations.id"], name=op.f("fk_clients_federation_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_clients")),
    )
    with op.batch_alter_table("clients", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_clients_federation_id"), ["federation_id"], unique=False)
        batch_op.create_index(
            "uq_clients_active_name",
            ["federation_id", "name"],
            unique=True,
            sqlite_where=sa.text("state = 'active'"),
            postgresql_where=sa.text("state = 'active'"),
        )

    op.create_table(
        "models",
        sa.Column("federation_id", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("blob_id", sa.String(length=32), nullable=False),
        sa.Column("private_blob_id", sa.String(length=32), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["blob_id"], ["blobs.id"], name=op.f("fk_models_blob_id")),
        sa.ForeignKeyConstraint(
            ["federation_id"], ["federations.id"], name=op.f("fk_models_federation_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["private_blob_id"], ["blobs.id"], name=op.f("fk_models_private_blob_id")),
        sa.PrimaryKeyConstraint("federation_id", "number", name=op.f("pk_models")),
    )
    op.create_table(
        "rounds",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("federation_id", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("base_model", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("facts", sa.Text(), nullable=False),
        sa.Column("roster", sa.Text(), nullable=False),
        sa.Column("opened_at", sa.Float(), nullable=False),
        sa.Column("deadline_at", sa.Float(), nullable=False),
        sa.Column("closed_at", sa.Float(), nullable=True),
        sa.Column("lease_owner", sa.String(length=32), nullable=True),
        sa.Column("lease_until", sa.Float(), nullable=True),
        sa.CheckConstraint("state IN ('open', 'aggregating', 'done', 'failed')", name=op.f("ck_rounds_state")),
        sa.ForeignKeyConstraint(
            ["federation_id"], ["federations.id"], name=op.f("fk_rounds_federation_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rounds")),
        sa.UniqueConstraint("federation_id", "number", name=op.f("uq_rounds_federation_id_number")),
    )
    with op.batch_alter_table("rounds", schema=None) as batch_op:
        batch_op.create_index(
            "uq_rounds_under_way",
            ["federation_id"],
            unique=True,
            sqlite_where=sa.text("state IN ('open', 'aggregating')"),
            postgresql_where=sa.text("state IN ('open', 'aggregating')"),
        )

    op.create_table(
        "evaluations",
        sa.Column("federation_id", sa.Integer(), nullable=False),
        sa.Column("model_number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("client_id", sa.String(length=32), nullable=False),
        sa.Column("result", sa.Text(), nullable=False),
        sa.Column("received_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["client_id"], ["clients.id"], name=op.f("fk_evaluations_client_id")),
        sa.ForeignKeyConstraint(
            ["federation_id"], ["federations.id"], name=op.f("fk_evaluations_federation_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("federation_id", "model_number", "client_id", name=op.f("pk_evaluations")),
    )
    op.create_table(
        "invites",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("federation_id", sa.Integer(), nullable=False),
        sa.Column("token_hash", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=False),
        sa.Column("used_at", sa.Float(), nullable=True),
        sa.Column("used_by", sa.String(length=32), nullable=True),
        sa.ForeignKeyConstraint(
            ["federation_id"], ["federations.id"], name=op.f("fk_invites_federation_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["used_by"], ["clients.id"], name=op.f("fk_invites_used_by")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_invites")),
    )
    with op.batch_alter_table("invites", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_invites_federation_id"), ["federation_id"], unique=False)

    op.create_table(
        "participants",
        sa.Column("round_id", sa.Integer(), nullable=False),
        sa.Column("client_id", sa.String(length=32), nullable=False),
        sa.ForeignKeyConstraint(["client_id"], ["clients.id"], name=op.f("fk_participants_client_id")),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.id"], name=op.f("fk_participants_round_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("round_id", "client_id", name=op.f("pk_participants")),
    )
    op.create_table(
        "personals",
        sa.Column("federation_id", sa.Integer(), nullable=False),
        sa.Column("model_number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("round_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("client_id", sa.String(length=32), nullable=False),
        sa.Column("blob_id", sa.String(length=32), nullable=False),
        sa.ForeignKeyConstraint(["blob_id"], ["blobs.id"], name=op.f("fk_personals_blob_id")),
        sa.ForeignKeyConstraint(["client_id"], ["clients.id"], name=op.f("fk_personals_client_id")),
        sa.ForeignKeyConstraint(
            ["federation_id"], ["federations.id"], name=op.f("fk_personals_federation_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("federation_id", "model_number", "round_id", "client_id", name=op.f("pk_personals")),
    )
    op.create_table(
        "transfers",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("round_id", sa.Integer(), nullable=False),
        sa.Column("client_id", sa.String(length=32), nullable=False),
        sa.Column("blob_id", sa.String(length=32), nullable=False),
        sa.Column("resumable", sa.Boolean(), nullable=False),
        sa.Column("length_bytes", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("last_byte_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["blob_id"], ["blobs.id"], name=op.f("fk_transfers_blob_id")),
        sa.ForeignKeyConstraint(["client_id"], ["clients.id"], name=op.f("fk_transfers_client_id")),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.id"], name=op.f("fk_transfers_round_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_transfers")),
        sa.UniqueConstraint("round_id", "client_id", name=op.f("uq_transfers_round_id_client_id")),
    )
    op.create_table(
        "updates",
        sa.Column("round_id", sa.Integer(), nullable=False),
        sa.Column("client_id", sa.String(length=32), nullable=False),
        sa.Column("blob_id", sa.String(length=32), nullable=True),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("report", sa.Text(), nullable=False),
        sa.Column("received_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["blob_id"], ["blobs.id"], name=op.f("fk_updates_blob_id")),
        sa.ForeignKeyConstraint(["client_id"], ["clients.id"], name=op.f("fk_updates_client_id")),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.id"], name=op.f("fk_updates_round_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("round_id", "client_id", name=op.f("pk_updates")),
    )
    for statement in _append_only_audit(op.get_bind().dialect.name):
        op.execute(statement)


def _append_only_audit(dialect: str) -> list[str]:
    message = "the audit log is append-only"
    if dialect == "sqlite":
        return [
            f"CREATE TRIGGER audit_no_{verb.lower()} BEFORE {verb} ON audit BEGIN SELECT RAISE(ABORT, '{message}'); END"
            for verb in ("UPDATE", "DELETE")
        ]
    return [
        f"CREATE FUNCTION audit_append_only() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION '{message}'; END $$",
        "CREATE TRIGGER audit_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit "
        "FOR EACH STATEMENT EXECUTE FUNCTION audit_append_only()",
    ]


def downgrade() -> None:
    """Undo it."""
    op.drop_table("updates")
    op.drop_table("transfers")
    op.drop_table("personals")
    op.drop_table("participants")
    with op.batch_alter_table("invites", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_invites_federation_id"))

    op.drop_table("invites")
    op.drop_table("evaluations")
    with op.batch_alter_table("rounds", schema=None) as batch_op:
        batch_op.drop_index(
            "uq_rounds_under_way",
            sqlite_where=sa.text("state IN ('open', 'aggregating')"),
            postgresql_where=sa.text("state IN ('open', 'aggregating')"),
        )

    op.drop_table("rounds")
    op.drop_table("models")
    with op.batch_alter_table("clients", schema=None) as batch_op:
        batch_op.drop_index(
            "uq_clients_active_name",
            sqlite_where=sa.text("state = 'active'"),
            postgresql_where=sa.text("state = 'active'"),
        )
        batch_op.drop_index(batch_op.f("ix_clients_federation_id"))

    op.drop_table("clients")
    op.drop_table("blob_chunks")
    op.drop_table("federations")
    op.drop_table("blobs")
    with op.batch_alter_table("audit", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_audit_at"))

    op.drop_table("audit")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION audit_append_only()")

"""The tables. Invariants are constraints here, not code elsewhere.

Columns ending in `_at` are seconds since 1970, UTC, for people to read; only `Invite.expires_at` is enforced. Columns
ending in `_uptime`, and `lease_until`, are seconds the coordinator has been up, whatever its clock says: deadlines,
leases and stalled uploads are measured in these.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Float,
    ForeignKey,
    Index,
    LargeBinary,
    MetaData,
    String,
    Text,
    UniqueConstraint,
    false,
    text,
    true,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """Names constraints by one rule, so that migrations can refer to them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


def _one_of(column: str, *values: str) -> str:
    return f"{column} IN ({', '.join(repr(value) for value in values)})"


class CoordinatorClock(Base):
    """One row: total uptime of the coordinator across processes and restarts. It never decreases."""

    __tablename__ = "clock"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    uptime: Mapped[float] = mapped_column(Float)
    counted_at: Mapped[float] = mapped_column(Float)  # wall-clock time of the last count, to show deadlines to people


class Blob(Base):
    """Bytes of any length, stored in chunks. Without a digest it is still being written."""

    __tablename__ = "blobs"
    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    digest: Mapped[str | None] = mapped_column(String(64))


class BlobChunk(Base):
    """Part of a blob, keyed by the position of its first byte."""

    __tablename__ = "blob_chunks"
    blob_id: Mapped[str] = mapped_column(ForeignKey("blobs.id", ondelete="CASCADE"), primary_key=True)
    start: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    size_bytes: Mapped[int]
    data: Mapped[bytes] = mapped_column(LargeBinary)  # empty when the bytes are in an object
    object_key: Mapped[str | None] = mapped_column(String(80))


class Federation(Base):
    """One training job."""

    __tablename__ = "federations"
    __table_args__ = (
        CheckConstraint(_one_of("state", "created", "running", "paused", "finished", "cancelled"), name="state"),
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(64), unique=True)
    plan: Mapped[str] = mapped_column(Text)
    state: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str] = mapped_column(Text, default="")  # shown to clients: must not name other clients
    reason_detail: Mapped[str] = mapped_column(Text, default="", server_default="")  # for the operator only
    created_at: Mapped[float] = mapped_column(Float)
    state_since: Mapped[float] = mapped_column(Float)
    completed_rounds: Mapped[int] = mapped_column(default=0)
    best_accuracy: Mapped[float | None] = mapped_column(Float)
    best_model: Mapped[int | None]
    stale_rounds: Mapped[int] = mapped_column(default=0)
    due_uptime: Mapped[float | None] = mapped_column(Float, index=True)  # when what it is waiting for is overdue
    look_uptime: Mapped[float | None] = mapped_column(
        Float, index=True
    )  # when a client may count as absent before that
    held_s: Mapped[float | None] = mapped_column(Float)  # time left until due_uptime when it was paused
    deleted_at: Mapped[float | None] = mapped_column(Float)  # no longer visible; its rows are being removed
    version: Mapped[int] = mapped_column(BigInteger, default=0)  # incremented to end long polls


class Client(Base):
    """An enrolled site. Names are unique among the active clients of a federation."""

    __tablename__ = "clients"
    __table_args__ = (
        CheckConstraint(_one_of("state", "active", "left", "revoked"), name="state"),
        Index(
            "uq_clients_active_name",
            "federation_id",
            "name",
            unique=True,
            sqlite_where=text("state = 'active'"),
            postgresql_where=text("state = 'active'"),
        ),
    )
    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    federation_id: Mapped[int] = mapped_column(ForeignKey("federations.id", ondelete="CASCADE"), index=True)
    name: Mapped[str] = mapped_column(String(64))
    token_hash: Mapped[str] = mapped_column(String(64))
    next_token_hash: Mapped[str | None] = mapped_column(String(64))  # replaces token_hash when first used
    token_generation: Mapped[int] = mapped_column(
        default=0, server_default="0"
    )  # incremented to invalidate tokens at once
    attempt_hash: Mapped[str | None] = mapped_column(
        String(64)
    )  # who may repeat the join, until the client authenticates
    certificate: Mapped[str | None] = mapped_column(String(64))  # SHA-256 of the certificate it must present, if any
    class_counts: Mapped[str] = mapped_column(Text)
    held_out_images: Mapped[int | None]  # None: agent of an older release
    agent_version: Mapped[str] = mapped_column(String(64))
    device: Mapped[str] = mapped_column(String(64))
    state: Mapped[str] = mapped_column(String(16))
    joined_at: Mapped[float] = mapped_column(Float)
    last_seen_at: Mapped[float] = mapped_column(Float)
    heard_uptime: Mapped[float] = mapped_column(
        Float, default=0.0, server_default="0"
    )  # the same as uptime, decides absence
    activity: Mapped[str] = mapped_column(String(16), default="", server_default="")  # last reported by its agent
    activity_detail: Mapped[str] = mapped_column(Text, default="", server_default="")  # for the operator and the client
    troubles: Mapped[str] = mapped_column(Text, default="[]", server_default="[]")
    status_at: Mapped[float | None] = mapped_column(Float)  # time of that report; None: its agent does not report
    counted: Mapped[bool] = mapped_column(
        Boolean, default=True, server_default=true()
    )  # whether its measurements are pooled


class Invite(Base):
    """Lets one site join once. The same attempt may be repeated until its client has authenticated."""

    __tablename__ = "invites"
    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    federation_id: Mapped[int] = mapped_column(ForeignKey("federations.id", ondelete="CASCADE"), index=True)
    token_hash: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[float] = mapped_column(Float)
    expires_at: Mapped[float] = mapped_column(Float)
    note: Mapped[str] = mapped_column(String(200), default="", server_default="")  # for the operator only
    revoked_at: Mapped[float | None] = mapped_column(Float)
    used_at: Mapped[float | None] = mapped_column(Float)
    used_by: Mapped[str | None] = mapped_column(ForeignKey("clients.id"))


class Model(Base):
    """A global model: number 0 is θ⁰, number n is the result of round n. The newest few keep their server state.

    Retention deletes the bytes of old models but never the rows.
    """

    __tablename__ = "models"
    federation_id: Mapped[int] = mapped_column(ForeignKey("federations.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    blob_id: Mapped[str | None] = mapped_column(ForeignKey("blobs.id"), index=True)
    private_blob_id: Mapped[str | None] = mapped_column(ForeignKey("blobs.id"), index=True)
    private_dropped: Mapped[bool] = mapped_column(
        Boolean, default=False, server_default=false()
    )  # it had server state once
    rounds_done: Mapped[int] = mapped_column(default=0, server_default="0")  # completed rounds behind this model
    created_at: Mapped[float] = mapped_column(Float)


class Round(Base):
    """One round. Facts and roster are frozen when it opens, so that any process aggregates it to the same result."""

    __tablename__ = "rounds"
    __table_args__ = (
        UniqueConstraint("federation_id", "number"),
        CheckConstraint(_one_of("state", "open", "aggregating", "done", "failed"), name="state"),
        Index(
            "uq_rounds_under_way",
            "federation_id",
            unique=True,
            sqlite_where=text("state IN ('open', 'aggregating')"),
            postgresql_where=text("state IN ('open', 'aggregating')"),
        ),
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    federation_id: Mapped[int] = mapped_column(ForeignKey("federations.id", ondelete="CASCADE"))
    number: Mapped[int]
    base_model: Mapped[int]
    state: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str] = mapped_column(Text, default="")  # as in Federation
    reason_detail: Mapped[str] = mapped_column(Text, default="", server_default="")
    facts: Mapped[str] = mapped_column(Text)
    roster: Mapped[str] = mapped_column(Text)
    opened_at: Mapped[float] = mapped_column(Float)
    closed_at: Mapped[float | None] = mapped_column(Float)
    clock_started: Mapped[bool] = mapped_column(
        Boolean, default=False, server_default=false()
    )  # of the upload deadline
    lease_owner: Mapped[str | None] = mapped_column(String(32))
    lease_until: Mapped[float | None] = mapped_column(Float)  # uptime


class Participant(Base):
    """A client chosen for a round."""

    __tablename__ = "participants"
    round_id: Mapped[int] = mapped_column(ForeignKey("rounds.id", ondelete="CASCADE"), primary_key=True)
    client_id: Mapped[str] = mapped_column(ForeignKey("clients.id"), primary_key=True)
    seen: Mapped[bool] = mapped_column(Boolean, default=False, server_default=false())  # has been handed the round
    most_bytes: Mapped[int] = mapped_column(
        BigInteger, default=0, server_default="0"
    )  # largest size any of its uploads reached


class Absence(Base):
    """Why a client has no update in a round: absent when it opened, or missing when it closed."""

    __tablename__ = "absences"
    round_id: Mapped[int] = mapped_column(ForeignKey("rounds.id", ondelete="CASCADE"), primary_key=True)
    client_id: Mapped[str] = mapped_column(ForeignKey("clients.id", ondelete="CASCADE"), primary_key=True)
    reason: Mapped[str] = mapped_column(Text)  # for the operator and the client


class Update(Base):
    """An accepted upload: one per participant and round. Retention deletes its bytes but never the row."""

    __tablename__ = "updates"
    round_id: Mapped[int] = mapped_column(ForeignKey("rounds.id", ondelete="CASCADE"), primary_key=True)
    client_id: Mapped[str] = mapped_column(ForeignKey("clients.id"), primary_key=True)
    blob_id: Mapped[str | None] = mapped_column(ForeignKey("blobs.id"), index=True)
    digest: Mapped[str] = mapped_column(String(64))
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    report: Mapped[str] = mapped_column(Text)
    received_at: Mapped[float] = mapped_column(Float)


class Transfer(Base):
    """An upload in progress: one per participant and round."""

    __tablename__ = "transfers"
    __table_args__ = (UniqueConstraint("round_id", "client_id"),)
    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    round_id: Mapped[int] = mapped_column(ForeignKey("rounds.id", ondelete="CASCADE"))
    client_id: Mapped[str] = mapped_column(ForeignKey("clients.id"))
    blob_id: Mapped[str] = mapped_column(ForeignKey("blobs.id"), index=True)
    resumable: Mapped[bool]
    length_bytes: Mapped[int] = mapped_column(BigInteger)
    digest: Mapped[str] = mapped_column(String(64))
    started_at: Mapped[float] = mapped_column(Float)
    touched_uptime: Mapped[float] = mapped_column(Float, default=0.0, server_default="0")  # started or last appended to
    grown_uptime: Mapped[float | None] = mapped_column(Float)  # last byte beyond Participant.most_bytes


class Evaluation(Base):
    """A client's measurement of a global model on its held-out data."""

    __tablename__ = "evaluations"
    federation_id: Mapped[int] = mapped_column(ForeignKey("federations.id", ondelete="CASCADE"), primary_key=True)
    model_number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    client_id: Mapped[str] = mapped_column(ForeignKey("clients.id"), primary_key=True)
    result: Mapped[str] = mapped_column(Text)
    received_at: Mapped[float] = mapped_column(Float)


class Personal(Base):
    """Tensors for one client and one global model; computed once, then served unchanged."""

    __tablename__ = "personals"
    federation_id: Mapped[int] = mapped_column(ForeignKey("federations.id", ondelete="CASCADE"), primary_key=True)
    model_number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    round_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)  # 0: for serving, outside any round
    client_id: Mapped[str] = mapped_column(ForeignKey("clients.id"), primary_key=True)
    blob_id: Mapped[str] = mapped_column(ForeignKey("blobs.id"), index=True)


# Every column that keeps a blob alive. All are indexed: deleting a blob looks up each of them.
BLOB_REFERENCES = (Model.blob_id, Model.private_blob_id, Update.blob_id, Transfer.blob_id, Personal.blob_id)


class Coordinator(Base):
    """The identity shared by all replicas on this database; marks its prefix in an object store."""

    __tablename__ = "coordinator"
    __table_args__ = (CheckConstraint("place = 1", name="one_row"),)
    place: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    id: Mapped[str] = mapped_column(String(32))


class AuditEntry(Base):
    """Who did what, when, and from where. Database triggers prevent changes and deletions."""

    __tablename__ = "audit"
    id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[float] = mapped_column(Float, index=True)
    actor: Mapped[str] = mapped_column(String(128))
    action: Mapped[str] = mapped_column(String(64))
    federation: Mapped[str] = mapped_column(String(64), default="")
    address: Mapped[str] = mapped_column(String(64), default="")
    detail: Mapped[str] = mapped_column(Text, default="")

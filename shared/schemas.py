"""Bodies of the REST API that both sides read and write. Times are seconds since 1970, UTC."""

from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from shared.fault_words import ATTEMPT_PATTERN, DIGEST_PATTERN, ONE_LINE_PATTERN, PRINTABLE_PATTERN
from shared.limits import MAX_WEIGHT
from shared.method_options import Frozen
from shared.plan import ClassName, Name, StoredPlan

# Limits of what a client may report. Sums over any number of clients stay far inside what floats and columns can hold.
MAX_IMAGES = MAX_WEIGHT
MAX_LOSS = 1e6  # cross-entropy per image; a model beyond it has diverged
ShortText = Annotated[str, StringConstraints(max_length=64, pattern=PRINTABLE_PATTERN)]
Digest = Annotated[str, StringConstraints(pattern=DIGEST_PATTERN)]
Attempt = Annotated[str, StringConstraints(pattern=ATTEMPT_PATTERN)]
Note = Annotated[str, StringConstraints(max_length=200, strip_whitespace=True, pattern=ONE_LINE_PATTERN)]
ImageCount = Annotated[int, Field(ge=0, le=MAX_IMAGES, strict=True)]


class TrainingReport(Frozen):
    """What a client says of its local training in one round; small numbers, no data."""

    model_config = ConfigDict(strict=True)  # neither true nor "5" is a number
    samples: int = Field(ge=1, le=MAX_IMAGES, description="Training images of the client.")
    batches: int = Field(ge=0, le=2**53, description="Optimisation steps taken.")
    loss: float = Field(
        ge=0, le=MAX_LOSS, description="Mean cross-entropy over the images trained on, as they were met."
    )
    accuracy: float = Field(ge=0, le=1, description="Share of them that was classified rightly, as they were met.")
    seconds: float = Field(ge=0, le=1e9, description="Time of the training itself.")
    offset_motion: float | None = Field(
        None,
        ge=0,
        le=1e9,
        description="‖t − t⁰‖ / ‖t⁰‖, or the rms of t where t⁰ = 0; none for methods without offset.",
    )


class Answer(BaseModel):
    """Base of what the coordinator answers: an agent of an older version ignores fields it does not know."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Problem(BaseModel):
    """An error, as RFC 9457's problem+json."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "type": "about:blank",
                "title": "Not Found",
                "status": 404,
                "code": "no-such-federation",
                "detail": "There is no federation 'lungs'.",
                "next_step": "GET /v1/federations lists them.",
                "request_id": "0d9f0c",
            }
        }
    )
    type: str = "about:blank"
    title: str
    status: int
    code: str = Field(description="Stable; programs should look at this.")
    detail: str = Field(description="A sentence for people.")
    next_step: str | None = Field(None, description="What to do about it.")
    errors: list[str] | None = Field(None, description="All faults of a rejected input, each with its field.")
    request_id: str | None = None


class JoinRequest(Frozen):
    """A site enrols; the invite token is its bearer token."""

    name: Name = Field(examples=["north-hospital"])
    class_counts: dict[ClassName, ImageCount] = Field(
        max_length=100_000, description="Training images per class.", examples=[{"benign": 812, "malignant": 97}]
    )
    held_out_images: ImageCount | None = Field(
        None, description="Images for evaluations: none may be over more. Unset: as many as the training images."
    )
    agent_version: ShortText = ""
    device: ShortText = ""
    attempt: Attempt | None = Field(
        None,
        description="A random number that the site keeps: with it, and the same invite, it can repeat a join whose "
        "answer it never got.",
    )


class FederationPlanAnswer(Answer):
    """The plan behind an invite."""

    federation: str
    plan: StoredPlan


class JoinAnswer(Answer):
    """The client's identity; the token is shown this once."""

    client_id: str
    token: str
    federation: str
    plan: StoredPlan


class ClassCountsPatch(Frozen):
    """The counts of a client whose data have changed; class counts take effect with the next round."""

    class_counts: dict[ClassName, ImageCount] = Field(max_length=100_000)
    held_out_images: ImageCount | None = Field(None, description="Unset: as before.")


def _printable(text: str) -> str:
    """Control characters could forge log lines, or hide on a terminal what stands before them."""
    return "".join(character if character.isprintable() else " " for character in text)


Printable = AfterValidator(_printable)
AgentActivity = Literal["starting", "waiting", "downloading", "training", "uploading", "measuring", "ended"]


class TroubleReport(BaseModel):
    """Something that keeps a site from taking part as it should, in a sentence for the operator."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    kind: Annotated[str, StringConstraints(max_length=64), Printable] = Field(examples=["images"])
    message: Annotated[str, StringConstraints(max_length=300), Printable] = Field(
        examples=["Some images cannot be read."]
    )


class StatusReport(BaseModel):
    """What an agent is doing and what troubles it; the operator reads it, no other client does."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    activity: AgentActivity
    detail: Annotated[str, StringConstraints(max_length=200), Printable] = Field("", examples=["training round 3"])
    troubles: list[TroubleReport] = Field([], max_length=8)


class ClientView(Answer):
    """A client as its operator, and it itself, see it."""

    id: str
    name: str
    state: Literal["active", "left", "revoked"]
    federation: str
    class_counts: dict[str, int]
    held_out_images: int | None = None
    agent_version: str
    device: str
    joined_at: float
    last_seen_at: float
    activity: str = Field("", description="What its agent last reported to be doing; empty for older agents.")
    activity_detail: str = ""
    troubles: list[TroubleReport] = []
    status_at: float | None = Field(None, description="When the agent last reported; null for older agents.")


class TokenAnswer(Answer):
    """A new token, shown this once."""

    client_id: str
    token: str


class InviteRequest(Frozen):
    """An invite to be made."""

    expires_in_s: float = Field(7 * 24 * 3600, gt=0, le=365 * 24 * 3600, description="Seconds until it expires.")
    note: Note = Field("", description="Whom it is for; the operator alone sees it.", examples=["north hospital"])


class InviteAnswer(Answer):
    """A one-use invite; the token is shown this once."""

    id: str = ""
    token: str
    federation: str
    expires_at: float


class InviteView(Answer):
    """An invite as the operator sees it, without its token."""

    id: str
    note: str
    state: Literal["open", "used", "expired", "revoked"]
    created_at: float
    expires_at: float
    used_at: float | None
    used_by: str | None = Field(description="The name of the client that joined with it.")


class ModelPointer(Answer):
    """Where a global model is, and what it must hash to."""

    number: int
    url: str
    digest: str
    size_bytes: int


class RoundSummary(Answer):
    """A round and how it stands."""

    id: int
    number: int
    state: Literal["open", "aggregating", "done", "failed"]
    reason: str = ""
    waiting_for: str | None = None
    facts: dict[str, str]
    participants: int
    updates: int
    opened_at: float
    deadline_at: float | None = Field(
        description="When the time to upload is over; null before enough participants have connected, while the "
        "federation is paused, and once the round is closed."
    )
    closed_at: float | None


class EvaluationView(Answer):
    """Rates over held-out images; positives are of the client's own classes."""

    samples: int
    accuracy: float | None
    loss: float | None
    positive_accuracy: float | None
    negative_accuracy: float | None
    negatives_as_own: float | None
    binary_accuracy: float | None


class UpdateView(Answer):
    """An accepted update."""

    client_id: str
    client: str
    digest: str
    size_bytes: int
    received_at: float
    report: TrainingReport


class MissingView(Answer):
    """A client without an update in a round."""

    client: str
    reason: str


class RoundView(RoundSummary):
    """A round with its updates and the evaluation of the model it made."""

    uploads: list[UpdateView]
    missing: list[MissingView] = Field(
        [],
        description="Clients that were absent when the round opened, or had not uploaded when it closed, and why.",
    )
    evaluation: EvaluationView | None
    client_evaluations: dict[str, EvaluationView]


class FederationView(Answer):
    """A federation and what it waits for."""

    name: str
    state: Literal["created", "running", "paused", "finished", "cancelled"]
    reason: str
    state_since: float
    waiting_for: str | None
    waiting_since: float | None
    waiting_until: float | None
    method: str
    rounds_done: int
    rounds_total: int
    round: RoundSummary | None
    latest_model: int
    clients: int
    dh: float | None
    best_accuracy: float | None
    best_model: int | None
    plan: StoredPlan | None = None


class HeterogeneityView(Answer):
    """How the classes lie over the clients."""

    dh: float | None
    classes: list[str]
    clients: dict[str, list[int]] = Field(description="Training images per class, by client name.")
    embeddings: dict[str, list[float]] = Field(description="Share of each class's images, by client name.")


class RoundTaskView(Answer):
    """A client's part in an open round."""

    id: int
    number: int
    facts: dict[str, str]
    update_url: str
    max_update_bytes: int


Action = Literal["train", "wait", "paused", "finished", "cancelled"]


class TaskAnswer(Answer):
    """What a client should do now."""

    action: Annotated[Action, BeforeValidator(lambda value: value if value in get_args(Action) else "wait")] = Field(
        description="An agent that does not know an action waits."
    )
    ticket: str = Field("", description="Changes when there is news; send it back as ?after= to wait for the next.")
    reason: str = Field("", description="Why there is nothing to train, in words.")
    round: RoundTaskView | None = None
    model: ModelPointer | None = Field(None, description="The newest global model, to train from or to serve.")
    personal_url: str | None = Field(None, description="This client's own tensors for that model.")
    facts: dict[str, str] = Field(default_factory=dict, description="Facts in force for the personal tensors.")
    deadline_s: float | None = Field(None, description="Seconds left for the upload.")


class UpdateReceipt(Answer):
    """The coordinator has the update; the same upload again is answered in the same way."""

    round: int
    digest: str
    size_bytes: int
    received_at: float


class AuditView(Answer):
    """One line of the audit log."""

    id: int
    at: float
    actor: str
    action: str
    federation: str
    address: str
    detail: str


class StateRequest(Frozen):
    """Why an operator changes a federation's state."""

    reason: Annotated[str, StringConstraints(max_length=500)] = ""


class RollbackRequest(Frozen):
    """The model to go back to."""

    to: int = Field(ge=0, lt=2**31, strict=True, description="The number of a round that made a model; 0 is the start.")

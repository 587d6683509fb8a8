"""REST bodies that both sides read and write. Times are Unix timestamps in seconds."""

from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from shared.contract.frozen import Frozen
from shared.contract.limits import MAX_IMAGES
from shared.contract.measurements import TrainingReport, Verdict
from shared.contract.patterns import ATTEMPT_PATTERN, DIGEST_PATTERN, ONE_LINE_PATTERN, PRINTABLE_PATTERN
from shared.contract.plan import ClassName, Name, StoredPlan

ShortText = Annotated[str, StringConstraints(max_length=64, pattern=PRINTABLE_PATTERN)]
Digest = Annotated[str, StringConstraints(pattern=DIGEST_PATTERN)]
Attempt = Annotated[str, StringConstraints(pattern=ATTEMPT_PATTERN)]
Note = Annotated[str, StringConstraints(max_length=200, strip_whitespace=True, pattern=ONE_LINE_PATTERN)]
ImageCount = Annotated[int, Field(ge=0, le=MAX_IMAGES, strict=True)]


class Answer(BaseModel):
    """Base class of the coordinator's responses; older agents ignore fields they do not know."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Problem(BaseModel):
    """An error as problem+json (RFC 9457)."""

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
    code: str = Field(description="Stable; for programs to match.")
    detail: str = Field(description="What went wrong, for people.")
    next_step: str | None = Field(None, description="What to do about it.")
    errors: list[str] | None = Field(None, description="Every error in a rejected input, each with its field.")
    request_id: str | None = None


class JoinRequest(Frozen):
    """A site's request to enroll, with the invite token as bearer token."""

    name: Name = Field(examples=["north-hospital"])
    class_counts: dict[ClassName, ImageCount] = Field(
        max_length=100_000,
        description="Training images per class. Empty: the site withholds them.",
        examples=[{"benign": 812, "malignant": 97}],
    )
    held_out_images: ImageCount | None = Field(
        None, description="Largest number of images an evaluation may cover. Unset: the number of training images."
    )
    agent_version: ShortText = ""
    device: ShortText = ""
    attempt: Attempt | None = Field(
        None,
        description="A random number the site stores. It allows the site to repeat a join with the same invite if "
        "the response was lost.",
    )


class FederationPlanAnswer(Answer):
    """The plan behind an invite."""

    federation: str
    plan: StoredPlan


class JoinAnswer(Answer):
    """The client's identity; its token is shown only once."""

    client_id: str
    token: str
    federation: str
    plan: StoredPlan


class ClassCountsPatch(Frozen):
    """New counts for a client whose data changed; class counts take effect with the next round."""

    class_counts: dict[ClassName, ImageCount] = Field(
        max_length=100_000, description="Training images per class. Empty: the site withholds them."
    )
    held_out_images: ImageCount | None = Field(None, description="Unset: unchanged.")


def _printable(text: str) -> str:
    """Blank out control characters, which could forge log lines or hide text on a terminal."""
    return "".join(character if character.isprintable() else " " for character in text)


Printable = AfterValidator(_printable)
AgentActivity = Literal["starting", "waiting", "downloading", "training", "uploading", "measuring", "ended"]


class TroubleReport(BaseModel):
    """A problem that keeps a site from participating fully, described for the operator."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    kind: Annotated[str, StringConstraints(max_length=64), Printable] = Field(examples=["images"])
    message: Annotated[str, StringConstraints(max_length=300), Printable] = Field(
        examples=["Some images cannot be read."]
    )


class StatusReport(BaseModel):
    """What an agent is doing and its current problems; visible to the operator, not to other clients."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    activity: AgentActivity
    detail: Annotated[str, StringConstraints(max_length=200), Printable] = Field("", examples=["training round 3"])
    troubles: list[TroubleReport] = Field([], max_length=8)


class ClientView(Answer):
    """A client as shown to the operator and to the client itself."""

    id: str
    name: str
    state: Literal["active", "left", "revoked"]
    federation: str
    class_counts: dict[str, int] = Field(description="Training images per class; empty if the site withholds them.")
    held_out_images: int | None = None
    agent_version: str
    device: str
    joined_at: float
    last_seen_at: float
    activity: str = Field("", description="The agent's last reported activity; empty for older agents.")
    activity_detail: str = ""
    troubles: list[TroubleReport] = []
    status_at: float | None = Field(None, description="When the agent last reported; null for older agents.")


class TokenAnswer(Answer):
    """A new token, shown only once."""

    client_id: str
    token: str


class InviteRequest(Frozen):
    """A request for an invite."""

    expires_in_s: float = Field(
        7 * 24 * 3600, gt=0, le=365 * 24 * 3600, description="Seconds until the invite expires."
    )
    note: Note = Field(
        "", description="Whom the invite is for; visible only to the operator.", examples=["north hospital"]
    )


class InviteAnswer(Answer):
    """A single-use invite; its token is shown only once."""

    id: str = ""
    token: str
    federation: str
    expires_at: float


class InviteView(Answer):
    """An invite as shown to the operator, without its token."""

    id: str
    note: str
    state: Literal["open", "used", "expired", "revoked"]
    created_at: float
    expires_at: float
    used_at: float | None
    used_by: str | None = Field(description="Name of the client that joined with this invite.")


class ModelPointer(Answer):
    """The location and expected digest of a global model."""

    number: int
    url: str
    digest: str
    size_bytes: int


class RoundSummary(Answer):
    """A round and its progress."""

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
        description="End of the upload time; null until enough participants have connected, while the federation is "
        "paused, and after the round has closed."
    )
    closed_at: float | None


class EvaluationView(Answer):
    """Rates over held-out images; positives belong to the client's own classes."""

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
    """A client that contributed no update to a round, and why."""

    client: str
    reason: str


class RoundView(RoundSummary):
    """A round with its updates and the evaluation of the resulting model."""

    uploads: list[UpdateView]
    missing: list[MissingView] = Field(
        [],
        description="Clients that were absent when the round opened or had not uploaded when it closed, and why.",
    )
    evaluation: EvaluationView | None
    client_evaluations: dict[str, EvaluationView]


class SiteVerdict(Answer):
    """Whether joining paid off at a site, by the newest model it evaluated."""

    client: str
    model: int
    verdict: Verdict


class VerdictSummary(Answer):
    """At how many sites joining paid off."""

    pays_off: int
    no_difference: int
    better_alone: int
    not_shared: int = Field(description="Sites that do not share their verdict, or have none yet.")
    sentence: str
    together: str = Field("", description="The difference over all their test images together; empty for one site.")


class FederationView(Answer):
    """A federation and what it is waiting for."""

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
    more_rounds: int | None = Field(
        None,
        description="The accuracy was still rising when the rounds were over, or almost over: about this many more "
        "rounds would help.",
    )
    verdicts: list[SiteVerdict] = Field([], description="Of the sites that share theirs; a client sees only its own.")
    verdict_summary: VerdictSummary | None = Field(None, description="Null for clients, and if no site shares any.")
    stored_bytes: int | None = Field(
        None, description="Bytes of all tensors stored for it: models, uploads and personal ones. Null for clients."
    )
    plan: StoredPlan | None = None
    warnings: list[str] = Field([], description="What in the plan may not be as its author expects.")


class HeterogeneityView(Answer):
    """The distribution of classes across clients."""

    dh: float | None
    classes: list[str]
    clients: dict[str, list[int]] = Field(description="Training images per class, by client name.")
    embeddings: dict[str, list[float]] = Field(description="Each client's share of a class's images, by client name.")
    withheld: list[str] = Field([], description="Clients that withhold their class counts and are left out above.")


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
        description="An agent that does not recognize the action waits."
    )
    ticket: str = Field(
        "", description="Changes whenever this answer changes; pass it as ?after= to wait for the next change."
    )
    reason: str = Field("", description="Why there is nothing to train, for people.")
    round: RoundTaskView | None = None
    model: ModelPointer | None = Field(None, description="The newest global model, to train from or to serve.")
    personal_url: str | None = Field(None, description="This client's personal tensors for that model.")
    facts: dict[str, str] = Field(default_factory=dict, description="Facts that apply to the personal tensors.")
    deadline_s: float | None = Field(None, description="Seconds left to upload.")


class UpdateReceipt(Answer):
    """Confirms that the update is stored; repeating the same upload returns the same receipt."""

    round: int
    digest: str
    size_bytes: int
    received_at: float


class AuditView(Answer):
    """An audit log entry."""

    id: int
    at: float
    actor: str
    action: str
    federation: str
    address: str
    detail: str


class StateRequest(Frozen):
    """The operator's reason for changing a federation's state."""

    reason: Annotated[str, StringConstraints(max_length=500)] = ""


class RollbackRequest(Frozen):
    """The model to roll back to."""

    to: int = Field(
        ge=0, lt=2**31, strict=True, description="Number of a round that produced a model; 0 is the initial model."
    )

"""The answers of `/predict` and `/`."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from client_agent.serving.model import AS_SERVED, ServingModel, View
from client_agent.serving.queue import PredictionResult
from client_agent.settings import PriorKind
from shared import __version__


class Links(BaseModel):
    """Paths of the other calls."""

    predict: str = "/predict"
    info: str = "/info"
    docs: str = "/docs"


class Overview(BaseModel):
    """The agent's answer at its root."""

    service: str = "DisTrans agent"
    version: str = __version__
    federation: str
    model: int | None = Field(description="Number of the model that answers /predict; null before the first one.")
    links: Links = Links()


class ScoredClass(BaseModel):
    """A class and its probability."""

    label: str
    class_id: int
    probability: float


class Prediction(BaseModel):
    """The most probable class of one image."""

    index: int
    label: str
    class_id: int
    probability: float
    top_k: list[ScoredClass]


class MemberInfo(BaseModel):
    """A base model's part in the answers."""

    base: str = Field(description="global, personal, offset, adapted or alone.")
    weight: float


class ModelInfo(BaseModel):
    """What produced an answer."""

    federation: str
    round: int
    digest: str
    offset_digest: str | None = Field(description="Null if no offset was applied.")
    candidate: str = Field(description="What the gate chose for this site, such as offset+prior, blend or alone.")
    candidate_digest: str | None = Field(
        description="Identifies the candidate with its weights and temperature; null for a model of an older agent."
    )
    members: list[MemberInfo] = Field(description="The models whose probabilities or logits were added up.")
    mixed: Literal["probabilities", "logits"] = Field(description="What the members' weights multiply.")
    prior: PriorKind | None = Field(
        description="Whose class frequencies the probabilities assume: this site's, the federation's (none) or the "
        "deployment's. Null if the counts that a prior needs are unknown."
    )
    temperature: float = Field(description="By which the probabilities were calibrated; 1 leaves them as they were.")


class PredictAnswer(BaseModel):
    """The answer of `/predict`."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "model": {
                    "federation": "lung-nodules",
                    "round": 12,
                    "digest": "9f2c…",
                    "offset_digest": "51ab…",
                    "candidate": "offset+prior & alone",
                    "candidate_digest": "c04e…",
                    "members": [{"base": "offset", "weight": 0.5}, {"base": "alone", "weight": 0.5}],
                    "prior": "site",
                    "temperature": 1.31,
                },
                "predictions": [
                    {
                        "index": 0,
                        "label": "benign",
                        "class_id": 0,
                        "probability": 0.97,
                        "top_k": [{"label": "benign", "class_id": 0, "probability": 0.97}],
                    }
                ],
                "request_id": "0d9f0c",
            }
        }
    )
    model: ModelInfo
    predictions: list[Prediction]
    request_id: str
    without_offset: list[Prediction] | None = None


def predict_answer(result: PredictionResult, top_k: int, request_id: str) -> PredictAnswer:
    """Return each image's most probable classes; a second view without the offset becomes `without_offset`."""
    model = result.model
    (view, first), *others = result.probabilities.items()
    described = PredictAnswer(
        model=describe_model(model, view), predictions=_rank(model, first, top_k), request_id=request_id
    )
    for _, probabilities in others:
        described.without_offset = _rank(model, probabilities, top_k)
    return described


def describe_model(model: ServingModel, view: View = AS_SERVED) -> ModelInfo:
    """Return what answers in this view."""
    return ModelInfo(
        federation=model.federation,
        round=model.key.number,
        digest=model.key.digest,
        offset_digest=model.offset_digest if view.use_offset else None,
        candidate=model.candidate.name,
        candidate_digest=model.record or None,
        members=[MemberInfo(base=member.base, weight=weight) for member, weight in model.members(view)],
        mixed=model.candidate.mixed,
        prior=model.applied_prior(view),
        temperature=model.temperature,
    )


def _rank(model: ServingModel, probabilities: Tensor, top_k: int) -> list[Prediction]:
    return [
        Prediction(index=index, **ranked[0]._asdict(), top_k=[ScoredClass(**one._asdict()) for one in ranked])
        for index, ranked in enumerate(model.rank(probabilities, top_k))
    ]

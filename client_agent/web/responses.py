"""The answers of `/predict` and `/`."""

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from client_agent.serving.model import ServingModel
from client_agent.serving.queue import PredictionResult
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


class ModelInfo(BaseModel):
    """The model and offset that produced an answer."""

    federation: str
    round: int
    digest: str
    offset_digest: str | None


class PredictAnswer(BaseModel):
    """The answer of `/predict`."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "model": {"federation": "lung-nodules", "round": 12, "digest": "9f2c…", "offset_digest": "51ab…"},
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
    """Return each image's most probable classes; if both kinds were requested, `without_offset` has the second."""
    model = result.model
    own = None if result.with_offset is None else _rank(model, result.with_offset, top_k)
    without = None if result.without_offset is None else _rank(model, result.without_offset, top_k)
    about = ModelInfo(
        federation=model.federation,
        round=model.key.number,
        digest=model.key.digest,
        offset_digest=None if own is None else model.offset_digest,
    )
    described = PredictAnswer(model=about, predictions=own or without or [], request_id=request_id)
    if own and without:
        described.without_offset = without
    return described


def _rank(model: ServingModel, probabilities: Tensor, top_k: int) -> list[Prediction]:
    return [
        Prediction(index=index, **ranked[0]._asdict(), top_k=[ScoredClass(**one._asdict()) for one in ranked])
        for index, ranked in enumerate(model.rank(probabilities, top_k))
    ]

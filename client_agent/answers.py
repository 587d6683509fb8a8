"""What `/predict` and `/` answer."""

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from client_agent.serving import Answer, ServingModel
from shared import __version__


class Links(BaseModel):
    """The other calls, relative to this one."""

    predict: str = "/predict"
    info: str = "/info"
    docs: str = "/docs"


class Overview(BaseModel):
    """What the agent answers at its root."""

    service: str = "DisTrans agent"
    version: str = __version__
    federation: str
    model: int | None = Field(description="Number of the model that answers /predict; null before the first one.")
    links: Links = Links()


class ScoredClass(BaseModel):
    """A class and how likely it is."""

    label: str
    class_id: int
    probability: float


class Prediction(BaseModel):
    """The likeliest class of one image."""

    index: int
    label: str
    class_id: int
    probability: float
    top_k: list[ScoredClass]


class ModelInfo(BaseModel):
    """Which model and which offset answered."""

    federation: str
    round: int
    digest: str
    offset_digest: str | None


class PredictAnswer(BaseModel):
    """What `/predict` answers."""

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


def describe(answer: Answer, top_k: int, request_id: str) -> PredictAnswer:
    """The likeliest classes of each image. Where both were asked for, those without the offset stand beside."""
    model = answer.model
    own = None if answer.own is None else _rank(model, answer.own, top_k)
    without = None if answer.without_offset is None else _rank(model, answer.without_offset, top_k)
    about = ModelInfo(
        federation=model.federation,
        round=model.number,
        digest=model.digest,
        offset_digest=None if own is None else model.offset_digest,
    )
    described = PredictAnswer(model=about, predictions=own or without or [], request_id=request_id)
    if own and without:
        described.without_offset = without
    return described


def _rank(model: ServingModel, probabilities: Tensor, top_k: int) -> list[Prediction]:
    values, positions = probabilities.topk(min(top_k, len(model.classes)), dim=1)
    predictions = []
    for index, (row, places) in enumerate(zip(values.tolist(), positions.tolist(), strict=True)):
        ranked = [
            ScoredClass(label=model.classes[place], class_id=place, probability=value)
            for value, place in zip(row, places, strict=True)
        ]
        best = ranked[0]
        predictions.append(
            Prediction(
                index=index, label=best.label, class_id=best.class_id, probability=best.probability, top_k=ranked
            )
        )
    return predictions

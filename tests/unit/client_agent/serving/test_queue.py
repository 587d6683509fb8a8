"""The prediction queue."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from client_agent.model_key import ModelKey
from client_agent.serving.candidates import Base, Member, single
from client_agent.serving.model import AS_SERVED, ServingModel, View
from client_agent.serving.queue import PredictionQueue, QueueFull

WITHOUT_OFFSET = View(use_offset=False)


class Net:
    """A network that returns the sum of the pixels and its negative, can be blocked, and records its batch sizes."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def __call__(self, images: Tensor) -> Tensor:
        self.batches.append(len(images))
        self.entered.set()
        assert self.go_on.wait(30)
        sums = images.flatten(1).sum(1, keepdim=True)
        return torch.cat([sums, -sums], dim=1)


@pytest.fixture
def net() -> Net:
    return Net()


@pytest.fixture
def predictions(net: Net) -> Iterator[PredictionQueue]:
    one = PredictionQueue(max_waiting=5, max_batch=4, threads=1)
    predictors = {Base.OFFSET: net, Base.GLOBAL: lambda images: -net(images)}
    candidate = single(Member(Base.OFFSET))
    one.model = ServingModel(predictors, candidate, "pets", ModelKey(1, "d", ""), ("cat", "dog"), offset_digest="o")
    yield one
    net.go_on.set()
    one.stop()


def images(*values: float) -> Tensor:
    return torch.tensor(values)[:, None, None, None]


def test_waiting_requests_are_batched_and_each_gets_its_own_answer(net: Net, predictions: PredictionQueue) -> None:
    net.go_on.clear()
    first = predictions.submit(lambda: images(0.0))
    assert net.entered.wait(30)
    decoded = threading.Barrier(2)

    def last_one() -> Tensor:
        decoded.wait(30)
        return images(5.0)

    rest = [
        predictions.submit(lambda: images(1.0, 2.0)),
        predictions.submit(lambda: images(3.0)),
        predictions.submit(lambda: images(4.0)),
        predictions.submit(last_one),
    ]
    decoded.wait(30)  # then the ones before it are decoded too: one thread decodes in order
    net.go_on.set()
    results = [answer.result(30).probabilities[AS_SERVED] for answer in (first, *rest)]
    assert net.batches[:2] == [1, 4]  # at most one batch
    expected = [(0.0,), (1.0, 2.0), (3.0,), (4.0,), (5.0,)]
    for result, values in zip(results, expected, strict=True):
        logits = torch.tensor([[value, -value] for value in values])
        assert torch.allclose(result, logits.softmax(dim=1))


def test_both_answers_of_a_request_come_from_one_model(net: Net, predictions: PredictionQueue) -> None:
    answer = predictions.submit(lambda: images(1.0), AS_SERVED, WITHOUT_OFFSET).result(30)
    assert torch.allclose(answer.probabilities[AS_SERVED].flip(1), answer.probabilities[WITHOUT_OFFSET])
    assert answer.model.key.number == 1
    alone = predictions.submit(lambda: images(1.0), WITHOUT_OFFSET).result(30)
    assert list(alone.probabilities) == [WITHOUT_OFFSET]
    assert net.batches == [1, 1, 1]


def test_an_undecodable_image_fails_only_its_own_request(predictions: PredictionQueue) -> None:
    def broken() -> Tensor:
        raise ValueError("no image")

    with pytest.raises(ValueError, match="no image"):
        predictions.submit(broken).result(30)
    assert predictions.submit(lambda: images(1.0)).result(30).probabilities


def test_requests_that_are_not_decoded_yet_count_as_waiting(net: Net, predictions: PredictionQueue) -> None:
    net.go_on.clear()
    answers = [predictions.submit(lambda: images(1.0)) for _ in range(5)]
    with pytest.raises(QueueFull):
        predictions.submit(lambda: images(1.0))
    net.go_on.set()
    for answer in answers:
        answer.result(30)
    assert predictions.submit(lambda: images(1.0)).result(30).probabilities


def test_a_caller_that_disconnects_does_not_affect_the_others(net: Net, predictions: PredictionQueue) -> None:
    net.go_on.clear()
    gone = predictions.submit(lambda: images(1.0))
    assert net.entered.wait(30)
    assert not gone.cancel()
    stays = predictions.submit(lambda: images(2.0))
    net.go_on.set()
    assert stays.result(30).probabilities


def test_requests_without_a_model_fail(predictions: PredictionQueue) -> None:
    predictions.model = None
    with pytest.raises(LookupError):
        predictions.submit(lambda: images(1.0)).result(30)


def test_stopping_answers_waiting_requests(net: Net, predictions: PredictionQueue) -> None:
    answers = [predictions.submit(lambda: images(1.0)) for _ in range(4)]
    predictions.stop()
    assert all(answer.done() for answer in answers)
    assert sum(net.batches) == 4

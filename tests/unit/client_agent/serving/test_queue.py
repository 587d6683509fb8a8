"""The prediction queue."""

import asyncio
import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from client_agent.model_key import ModelKey
from client_agent.serving.candidates import Base, Member, single
from client_agent.serving.model import AS_SERVED, ServingModel, View
from client_agent.serving.queue import PredictionQueue, PredictionResult, QueueFull, batch_size

WITHOUT_OFFSET = View(use_offset=False)
VIEWS = (AS_SERVED, WITHOUT_OFFSET, View(prior="none"))
LARGE = 10**9  # bytes, more than a thread decodes between two batches


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


def queue_of(net: Net, max_waiting: int = 5) -> PredictionQueue:
    one = PredictionQueue(max_waiting, max_batch=4, threads=1)
    predictors = {Base.OFFSET: net, Base.GLOBAL: lambda images: -net(images)}
    candidate = single(Member(Base.OFFSET))
    one.model = ServingModel(predictors, candidate, "pets", ModelKey(1, "d", ""), ("cat", "dog"), offset_digest="o")
    return one


@pytest.fixture
def predictions(net: Net) -> Iterator[PredictionQueue]:
    one = queue_of(net)
    yield one
    net.go_on.set()
    one.stop()


def images(*values: float) -> Tensor:
    return torch.tensor(values)[:, None, None, None]


def test_waiting_requests_are_batched_and_each_gets_its_own_answer(net: Net, predictions: PredictionQueue) -> None:
    net.go_on.clear()
    first = predictions.submit(lambda: images(0.0))
    assert net.entered.wait(30)
    rest = [
        predictions.submit(lambda: images(1.0, 2.0)),
        predictions.submit(lambda: images(3.0)),
        predictions.submit(lambda: images(4.0)),
        predictions.submit(lambda: images(5.0)),
    ]
    net.go_on.set()
    results = [answer.result(30).probabilities[AS_SERVED] for answer in (first, *rest)]
    assert net.batches[:2] == [1, 4]  # at most one batch
    expected = [(0.0,), (1.0, 2.0), (3.0,), (4.0,), (5.0,)]
    for result, values in zip(results, expected, strict=True):
        logits = torch.tensor([[value, -value] for value in values])
        assert torch.allclose(result, logits.softmax(dim=1))


def test_large_images_are_decoded_while_the_network_computes(net: Net, predictions: PredictionQueue) -> None:
    net.go_on.clear()
    first = predictions.submit(lambda: images(0.0))
    assert net.entered.wait(30)
    decoded = threading.Event()

    def large() -> Tensor:
        decoded.set()
        return images(1.0)

    second = predictions.submit(large, size_bytes=LARGE)
    assert decoded.wait(30)
    net.go_on.set()
    assert first.result(30).probabilities
    assert second.result(30).probabilities


def test_small_requests_do_not_wait_for_a_large_image(predictions: PredictionQueue) -> None:
    decoding, go_on = threading.Event(), threading.Event()

    def large() -> Tensor:
        decoding.set()
        assert go_on.wait(30)
        return images(1.0)

    slow = predictions.submit(large, size_bytes=LARGE)
    assert decoding.wait(30)
    assert predictions.submit(lambda: images(2.0)).result(30).probabilities
    assert not slow.done()
    go_on.set()
    assert slow.result(30).probabilities


def test_small_requests_are_answered_when_all_threads_are_done_with_large_images(predictions: PredictionQueue) -> None:
    decoding, go_on = threading.Semaphore(0), threading.Event()

    def large() -> Tensor:
        decoding.release()
        assert go_on.wait(30)
        return images(1.0)

    answers = [predictions.submit(large, size_bytes=LARGE) for _ in range(2)]
    for _ in answers:
        assert decoding.acquire(timeout=30)
    answers.append(predictions.submit(lambda: images(2.0)))
    go_on.set()
    for answer in answers:
        assert answer.result(30).probabilities


@given(
    st.lists(
        st.tuples(
            st.integers(1, 6),
            st.sampled_from([0, LARGE]),
            st.lists(st.sampled_from(VIEWS), min_size=1, max_size=3, unique=True),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_every_request_gets_its_own_views_in_order(requests: list[tuple[int, int, list[View]]]) -> None:
    net = Net()
    one = queue_of(net, max_waiting=len(requests))
    try:
        net.go_on.clear()
        answers = [
            one.submit(partial(images, *[number + place / 10 for place in range(count)]), *views, size_bytes=size)
            for number, (count, size, views) in enumerate(requests)
        ]
        net.go_on.set()
        for number, (answer, (count, _, views)) in enumerate(zip(answers, requests, strict=True)):
            found = answer.result(30).probabilities
            assert list(found) == views
            sums = torch.tensor([[number + place / 10] for place in range(count)])
            logits = torch.cat([sums, -sums], dim=1)
            for view in views:
                expected = (logits if view.use_offset else -logits).softmax(dim=1)
                assert torch.allclose(found[view], expected, atol=1e-5)
    finally:
        net.go_on.set()
        one.stop()


def test_callers_in_an_event_loop_get_their_answers_and_errors(predictions: PredictionQueue) -> None:
    def broken() -> Tensor:
        raise ValueError("no image")

    async def call() -> list[PredictionResult | BaseException]:
        calls = [predictions.predict(prepare) for prepare in (lambda: images(1.0), broken, lambda: images(2.0))]
        return await asyncio.gather(*calls, return_exceptions=True)

    first, error, second = asyncio.run(call())
    assert isinstance(first, PredictionResult)
    assert isinstance(error, ValueError)
    assert isinstance(second, PredictionResult)
    assert not torch.equal(first.probabilities[AS_SERVED], second.probabilities[AS_SERVED])


def test_a_cancelled_caller_does_not_affect_the_others_in_its_batch(net: Net, predictions: PredictionQueue) -> None:
    async def call() -> PredictionResult:
        net.go_on.clear()
        first = asyncio.create_task(predictions.predict(lambda: images(0.0)))
        await asyncio.to_thread(net.entered.wait, 30)
        gone, stays = (asyncio.create_task(predictions.predict(lambda: images(1.0))) for _ in range(2))
        await asyncio.sleep(0)  # both are waiting
        gone.cancel()
        net.go_on.set()
        await first
        return await stays

    assert asyncio.run(call()).probabilities
    assert sum(net.batches) == 3
    assert not predictions.is_full


def test_a_caller_whose_event_loop_is_gone_does_not_affect_the_others(net: Net, predictions: PredictionQueue) -> None:
    net.go_on.clear()

    async def leave() -> None:
        task = asyncio.create_task(predictions.predict(lambda: images(1.0)))
        await asyncio.to_thread(net.entered.wait, 30)
        task.cancel()

    asyncio.run(leave())
    stays = predictions.submit(lambda: images(2.0))
    net.go_on.set()
    assert stays.result(30).probabilities


def test_batches_are_smaller_on_a_cpu() -> None:
    assert batch_size("cpu", largest=32) < batch_size("cuda", largest=32) == 32
    assert batch_size("cpu", largest=1) == 1


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

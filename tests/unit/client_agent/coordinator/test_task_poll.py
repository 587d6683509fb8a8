"""A long poll next to the agent's own work."""

import queue

import pytest

from client_agent.coordinator.task_poll import TaskPoll
from shared.contract.errors import DistransError
from shared.contract.messages import ModelPointer, TaskAnswer

MODEL = ModelPointer(number=3, url="/m", digest="d", size_bytes=1)
WAIT = TaskAnswer(action="wait", ticket="1", reason="waiting for 3 sites", model=MODEL)


class Coordinator:
    """Answers when the test says so, and records the tickets it was asked with."""

    def __init__(self) -> None:
        self.tickets: queue.Queue[str] = queue.Queue()
        self.answers: queue.Queue[TaskAnswer | Exception] = queue.Queue()

    def ask(self, ticket: str) -> TaskAnswer:
        self.tickets.put(ticket)
        answer = self.answers.get(timeout=60)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def coordinator() -> Coordinator:
    return Coordinator()


def test_another_reason_to_wait_is_no_news(coordinator: Coordinator) -> None:
    poll = TaskPoll(coordinator.ask, WAIT)
    other = WAIT.model_copy(update={"ticket": "2", "reason": "waiting for 2 sites"})
    coordinator.answers.put(other)
    assert [coordinator.tickets.get(timeout=60) for _ in range(2)] == ["1", "2"]  # it has asked again
    assert not poll.has_news()
    train = WAIT.model_copy(update={"action": "train", "ticket": "3"})
    coordinator.answers.put(train)
    assert poll.wait() == train
    assert poll.has_news()


@pytest.mark.parametrize(
    "news",
    [
        WAIT.model_copy(update={"action": "train"}),
        WAIT.model_copy(update={"action": "finished"}),
        WAIT.model_copy(update={"model": MODEL.model_copy(update={"number": 4})}),
    ],
)
def test_a_task_or_a_model_is_news(coordinator: Coordinator, news: TaskAnswer) -> None:
    poll = TaskPoll(coordinator.ask, WAIT)
    coordinator.answers.put(news)
    assert poll.wait() == news


def test_somebody_who_waits_gets_any_answer(coordinator: Coordinator) -> None:
    poll = TaskPoll(coordinator.ask, WAIT)
    coordinator.tickets.get(timeout=60)
    poll._is_awaited.set()  # as `wait` does before it blocks
    coordinator.answers.put(WAIT)
    assert poll.wait() == WAIT


def test_an_error_is_news_and_raised_again(coordinator: Coordinator) -> None:
    poll = TaskPoll(coordinator.ask, WAIT)
    coordinator.answers.put(DistransError("revoked"))
    with pytest.raises(DistransError, match="revoked"):
        poll.wait()
    assert poll.has_news()

"""Asks for the next task in a thread, so that the agent can do something useful until there is news."""

import threading
from collections.abc import Callable
from concurrent.futures import Future

from shared.contract.messages import TaskAnswer


class TaskPoll:
    """A long poll under way. Answers without news, such as another site's upload, do not end it."""

    def __init__(self, ask: Callable[[str], TaskAnswer], known: TaskAnswer) -> None:
        """`ask` waits for a task after a ticket; `known` is the last one."""
        self._ask, self._known = ask, known
        self._result: Future[TaskAnswer] = Future()
        self._is_awaited = threading.Event()
        threading.Thread(target=self._run, name="poll", daemon=True).start()

    def has_news(self) -> bool:
        """Return whether there is something else to do now, or the poll has failed."""
        return self._result.done()

    def wait(self) -> TaskAnswer:
        """Return the next answer, with or without news; raise the poll's error if it failed."""
        self._is_awaited.set()
        return self._result.result()

    def _run(self) -> None:
        ticket = self._known.ticket
        try:
            while True:
                answer = self._ask(ticket)
                if self._is_awaited.is_set() or _essence(answer) != _essence(self._known):
                    self._result.set_result(answer)
                    return
                ticket = answer.ticket
        except BaseException as error:  # raised again by `wait`
            self._result.set_exception(error)


def _essence(answer: TaskAnswer) -> tuple[object, ...]:
    """Return what an agent acts on; the reason for waiting and the time left are not part of it."""
    return answer.action, answer.model, answer.round, answer.facts

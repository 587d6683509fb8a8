"""All thin clients of a federation, one thread each, which pause between rounds until they are told to go on."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lab.bench.thin_client import Stopped, ThinClient
from shared.contract.messages import TaskAnswer


@dataclass
class RoundTimes:
    """When things happened in a round, as `time.perf_counter` counts."""

    started: float = 0.0
    acknowledged: list[float] = field(default_factory=list)  # each client's upload
    announced: list[float] = field(default_factory=list)  # when each client learned of the new model
    ready: list[float] = field(default_factory=list)  # when each client knew what to do next

    @property
    def seconds(self) -> float:
        """From the start until every client knows what to do next: the next round, or that there is none."""
        return max(self.ready) - self.started

    @property
    def tail_s(self) -> float:
        """From the last acknowledgment until a client has learned of the new model."""
        return max(0.0, min(self.announced) - max(self.acknowledged))


class Swarm:
    """The clients' threads. Close it to end them; a client that fails ends the measurement."""

    def __init__(self, connect: Callable[[str, threading.Event], ThinClient], tokens: Sequence[str]) -> None:
        self._stopping, self._lock = threading.Event(), threading.Lock()
        self._gate, self._news = threading.Condition(self._lock), threading.Condition(self._lock)
        self._clients = [connect(token, self._stopping) for token in tokens]
        self._rounds: dict[int, RoundTimes] = {}
        self._allowed = 0  # number of the last round that may start
        self._waiting = 0  # clients that know of a round they may not start yet
        self._failure: BaseException | None = None
        self._threads = [threading.Thread(target=self._run, args=[client], daemon=True) for client in self._clients]

    def __enter__(self) -> "Swarm":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._stopping.set()
            self._gate.notify_all()

    def join(self) -> None:
        """Wait for the threads to end; call it once the coordinator has been stopped."""
        for thread in self._threads:
            thread.join(timeout=10)

    def await_ready(self, pause: Callable[[float], None]) -> None:
        """Wait until all clients know of the first round."""
        self._await(lambda: self._waiting == len(self._clients), pause)

    def run_round(self, number: int, pause: Callable[[float], None]) -> RoundTimes:
        """Let the clients take part in one round, and wait for its end; `pause` sleeps and may raise."""
        times = RoundTimes(time.perf_counter())
        with self._lock:
            self._rounds[number] = times
            self._allowed, self._waiting = number, 0
            self._gate.notify_all()
        self._await(lambda: len(times.ready) == len(self._clients), pause)
        return times

    def _await(self, is_over: Callable[[], bool], pause: Callable[[float], None]) -> None:
        while True:
            with self._lock:
                over = self._news.wait_for(lambda: is_over() or self._failure is not None, timeout=0.2)
                if self._failure is not None:
                    raise self._failure
            if over:
                return
            pause(0)  # raises if the coordinator has ended

    def _run(self, client: ThinClient) -> None:
        try:
            task = self._await_work(client, "")
            while task.round is not None:
                number = task.round.number
                self._await_permission(number)
                client.download(task)
                acknowledged = client.upload(task.round.update_url)
                with self._lock:
                    self._rounds[number].acknowledged.append(acknowledged)
                task = self._await_work(client, task.ticket, number)
        except Stopped:
            pass
        except Exception as error:
            with self._lock:
                self._failure = self._failure or error
                self._news.notify()
        finally:
            client.close()

    def _await_work(self, client: ThinClient, ticket: str, after: int = 0) -> TaskAnswer:
        """Poll until there is a round to train in or the federation has finished; note when news of `after` arrived."""
        announced = False
        while True:
            task = client.task(ticket)
            now, ticket = time.perf_counter(), task.ticket
            with self._lock:
                if after and not announced and task.model is not None and task.model.number >= after:
                    self._rounds[after].announced.append(now)
                    announced = True
                if task.action in ("train", "finished"):
                    if after:
                        self._rounds[after].ready.append(now)
                    self._waiting += 1
                    self._news.notify()
                    return task

    def _await_permission(self, number: int) -> None:
        with self._lock:
            self._gate.wait_for(lambda: self._allowed >= number or self._stopping.is_set())
        if self._stopping.is_set():
            raise Stopped

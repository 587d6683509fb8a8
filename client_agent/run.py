"""`distrans-agent run`: the loop and the web service as one process."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

from rich.console import Console

from client_agent.agent import Agent
from client_agent.api import create_app
from client_agent.coordinator import Coordinator
from client_agent.data import open_data
from client_agent.errors import AgentEnded, Stopped
from client_agent.model_gate import ModelGate
from client_agent.network import open_http
from client_agent.serving import PredictionQueue
from client_agent.settings import RunOptions
from client_agent.state import StateFolder
from client_agent.threads import limit_threads
from client_agent.web_service import serving
from shared.problems import DistransError
from shared.runtime import Runtime, select_device


def run_agent(state: StateFolder, options: RunOptions, console: Console) -> None:
    """Run until SIGTERM, Ctrl-C or the end; raises AgentEnded when the coordinator has ended this agent's part."""
    stopping = threading.Event()
    with _signals(stopping):
        run_until(stopping, state, options, console)


def run_until(stopping: threading.Event, state: StateFolder, options: RunOptions, console: Console) -> None:
    """Run until asked to stop; in any thread."""
    identity = state.identity()
    device = select_device(options.device)
    runtime = Runtime(device, options.precision, options.channels_last, options.compile)
    with ExitStack() as stack:
        stack.enter_context(state.locked())
        data = None
        if options.train:
            data = open_data(
                identity.data,
                identity.plan,
                skip_bad=identity.skip_bad,
                cache_bytes=options.cache_bytes,
                pin=device.type == "cuda",
            )
        coordinator = Coordinator(stack.enter_context(open_http(identity.connection, identity.token)), stopping)
        serve, predictions = options.serve, None
        if serve is not None:
            predictions = PredictionQueue(serve.queue, serve.max_images, serve.threads)
            stack.callback(predictions.stop)
        gate = ModelGate(state, identity, data, runtime, options, predictions)
        agent = Agent(state, identity, coordinator, data, runtime, options, gate, console, stopping)
        if serve is not None and predictions is not None:
            stack.enter_context(serving(create_app(identity.plan, predictions, serve, agent.info), serve))
        _run_loop(agent, gate, options, stopping)


def _run_loop(agent: Agent, gate: ModelGate, options: RunOptions, stopping: threading.Event) -> None:
    """The loop in a thread, so that a signal need not wait for a long poll."""
    failure: list[BaseException] = []

    def loop() -> None:
        limit_threads(options.train_threads or max(1, (os.cpu_count() or 2) - 1))
        try:
            agent.run()
        except Stopped:
            pass
        except BaseException as error:  # handed to the main thread
            failure.append(error)
        finally:
            stopping.set()

    thread = threading.Thread(target=loop, name="agent", daemon=True)
    watcher = threading.Thread(target=gate.follow_pin, args=(stopping,), name="pin", daemon=True)
    thread.start()
    watcher.start()
    stopping.wait()
    # Training ends within a batch. Anything else may be cut off at any point: what counts is on the disk.
    while thread.is_alive() and agent.doing.startswith("training"):
        thread.join(timeout=0.1)
    watcher.join()
    if failure:
        error = failure[0]
        if isinstance(error, DistransError):
            raise error
        raise AgentEnded(f"The agent met an error that it did not expect: {type(error).__name__}: {error}") from error


@contextmanager
def _signals(stopping: threading.Event) -> Iterator[None]:
    """SIGTERM and Ctrl-C ask to stop; a second one ends at once."""

    def handler(_number: int, _frame: FrameType | None) -> None:
        if stopping.is_set():
            os._exit(130)
        stopping.set()

    previous = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)

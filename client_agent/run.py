"""`distrans-agent run`: the loop and the web service as one process, each with a life of its own."""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import FrameType

from rich.console import Console

from client_agent.agent import Agent, Parts
from client_agent.api import create_app
from client_agent.condition import Condition, TroubleKind
from client_agent.coordinator import Coordinator
from client_agent.credentials import HOW_TO_RETURN, CurrentToken
from client_agent.data import SiteData, open_data
from client_agent.errors import AgentEnded, Ending, Stopped, TokenRefused
from client_agent.model_gate import ModelGate
from client_agent.network import open_http
from client_agent.reporting import reporting
from client_agent.serving import PredictionQueue
from client_agent.settings import RunOptions
from client_agent.state import StateFolder
from client_agent.threads import limit_threads
from client_agent.web_service import serving
from shared.problems import DistransError
from shared.runtime import Runtime, select_device

logger = logging.getLogger(__name__)
_SHOWN = 10


def run_agent(state: StateFolder, options: RunOptions, console: Console) -> None:
    """Run until SIGTERM or Ctrl-C; see run_until for what else ends it."""
    stopping = threading.Event()
    with _signals(stopping):
        run_until(stopping, state, options, console)


def run_until(stopping: threading.Event, state: StateFolder, options: RunOptions, console: Console) -> None:
    """Run until asked to stop; in any thread.

    While it serves, nothing else ends it: neither the end of the federation or of this agent's part in it, nor data or
    a coordinator that cannot be reached; only a failure of the web service itself does, with a DistransError. Without a
    web service, or with `exit_when_finished`, it ends with the federation, and raises AgentEnded when its part is over
    for good.
    """
    identity = state.identity()
    token = CurrentToken(state, identity.token)
    if identity.has_left:
        options = replace(options, train=False)
    device = select_device(options.device)
    runtime = Runtime(device, options.precision, options.channels_last, options.compile)
    serve = options.serve
    web_has_failed = threading.Event()

    def end_without_web_service() -> None:
        web_has_failed.set()
        stopping.set()

    with ExitStack() as stack:
        stack.enter_context(state.locked())
        predictions = None
        if serve is not None:
            predictions = PredictionQueue(serve.queue, serve.max_images, serve.threads)
            stack.callback(predictions.stop)
        condition = Condition(state.save_condition, state.condition())
        gate = ModelGate(state, identity, runtime, options, predictions, condition.serve)

        def connect() -> Coordinator:
            if identity.has_left:
                raise AgentEnded(Ending.LEFT, "This site has left the federation.", HOW_TO_RETURN)
            http = stack.enter_context(open_http(identity.connection, token))
            return Coordinator(http, stopping, condition.note_coordinator, token)

        def open_site_data() -> SiteData:
            data = open_data(
                identity.data,
                identity.plan,
                skip_bad=identity.skip_bad,
                class_map=identity.class_map,
                skipped=identity.skipped,
                cache_bytes=options.cache_bytes,
                pin=device.type == "cuda",
            )
            for line in data.report.bad[:_SHOWN]:
                logger.warning("left out, as --skip-bad asks: %s", line)
            return data

        agent = Agent(
            Parts(state, identity, options, runtime, gate, condition, console, stopping, connect, open_site_data)
        )
        if serve is not None and predictions is not None:
            gate.serve_kept()
            app = create_app(identity.plan, predictions, serve, agent.info)
            stack.enter_context(serving(app, serve, end_without_web_service))
        else:
            agent.prepare()  # nobody is served meanwhile: better end at once than wait for what a person must fix
        with reporting(condition, lambda: open_http(identity.connection, token)):
            _run_loop(agent, gate, condition, options, stopping, token)
        if web_has_failed.is_set():
            raise DistransError(
                "The web service has stopped.", next_step="The log has the reason; start the agent again."
            )


def _run_loop(
    agent: Agent,
    gate: ModelGate,
    condition: Condition,
    options: RunOptions,
    stopping: threading.Event,
    token: CurrentToken,
) -> None:
    """The loop in a thread, so that a signal need not wait for a long poll."""
    serves_on = options.serve is not None and not options.exit_when_finished
    endings: list[BaseException] = []

    def run_with_valid_token() -> None:
        while True:
            try:
                return agent.run()
            except TokenRefused as error:
                if not serves_on:
                    raise
                condition.end(error)
                token.wait_for_another(error.token, stopping)
                logger.info("the token was replaced: taking part again")

    def loop() -> None:
        limit_threads(options.train_threads or max(1, (os.cpu_count() or 2) - 1))
        try:
            run_with_valid_token()
        except Stopped:
            pass
        except AgentEnded as error:
            condition.end(error)
            endings.append(error)
        except BaseException as error:  # such as a SystemExit in the site's own code
            logger.critical("the loop has stopped", exc_info=error)
            condition.record(TroubleKind.UNEXPECTED, f"The loop has stopped: {type(error).__name__}: {error}")
            endings.append(error)
        finally:
            if not serves_on:
                stopping.set()

    thread = threading.Thread(target=loop, name="agent", daemon=True)
    watcher = threading.Thread(target=gate.follow_pin, args=(stopping, condition), name="pin", daemon=True)
    thread.start()
    if options.serve is not None:
        watcher.start()
    stopping.wait()
    # Training ends within a batch. Anything else may be cut off at any point: what counts is on the disk.
    while thread.is_alive() and condition.activity.stops_soon:
        thread.join(timeout=0.1)
    if options.serve is not None:
        watcher.join()
    if endings and not serves_on:
        raise endings[0]


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

"""`distrans-agent run`: the loop and the web service, independent of each other in one process."""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import FrameType

from rich.console import Console

from client_agent.agent import Agent
from client_agent.context import AgentContext
from client_agent.coordinator.client import Coordinator
from client_agent.coordinator.connection import open_http
from client_agent.coordinator.leaving import REJOIN_ADVICE
from client_agent.coordinator.status_reports import reporting
from client_agent.coordinator.tokens import CurrentToken
from client_agent.data.dataset import SiteData, open_data
from client_agent.errors import AgentEnded, Ending, StopRequested, TokenRefused, describe_error
from client_agent.memory import exempt_from_collection
from client_agent.serving.gate import ModelGate
from client_agent.serving.queue import PredictionQueue, batch_size
from client_agent.settings import HAS_LEFT, RunOptions
from client_agent.state.folder import StateFolder
from client_agent.status import AgentStatus, TroubleKind
from client_agent.threads import limit_threads, most_training_threads
from client_agent.web.app import create_app
from client_agent.web.info import agent_version, describe_agent
from client_agent.web.serve import web_server
from client_agent.web.site import Site
from shared.contract.errors import DistransError
from shared.learning.runtime import Runtime, select_device

logger = logging.getLogger(__name__)


def run_agent(state: StateFolder, options: RunOptions, console: Console) -> None:
    """Run until SIGTERM or Ctrl-C; see run_until_stopped for what else ends it."""
    stopping = threading.Event()
    with _signals(stopping):
        run_until_stopped(stopping, state, options, console)


def run_until_stopped(stopping: threading.Event, state: StateFolder, options: RunOptions, console: Console) -> None:
    """Run, in any thread, until asked to stop.

    A serving agent outlasts the federation and its own part in it, and survives unreachable data or an unreachable
    coordinator; if the web service fails, it raises DistransError. Without a web service, or with `exit_when_finished`,
    it ends with the federation, and raises AgentEnded if its part is over.
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
        state.save_prior(options.prior)
        predictions = None
        if serve is not None:
            predictions = PredictionQueue(serve.queue, batch_size(device.type, serve.max_images), serve.threads)
            stack.callback(predictions.stop)
        status = AgentStatus(state.save_status, state.load_status())
        gate = ModelGate(state, identity, runtime, options, predictions, status.serve)

        def connect() -> Coordinator:
            if identity.has_left:
                raise AgentEnded(Ending.LEFT, HAS_LEFT, REJOIN_ADVICE)
            http = stack.enter_context(open_http(identity.connection, token))
            return Coordinator(http, stopping, status.note_coordinator, token)

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
            for line in data.report.first_problems:
                logger.warning("skipped because of --skip-bad: %s", line)
            if limited := data.describe_cache():
                logger.info("%s (--cache-mb %d)", limited, options.cache_bytes // 1024**2)
            return data

        context = AgentContext(
            state, identity, options, runtime, gate, status, console, stopping, connect, open_site_data
        )
        agent = Agent(context)
        if serve is not None and predictions is not None:
            gate.serve_kept()

            predicted = predictions.predicted
            site = Site(
                info=lambda: describe_agent(state, identity, runtime, gate, status, agent.connection, predicted),
                version=lambda: agent_version(state, gate, status, agent.connection, predicted.total()),
                pin=state.models.pin,
            )
            app = create_app(identity.plan, predictions, serve, site)
            exempt_from_collection()
            stack.enter_context(web_server(app, serve, end_without_web_service))
        else:
            agent.prepare()  # nobody is being served: fail now rather than wait for a person to fix the problem
        with reporting(status, lambda: open_http(identity.connection, token)):
            _run_loop(agent, context, token)
        if web_has_failed.is_set():
            raise DistransError(
                "The web service has stopped.", next_step="See the log for the reason, then restart the agent."
            )


def _run_loop(agent: Agent, context: AgentContext, token: CurrentToken) -> None:
    """Run the loop in a thread, so that a signal need not wait for a long poll."""
    options, status, stopping = context.options, context.status, context.stopping
    serves_on = options.serve is not None and not options.exit_when_finished
    endings: list[BaseException] = []

    def run_with_valid_token() -> None:
        while True:
            try:
                return agent.run()
            except TokenRefused as error:
                if not serves_on:
                    raise
                status.end(error)
                token.wait_for_another(error.token, stopping)
                logger.info("the token was replaced: resuming")

    def loop() -> None:
        limit_threads(options.train_threads or most_training_threads(serves=options.serve is not None))
        try:
            run_with_valid_token()
        except StopRequested:
            pass
        except AgentEnded as error:
            status.end(error)
            endings.append(error)
        except BaseException as error:  # such as a SystemExit in the site's data code
            logger.critical("the loop has stopped", exc_info=error)
            status.record(TroubleKind.UNEXPECTED, f"The loop has stopped: {describe_error(error)}")
            endings.append(error)
        finally:
            if not serves_on:
                stopping.set()

    thread = threading.Thread(target=loop, name="agent", daemon=True)
    watcher = threading.Thread(target=context.gate.follow_pin, args=(stopping, status), name="pin", daemon=True)
    thread.start()
    if options.serve is not None:
        watcher.start()
    stopping.wait()
    # Training ends within a batch. Anything else can be cut off at any point: what matters is on disk.
    while thread.is_alive() and status.activity.is_interruptible:
        thread.join(timeout=0.1)
    if options.serve is not None:
        watcher.join()
    if endings and not serves_on:
        raise endings[0]


@contextmanager
def _signals(stopping: threading.Event) -> Iterator[None]:
    """Let SIGTERM and Ctrl-C request a stop; a second one ends the process at once."""

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

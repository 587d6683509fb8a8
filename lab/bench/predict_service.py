"""The agent's web service with a network of random weights; runs in a process of its own."""

import logging
import signal
import sys

from client_agent.memory import exempt_from_collection
from client_agent.serving.queue import PredictionQueue, batch_size
from client_agent.settings import ServeOptions
from client_agent.threads import limit_threads
from client_agent.web.app import ACCESS_LOG, create_app
from client_agent.web.serve import web_server
from client_agent.web.site import Site
from lab.bench.predict_network import Served, bench_model, bench_plan


def main() -> None:
    """Serve until terminated: python -m lab.bench.predict_service BACKBONE offset|blend."""
    backbone = sys.argv[1]
    served: Served = "blend" if sys.argv[2] == "blend" else "offset"
    logging.basicConfig(level=logging.INFO)
    logging.getLogger(ACCESS_LOG).setLevel(logging.WARNING)  # as `distrans-agent run` does
    options = ServeOptions(port=0)
    limit_threads(options.threads)
    plan = bench_plan(backbone)
    max_batch = batch_size("cpu", options.max_images)
    predictions = PredictionQueue(options.queue, max_batch, options.threads)
    predictions.model = bench_model(plan, served)
    app = create_app(plan, predictions, options, Site(dict))
    exempt_from_collection()
    with web_server(app, options):
        signal.pause()


if __name__ == "__main__":
    main()

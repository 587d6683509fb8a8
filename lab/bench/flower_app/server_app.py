"""Flower's server side: FedAvg, one round for every line that the bench sends; runs in Flower's own environment."""

import json
import socket
import time

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()
client = ClientApp()  # a Flower app must name one; the nodes reply without it


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run rounds until the bench closes the connection, and tell it the seconds of each."""
    with (
        socket.create_connection(("127.0.0.1", int(context.run_config["port"]))) as connection,
        connection.makefile("rw") as bench,
    ):
        description = json.loads(bench.readline())
        arrays = ArrayRecord([np.zeros(size, dtype=np.float32) for size in description["sizes"]])
        strategy = FedAvg(
            fraction_evaluate=0.0,
            min_train_nodes=description["clients"],
            min_available_nodes=description["clients"],
        )
        _await_nodes(grid, description["clients"])
        bench.write("ready\n")
        bench.flush()
        while bench.readline():
            _await_nodes(grid, description["clients"])  # they count as offline while they are stopped
            started = time.perf_counter()
            result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=1, timeout=3600)
            seconds = time.perf_counter() - started
            replies = result.train_metrics_clientapp
            bench.write(json.dumps({"seconds": seconds, "aggregated": bool(replies)}) + "\n")
            bench.flush()
            arrays = result.arrays


def _await_nodes(grid: Grid, count: int) -> None:
    while len(list(grid.get_node_ids())) < count:
        time.sleep(0.2)

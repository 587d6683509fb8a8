"""Flower's nodes without training, all in one process; runs in Flower's own environment.

Each node is a thread that does what `flower-supernode` does, through the same functions: it waits for a message, pulls
its objects, and sends a reply with arrays of the same size. No ClientApp process is started.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import pull_objects, push_object_contents_from_iterable
from flwr.supernode.fleet_http_connection import http_request_response

_POLL_S = 3.0  # as in flwr.supernode.start_client_internal


def main() -> None:
    """Run the nodes of a description until the process is terminated: python nodes.py ADDRESS FILE."""
    address, file = sys.argv[1:]
    description = json.loads(Path(file).read_text())
    weights = [np.zeros(size, dtype=np.float32) for size in description["sizes"]]
    nodes = [
        threading.Thread(target=_run_node, args=[address, number, weights]) for number in range(description["clients"])
    ]
    for node in nodes:
        node.start()
    for node in nodes:  # Flower's functions use thread pools, which end with the main thread
        node.join()


def _run_node(address: str, number: int, weights: "list[np.ndarray[tuple[int], np.dtype[np.float32]]]") -> None:
    with http_request_response(address, insecure=True) as connection:
        _, receive, send, _, _, pull_object, push_object, confirm = connection
        while True:
            received = receive()
            if received is None:
                time.sleep(_POLL_S)
                continue
            message, tree = received
            run_id = message.metadata.run_id
            names = [found.object_id for found in iterate_object_tree(tree)]
            pull_objects(names, pull_object_fn=partial(pull_object, run_id))
            confirm(run_id, message.metadata.message_id)
            _reply(message, number, weights, send, push_object)


def _reply(
    message: Message,
    number: int,
    weights: "list[np.ndarray[tuple[int], np.dtype[np.float32]]]",
    send: Callable[[Message, ObjectTree, float], tuple[set[str], str]],
    push_object: Callable[[int, str, str, bytes], None],
) -> None:
    # Other values at every node: the SuperLink stores equal objects once, and asks for them once.
    arrays = ArrayRecord([array + np.float32(number + 1) for array in weights])
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 10})})
    reply = Message(content, reply_to=message)
    with no_object_id_recompute():
        reply.metadata.__dict__["_message_id"] = reply.object_id
        objects = get_all_nested_objects(reply)
        wanted, session = send(reply, get_object_tree(reply), 0.0)

        def contents() -> Iterator[tuple[str, bytes]]:
            for name, found in objects.items():
                if name in wanted:
                    yield name, found.deflate()

        push = partial(push_object, message.metadata.run_id, session)
        push_object_contents_from_iterable(contents(), push_object_fn=push)


if __name__ == "__main__":
    main()

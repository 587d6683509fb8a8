"""The process engine's child: reads one job per line from stdin, writes messages as JSON lines to stdout."""

import json
import os
import queue
import sys
import threading

import torch

from lab.experiments.cells import attempt, decode_job


def main() -> None:
    """Run jobs until stdin closes, which also happens when the parent dies; then exit even in the middle of a cell."""
    torch.set_num_threads(1)
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # anything else that prints goes to the log

    def send(message: dict[str, object]) -> None:
        try:
            messages.write(json.dumps(message) + "\n")
            messages.flush()
        except BrokenPipeError:
            os._exit(1)  # the parent is gone

    jobs: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            jobs.put(line)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        cell, workspace = decode_job(jobs.get())
        send(attempt(cell, workspace, lambda done: send({"round": done})))


if __name__ == "__main__":
    main()

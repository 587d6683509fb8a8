"""A child process of the process engine: a job a line on stdin, answers as JSON lines on stdout."""

import json
import os
import queue
import sys
import threading

import torch

from lab.engines import attempt, decode_job


def main() -> None:
    """Run jobs until stdin ends; that also happens when the parent dies, whatever the cell under way."""
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever else prints goes to the log

    def send(message: dict[str, object]) -> None:
        try:
            answers.write(json.dumps(message) + "\n")
            answers.flush()
        except BrokenPipeError:
            os._exit(1)  # nobody listens any more

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

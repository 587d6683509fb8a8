"""How many cores a thread computes with."""

import torch


def limit_threads(count: int) -> None:
    """Let the calling thread, and no other, compute with so many cores."""
    # A thread takes over the process-wide number at its first operation, and with it whatever another thread has set
    # in the meantime. Asking is such an operation: what is set after it stays this thread's own.
    torch.get_num_threads()
    torch.set_num_threads(count)

"""CPU threads per Python thread."""

import torch


def limit_threads(count: int) -> None:
    """Limit torch in the calling thread, and only there, to this many CPU threads."""
    # A thread adopts the process-wide setting at its first torch operation, overwriting its own. Reading the setting
    # is such an operation: what is set afterward sticks.
    torch.get_num_threads()
    torch.set_num_threads(count)

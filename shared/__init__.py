"""Code shared by the coordinator and the agents: contract, tensors, learning, HTTP and system helpers."""

__version__ = "0.1.0"

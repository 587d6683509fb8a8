"""What the coordinator and the agents agree on: models, methods, plans and the form of data on the wire."""

__version__ = "0.1.0"

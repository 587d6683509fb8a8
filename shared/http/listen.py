"""Listening sockets."""

import socket

from uvicorn import Config

from shared.problems import DistransError


def listen(config: Config) -> socket.socket:
    """Bind and listen: from here on connections queue up, also while the application still starts."""
    try:
        listening = config.bind_socket()
    except SystemExit as error:  # uvicorn has logged why
        raise DistransError(
            f"Cannot listen on {config.host}:{config.port}.", next_step="Is another program there? Try --port."
        ) from error
    listening.listen(config.backlog)
    return listening

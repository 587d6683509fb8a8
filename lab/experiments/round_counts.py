"""Progress of the cells on a Ray cluster. Imports nothing, so that the actor starts quickly and stays small."""


class RoundCounts:
    """An actor that tasks report to. It only serves the display, so losing it costs no result."""

    def __init__(self) -> None:
        self._done: dict[str, int] = {}

    def report(self, cell_id: str, done: int) -> None:
        """Record that a cell has finished this many rounds."""
        self._done[cell_id] = done

    def read(self) -> dict[str, int]:
        """Return the number of finished rounds by cell id."""
        return self._done

"""How far the cells on a Ray cluster are. Imports nothing: the actor's process starts quickly and stays small."""


class RoundCounts:
    """An actor that tasks report to. It only knows what is displayed: losing it costs no result."""

    def __init__(self) -> None:
        self._done: dict[str, int] = {}

    def report(self, cell_id: str, done: int) -> None:
        """Note that a cell has done this many rounds."""
        self._done[cell_id] = done

    def read(self) -> dict[str, int]:
        """The rounds done by each cell, by id."""
        return self._done

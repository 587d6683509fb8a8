"""The federation's training images per class, published with every round so that sites can apply their own prior."""

from collections.abc import Iterable, Mapping, Sequence

CLASS_TOTALS = "class_totals"  # the fact's key
_MAX_CLASSES = 4096  # a longer list would outweigh the rest of every answer


def class_totals_fact(counts: Iterable[Sequence[int]]) -> dict[str, str]:
    """Return the fact for clients with these counts; empty if nobody has told any, or for too many classes.

    A client that withholds its counts has only zeros and therefore counts for nothing.
    """
    totals = [sum(column) for column in zip(*counts, strict=True)]
    if not any(totals) or len(totals) > _MAX_CLASSES:
        return {}
    return {CLASS_TOTALS: ",".join(map(str, totals))}


def read_class_totals(facts: Mapping[str, str], classes: int) -> tuple[int, ...] | None:
    """Return the totals; None if a round has none or they do not fit the plan, as from a broken coordinator."""
    parts = facts.get(CLASS_TOTALS, "").split(",")
    if len(parts) != classes or not all(part.isascii() and part.isdigit() and len(part) <= 18 for part in parts):
        return None
    totals = tuple(map(int, parts))
    return totals if any(totals) else None

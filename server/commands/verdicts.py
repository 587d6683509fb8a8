"""How `federation show` prints whether joining paid off."""

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from shared.contract.measurements import Interval
    from shared.contract.messages import FederationView


def verdict_section(view: "FederationView") -> "list[RenderableType]":
    """Return a table with one row per site that shares its verdict, then the summary; nothing without verdicts."""
    if not view.verdicts:
        return []
    table = Table("client", "model", "served", "alone", "points", "verdict")
    for one in view.verdicts:
        verdict = one.verdict
        table.add_row(
            one.client,
            str(one.model),
            _cell(verdict.served_accuracy, verdict.served_interval, "{:.1f}%"),
            _cell(verdict.alone_accuracy, verdict.alone_interval, "{:.1f}%"),
            _cell(verdict.difference, verdict.difference_interval, "{:+z.1f}"),
            verdict.sentence,
        )
    summary = view.verdict_summary
    return [table, *(line for line in (summary.sentence, summary.together) if line)] if summary else [table]


def _cell(rate: float | None, interval: "Interval", form: str) -> str:
    """Return for example `+4.1 (1.2 to 7.0)`, in percent; a dash without images."""
    if rate is None:
        return "–"
    return f"{form.format(100 * rate)} ({100 * interval.low:z.1f} to {100 * interval.high:z.1f})".replace("-", "−")

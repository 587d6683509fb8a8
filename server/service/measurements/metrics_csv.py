"""The history of a federation as CSV."""

import csv
import io
from collections.abc import Iterable, Iterator

from server.service.context import Context
from server.service.measurements.history import RoundRecord, Selection, pages
from server.service.measurements.pooling import describe_evaluation
from shared.contract.measurements import Evaluation as Measured
from shared.contract.measurements import EvaluationReport

COLUMNS = (
    "round", "state", "client", "samples", "train_loss", "train_accuracy", "seconds", "offset_motion", "upload_bytes",
    "test_samples", "test_accuracy", "test_loss", "positive_accuracy", "negative_accuracy", "negatives_as_own",
    "binary_accuracy", "paired_samples", "paired_both", "paired_only_served", "paired_only_alone", "paired_neither",
)  # fmt: skip


def metrics_csv(ctx: Context, name: str, only_client: str | None) -> Iterator[str]:
    """Yield one row per round and client as CSV, page by page, starting with the header."""
    header = ",".join(COLUMNS) + "\n"
    wanted = Selection(name, only_client)
    for page in pages(ctx, wanted, lambda _, found: _lines(found, only_client)):
        yield header + page
        header = ""
    if header:
        yield header


def _lines(found: Iterable[RoundRecord], only_client: str | None) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    for record in found:
        writer.writerows(_rows(record, only_client))
    return text.getvalue()


def _rows(record: RoundRecord, only_client: str | None) -> Iterator[dict[str, object]]:
    """Yield one row per client with its training and its test of the round's result, then the pooled tests.

    Clients that left before the federation ended are not pooled.
    """
    round_: dict[str, object] = {"round": record.round.number, "state": record.round.state}
    updates = {update.client_id: update for update in record.updates}
    for client_id, name in sorted(record.names.items(), key=lambda item: (item[1], item[0])):
        row = round_ | {"client": name}
        if update := updates.get(client_id):
            report = update.report
            row |= {
                "samples": report.samples,
                "train_loss": report.loss,
                "train_accuracy": report.accuracy,
                "seconds": report.seconds,
                "offset_motion": report.offset_motion,
                "upload_bytes": update.size_bytes,
            }
        test = record.evaluations.get(client_id)
        yield row | (_test_columns(test) | _paired_columns(test) if test is not None else {})
    if only_client is None and record.counted:
        yield round_ | {"client": "(all)"} | _test_columns(record.pooled)


def _paired_columns(result: EvaluationReport) -> dict[str, object]:
    return {} if result.paired is None else {f"paired_{key}": value for key, value in result.paired}


def _test_columns(result: Measured) -> dict[str, object]:
    view = describe_evaluation(result)
    return {
        "test_samples": view.samples,
        "test_accuracy": view.accuracy,
        "test_loss": view.loss,
        "positive_accuracy": view.positive_accuracy,
        "negative_accuracy": view.negative_accuracy,
        "negatives_as_own": view.negatives_as_own,
        "binary_accuracy": view.binary_accuracy,
    }

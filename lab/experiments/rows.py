"""The rows of a report: each method as it predicts, and what its entry in the experiment asks for besides."""

from dataclasses import dataclass
from typing import Literal

from lab.experiments.experiment import MethodEntry
from lab.experiments.results import Result
from lab.simulation.final import Counts

Which = Literal["last", "best"]


@dataclass(frozen=True)
class ReportRow:
    """A method in one of its forms: where results have its accuracy."""

    label: str
    ending: str = ""
    curve: str = ""  # the measure in the rows of the curve
    final: str = ""  # otherwise, the counts of the final evaluation

    @property
    def title(self) -> str:
        """For example `FedAvg + prior`."""
        return self.label + self.ending

    def accuracy(self, result: Result, which: Which) -> float | None:
        """Return the accuracy in the last or best round; final evaluations are always of the last. None if unknown."""
        if self.curve:
            value = result[which].get(self.curve)
            return None if value is None else float(value)
        counted = self.counts(result, which)
        return counted.correct / counted.samples if counted else None

    def counts(self, result: Result, which: Which) -> Counts | None:
        """Return the accuracy as counts over all test images; None if unknown."""
        if self.final:
            counted = result.get("final", {}).get(self.final)
            return Counts(**counted) if counted and counted["samples"] else None
        value, images = self.accuracy(result, which), result.get("images", {}).get("test")
        return Counts(images, round(value * images)) if value is not None and images else None


def rows_of(method: MethodEntry) -> list[ReportRow]:
    """Return the method's rows, the one as it predicts first."""
    rows = [ReportRow(method.label, curve="accuracy")]
    if method.controls:
        rows.append(ReportRow(method.label, ", masked", curve="masked_accuracy"))
    if method.controls or method.prior or method.served:
        rows.append(ReportRow(method.label, " + prior", curve="reweighted_accuracy"))
    if method.fine_tuned:
        rows.append(ReportRow(method.label, ", fine-tuned", final="fine_tuned"))
    if method.served:
        rows.append(ReportRow(method.label, ", without offset", final="global"))
        rows.append(ReportRow(method.label, ", without offset + prior", final="global+prior"))
        rows.append(ReportRow(method.label, ", served", final="served"))
    return rows

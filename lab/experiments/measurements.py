"""What a cell's result says about a round, and about the bytes that rounds transfer."""

import statistics

from lab.simulation.alone import AloneSimulation
from lab.simulation.controls import Scores
from lab.simulation.simulation import RoundOutcome, Simulation
from shared.tensors.spec import Spec

Row = dict[str, float | int | None]


def measure(outcome: RoundOutcome, scores: dict[str, Scores]) -> Row:
    """Return a row of the curve: accuracies over all clients' images, their spread over clients, losses."""
    pooled = sum(scores.values(), Scores())
    plain = pooled.plain
    each = [value.plain.accuracy for value in scores.values() if value.plain.accuracy is not None]
    reports = outcome.reports.values()
    motions = [report.offset_motion for report in reports if report.offset_motion is not None]
    return {
        "round": outcome.round,
        "accuracy": plain.accuracy,
        "positive_accuracy": plain.positive_accuracy,
        "negative_accuracy": plain.negative_accuracy,
        "negatives_as_own": plain.negatives_as_own / plain.negatives if plain.negatives else None,
        "binary_accuracy": plain.binary_accuracy,
        "masked_accuracy": pooled.masked.accuracy,
        "reweighted_accuracy": pooled.reweighted.accuracy,
        "foreign_offset_accuracy": pooled.foreign.accuracy,
        "alternative_accuracy": pooled.alternative.accuracy,
        "client_mean": statistics.fmean(each) if each else None,
        "client_std": statistics.pstdev(each) if each else None,
        "client_min": min(each) if each else None,
        "loss": plain.loss_sum / plain.samples if plain.samples else None,
        "train_loss": statistics.fmean(report.loss for report in reports),
        "offset_motion": statistics.fmean(motions) if motions else None,
    }


def transferred_bytes(simulation: Simulation) -> dict[str, int]:
    """Return the tensor bytes that one participant transfers per round."""
    participants = len(simulation.participants())
    if isinstance(simulation, AloneSimulation):
        return {"down_shared": 0, "down_personal": 0, "up": 0, "participants": participants}
    task = simulation.task(simulation.clients[0])
    return {
        "down_shared": Spec.of(task.shared).data_bytes,
        "down_personal": Spec.of(task.personal).data_bytes,
        "up": simulation.server.half.upload_spec(task.facts).data_bytes,
        "participants": participants,
    }

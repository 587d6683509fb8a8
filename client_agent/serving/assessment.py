"""The gate's findings about a model: what to serve, and how well that works on images that did not choose it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from client_agent.serving.calibration import (
    apply_temperature,
    calibration_bins,
    calibration_of,
    expected_calibration_error,
    fit_temperature,
    log_probabilities,
)
from client_agent.serving.candidates import Base, Candidate, as_trained, member_logits
from client_agent.serving.class_counts import ClassCounts
from client_agent.serving.class_scores import score_classes
from client_agent.serving.measurement import Measured
from client_agent.serving.selection import choose, cross_fit
from client_agent.state.records import Score, SiteReport
from shared.contract.measurements import Evaluation, PairedCounts
from shared.learning.evaluation import evaluate
from shared.learning.verdict import reach_verdict, wilson


@dataclass(frozen=True)
class Assessment:
    """A candidate with its temperature and, if there were images to measure it on, what they showed."""

    candidate: Candidate
    temperature: float = 1.0
    report: SiteReport | None = None
    with_offset: Evaluation | None = None  # the model as trained, on all held-out images
    without_offset: Evaluation | None = None
    local: Evaluation | None = None
    score: Evaluation | None = None  # the candidate, on the images that choose
    tested: Evaluation | None = None  # the candidate, on the images that test


def unmeasured(bases: Sequence[Base], counts: ClassCounts) -> Assessment:
    """Return what to serve if nothing can be measured: the model as it was trained, with the prior."""
    return Assessment(as_trained(bases, counts.site_shift is not None))


def assess(measured: Measured, counts: ClassCounts, classes: tuple[str, ...], own_classes: Sequence[int]) -> Assessment:
    """Choose a candidate on the validation images and test it on the others.

    Few images do both: each is then tested with what the others choose. Raises DistransError if the federation's
    models diverged.
    """
    logits, labels, shift = measured.logits, measured.labels, counts.site_shift
    validation, test = measured.holdout.validation, measured.holdout.test

    def count(values: Tensor, truth: Tensor) -> Evaluation:
        return evaluate(lambda _: values, [(values, truth)], own_classes)

    trained = next(base for base in (Base.OFFSET, Base.PERSONAL, Base.GLOBAL) if base in logits)
    plain = next(base for base in (Base.GLOBAL, Base.PERSONAL) if base in logits)
    with_offset, without_offset = count(logits[trained], labels), count(logits[plain], labels)
    choice = choose({base: values[validation] for base, values in logits.items()}, labels[validation], shift)
    members = [member for member, _ in choice.candidate.weights]
    mixed = choice.candidate.probabilities(member_logits(logits, shift, members))
    temperature = fit_temperature(mixed[validation], labels[validation])
    if measured.holdout.is_split:
        calibrated = apply_temperature(mixed, temperature)
        chosen, tested = calibrated[validation], calibrated[test]
    else:
        chosen = tested = cross_fit(logits, labels, shift, calibration_of)
    predicted = {"served": tested.argmax(dim=1), "federation": logits[plain][test].argmax(dim=1)}
    if Base.ALONE in logits:
        predicted["alone"] = logits[Base.ALONE][test].argmax(dim=1)
    right = {name: found == labels[test] for name, found in predicted.items()}
    bins = calibration_bins(tested, labels[test])
    scores, confusion = score_classes(tested, labels[test], classes)
    report = SiteReport(
        holdout=measured.holdout.sizes,
        losses=dict(choice.losses),
        served=_score(right["served"]),
        federation=_score(right["federation"]),
        alone=_score(right["alone"]) if "alone" in right else None,
        verdict=reach_verdict(_pair(right["served"], right["alone"]), choice.candidate.name)
        if "alone" in right
        else None,
        calibration_error=expected_calibration_error(bins),
        calibration=bins,
        classes=scores,
        confusion=confusion,
    )
    return Assessment(
        candidate=choice.candidate,
        temperature=temperature,
        report=report,
        with_offset=with_offset,
        without_offset=without_offset,
        local=count(logits[Base.ALONE], labels) if Base.ALONE in logits else None,
        score=count(log_probabilities(chosen), labels[validation]),
        tested=count(log_probabilities(tested), labels[test]),
    )


def _score(right: Tensor) -> Score:
    correct, samples = int(right.sum()), len(right)
    accuracy = correct / samples if samples else None
    return Score(correct=correct, samples=samples, accuracy=accuracy, interval=wilson(correct, samples))


def _pair(served: Tensor, alone: Tensor) -> PairedCounts:
    def images(both: Tensor) -> int:
        return int(torch.count_nonzero(both))

    return PairedCounts(
        samples=len(served),
        both=images(served & alone),
        only_served=images(served & ~alone),
        only_alone=images(~served & alone),
        neither=images(~served & ~alone),
    )

"""Candidates on disk: what the gate chose for a kept model, and how it did on the held-out images.

models/NUMBER-ORDER/candidate-DIGEST.json        members, weights, temperature, class counts, and the report
models/NUMBER-ORDER/BASE-DIGEST.safetensors      weights of a member that is not part of the model: adapted or alone

Files are named by their content and written before the decision that names them, so a crash at any point leaves a
complete candidate: the old one or the new one.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from client_agent.errors import StateError
from client_agent.status import HoldoutSizes
from shared.contract.measurements import Interval, Verdict
from shared.system.files import write_durably
from shared.tensors.wire import digest

_ENOUGH = 0.9  # of the steps
_RECORD, _WEIGHTS = "candidate-", ".safetensors"


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True)


class Score(_Stored):
    """An accuracy with its 95 % interval."""

    correct: int
    samples: int
    accuracy: float | None
    interval: Interval


class ClassScores(_Stored):
    """How one class is recognized; a rate without images to compute it from is None."""

    label: str
    images: int
    sensitivity: float | None
    specificity: float | None
    auc: float | None = Field(description="Area under the ROC curve of this class against all others.")


class CalibrationBin(_Stored):
    """Test images whose predictions have about the same confidence."""

    confidence: float  # their mean
    accuracy: float
    images: int


class SiteReport(_Stored):
    """What the gate found out on the held-out images: choosing on one part, testing on the other."""

    holdout: HoldoutSizes
    losses: dict[str, float]  # each candidate's mean log loss on the images that choose
    served: Score
    federation: Score  # the federation's model without anything of this site's
    alone: Score | None = None
    verdict: Verdict | None = None  # None without a model of the site's own
    alone_steps: int = 0  # that the site's own model has taken
    alone_steps_due: int = 0  # that it would have taken in all rounds; until then, a comparison flatters the federation
    calibration_error: float | None = None
    calibration: list[CalibrationBin] = []  # missing from files of older agents
    classes: list[ClassScores] = []  # of classes with test images
    confusion: list[tuple[str, str, int]] = []  # label, prediction, test images; only where there are any

    @property
    def is_alone_behind(self) -> bool:
        """Whether the site's own model has yet to catch up with the federation's."""
        return self.alone_steps < _ENOUGH * self.alone_steps_due


class MemberRecord(_Stored):
    """A base model's part in a candidate."""

    base: str
    uses_prior: bool
    weight: float


class CandidateRecord(_Stored):
    """A candidate as it is served."""

    name: str
    members: tuple[MemberRecord, ...]
    mixed: Literal["probabilities", "logits"] = "probabilities"  # what the weights multiply
    temperature: float = 1.0
    site_counts: tuple[int, ...] | None = None  # training images per class, of which the prior is made
    files: dict[str, str] = {}  # digests of the weights of adapted and alone, if they are members
    report: SiteReport | None = None


def describe_verdict_so_far(report: SiteReport) -> str:
    """Return the verdict's sentence, with a reservation while the site's own model is behind."""
    if report.verdict is None:
        return ""
    steps = f"{report.alone_steps} of {report.alone_steps_due} steps"
    note = f" (so far; this site's own model has taken {steps})" if report.is_alone_behind else ""
    return report.verdict.sentence + note


def describe_findings(report: SiteReport | None) -> dict[str, Any]:
    """Return the report as `/info` and `status --json` show it; None where nothing was measured."""
    if report is None:
        return {
            "verdict": None,
            "verdict_so_far": "",
            "scores": None,
            "calibration_error": None,
            "calibration": [],
            "classes": [],
            "confusion": [],
        }
    return {
        "verdict": None if report.verdict is None else report.verdict.model_dump(),
        "verdict_so_far": describe_verdict_so_far(report),
        "scores": report.model_dump(exclude={"verdict", "calibration_error", "calibration", "classes", "confusion"}),
        "calibration_error": report.calibration_error,
        "calibration": [one.model_dump() for one in report.calibration],
        "classes": [one.model_dump() for one in report.classes],
        "confusion": [list(cell) for cell in report.confusion],
    }


class CandidateFiles:
    """The candidates in the folder of one kept model."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, record: CandidateRecord, weights: Mapping[str, bytes]) -> str:
        """Store a candidate with the weights that `record.files` names, and return its digest."""
        for base, name in record.files.items():
            file = self._weights_file(base, name)
            if not file.exists():
                write_durably(file, weights[base])
        body = record.model_dump_json().encode()
        write_durably(self._folder / f"{_RECORD}{digest(body)}.json", body)
        return digest(body)

    def load(self, name: str) -> CandidateRecord:
        """Return the candidate with this digest; raise StateError if it is missing or has changed."""
        file = self._folder / f"{_RECORD}{name}.json"
        try:
            body = file.read_bytes()
            record = CandidateRecord.model_validate_json(body)
        except (OSError, ValidationError) as error:
            raise StateError(f"{file} cannot be read: {error}.") from error
        if digest(body) != name:
            raise StateError(f"{file} has changed since it was written.")
        return record

    def weights(self, record: CandidateRecord) -> dict[str, bytes]:
        """Return the weights of adapted and alone that a candidate needs; raise StateError as in `load`."""
        found = {}
        for base, name in record.files.items():
            file = self._weights_file(base, name)
            try:
                found[base] = file.read_bytes()
            except OSError as error:
                raise StateError(f"{file} cannot be read: {error}.") from error
            if digest(found[base]) != name:
                raise StateError(f"{file} has changed since it was written.")
        return found

    def damage(self, name: str) -> str:
        """Return why a candidate cannot be loaded; empty if it can."""
        try:
            self.weights(self.load(name))
        except StateError as error:
            return error.message
        return ""

    def prune(self, names: Collection[str]) -> None:
        """Remove all candidates but these, and weights that none of them needs."""
        needed = set()
        for file in self._folder.glob(f"{_RECORD}*.json"):
            name = file.stem.removeprefix(_RECORD)
            if name not in names:
                file.unlink(missing_ok=True)
                continue
            try:
                needed |= {self._weights_file(*pair).name for pair in self.load(name).files.items()}
            except StateError:  # damaged: of no use, and neither are its weights
                continue
        for file in self._folder.glob(f"*-*{_WEIGHTS}"):
            if file.name not in needed:
                file.unlink(missing_ok=True)

    def _weights_file(self, base: str, name: str) -> Path:
        return self._folder / f"{base}-{name}{_WEIGHTS}"

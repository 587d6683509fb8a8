"""Which kept models may be served: the models on disk, the gate's decisions about them, and the pin."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from client_agent.errors import StateError
from client_agent.model_key import ModelKey
from client_agent.state.decisions import GateDecision, append_decision, compact, read_decisions
from client_agent.state.kept_models import Bundle, KeptModel, KeptModels
from client_agent.state.records import CandidateRecord, SiteReport
from shared.system.files import sync_folder, write_durably

_MAX_DIGITS = 18


class Pin(NamedTuple):
    """The pinned model and candidate; older agents stored no fingerprint, or no record."""

    number: int
    fingerprint: str
    record: str


class ModelStore:
    """The kept models of a state folder, in order of preference."""

    def __init__(self, folder: Path) -> None:
        self._kept = KeptModels(folder / "models")
        self._history_file, self._pin_file = folder / "history.jsonl", folder / "pin"

    def version(self) -> tuple[int, ...]:
        """Return a value that changes with every model, decision and pin. Reads no file."""
        return tuple(number for path in (self._history_file, self._pin_file, self._kept.path) for number in _mark(path))

    # Models

    def save(self, bundle: Bundle, keep: int, served: ModelKey | None = None) -> None:
        """Store a model, then remove all but the last `keep`, the pinned one, the first choice and the served one.

        The served one differs from the first choice when the first choice is damaged.
        """
        self._kept.save(bundle)
        protected = self.servable()[: 1 if self._pin() is None else 2]
        if served is not None:
            protected += [one for one in self._kept.all() if one.holds(served)]
        self._kept.prune(keep, protected)

    def all(self) -> list[KeptModel]:
        """Return the kept models in order of arrival."""
        return self._kept.all()

    def numbers(self) -> list[int]:
        """Return the numbers of the kept models in order of arrival."""
        return list(dict.fromkeys(kept.key.number for kept in self._kept.all()))

    def load(self, kept: KeptModel) -> Bundle:
        """Read a kept model; raise StateError if it is damaged."""
        return self._kept.load(kept)

    def load_number(self, number: int) -> Bundle:
        """Read the kept model with this number; see `find`."""
        return self._kept.load(self.find(number))

    def find(self, number: int) -> KeptModel:
        """Return the kept model with this number; of several, the last approved one, else the last to arrive."""
        for kept in [*self.approved(), *reversed(self._kept.all())]:
            if kept.key.number == number:
                return kept
        numbers = ", ".join(map(str, self.numbers())) or "none"
        raise StateError(f"Model {number} is not kept here.", next_step=f"Kept: {numbers}.")

    def servable(self) -> list[KeptModel]:
        """Return the kept models that may be served, first choice first.

        The pinned one, then the approved ones, latest decision first. A model without a decision is never included.
        """
        approved = self.approved()
        return list(dict.fromkeys(self._pinned_model(approved) + approved))

    def first_choice(self) -> KeptModel | None:
        """Return the model that an agent started now would serve: the first servable one whose files are intact."""
        return next((kept for kept in self.servable() if not self._damage(kept)), None)

    def _damage(self, kept: KeptModel) -> str:
        record = self.record_name(kept)
        return self._kept.damage(kept) or (kept.candidates.damage(record) if record else "")

    # Candidates

    def record_name(self, kept: KeptModel) -> str:
        """Return the digest of the candidate to serve: the pinned one, or else what the gate last chose.

        Empty if there is none, as for a model of an older agent or one that the gate has not decided about.
        """
        pin = self._pin()
        is_pinned = pin is not None and (kept.key.number, kept.key.fingerprint) == (pin.number, pin.fingerprint)
        if pin is not None and is_pinned and pin.record and not kept.candidates.damage(pin.record):
            return pin.record
        decision = self.decision(kept)
        return "" if decision is None else decision.record

    def record(self, kept: KeptModel) -> CandidateRecord | None:
        """Return the candidate to serve; None if there is none. Raises StateError if it is damaged."""
        name = self.record_name(kept)
        return kept.candidates.load(name) if name else None

    def report(self, key: ModelKey, record: str) -> SiteReport | None:
        """Return what was found out when a candidate was chosen; None if it was not measured or cannot be read."""
        for kept in self._kept.all():
            if record and kept.holds(key):
                try:
                    return kept.candidates.load(record).report
                except StateError:
                    return None
        return None

    def save_record(self, key: ModelKey, record: CandidateRecord, weights: Mapping[str, bytes]) -> str:
        """Store a candidate next to its model and return its digest; empty if the model is not kept.

        Candidates that are neither pinned nor decided for are removed.
        """
        kept = next((one for one in reversed(self._kept.all()) if one.key == key), None)
        if kept is None:
            return ""
        name, pin, decision = kept.candidates.save(record, weights), self._pin(), self.decision(kept)
        kept.candidates.prune({name, "" if pin is None else pin.record, "" if decision is None else decision.record})
        return name

    def approved(self) -> list[KeptModel]:
        """Return the kept models that the gate approved, latest decision first."""
        kept = self._kept.all()
        return [
            one
            for decision in reversed(self.history())
            if decision.approved
            for one in kept
            if _is_about(decision, one)
        ]

    # Decisions

    def add_decision(self, decision: GateDecision) -> None:
        """Store a decision, which replaces an earlier one about the same model; of thousands, drop the oldest."""
        kept = self._kept.all()
        compact(self._history_file, lambda old: old.approved and any(_is_about(old, one) for one in kept))
        append_decision(self._history_file, decision)

    def history(self) -> list[GateDecision]:
        """Return the last decision about each model, oldest first."""
        return read_decisions(self._history_file)

    def decision(self, kept: KeptModel) -> GateDecision | None:
        """Return the gate's decision about a kept model, if there is one."""
        return next((decision for decision in reversed(self.history()) if _is_about(decision, kept)), None)

    def best_approved(self) -> GateDecision | None:
        """Return the approved decision with the best score among the kept models, or else the last with a score.

        Comparing with the latest model instead would let models get worse step by step, each within the margin.
        """
        scored = [decision for decision in self.history() if decision.approved and decision.compared is not None]
        kept = self._kept.all()
        among = [decision for decision in scored if any(_is_about(decision, one) for one in kept)] or scored[-1:]
        return max(among, key=lambda decision: (decision.compared and decision.compared.accuracy) or 0.0, default=None)

    # The pin

    def pin(self, number: int | None) -> None:
        """Pin /predict to a kept model, or unpin it so that it follows the newest again."""
        if number is None:
            self._pin_file.unlink(missing_ok=True)
            sync_folder(self._pin_file.parent)
        else:
            kept = self.find(number)
            self._kept.load(kept)
            decision = self.decision(kept)
            parts = [str(kept.key.number), kept.key.fingerprint, "" if decision is None else decision.record]
            write_durably(self._pin_file, " ".join(parts).rstrip().encode())

    def pinned(self) -> int | None:
        """Return the number of the pinned model; None without a pin, or if the pin cannot be read."""
        pin = self._pin()
        return None if pin is None else pin.number

    def lacks_pinned(self) -> bool:
        """Return whether the pinned model is no longer kept."""
        return self._pin() is not None and not self._pinned_model(self.approved())

    def pin_problem(self) -> str:
        """Return why the pinned model cannot be served; empty if it can, or if there is no pin."""
        if self.lacks_pinned():
            return "It is no longer kept."
        return "".join(self._damage(kept) for kept in self._pinned_model(self.approved()))

    def pin_text(self) -> str:
        """Return the raw content of the pin file, to detect changes; raise OSError if it cannot be read."""
        try:
            return self._pin_file.read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def _pin(self) -> Pin | None:
        try:
            number, fingerprint, record, *_ = [*self.pin_text().split(), "", "", ""]
        except OSError:  # the gate reports it; approved models can still be served
            return None
        is_number = number.isascii() and number.isdigit() and len(number) <= _MAX_DIGITS
        return Pin(int(number), fingerprint, record) if is_number else None

    def _pinned_model(self, approved: list[KeptModel]) -> list[KeptModel]:
        pin = self._pin()
        if pin is None:
            return []
        named = [one for one in [*approved, *reversed(self._kept.all())] if one.key.number == pin.number]
        exact = [one for one in named if one.key.fingerprint == pin.fingerprint]
        # An older agent's pin has no fingerprint; it means that agent's folder as long as there is one.
        return (exact if exact or pin.fingerprint else named)[:1]


def _mark(path: Path) -> tuple[int, ...]:
    try:
        about = path.stat()
    except OSError:
        return ()
    return about.st_ino, about.st_mtime_ns, about.st_size


def _is_about(decision: GateDecision, kept: KeptModel) -> bool:
    # An older agent's decision has neither digest nor fingerprint, and is about a folder that such an agent wrote.
    key = kept.key
    return (
        decision.model == key.number and decision.fingerprint == key.fingerprint and decision.digest in ("", key.digest)
    )

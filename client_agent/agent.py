"""The agent's loop: poll, download, measure, swap, train, upload; through everything that can be survived."""

import logging
import threading
import time
from typing import Any

import safetensors.torch
from rich.console import Console

from client_agent import serving
from client_agent.coordinator import Coordinator
from client_agent.data import SiteData
from client_agent.errors import AgentEnded, Refused, Stopped
from client_agent.progress import TrainingDisplay
from client_agent.serving import PredictionQueue
from client_agent.settings import Identity, RunOptions
from client_agent.state import Bundle, HistoryLine, PendingUpload, StateFolder
from client_agent.training import LocalBaseline, measure
from shared import __version__
from shared.evaluation import Evaluation
from shared.methods import client_half
from shared.methods.base import PERSONAL, SHARED, RoundTask, TrainingInterrupted, Update, Workplace
from shared.problems import DistransError
from shared.runtime import Runtime
from shared.schemas import TaskAnswer
from shared.wire import digest, encode

logger = logging.getLogger(__name__)
_NO_TICKET = "none"  # whatever the coordinator answers is news


class Agent:
    """One site's part in a federation."""

    def __init__(
        self,
        state: StateFolder,
        identity: Identity,
        coordinator: Coordinator,
        data: SiteData | None,
        runtime: Runtime,
        options: RunOptions,
        console: Console,
        stopping: threading.Event,
    ) -> None:
        self._state, self._identity, self._coordinator = state, identity, coordinator
        self._data, self._runtime, self._options = data, runtime, options
        self._console, self._stopping = console, stopping
        self._plan = identity.plan
        self._half = client_half(identity.plan)
        self._newest: Bundle | None = None
        self._served_score: Evaluation | None = None
        self.predictions: PredictionQueue | None = None
        self.doing = "starting"
        self.outcome = ""

    # The loop

    def run(self) -> None:
        """Until the agent is stopped or ended; serving goes on beside it."""
        self.serve_kept_model()
        ticket = _NO_TICKET
        if self._data is not None:
            self._tell_class_counts(self._data)
        self._settle_pending()
        while not self._stopping.is_set():
            self.doing = "waiting for work"
            task = self._coordinator.task(ticket)
            ticket = task.ticket
            if task.action == "cancelled":
                raise AgentEnded(f"The federation was cancelled: {task.reason}")
            try:
                self._take_model(task)
                if task.action == "train" and self._data is not None:
                    self._train(task, self._data)
                    ticket = _NO_TICKET
            except Refused as error:
                # The round or the model has been overtaken; the next task says what is next.
                logger.warning("%s", error)
                ticket = _NO_TICKET
                self._stopping.wait(1.0)
            if task.action == "finished":
                if not self.outcome:
                    self.outcome = f"The federation has finished: {task.reason}"
                    logger.info("%s", self.outcome)
                if self._options.exit_when_finished or self._options.serve is None:
                    return

    def _tell_class_counts(self, data: SiteData) -> None:
        if self._coordinator.me().class_counts != data.report.class_counts:
            logger.info("the class counts have changed; telling the coordinator")
            self._coordinator.update_counts(data.report.class_counts)

    # Uploads

    def _settle_pending(self) -> None:
        """Send the upload that is not acknowledged yet; the coordinator knows a repeat by its digest."""
        found = self._state.pending()
        if found is None:
            return
        pending, body = found
        self.doing = f"uploading round {pending.round_number}"
        try:
            self._coordinator.upload(pending.round_id, body, pending.digest)
        except Refused as error:
            logger.warning("the update of round %d does not count: %s", pending.round_number, error)
            self._state.drop_upload()
        else:
            self._state.commit_upload()

    def _train(self, task: TaskAnswer, data: SiteData) -> None:
        if task.round is None or self._newest is None:
            return
        number = task.round.number
        self.doing = f"training round {number}"
        bundle = self._newest
        round_task = RoundTask(self._identity.name, number, bundle.shared, bundle.personal, task.round.facts)
        private = self._state.private()
        try:
            with TrainingDisplay(number, self._console, self._options.progress) as display:
                place = Workplace(data.train, self._runtime, display.update, self._stopping.is_set)
                update, new_private = self._half.train(round_task, private, place)
        except TrainingInterrupted as error:
            raise Stopped from error
        body = encode_update(update)
        self._state.stage_upload(
            PendingUpload(round_id=task.round.id, round_number=number, digest=digest(body)), body, new_private
        )
        report = update.report
        logger.info(
            "round %d: trained on %d images in %.1f s, loss %.4f, accuracy %.1f %%",
            number,
            report.samples,
            report.seconds,
            report.loss,
            100 * report.accuracy,
        )
        self._settle_pending()
        if self._options.local_baseline:
            self._train_baseline(number, data)

    def _train_baseline(self, number: int, data: SiteData) -> None:
        self.doing = f"training this site's own model, round {number}"
        baseline = LocalBaseline(self._plan, self._identity.name)
        place = Workplace(data.train, self._runtime, None, self._stopping.is_set)
        try:
            self._state.save_baseline(baseline.train(self._state.baseline(), number, place))
        except TrainingInterrupted as error:
            raise Stopped from error

    # Models

    def _take_model(self, task: TaskAnswer) -> None:
        """Download the newest model with this site's tensors, unless they are here; measure it, swap it in."""
        pointer = task.model
        if pointer is None or task.personal_url is None:
            return
        if self._newest is not None and self._newest.number == pointer.number and task.action != "train":
            return
        self.doing = f"downloading model {pointer.number}"
        folder = self._state.path
        if self._newest is not None and self._newest.digest == pointer.digest:
            shared = self._newest.shared
        else:
            body = self._coordinator.download(pointer.url, folder / "model.part", pointer.digest)
            shared = safetensors.torch.load(body)
        personal = safetensors.torch.load(self._coordinator.download(task.personal_url, folder / "personal.part"))
        is_new = self._newest is None or self._newest.number != pointer.number
        bundle = Bundle(pointer.number, pointer.digest, shared, personal, self._state.private(), task.facts)
        self._newest = bundle
        if is_new:
            self._state.save_bundle(bundle, self._options.keep_models)
            self._measure_and_swap(bundle)

    def _measure_and_swap(self, bundle: Bundle) -> None:
        self.doing = f"measuring model {bundle.number}"
        try:
            model = serving.build(self._plan, self._identity.name, bundle, self._runtime)
            line = self._measure(bundle.number, model)
        except DistransError as error:  # the served model stays; the federation may recover
            logger.warning("model %d is not served: %s", bundle.number, error)
            self._state.add_history(
                HistoryLine(model=bundle.number, with_offset=None, without_offset=None, served=False, reason=str(error))
            )
            return
        self._state.add_history(line)
        own = line.with_offset
        if own is not None:
            self._coordinator.evaluation(bundle.number, own)
        if line.served:
            self._served_score = own
            self._swap(model)
        else:
            logger.warning("model %d is not served: %s", bundle.number, line.reason)
        score = "" if own is None or own.accuracy is None else f", {own.accuracy:.1%} on held-out images"
        logger.info("model %d is here%s", bundle.number, score)

    def _measure(self, number: int, model: serving.ServingModel) -> HistoryLine:
        """What a model scores here, and whether it may be served."""
        own = without = local = None
        if self._data is not None:
            own = measure(model.own, self._data, self._plan)
            without = measure(model.none, self._data, self._plan)
            weights = self._state.baseline() if self._options.local_baseline else {}
            if weights:
                predictor = LocalBaseline(self._plan, self._identity.name).predictor(weights, self._runtime)
                local = measure(predictor, self._data, self._plan)
        reason = self._objection(own)
        return HistoryLine(
            model=number, with_offset=own, without_offset=without, local=local, served=not reason, reason=reason
        )

    def _objection(self, score: Evaluation | None) -> str:
        """Why a new model should not take the served one's place; empty when it may."""
        pinned, margin = self._state.pinned(), self._options.max_accuracy_drop
        if pinned is not None:
            return f"/predict is pinned to model {pinned}"
        if margin is None or score is None or self._served_score is None:
            return ""
        new, old = score.accuracy or 0.0, self._served_score.accuracy or 0.0
        if new < old - margin:
            return f"it scores {new:.1%} where the served one has {old:.1%}; --max-accuracy-drop allows {margin:.1%}"
        return ""

    def _swap(self, model: serving.ServingModel) -> None:
        if self.predictions is not None:
            self.predictions.model = model

    def serve_kept_model(self) -> None:
        """Serve the pinned model, or the newest one that was served before; needs no coordinator."""
        numbers = self._state.bundle_numbers()
        if not numbers:
            return
        refused = {line.model for line in self._state.history() if not line.served}
        wanted = self._state.pinned() or next((n for n in reversed(numbers) if n not in refused), numbers[-1])
        try:
            bundle = self._state.load_bundle(wanted)
            self._swap(serving.build(self._plan, self._identity.name, bundle, self._runtime))
        except DistransError as error:
            logger.warning("the kept model %d cannot be served: %s", wanted, error)
            return
        self._served_score = next(
            (line.with_offset for line in self._state.history() if line.model == wanted), self._served_score
        )
        if self._newest is None and wanted == numbers[-1]:
            self._newest = bundle

    def follow_pin(self) -> None:
        """Watch the pin, so that `distrans-agent pin` takes effect at once; runs in a thread of its own."""
        last = self._state.pinned()
        while not self._stopping.wait(0.5):
            now = self._state.pinned()
            if now != last:
                last = now
                self.serve_kept_model()

    def info(self) -> dict[str, Any]:
        """For `/info` and `status`."""
        model = self.predictions.model if self.predictions else None
        return {
            "agent": {
                "name": self._identity.name,
                "version": __version__,
                "device": str(self._runtime.device),
                "doing": self.doing,
                "outcome": self.outcome,
            },
            "federation": self._identity.federation,
            "coordinator": {"address": self._identity.connection.server, "reachable": self._coordinator.reachable},
            "bytes": {"sent": self._coordinator.bytes_sent, "received": self._coordinator.bytes_received},
            "method": self._plan.method.name,
            "serving": None
            if model is None
            else {"round": model.number, "digest": model.digest, "offset_digest": model.offset_digest},
            "pinned": self._state.pinned(),
            "kept_models": self._state.bundle_numbers(),
            "history": [history_row(line) for line in self._state.history()],
            "time": time.time(),
        }


def history_row(line: HistoryLine) -> dict[str, Any]:
    """Accuracies of one model on this site's held-out images."""

    def accuracy(result: Evaluation | None) -> float | None:
        return None if result is None else result.accuracy

    return {
        "model": line.model,
        "with_offset": accuracy(line.with_offset),
        "without_offset": accuracy(line.without_offset),
        "local": accuracy(line.local),
        "served": line.served,
        "reason": line.reason,
    }


def encode_update(update: Update) -> bytes:
    """An update as it goes over the wire."""
    tensors = {SHARED + name: value for name, value in update.shared.items()}
    tensors |= {PERSONAL + name: value for name, value in update.personal.items()}
    return encode(tensors, {"report": update.report.model_dump_json()})

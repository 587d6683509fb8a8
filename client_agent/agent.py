"""The agent's loop: poll, download, measure, swap, train, upload; through everything that can be survived."""

import logging
import threading
import time
from typing import Any

import safetensors.torch
from rich.console import Console

from client_agent.coordinator import Coordinator
from client_agent.data import SiteData
from client_agent.errors import AgentEnded, Refused, StateError, Stopped
from client_agent.model_gate import ModelGate
from client_agent.progress import TrainingDisplay
from client_agent.settings import Identity, RunOptions
from client_agent.state import Bundle, PendingUpload, StateFolder
from client_agent.training import LocalBaseline
from shared import __version__
from shared.methods import client_half
from shared.methods.base import RoundTask, Tensors, TrainingInterrupted, Update, Workplace
from shared.problems import DistransError
from shared.runtime import Runtime
from shared.schemas import RoundTaskView, TaskAnswer
from shared.wire import digest

logger = logging.getLogger(__name__)
_NO_TICKET = "none"  # whatever the coordinator answers is news
_AFTER_REFUSAL_S = 1.0
_AFTER_FAILURE_S = 10.0


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
        gate: ModelGate,
        console: Console,
        stopping: threading.Event,
    ) -> None:
        self._state, self._identity, self._coordinator = state, identity, coordinator
        self._data, self._runtime, self._options, self._gate = data, runtime, options, gate
        self._console, self._stopping = console, stopping
        self._plan = identity.plan
        self._half = client_half(identity.plan)
        self._newest: Bundle | None = None
        self._given_up: int | None = None  # the id of a round that cannot be trained here
        self.doing = "starting"
        self.trouble = ""
        self.outcome = ""

    # The loop

    def run(self) -> None:
        """Until the agent is stopped or ended; serving goes on beside it."""
        self._gate.serve_kept()
        self._newest = self._newest_kept()
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
            if task.round is not None and task.round.id == self._given_up:
                # The coordinator does not know that and hands the round out at once, again and again.
                self._stopping.wait(_AFTER_FAILURE_S)
                continue
            try:
                self._take_model(task)
                if task.action == "train" and task.round is not None and self._data is not None:
                    self._train(task.round, self._data)
                    ticket = _NO_TICKET
            except Refused as error:
                # The round or the model has been overtaken; the next task says what is next.
                logger.warning("%s", error)
                ticket = _NO_TICKET
                self._stopping.wait(_AFTER_REFUSAL_S)
            if task.action == "finished":
                if not self.outcome:
                    self.outcome = f"The federation has finished: {task.reason}"
                    logger.info("%s", self.outcome)
                if self._options.exit_when_finished or self._options.serve is None:
                    return

    def _tell_class_counts(self, data: SiteData) -> None:
        known, report = self._coordinator.me(), data.report
        if (known.class_counts, known.held_out_images) != (report.class_counts, report.test_images):
            logger.info("the numbers of images have changed; telling the coordinator")
            self._coordinator.update_counts(report.class_counts, report.test_images)

    # Training

    def _train(self, current: RoundTaskView, data: SiteData) -> None:
        if self._newest is None:
            return
        self.doing = f"training round {current.number}"
        task = RoundTask(self._identity.name, current.number, self._newest.shared, self._newest.personal, current.facts)
        try:
            with TrainingDisplay(current.number, self._console, self._options.progress) as display:
                place = Workplace(data.train, self._runtime, display.update, self._stopping.is_set)
                update, private = self._half.train(task, self._state.private(), place)
        except TrainingInterrupted as error:
            raise Stopped from error
        except (DistransError, OSError, RuntimeError) as error:  # RuntimeError: torch's, such as out of memory
            # The same round would end in the same way. The next one starts from another model.
            self._given_up = current.id
            self.trouble = f"Round {current.number} could not be trained here: {error}"
            logger.error("%s Waiting for the next round; /predict goes on.", self.trouble)
            return
        self.trouble = ""
        self._stage(current, update, private)
        self._settle_pending()
        if self._options.local_baseline:
            self._train_baseline(current.number, data)

    def _train_baseline(self, number: int, data: SiteData) -> None:
        self.doing = f"training this site's own model, round {number}"
        baseline = LocalBaseline(self._plan, self._identity.name)
        place = Workplace(data.train, self._runtime, None, self._stopping.is_set)
        try:
            self._state.save_baseline(baseline.train(self._state.baseline(), number, place))
        except TrainingInterrupted as error:
            raise Stopped from error
        except (DistransError, OSError, RuntimeError) as error:
            logger.error("this site's own model could not be trained: %s", error)

    # Uploads

    def _stage(self, current: RoundTaskView, update: Update, private: Tensors) -> None:
        body, report = update.encode(), update.report
        pending = PendingUpload(round_id=current.id, round_number=current.number, digest=digest(body))
        self._state.stage_upload(pending, body, private)
        logger.info(
            "round %d: trained on %d images in %.1f s, loss %.4f, accuracy %.1f %%",
            current.number,
            report.samples,
            report.seconds,
            report.loss,
            100 * report.accuracy,
        )

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

    # Models

    def _newest_kept(self) -> Bundle | None:
        """The newest model on the disk; None also for one that a crash kept from being measured."""
        numbers, measured = self._state.bundle_numbers(), {line.model for line in self._state.history()}
        if not numbers or numbers[-1] not in measured:
            return None
        try:
            return self._state.load_bundle(numbers[-1])
        except StateError:
            return None

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
            self._measure(bundle)

    def _measure(self, bundle: Bundle) -> None:
        self.doing = f"measuring model {bundle.number}"
        own = self._gate.consider(bundle).with_offset
        score = "" if own is None or own.accuracy is None else f", {own.accuracy:.1%} on held-out images"
        logger.info("model %d is here%s", bundle.number, score)
        if own is not None:
            self._coordinator.evaluation(bundle.number, own)

    def info(self) -> dict[str, Any]:
        """For `/info`."""
        model = self._gate.served
        return {
            "agent": {
                "name": self._identity.name,
                "version": __version__,
                "device": str(self._runtime.device),
                "doing": self.doing,
                "trouble": self.trouble,
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
            "history": [line.row() for line in self._state.history()],
            "time": time.time(),
        }

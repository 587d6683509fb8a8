"""A federation in memory: the method's halves in a loop, with no HTTP and no database."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch

from server.core.sampling import choose_participants
from shared.evaluation import Evaluation
from shared.measuring import evaluate
from shared.methods import client_half, server_half
from shared.methods.base import ClientRecord, Facts, LocalData, RoundTask, ServerState, Tensors, Update, Workplace
from shared.plan import FederationPlan
from shared.runtime import Runtime
from shared.schemas import TrainingReport
from shared.summation import RunningMean

EVALUATION_BATCH = 256


@dataclass
class SimulatedClient:
    """A site: its record, its data, and the private tensors it has kept."""

    record: ClientRecord
    train: LocalData
    test: LocalData
    _kept: Tensors | Path = field(default_factory=dict, repr=False)

    @property
    def private(self) -> Tensors:
        """What it has kept from round to round; read anew each time where it lies in a file."""
        return safetensors.torch.load_file(self._kept) if isinstance(self._kept, Path) else self._kept

    @private.setter
    def private(self, tensors: Tensors) -> None:
        self._kept = tensors

    @property
    def file(self) -> Path | None:
        """The file with its private tensors, unless they are in memory."""
        return self._kept if isinstance(self._kept, Path) else None

    def leave_in(self, file: Path) -> None:
        """Forget the private tensors, which this file has; it must stay until others take their place."""
        self._kept = file

    @property
    def own_classes(self) -> set[int]:
        """The classes it has training images of."""
        return {label for label, count in enumerate(self.record.class_counts) if count}


@dataclass(frozen=True)
class RoundOutcome:
    """What a round did, by client id; reports are the participants', evaluations everybody's."""

    round: int
    facts: Facts
    reports: dict[str, TrainingReport]
    evaluations: dict[str, Evaluation]

    @property
    def pooled(self) -> Evaluation:
        """All clients' evaluations in one."""
        return sum(self.evaluations.values(), Evaluation(samples=0, correct=0, loss_sum=0.0))


class Simulation:
    """Runs a plan over clients, one round at a time; the same plan and data give the same bits."""

    def __init__(
        self,
        plan: FederationPlan,
        clients: Sequence[SimulatedClient],
        runtime: Runtime | None = None,
        pretrained: Tensors | None = None,
    ) -> None:
        self.plan = plan
        self.clients = sorted(clients, key=lambda client: client.record.id)
        self.runtime = runtime or Runtime()
        self.server, self.client = server_half(plan), client_half(plan)
        self.roster = [client.record for client in self.clients]
        self.state: ServerState = self.server.initial_state(pretrained)
        self.round = 0

    def task(self, client: SimulatedClient) -> RoundTask:
        """What the client would download now."""
        facts = self.server.facts(self.roster)
        personal = self.server.personal(self.state, client.record, self.roster, facts)
        return RoundTask(client.record.id, self.round + 1, self.state.shared, personal, facts)

    def participants(self) -> list[SimulatedClient]:
        """Who trains in the next round: the choice that the coordinator would make."""
        names = [record.id for record in self.roster]
        chosen = choose_participants(names, self.plan.rounds.sample_fraction, self.plan.seed, self.round + 1)
        return [client for client in self.clients if client.record.id in set(chosen)]

    def run_round(self, *, evaluate: bool = True) -> RoundOutcome:
        """One round of the participants, then, if asked for, an evaluation of the new model at every client."""
        facts, mean = self.server.facts(self.roster), RunningMean()
        uploads: list[tuple[ClientRecord, Tensors]] = []
        reports: dict[str, TrainingReport] = {}
        for client in self.participants():
            update = self._train(client)
            self.server.fold(mean, update.shared, client.record)
            uploads.append((client.record, update.personal))
            reports[client.record.id] = update.report
        self.state = self.server.finish(self.state, mean.result(), uploads, self.roster, facts)
        self.round += 1
        return RoundOutcome(self.round, facts, reports, self.evaluate() if evaluate else {})

    def run(self) -> Iterator[RoundOutcome]:
        """All rounds of the plan that are left."""
        while self.round < self.plan.rounds.count:
            yield self.run_round()

    def evaluate(self) -> dict[str, Evaluation]:
        """The model as each client would use it now, on that client's held-out images."""
        results = {}
        for client in self.clients:
            predictor = self.client.predictor(self.task(client), client.private, self.runtime)
            batches = client.test.batches(EVALUATION_BATCH, seed=0)
            results[client.record.id] = evaluate(predictor, batches, client.own_classes)
        return results

    def _train(self, client: SimulatedClient) -> Update:
        workplace = Workplace(client.train, self.runtime)
        update, client.private = self.client.train(self.task(client), client.private, workplace)
        return update

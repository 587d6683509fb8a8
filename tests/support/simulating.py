"""Whole simulations in one call, evaluated as the methods predict."""

from lab.simulation.controls import EVALUATION_BATCH
from lab.simulation.simulation import RoundOutcome, Simulation
from shared.contract.measurements import Evaluation
from shared.learning.evaluation import evaluate


def run_all(simulation: Simulation) -> list[RoundOutcome]:
    """Run the remaining rounds of the plan."""
    return [simulation.run_round() for _ in range(simulation.round, simulation.plan.rounds.count)]


def evaluate_clients(simulation: Simulation) -> dict[str, Evaluation]:
    """Evaluate the current model as each client would use it, on its test images; by client id."""
    results = {}
    for client in simulation.clients:
        predictor = simulation.client.predictor(simulation.task(client), client.private, simulation.runtime)
        batches = client.test.batches(EVALUATION_BATCH, seed=0)
        results[client.record.id] = evaluate(predictor, batches, client.own_classes)
    return results


def evaluate_all(simulation: Simulation) -> Evaluation:
    """Evaluate the current model at all clients and pool the counts."""
    return sum(evaluate_clients(simulation).values(), Evaluation(samples=0, correct=0, loss_sum=0.0))

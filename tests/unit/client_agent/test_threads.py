"""Thread limits, and the number of threads for training."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from client_agent.threads import (
    TrainingThreads,
    available_cores,
    limit_threads,
    most_training_threads,
    time_steps,
)
from shared.contract.plan import validate_plan
from shared.learning.runtime import Runtime


def test_each_thread_keeps_its_own_limit_whatever_others_set_later() -> None:
    before, found = torch.get_num_threads(), {}
    both_set = threading.Barrier(2)

    def compute(count: int) -> None:
        limit_threads(count)
        both_set.wait(30)
        torch.ones(4, 4) @ torch.ones(4, 4)
        found[count] = torch.get_num_threads()

    threads = [threading.Thread(target=compute, args=(count,)) for count in (1, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {1: 1, 3: 3}
    assert torch.get_num_threads() == before
    torch.set_num_threads(before)  # new threads start with what was set last


class Machine:
    """Measured seconds per step, by number of threads; records what was asked."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = {int(name.removeprefix("with_")): taken for name, taken in seconds.items()}
        self.asked: list[Sequence[int]] = []

    def __call__(self, counts: Sequence[int]) -> dict[int, float]:
        self.asked.append(list(counts))
        return {count: self.seconds[count] for count in counts}


class TestTrainingThreads:
    @pytest.mark.parametrize(
        ("seconds", "chosen"),
        [
            ({"with_1": 1.0, "with_2": 5.0, "with_3": 9.0}, 1),
            ({"with_1": 1.0, "with_2": 0.6, "with_3": 0.5}, 3),
            ({"with_1": 1.0, "with_2": 0.6, "with_3": 0.59}, 2),  # hardly faster
            ({"with_1": 1.0, "with_2": 0.97, "with_3": 0.96}, 1),
        ],
    )
    def test_more_threads_must_be_worth_it(self, seconds: dict[str, float], chosen: int) -> None:
        machine = Machine(**seconds)
        threads = TrainingThreads(3, machine)
        assert [threads.choose() for _ in range(3)] == [chosen] * 3
        assert machine.asked == [[1, 2, 3]]  # once for the process

    @pytest.mark.parametrize(("most", "counts"), [(2, [1, 2]), (4, [1, 2, 4]), (7, [1, 2, 4, 7])])
    def test_powers_of_two_and_all_cores_are_measured(self, most: int, counts: list[int]) -> None:
        machine = Machine(with_1=1.0, with_2=1.0, with_4=1.0, with_7=1.0)
        TrainingThreads(most, machine).choose()
        assert machine.asked == [counts]

    def test_single_core_needs_no_measurement(self) -> None:
        machine = Machine()
        assert TrainingThreads(1, machine).choose() == 1
        assert machine.asked == []

    @pytest.mark.parametrize(
        ("steps_s", "measurements"),
        [
            ([1.0, 1.4, 0.7, 1.0], 1),
            ([1.0, 1.6, 1.6, 1.6], 2),  # what is usual is learned anew after a measurement
            ([1.0, 1.0, 0.5, 0.5], 2),
            ([1.0, 2.0, 1.0, 1.0], 2),
        ],
    )
    def test_clear_change_of_speed_is_followed_by_another_measurement(
        self, steps_s: list[float], measurements: int
    ) -> None:
        machine = Machine(with_1=1.0, with_2=0.5)
        threads = TrainingThreads(2, machine)
        for step_s in steps_s:
            threads.choose()
            threads.note_round(10 * step_s, 10)
        threads.choose()
        assert len(machine.asked) == measurements

    def test_second_measurement_may_choose_otherwise(self) -> None:
        machine = Machine(with_1=1.0, with_2=0.5)
        threads = TrainingThreads(2, machine)
        assert threads.choose() == 2
        threads.note_round(1.0, 10)
        machine.seconds = {1: 1.0, 2: 5.0}  # another program has begun to compute
        threads.note_round(9.0, 10)
        assert threads.choose() == 1

    def test_failed_or_interrupted_measurement_means_as_many_as_allowed(self) -> None:
        def fail(_: Sequence[int]) -> dict[int, float]:
            raise ValueError("Expected more than 1 value per channel when training")

        assert TrainingThreads(4, fail).choose() == 4
        assert TrainingThreads(4, lambda _: {}).choose() == 4


@pytest.fixture
def unchanged_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("unchanged_threads")
class TestMeasurement:
    PLAN = validate_plan(
        {
            "name": "pets",
            "classes": ["cat", "dog", "eel"],
            "image": {"channels": 1, "height": 14, "width": 14},
            "training": {"batch_size": 4},
        }
    )

    def test_real_steps_are_timed_with_every_number_of_threads(self) -> None:
        before = torch.get_rng_state()
        found = time_steps(self.PLAN, Runtime(), lambda: False, [1, 2])
        assert list(found) == [1, 2]
        assert min(found.values()) > 0
        assert torch.equal(torch.get_rng_state(), before)

    def test_stopping_agent_does_not_measure(self) -> None:
        assert time_steps(self.PLAN, Runtime(), lambda: True, [1, 2]) == {}


@pytest.mark.parametrize(
    ("text", "cores"), [("100000 100000", 1), ("50000 100000", 1), ("max 100000", None), ("broken", None)]
)
def test_quota_of_the_control_group_limits_the_cores(tmp_path: Path, text: str, cores: int | None) -> None:
    (tmp_path / "cpu.max").write_text(text + "\n")
    assert available_cores(tmp_path / "cpu.max") == (cores or available_cores(tmp_path / "none"))


def test_a_core_is_left_for_predictions() -> None:
    assert most_training_threads(serves=False) == available_cores()
    assert most_training_threads(serves=True) == max(1, available_cores() - 1)

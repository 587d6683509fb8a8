"""Temperature scaling and the expected calibration error."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from client_agent.serving.calibration import (
    HIGHEST,
    LOWEST,
    apply_temperature,
    calibration_bins,
    calibration_of,
    expected_calibration_error,
    fit_temperature,
)

seeds = st.integers(0, 2**32 - 1)


def drawn(seed: int, count: int = 2000) -> tuple[Tensor, Tensor]:
    """Return logits, and labels drawn from their softmax: perfectly calibrated."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(count, 4, generator=generator)
    return logits, torch.multinomial(logits.softmax(dim=1), 1, generator=generator)[:, 0]


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_the_fitted_temperature_undoes_overconfidence(factor: float) -> None:
    logits, labels = drawn(0)
    probabilities = (factor * logits).softmax(dim=1)
    assert fit_temperature(probabilities, labels) == pytest.approx(factor, rel=0.1)
    before, after = (
        expected_calibration_error(calibration_bins(found, labels))
        for found in (probabilities, calibration_of(probabilities, labels)(probabilities))
    )
    assert before is not None
    assert after is not None
    assert after < 0.04
    assert factor == 1 or before > 0.05


def test_the_fitted_temperature_is_the_best_one() -> None:
    logits, labels = drawn(1, 40)

    def loss(temperature: float) -> float:
        return float(torch.nn.functional.cross_entropy(logits / temperature, labels))

    found = fit_temperature(logits.softmax(dim=1), labels)
    assert all(loss(found) <= loss(other / 100) + 1e-6 for other in range(25, 401, 5))


def test_few_images_change_nothing() -> None:
    logits, labels = drawn(0, 9)
    assert fit_temperature((9 * logits).softmax(dim=1), labels) == 1.0


@pytest.mark.parametrize(("right", "expected"), [(True, LOWEST), (False, HIGHEST)])
def test_the_temperature_is_bounded(right: bool, expected: float) -> None:
    probabilities = torch.tensor([[0.9, 0.1]]).expand(20, 2)
    labels = torch.zeros(20, dtype=torch.int64) if right else torch.ones(20, dtype=torch.int64)
    assert fit_temperature(probabilities, labels) == pytest.approx(expected, rel=1e-6)


def test_certain_mistakes_give_a_finite_result() -> None:
    probabilities = torch.tensor([[1.0, 0.0]]).expand(20, 2)
    found = calibration_of(probabilities, torch.ones(20, dtype=torch.int64))(probabilities)
    assert bool(found.isfinite().all())


def test_a_temperature_of_one_keeps_every_bit() -> None:
    probabilities = torch.rand(5, 3).softmax(dim=1)
    assert apply_temperature(probabilities, 1.0) is probabilities


@given(seeds, st.floats(LOWEST, HIGHEST))
def test_a_temperature_keeps_the_ranking_and_the_sum(seed: int, temperature: float) -> None:
    probabilities = drawn(seed, 20)[0].softmax(dim=1)
    found = apply_temperature(probabilities, temperature)
    torch.testing.assert_close(found.sum(dim=1), torch.ones(20))
    assert torch.equal(found.argmax(dim=1), probabilities.argmax(dim=1))


def test_the_calibration_error_of_a_worked_example() -> None:
    """Two bins: three images at 0.9, of which two are right, and one at 0.6 that is right."""
    probabilities = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.1, 0.9], [0.4, 0.6]])
    labels = torch.tensor([0, 0, 0, 1])
    expected = (abs(2.7 - 2) + abs(0.6 - 1)) / 4
    assert expected_calibration_error(calibration_bins(probabilities, labels)) == pytest.approx(expected)
    assert expected_calibration_error(calibration_bins(probabilities[:0], labels[:0])) is None


@given(seeds, st.integers(1, 50))
def test_the_calibration_error_is_between_zero_and_one(seed: int, count: int) -> None:
    logits, labels = drawn(seed, count)
    error = expected_calibration_error(calibration_bins((3 * logits).softmax(dim=1), labels))
    assert error is not None
    assert 0 <= error <= 1

from math import comb, sqrt

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shared.contract.measurements import PairedCounts
from shared.learning.verdict import describe_verdict, difference_interval, mcnemar, reach_verdict, wilson

Z = 1.959963984540054


def pairs(both: int, only_served: int, only_alone: int, neither: int) -> PairedCounts:
    samples = both + only_served + only_alone + neither
    return PairedCounts(samples=samples, both=both, only_served=only_served, only_alone=only_alone, neither=neither)


counts = st.integers(0, 60)
paired_counts = st.builds(pairs, counts, counts, counts, counts)


class TestWilson:
    @pytest.mark.parametrize(
        ("correct", "samples", "low", "high"),
        [
            (81, 263, 0.2553, 0.3662),  # Newcombe (1998), table I, method 3
            (15, 148, 0.0624, 0.1605),
            (0, 20, 0.0, 0.1611),
            (1, 29, 0.0061, 0.1718),
        ],
    )
    def test_matches_published_intervals(self, correct: int, samples: int, low: float, high: float) -> None:
        found = wilson(correct, samples)
        assert (found.low, found.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))

    @given(samples=st.integers(1, 2**28), share=st.floats(0, 1))
    def test_ends_are_the_rates_that_a_score_test_just_accepts(self, samples: int, share: float) -> None:
        correct = round(share * samples)
        found = wilson(correct, samples)
        assert 0 <= found.low <= correct / samples <= found.high <= 1
        for rate in {found.low, found.high} - {0.0, 1.0}:
            score = abs(correct / samples - rate) / sqrt(rate * (1 - rate) / samples)
            assert score == pytest.approx(Z, rel=1e-3)

    def test_is_everything_without_images(self) -> None:
        assert (wilson(0, 0).low, wilson(0, 0).high) == (0, 1)


class TestMcNemar:
    @pytest.mark.parametrize(
        ("only_served", "only_alone", "p"),
        [
            (5, 0, 2 / 32),
            (6, 0, 2 / 64),
            (0, 6, 2 / 64),
            (9, 1, 2 * (1 + 10) / 1024),
            (4, 4, 1.0),
            (0, 0, 1.0),
        ],
    )
    def test_matches_values_worked_out_by_hand(self, only_served: int, only_alone: int, p: float) -> None:
        assert mcnemar(pairs(3, only_served, only_alone, 2)) == pytest.approx(p)

    @given(paired=paired_counts)
    def test_is_twice_the_smaller_tail_of_a_fair_coin(self, paired: PairedCounts) -> None:
        tosses = paired.only_served + paired.only_alone
        tail = sum(comb(tosses, heads) for heads in range(min(paired.only_served, paired.only_alone) + 1))
        assert mcnemar(paired) == pytest.approx(min(1.0, 2 * tail / 2**tosses))

    def test_copes_with_the_largest_counts(self) -> None:
        assert mcnemar(pairs(0, 2**27, 2**27, 0)) == 1
        assert mcnemar(pairs(0, 2**28, 0, 0)) == 0


class TestDifference:
    def test_matches_values_worked_out_by_hand(self) -> None:
        """Two surveys of 1600 people: 64 / 1602 ± 1.96 √(237 − 64² / 1602) / 1602 = 0.03995 ± 0.01873."""
        found = difference_interval(pairs(794, 150, 86, 570))
        assert (found.low, found.high) == (pytest.approx(0.02122, abs=1e-5), pytest.approx(0.05868, abs=1e-5))

    @given(paired=paired_counts.filter(lambda paired: paired.samples > 0))
    def test_contains_wald_s_interval_of_the_counts_plus_one_half_each(self, paired: PairedCounts) -> None:
        n = paired.samples + 2
        served, alone = (paired.only_served + 0.5) / n, (paired.only_alone + 0.5) / n
        center, margin = served - alone, Z * sqrt((served + alone - (served - alone) ** 2) / n)
        found = difference_interval(paired)
        assert -1 <= found.low <= max(-1, center - margin) + 1e-12
        assert 1 >= found.high >= min(1, center + margin) - 1e-12
        assert found.low <= (paired.only_served - paired.only_alone) / paired.samples <= found.high

    @given(paired=paired_counts.filter(lambda paired: paired.samples > 0))
    @example(paired=pairs(20, 9, 2, 31))  # Agresti and Min's interval: 0.7 to 21.2 points
    @example(paired=pairs(500, 2**20, 2**20 + 4000, 0))
    def test_includes_zero_exactly_where_the_test_shows_no_difference(self, paired: PairedCounts) -> None:
        found = difference_interval(paired)
        assert (found.low <= 0 <= found.high) == (mcnemar(paired) >= 0.05)

    def test_is_the_test_s_interval_near_its_limit(self) -> None:
        """Of 11 discordant images, Clopper and Pearson leave the served model 48.22 % to 97.72 %."""
        found = difference_interval(pairs(20, 9, 2, 31))
        assert found.low == pytest.approx((2 * 0.48224 - 1) * 11 / 62, abs=1e-5)
        assert found.high == pytest.approx(7 / 64 + Z * sqrt(12 - 49 / 64) / 64)

    def test_is_everything_without_images(self) -> None:
        found = difference_interval(pairs(0, 0, 0, 0))
        assert (found.low, found.high) == (-1, 1)


class TestVerdict:
    @pytest.mark.parametrize(
        ("paired", "candidate", "sentence"),
        [
            (pairs(300, 27, 10, 75), None, "Joining pays off: +4.1 points (1.2 to 7.0) on 412 test images"),
            (pairs(40, 5, 3, 10), None, "No difference can be shown with 58 images: +3.4 points (−6.4 to 13.1)"),
            (
                pairs(300, 10, 30, 72),
                "blend",
                "This site does better alone: −4.9 points (−7.8 to −1.8) on 412 test images",
            ),
            (
                pairs(350, 0, 0, 62),
                "alone",
                "This site does better alone; its own model is served: 85.0 % (81.2 to 88.1) on 412 test images",
            ),
            (
                pairs(350, 0, 0, 62),
                None,
                "No difference on 412 test images: both models agree, or the site serves its own",
            ),
            (
                pairs(1, 0, 0, 0),
                "blend",
                "No difference on 1 test image: both models agree, or the site serves its own",
            ),
            (pairs(40, 4, 4, 10), "blend", "No difference can be shown with 58 images: 0.0 points (−9.8 to 9.8)"),
            (pairs(0, 0, 0, 0), "blend", "No difference can be shown without test images"),
            (pairs(0, 0, 0, 0), "alone", "This site does better alone; its own model is served"),
        ],
    )
    def test_sentence_states_the_outcome_with_figures(
        self, paired: PairedCounts, candidate: str | None, sentence: str
    ) -> None:
        assert describe_verdict(paired, candidate) == sentence

    @given(paired=paired_counts)
    def test_five_percent_decides_and_the_interval_agrees(self, paired: PairedCounts) -> None:
        verdict = reach_verdict(paired)
        assert (verdict.outcome == "no-difference") == (verdict.p_value >= 0.05)
        if verdict.outcome == "pays-off":
            assert verdict.difference_interval.low > 0
        if verdict.outcome == "better-alone":
            assert verdict.difference_interval.high < 0

    def test_reports_accuracies_of_both_models(self) -> None:
        verdict = reach_verdict(pairs(60, 20, 10, 10), "offset+prior")
        assert (verdict.served_accuracy, verdict.alone_accuracy, verdict.difference) == (0.8, 0.7, 0.1)
        assert (verdict.served_interval, verdict.alone_interval) == (wilson(80, 100), wilson(70, 100))
        assert verdict.candidate == "offset+prior"

    def test_has_no_accuracies_without_images(self) -> None:
        verdict = reach_verdict(pairs(0, 0, 0, 0))
        assert verdict.served_accuracy is verdict.alone_accuracy is verdict.difference is None
        assert verdict.outcome == "no-difference"

"""Whether joining paid off at a site, from what the served model and the site's own one got right on the same images.

An exact McNemar test decides, at a level of 5 %. The intervals show how large the difference may be:

- Wilson (1927), Probable inference, the law of succession, and statistical inference. JASA 22:209-212.
- Agresti and Min (2005), Simple improved confidence intervals for comparing matched proportions. Statistics in
  Medicine 24:729-740. They add half an image to each of the four counts.

Near the test's limit, Agresti and Min's interval may exclude a difference of zero although the test does not. It is
then widened to include the interval that belongs to the test: Clopper and Pearson's, for the discordant images.
"""

from math import sqrt

from shared.contract.measurements import ALONE, Interval, Outcome, PairedCounts, Verdict

LEVEL = 0.05
_Z = 1.959963984540054  # standard normal quantile of 97.5 %


def wilson(correct: int, samples: int) -> Interval:
    """Return Wilson's 95 % interval of an accuracy; from 0 to 1 without images."""
    if not samples:
        return Interval(low=0.0, high=1.0)
    rate, spread = correct / samples, _Z**2 / samples
    center = (rate + spread / 2) / (1 + spread)
    margin = _Z * sqrt(rate * (1 - rate) / samples + spread / (4 * samples)) / (1 + spread)
    # The ends are exact where rounding could miss them: no interval excludes the rate it belongs to.
    return Interval(
        low=max(0.0, center - margin) if correct else 0.0, high=min(1.0, center + margin) if correct < samples else 1.0
    )


def mcnemar(paired: PairedCounts) -> float:
    """Return the two-sided p-value of the exact McNemar test: do both models get equally many images right?"""
    from scipy.stats import binomtest  # takes half a second to import

    discordant = paired.only_served + paired.only_alone
    return float(binomtest(paired.only_served, discordant).pvalue) if discordant else 1.0


def difference_interval(paired: PairedCounts) -> Interval:
    """Return the 95 % interval of the difference in accuracy, served minus alone; from −1 to 1 without images.

    It includes zero exactly where `mcnemar` shows no difference.
    """
    if not paired.samples:
        return Interval(low=-1.0, high=1.0)
    samples = paired.samples + 2
    difference = paired.only_served - paired.only_alone
    discordant = paired.only_served + paired.only_alone + 1
    margin = _Z * sqrt(discordant - difference**2 / samples) / samples
    low, high = difference / samples - margin, difference / samples + margin
    if not low <= 0 <= high and mcnemar(paired) >= LEVEL:
        accepted = _accepted_by_mcnemar(paired)
        low, high = min(low, accepted[0]), max(high, accepted[1])
    return Interval(low=max(-1.0, low), high=min(1.0, high))


def _accepted_by_mcnemar(paired: PairedCounts) -> tuple[float, float]:
    """Return the differences that the exact test does not rule out, given the number of discordant images."""
    from scipy.stats import binomtest

    discordant = paired.only_served + paired.only_alone
    share = binomtest(paired.only_served, discordant).proportion_ci(1 - LEVEL, method="exact")
    return (2 * share.low - 1) * discordant / paired.samples, (2 * share.high - 1) * discordant / paired.samples


def reach_verdict(paired: PairedCounts, candidate: str | None = None) -> Verdict:
    """Return the verdict on paired counts.

    Counts alone cannot tell a site that serves its own model from one whose models happen to agree: `candidate`, the
    name of what the site serves, does.
    """
    samples, p_value = paired.samples, mcnemar(paired)
    outcome = _outcome(paired, p_value, candidate)
    return Verdict(
        paired=paired,
        candidate=candidate,
        served_accuracy=paired.served_correct / samples if samples else None,
        served_interval=wilson(paired.served_correct, samples),
        alone_accuracy=paired.alone_correct / samples if samples else None,
        alone_interval=wilson(paired.alone_correct, samples),
        difference=(paired.only_served - paired.only_alone) / samples if samples else None,
        difference_interval=difference_interval(paired),
        p_value=p_value,
        outcome=outcome,
        sentence=_sentence(paired, outcome, candidate),
    )


def describe_verdict(paired: PairedCounts, candidate: str | None = None) -> str:
    """Return one sentence that says whether joining paid off, with figures; see `reach_verdict`."""
    return reach_verdict(paired, candidate).sentence


def _outcome(paired: PairedCounts, p_value: float, candidate: str | None) -> Outcome:
    if candidate == ALONE:
        return "better-alone"
    if p_value >= LEVEL:
        return "no-difference"
    return "pays-off" if paired.only_served > paired.only_alone else "better-alone"


def _sentence(paired: PairedCounts, outcome: Outcome, candidate: str | None) -> str:
    images = f"image{'' if paired.samples == 1 else 's'}"
    if candidate == ALONE:
        accuracy = f": {_accuracy(paired)} on {paired.samples} test {images}" if paired.samples else ""
        return f"This site does better alone; its own model is served{accuracy}"
    if not paired.samples:
        return "No difference can be shown without test images"
    if not paired.only_served + paired.only_alone:
        return f"No difference on {paired.samples} test {images}: both models agree, or the site serves its own"
    if outcome == "no-difference":
        return f"No difference can be shown with {paired.samples} {images}: {describe_difference(paired)}"
    result = "Joining pays off" if outcome == "pays-off" else "This site does better alone"
    return f"{result}: {describe_difference(paired)} on {paired.samples} test {images}"


def _accuracy(paired: PairedCounts) -> str:
    """Return for example `78.4 % (74.2 to 82.1)`."""
    interval = wilson(paired.alone_correct, paired.samples)
    return f"{_percent(paired.alone_correct / paired.samples)} % ({_range(interval)})"


def describe_difference(paired: PairedCounts) -> str:
    """Return for example `+4.1 points (1.2 to 7.0)`; the counts must not be empty."""
    difference = _percent((paired.only_served - paired.only_alone) / paired.samples)
    sign = "+" if paired.only_served > paired.only_alone else ""
    return f"{sign}{difference} points ({_range(difference_interval(paired))})"


def _range(interval: Interval) -> str:
    return f"{_percent(interval.low)} to {_percent(interval.high)}"


def _percent(rate: float) -> str:
    return f"{100 * rate:z.1f}".replace("-", "−")

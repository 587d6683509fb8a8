"""Class counts, and what they add to a member's logits.

A member that was trained with counts P and is to predict where counts are Q gets log Q − log P, smoothed. The prior
decides about Q: this site's counts, the federation's (`none`), or those of a deployment.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from client_agent.serving.candidates import Candidate, Member
from client_agent.settings import PriorKind, ServedPrior
from client_agent.state.kept_models import Bundle
from shared.contract.class_totals import read_class_totals
from shared.contract.plan import FederationPlan
from shared.learning.priors import exclude_unseen, prior_shift


@dataclass(frozen=True)
class ClassCounts:
    """Training images per class at this site and in the federation, and expected ones at a deployment."""

    site: Sequence[int] | None = None  # None if the agent has not opened its images
    federation: Sequence[int] | None = None  # None if the coordinator does not know them
    deployment: Sequence[float] | None = None
    only_own_classes: bool = False

    @property
    def site_shift(self) -> Tensor | None:
        """What adjusts the federation's logits to this site; None if either side is unknown."""
        return None if self.site is None or self.federation is None else prior_shift(self.site, self.federation)

    def shift(self, member: Member, kind: PriorKind) -> Tensor | None:
        """Return what to add to a member's logits under a prior; None for nothing."""
        found = self._prior_shift(member, kind)
        if not self.only_own_classes or self.site is None:
            return found
        excluded = exclude_unseen(self.site)
        return excluded if found is None else found + excluded

    def _prior_shift(self, member: Member, kind: PriorKind) -> Tensor | None:
        if self.site is None or self.federation is None:
            return None
        trained = self.site if member.base.assumes_site_prior else self.federation
        if kind == "site":  # as the gate chose it
            return self.site_shift if member.uses_prior else None
        wanted = self.federation if kind == "none" else self.deployment
        return None if wanted is None or wanted is trained else prior_shift(wanted, trained)

    def applied(self, candidate: Candidate, kind: PriorKind) -> PriorKind | None:
        """Return the prior that the candidate's answers assume; None if it cannot be applied, as counts are unknown."""
        if kind == "site" and all(
            member.base.assumes_site_prior or member.uses_prior for member, _ in candidate.weights
        ):
            return "site"
        if self.site is None or self.federation is None:
            return None
        return "none" if kind == "site" else kind

    def served_as(self, prior: ServedPrior, classes: Sequence[str]) -> "ClassCounts":
        """Return the counts with a deployment's, which weigh as much as the site's, if the prior has any."""
        if prior.kind != "deployment":
            return replace(self, only_own_classes=prior.only_own_classes)
        images, total = sum(self.site or self.federation or ()), sum(prior.frequencies.values())
        expected = tuple(images * prior.frequencies.get(name, 0.0) / total for name in classes)
        return replace(self, deployment=expected, only_own_classes=prior.only_own_classes)


def class_counts(plan: FederationPlan, bundle: Bundle, site: Sequence[int] | None) -> ClassCounts:
    """Return the counts that apply to a model."""
    return ClassCounts(site, read_class_totals(bundle.facts, len(plan.classes)))

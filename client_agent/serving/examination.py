"""The gate's look at a model: its base models are built and measured, and one candidate is made ready to serve."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from client_agent.data.dataset import SiteData
from client_agent.serving.assessment import Assessment, assess, unmeasured
from client_agent.serving.baseline import LocalBaseline
from client_agent.serving.bases import build_base, federated_bases
from client_agent.serving.candidates import Base
from client_agent.serving.class_counts import class_counts
from client_agent.serving.measurement import measure_bases
from client_agent.serving.model import Recipe, ServingModel, build
from client_agent.settings import Identity, RunOptions
from client_agent.state.folder import StateFolder
from client_agent.state.kept_models import Bundle
from client_agent.state.own_models import OwnModel
from client_agent.state.records import CandidateRecord, MemberRecord, SiteReport
from shared.learning.methods.base import Predictor
from shared.learning.runtime import Runtime
from shared.tensors.names import Tensors

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Examined:
    """What was found out about a model, and what to serve if it is approved."""

    assessment: Assessment
    model: ServingModel
    record: CandidateRecord
    weights: Mapping[str, bytes]  # of adapted and alone, as far as the candidate needs them
    considered: Mapping[str, str]  # digests of the site's own models


class Examiner:
    """Examines models on a site's images."""

    def __init__(self, state: StateFolder, identity: Identity, runtime: Runtime, options: RunOptions) -> None:
        self._state, self._identity, self._runtime, self._options = state, identity, runtime, options

    def own_models(self, fingerprint: str) -> dict[str, OwnModel]:
        """Return the site's own models to consider with a bundle, as far as there are any."""
        found = {}
        if self._options.alone and (alone := self._state.own.alone()):
            found[str(Base.ALONE)] = alone
        if self._options.adapt != "off" and (adapted := self._state.own.adapted(fingerprint, self._options.adapt)):
            found[str(Base.ADAPTED)] = adapted
        return found

    def examine(self, bundle: Bundle, data: SiteData | None) -> Examined:
        """Measure a model on the held-out images, if any, and build the chosen candidate.

        Raises whatever goes wrong with the federation's model; the site's own models are left out if they fail.
        """
        plan, name, own = self._identity.plan, self._identity.name, self.own_models(bundle.fingerprint)
        predictors, weights = self._build(bundle, own)
        site_counts = None if data is None else tuple(data.report.class_counts.values())
        counts = class_counts(plan, bundle, site_counts)
        measured = None if data is None else measure_bases(predictors, data, plan.seed)
        if measured is None:
            assessment = unmeasured(list(predictors), counts)
        else:
            own_classes = [place for place, images in enumerate(site_counts or ()) if images]
            assessment = assess(measured, counts, plan.classes, own_classes)
        recipe = Recipe(assessment.candidate, assessment.temperature, site_counts, weights)
        model = build(plan, name, bundle, self._runtime, recipe, self._options.prior, predictors)
        used = {base: own[base] for base in own if base in {member.base for member, _ in assessment.candidate.weights}}
        record = CandidateRecord(
            name=assessment.candidate.name,
            members=tuple(
                MemberRecord(base=member.base, uses_prior=member.uses_prior, weight=weight)
                for member, weight in assessment.candidate.weights
            ),
            mixed=assessment.candidate.mixed,
            temperature=assessment.temperature,
            site_counts=site_counts,
            files={base: stored.digest for base, stored in used.items()},
            report=self._with_steps(assessment.report, bundle, data, own.get(Base.ALONE)),
        )
        bodies = {base: stored.body for base, stored in used.items()}
        return Examined(assessment, model, record, bodies, {base: stored.digest for base, stored in own.items()})

    def _build(self, bundle: Bundle, own: Mapping[str, OwnModel]) -> tuple[dict[Base, Predictor], dict[str, Tensors]]:
        """Return the base models' predictors, and the weights of the site's own models."""
        plan, name = self._identity.plan, self._identity.name
        bases = federated_bases(plan, name, bundle)
        predictors = {base: build_base(base, plan, name, bundle, {}, self._runtime) for base in bases}
        weights: dict[str, Tensors] = {}
        for base, stored in own.items():
            try:
                weights[base] = stored.tensors
                predictor = build_base(Base(base), plan, name, bundle, weights, self._runtime)
                predictor(torch.zeros(1, *plan.image.shape))
            except Exception as error:  # such as weights for another plan
                logger.warning("the %s model cannot be used: %s", base, error)
            else:
                predictors[Base(base)] = predictor
        return predictors, weights

    def _with_steps(
        self, report: SiteReport | None, bundle: Bundle, data: SiteData | None, alone: OwnModel | None
    ) -> SiteReport | None:
        """Return the report with how far the site's own model has come."""
        if report is None or data is None or alone is None:
            return report
        baseline = LocalBaseline(self._identity.plan, self._identity.name)
        due = bundle.number * baseline.steps_per_round(data.train.samples)
        return report.model_copy(update={"alone_steps": alone.count("steps"), "alone_steps_due": due})

"""Whether joining paid off, site by site: verdicts from the paired counts that sites share."""

from collections import Counter
from functools import lru_cache

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from server.service.measurements.pooling import stored_evaluation
from server.store.tables import Client, Evaluation, Federation
from shared.contract.messages import SiteVerdict, VerdictSummary
from shared.learning.verdict import reach_verdict

_reach_verdict = lru_cache(maxsize=4096)(reach_verdict)  # `federation show --watch` asks for the same ones again


def verdicts(session: Session, federation: Federation) -> tuple[list[SiteVerdict], VerdictSummary | None]:
    """Return the verdict of each site on the newest model it evaluated, by name, and a summary; None without any.

    As with accuracies, sites that left before the federation ended do not count.
    """
    newest = select(func.max(Evaluation.model_number)).where(
        Evaluation.federation_id == federation.id, Evaluation.client_id == Client.id
    )
    query = select(Client.name, Evaluation.model_number, Evaluation.result).outerjoin(
        Evaluation,
        (Evaluation.federation_id == federation.id)
        & (Evaluation.client_id == Client.id)
        & (Evaluation.model_number == newest.scalar_subquery()),
    )
    rows = session.execute(query.where(Client.federation_id == federation.id, Client.counted)).all()
    shared = [found for name, number, text in rows if text is not None and (found := _of_site(name, number, text))]
    shared.sort(key=lambda one: one.client)
    return shared, summarize(shared, len(rows) - len(shared)) if shared else None


def own_verdict(session: Session, federation: Federation, client_id: str) -> list[SiteVerdict]:
    """Return what `verdicts` has of this client."""
    query = select(Client.name, Evaluation.model_number, Evaluation.result)
    query = query.join(Evaluation, Evaluation.client_id == Client.id).where(
        Evaluation.federation_id == federation.id, Evaluation.client_id == client_id
    )
    row = session.execute(query.order_by(Evaluation.model_number.desc()).limit(1)).one_or_none()
    found = _of_site(*row) if row is not None else None
    return [found] if found else []


def _of_site(client: str, model: int, text: str) -> SiteVerdict | None:
    result = stored_evaluation(text)
    if result is None or result.paired is None:
        return None
    return SiteVerdict(client=client, model=model, verdict=_reach_verdict(result.paired, result.candidate))


def summarize(shared: list[SiteVerdict], not_shared: int) -> VerdictSummary:
    """Count the outcomes, and say in one sentence at how many sites joining paid off."""
    outcomes = Counter(one.verdict.outcome for one in shared)
    pays_off, unclear, alone = (outcomes[one] for one in ("pays-off", "no-difference", "better-alone"))
    parts = [f"Joining pays off at {pays_off or 'none'} of {len(shared)} {'site' if len(shared) == 1 else 'sites'}"]
    if unclear:
        parts.append(f"no difference can be shown at {unclear}")
    if alone:
        parts.append(f"{alone} {'does' if alone == 1 else 'do'} better alone")
    if not_shared:
        parts.append(f"{not_shared} more {'does not share its' if not_shared == 1 else 'do not share their'} verdict")
    return VerdictSummary(
        pays_off=pays_off,
        no_difference=unclear,
        better_alone=alone,
        not_shared=not_shared,
        sentence="; ".join(parts) + ".",
    )

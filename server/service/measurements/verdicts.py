"""Whether joining paid off, site by site: verdicts from the paired counts that sites share."""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache, reduce
from operator import add
from typing import NamedTuple

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from server.service.measurements.pooling import stored_evaluation
from server.store.tables import Client, Evaluation, Federation
from shared.contract.messages import SiteVerdict, VerdictSummary
from shared.learning.verdict import describe_difference, reach_verdict

_RECENT_MODELS = 10  # looked at first: finding each site's newest among those of all rounds takes far longer
_reach_verdict = lru_cache(maxsize=4096)(reach_verdict)  # `federation show --watch` asks for the same ones again


def verdicts(
    session: Session, federation: Federation, only_client: str | None
) -> tuple[list[SiteVerdict], VerdictSummary | None]:
    """Return the verdict of each site on the newest model it evaluated, by name, and a summary; None without any.

    As with accuracies, sites that left before the federation ended do not count. A client gets its own verdict and no
    summary, which would give away another's if there are few.
    """
    rows = _newest_results(session, federation, only_client, since=_last_models(session, federation))
    if missing := [row.id for row in rows if row.result is None]:
        older = {row.id: row for row in _newest_results(session, federation, only_client, among=missing)}
        rows = [older.get(row.id, row) for row in rows]
    shared = [found for row in rows if (found := _of_site(row)) is not None]
    shared.sort(key=lambda one: one.client)
    return shared, summarize(shared, len(rows) - len(shared)) if shared and only_client is None else None


class _Newest(NamedTuple):
    """A site's evaluation of the newest model it has evaluated, if there is any."""

    id: str
    client: str
    model: int | None
    result: str | None


def _last_models(session: Session, federation: Federation) -> int:
    newest = select(func.max(Evaluation.model_number)).where(Evaluation.federation_id == federation.id)
    return (session.execute(newest).scalar() or 0) - _RECENT_MODELS


def _newest_results(
    session: Session,
    federation: Federation,
    only_client: str | None,
    *,
    since: int = 0,
    among: Sequence[str] | None = None,
) -> list[_Newest]:
    """Return each site's newest evaluation of models from `since` on; `among` limits the sites."""
    newest = select(Evaluation.client_id, func.max(Evaluation.model_number).label("number"))
    newest = newest.where(Evaluation.federation_id == federation.id, Evaluation.model_number >= since)
    if among is not None:
        newest = newest.where(Evaluation.client_id.in_(among))
    last = newest.group_by(Evaluation.client_id).subquery()
    query = select(Client.id, Client.name, Evaluation.model_number, Evaluation.result).outerjoin(
        last, last.c.client_id == Client.id
    )
    query = query.outerjoin(
        Evaluation,
        (Evaluation.federation_id == federation.id)
        & (Evaluation.client_id == last.c.client_id)
        & (Evaluation.model_number == last.c.number),
    ).where(Client.federation_id == federation.id, Client.counted)
    if only_client is not None:
        query = query.where(Client.id == only_client)
    if among is not None:
        query = query.where(Client.id.in_(among))
    return [_Newest(*row) for row in session.execute(query)]


def _of_site(row: _Newest) -> SiteVerdict | None:
    result = None if row.result is None else stored_evaluation(row.result)
    if result is None or result.paired is None or row.model is None:
        return None
    return SiteVerdict(client=row.client, model=row.model, verdict=_reach_verdict(result.paired, result.candidate))


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
        together=_together(shared),
    )


def _together(shared: list[SiteVerdict]) -> str:
    """Return the difference over all test images: what few images per site cannot show, all together may."""
    pooled = reduce(add, (one.verdict.paired for one in shared))
    if len(shared) == 1 or not pooled.samples:
        return ""
    return f"All {len(shared)} together: {describe_difference(pooled)} on {pooled.samples:,} test images."

import json

from server.dashboard.feed import MOST, feed
from server.service.insights.activity import RoundEnd
from shared.contract.messages import AuditView


def entry(at: float, action: str, actor: str = "admin", **detail: object) -> AuditView:
    text = json.dumps(detail) if detail else ""
    return AuditView(id=int(at), at=at, actor=actor, action=action, federation="pets", address="", detail=text)


def test_the_feed_tells_rounds_and_actions_in_order() -> None:
    entries = [
        entry(5, "client.join", "client:north", id="x"),
        entry(6, "federation.rollback", to=3, model=9),
        entry(7, "client.revoke", client="{south}"),
        entry(8, "dashboard.sign-in"),
    ]
    ends = [
        RoundEnd(7, "done", "", 5.5, 5, 4),
        RoundEnd(8, "failed", "no quorum", 9, 5, 1),
        RoundEnd(9, "done", "", 6, 0, 0),
    ]
    assert [item.text for item in feed(entries, ends)] == [
        "Round 8 failed: no quorum",
        "Access of {south} revoked",
        "Model 9 published again",
        "Rolled back to model 3",
        "Round 7 aggregated · 4 of 5 sites",
        "north joined",
    ]


def test_the_feed_is_short() -> None:
    assert len(feed([entry(at, "federation.pause") for at in range(50)], [])) == MOST

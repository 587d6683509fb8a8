from hypothesis import given
from hypothesis import strategies as st

from server.dashboard.sessions import LIFETIME_S, Sessions
from server.service.settings import Settings

NOW = 1_700_000_000.0
SESSIONS = Sessions(Settings("sqlite:///x.db", "an-admin-token", viewer_token="a-viewer-token"))
ADMIN, COOKIE = SESSIONS.open("admin", NOW)
VIEWER, VIEWERS_COOKIE = SESSIONS.open("viewer", NOW)


def test_a_session_lasts_its_lifetime_and_no_longer() -> None:
    assert SESSIONS.read(COOKIE, NOW + LIFETIME_S - 1) == ADMIN
    assert SESSIONS.read(COOKIE, NOW + LIFETIME_S) is None
    assert SESSIONS.read(VIEWERS_COOKIE, NOW) == VIEWER
    assert (ADMIN.may_act, VIEWER.may_act) == (True, False)


def test_a_clock_that_was_wrong_opens_no_endless_session() -> None:
    assert SESSIONS.read(SESSIONS.open("admin", NOW + 10 * LIFETIME_S)[1], NOW) is None


@given(st.integers(0, len(COOKIE) - 1), st.characters(max_codepoint=0x2FF))
def test_a_cookie_with_any_other_character_is_worthless(place: int, character: str) -> None:
    changed = COOKIE[:place] + character + COOKIE[place + 1 :]
    assert changed == COOKIE or SESSIONS.read(changed, NOW) is None


@given(st.text(max_size=300))
def test_no_text_is_mistaken_for_a_cookie(text: str) -> None:
    assert SESSIONS.read(text, NOW) is None


def test_a_viewer_cannot_become_the_admin() -> None:
    assert SESSIONS.read("admin" + VIEWERS_COOKIE.removeprefix("viewer"), NOW) is None
    without_viewers = Sessions(Settings("sqlite:///x.db", "an-admin-token"))
    assert without_viewers.read(VIEWERS_COOKIE, NOW) is None
    assert without_viewers.read(COOKIE, NOW) == ADMIN


def test_a_form_belongs_to_one_session() -> None:
    other, _ = SESSIONS.open("admin", NOW)
    assert SESSIONS.is_form_token(ADMIN, SESSIONS.form_token(ADMIN))
    assert not SESSIONS.is_form_token(other, SESSIONS.form_token(ADMIN))
    assert not SESSIONS.is_form_token(ADMIN, "")

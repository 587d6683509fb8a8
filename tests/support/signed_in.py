"""People who have signed in to the dashboard of an application under test."""

import re
from typing import Any

import httpx
from fastapi.testclient import TestClient
from support.api import Api
from support.coordinator import ADMIN_TOKEN

VIEWER_TOKEN = "a-viewer-token-for-tests"
OWN = {"Sec-Fetch-Site": "same-origin"}


class Person:
    """A browser without a screen: cookies, and forms with their hidden fields."""

    def __init__(self, api: Api, token: str | None = ADMIN_TOKEN, **options: Any) -> None:
        self.http: Any = TestClient(api.app, follow_redirects=False, **options)
        if token is not None:
            self.signed_in = self.sign_in(token)

    def sign_in(self, token: str) -> httpx.Response:
        """Send the sign-in form."""
        return self.http.post("/sign-in", data={"token": token}, headers=OWN)

    def get(self, path: str, **headers: str) -> httpx.Response:
        """Open a page."""
        return self.http.get(path, headers=headers)

    def fill(self, path: str, **fields: str) -> httpx.Response:
        """Open the page of a form and send it."""
        page = self.get(path)
        assert page.status_code == 200, page.text
        return self.http.post(path, data={"csrf": hidden(page, "csrf"), **fields}, headers=OWN)


def hidden(page: httpx.Response, name: str) -> str:
    """Return the value of a hidden field."""
    found = re.search(rf'<input type="hidden" name="{name}" value="([^"]*)">', page.text)
    assert found, page.text
    return found[1]

"""A real coordinator process, and sites that talk to it over HTTP."""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import safetensors.torch
from support.forked import STRICT
from support.processes import LoggedProcess
from torch import Tensor

from shared.plan import FederationPlan
from shared.schemas import FederationView, TaskAnswer
from shared.wire import digest, digest_header

ADMIN_TOKEN = "an-admin-token-for-tests"


class Coordinator:
    """What an operator does with a coordinator, over whichever connection `http` is."""

    http: httpx.Client

    def admin(self, method: str, path: str, **options: Any) -> Any:
        """A call with the admin token that must succeed; its JSON."""
        response = self.http.request(method, path, headers={"Authorization": f"Bearer {ADMIN_TOKEN}"}, **options)
        assert response.is_success, response.text
        return response.json() if response.content else None

    def create(self, plan: FederationPlan, *, start: bool = True) -> None:
        """Create, and start, a federation."""
        self.admin("POST", "/v1/federations", json=plan.model_dump(mode="json"))
        if start:
            self.admin("POST", f"/v1/federations/{plan.name}/start")

    def show(self, name: str) -> FederationView:
        """A federation as the admin sees it."""
        return FederationView.model_validate(self.admin("GET", f"/v1/federations/{name}"))

    def join(self, plan: FederationPlan, name: str, class_counts: dict[str, int]) -> "Site":
        """Invite and enrol a site."""
        invite = self.admin("POST", f"/v1/federations/{plan.name}/invites")["token"]
        answer = self.http.post(
            "/v1/join",
            json={"name": name, "class_counts": class_counts, "held_out_images": 100},
            headers={"Authorization": f"Bearer {invite}"},
        )
        assert answer.status_code == 201, answer.text
        return Site(self.http, plan, name, answer.json()["token"])


class CoordinatorProcess(LoggedProcess, Coordinator):
    """`distrans-server serve` on a free port; `forked` makes it start soon, see support.forked."""

    def __init__(
        self, db_url: str, data_dir: Path, *options: str, ca_file: str | None = None, forked: bool = False
    ) -> None:
        super().__init__(
            ["distrans-server", "serve", "--port", "0", "--data-dir", data_dir, *options],
            forked=forked,
            DISTRANS_ADMIN_TOKEN=ADMIN_TOKEN,
            DISTRANS_DB=db_url,
            PYTHONWARNINGS=STRICT,
        )
        self.url = self.wait_for_line(r"listening on (\S+)")
        trust = ssl.create_default_context(cafile=ca_file)
        self.http = httpx.Client(base_url=self.url, timeout=120, verify=trust, trust_env=False)
        self.wait_for_line("Application startup complete")

    def wait(self, timeout_s: float = 90) -> int:
        """Until it ends; the exit code."""
        code = super().wait(timeout_s)
        self.http.close()
        return code


class Site:
    """A client of a federation, by its token."""

    def __init__(self, http: httpx.Client, plan: FederationPlan, name: str, token: str) -> None:
        self.http, self.plan, self.name, self.token = http, plan, name, token
        self.headers = {"Authorization": f"Bearer {token}"}

    def on(self, http: httpx.Client) -> "Site":
        """The same site over another connection."""
        return Site(http, self.plan, self.name, self.token)

    def task(self, wait_s: float = 30, after: str = "") -> TaskAnswer:
        """What to do now."""
        response = self.http.get("/v1/task", params={"wait": wait_s, "after": after}, headers=self.headers)
        assert response.status_code == 200, response.text
        return TaskAnswer.model_validate(response.json())

    def tensors(self, url: str) -> dict[str, Tensor]:
        """Download safetensors."""
        response = self.http.get(url, headers=self.headers)
        assert response.status_code == 200, response.text
        return safetensors.torch.load(response.content)

    def put(self, round_id: int, body: bytes, **headers: str) -> httpx.Response:
        """Upload in one go, with the body's digest unless another is given."""
        digests = {"Content-Digest": digest_header(digest(body))}
        return self.http.put(f"/v1/rounds/{round_id}/update", content=body, headers=self.headers | digests | headers)

    def patch(self, round_id: int, part: bytes, offset: int, whole: bytes) -> httpx.Response:
        """Upload a part of `whole`."""
        return self.http.patch(
            f"/v1/rounds/{round_id}/update",
            content=part,
            headers=self.headers
            | {
                "Upload-Offset": str(offset),
                "Upload-Length": str(len(whole)),
                "Repr-Digest": digest_header(digest(whole)),
            },
        )


@contextmanager
def running(
    db_url: str, data_dir: Path, *options: str, ca_file: str | None = None, forked: bool = False
) -> Iterator[CoordinatorProcess]:
    """A coordinator process that is gone afterwards, however the block ends."""
    coordinator = CoordinatorProcess(db_url, data_dir, *options, ca_file=ca_file, forked=forked)
    try:
        yield coordinator
    finally:
        if coordinator.process.poll() is None:
            coordinator.stop()
        else:
            coordinator.wait()

"""A coordinator process, and sites that talk to it over HTTP."""

import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import safetensors.torch
from support.launcher import STRICT
from support.processes import LoggedProcess
from torch import Tensor

from shared.contract.messages import FederationView, TaskAnswer
from shared.contract.plan import FederationPlan
from shared.tensors.wire import digest, digest_header

ADMIN_TOKEN = "an-admin-token-for-tests"


class Coordinator:
    """What an operator can do with a coordinator, through `http`."""

    http: httpx.Client

    def admin(self, method: str, path: str, **options: Any) -> Any:
        """Send a request with the admin token, which must succeed, and return its JSON."""
        response = self.http.request(method, path, headers={"Authorization": f"Bearer {ADMIN_TOKEN}"}, **options)
        assert response.is_success, response.text
        return response.json() if response.content else None

    def create(self, plan: FederationPlan, *, start: bool = True) -> None:
        """Create a federation and, by default, start it."""
        self.admin("POST", "/v1/federations", json=plan.model_dump(mode="json"))
        if start:
            self.admin("POST", f"/v1/federations/{plan.name}/start")

    def show(self, name: str) -> FederationView:
        """Return a federation as the admin sees it."""
        return FederationView.model_validate(self.admin("GET", f"/v1/federations/{name}"))

    def join(
        self,
        plan: FederationPlan,
        name: str,
        class_counts: dict[str, int],
        *,
        http: httpx.Client | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> "Site":
        """Invite and enroll a site, through `http` if given; `headers` are sent with the join only."""
        http = http or self.http
        invite = self.admin("POST", f"/v1/federations/{plan.name}/invites")["token"]
        answer = http.post(
            "/v1/join",
            json={"name": name, "class_counts": class_counts, "held_out_images": 100},
            headers={**(headers or {}), "Authorization": f"Bearer {invite}"},
        )
        assert answer.status_code == 201, answer.text
        return Site(http, plan, name, answer.json()["token"])


class CoordinatorProcess(LoggedProcess, Coordinator):
    """`distrans-server serve` on a free port; `forked` starts it faster, see support.launcher."""

    def __init__(
        self,
        db_url: str,
        data_dir: Path,
        *options: str,
        ca_file: str | None = None,
        forked: bool = False,
        **variables: str,
    ) -> None:
        super().__init__(
            ["distrans-server", "serve", "--port", "0", "--data-dir", data_dir, *options],
            forked=forked,
            DISTRANS_ADMIN_TOKEN=ADMIN_TOKEN,
            DISTRANS_DB=db_url,
            PYTHONWARNINGS=STRICT,
            **variables,
        )
        self.url = self.wait_for_line(r"listening on (\S+)")
        trust = ssl.create_default_context(cafile=ca_file)
        self.http = httpx.Client(base_url=self.url, timeout=120, verify=trust, trust_env=False)
        self.wait_for_line("Application startup complete")

    def wait(self, timeout_s: float = 90) -> int:
        """Wait for the process to end and return its exit code."""
        code = super().wait(timeout_s)
        self.http.close()
        return code


class Site:
    """A client of a federation, identified by its token."""

    def __init__(self, http: httpx.Client, plan: FederationPlan, name: str, token: str) -> None:
        self.http, self.plan, self.name, self.token = http, plan, name, token
        self.headers = {"Authorization": f"Bearer {token}"}

    def on(self, http: httpx.Client) -> "Site":
        """Return the same site with another connection."""
        return Site(http, self.plan, self.name, self.token)

    def task(self, wait_s: float = 30, after: str = "") -> TaskAnswer:
        """Ask what to do now."""
        response = self.http.get("/v1/task", params={"wait": wait_s, "after": after}, headers=self.headers)
        assert response.status_code == 200, response.text
        return TaskAnswer.model_validate(response.json())

    def wait_for_task(self, is_wanted: Callable[[TaskAnswer], bool], timeout_s: float = 120) -> TaskAnswer:
        """Poll until the task is the wanted one and return it; fail after the timeout."""
        give_up_at = time.monotonic() + timeout_s
        task = self.task(wait_s=0)
        while not is_wanted(task):
            assert time.monotonic() < give_up_at, f"still {task!r} after {timeout_s:g} s"
            task = self.task(after=task.ticket)
        return task

    def wait_for_model(self, number: int) -> TaskAnswer:
        """Poll until the coordinator has published this model or a later one; return the task."""
        return self.wait_for_task(lambda task: task.model is not None and task.model.number >= number)

    def wait_for_round(self, number: int) -> TaskAnswer:
        """Poll until this round is open for the site; return the task."""
        return self.wait_for_task(lambda task: task.round is not None and task.round.number == number)

    def wait_until_finished(self) -> TaskAnswer:
        """Poll until the federation has finished; return the task."""
        return self.wait_for_task(lambda task: task.action == "finished")

    def tensors(self, url: str) -> dict[str, Tensor]:
        """Download and decode tensors."""
        response = self.http.get(url, headers=self.headers)
        assert response.status_code == 200, response.text
        return safetensors.torch.load(response.content)

    def put(self, round_id: int, body: bytes, **headers: str) -> httpx.Response:
        """Upload an update in one piece, with its digest unless `headers` has another."""
        digests = {"Content-Digest": digest_header(digest(body))}
        return self.http.put(f"/v1/rounds/{round_id}/update", content=body, headers=self.headers | digests | headers)

    def patch(self, round_id: int, part: bytes, offset: int, whole: bytes) -> httpx.Response:
        """Upload the part of `whole` that begins at `offset`."""
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
    """Yield a coordinator process that is stopped however the block ends."""
    coordinator = CoordinatorProcess(db_url, data_dir, *options, ca_file=ca_file, forked=forked)
    try:
        yield coordinator
    finally:
        if coordinator.process.poll() is None:
            coordinator.stop()
        else:
            coordinator.wait()

"""A real coordinator process, and sites that talk to it over HTTP."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import safetensors.torch
from torch import Tensor

from shared.plan import FederationPlan
from shared.schemas import FederationView, TaskAnswer
from shared.wire import digest, digest_header

ADMIN_TOKEN = "an-admin-token-for-tests"
PROGRAMS = Path(sys.executable).parent


class CoordinatorProcess:
    """`distrans-server serve` on a free port; its log is kept in `lines`."""

    def __init__(self, db_url: str, data_dir: Path, *options: str, ca_file: str | None = None) -> None:
        environment = os.environ | {
            "DISTRANS_ADMIN_TOKEN": ADMIN_TOKEN,
            "DISTRANS_DB": db_url,
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "error::ResourceWarning",
        }
        self.lines: list[str] = []
        self._address: str | None = None
        self._seen = threading.Condition()
        self.process = subprocess.Popen(
            [PROGRAMS / "distrans-server", "serve", "--port", "0", "--data-dir", data_dir, *options],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self.wait_for_line(r"listening on (\S+)")
        self.http = httpx.Client(base_url=self.url, timeout=30, verify=ca_file or True, trust_env=False)
        self.wait_for_line("Application startup complete")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._seen:
                self.lines.append(line.rstrip("\n"))
                self._seen.notify_all()
        with self._seen:
            self._seen.notify_all()

    def wait_for_line(self, pattern: str, timeout_s: float = 60) -> str:
        """The first group (or the whole) of the first log line that matches."""

        def found() -> re.Match[str] | None:
            return next((match for line in self.lines if (match := re.search(pattern, line))), None)

        with self._seen:
            self._seen.wait_for(lambda: found() or self.process.poll() is not None, timeout_s)
        match = found()
        assert match, "no such line in the log:\n" + "\n".join(self.lines)
        return match[1] if match.re.groups else match[0]

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()
        self._close()

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=60)
        self._close()
        return code

    def _close(self) -> None:
        self._reader.join(timeout=10)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.http.close()

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
            json={"name": name, "class_counts": class_counts},
            headers={"Authorization": f"Bearer {invite}"},
        )
        assert answer.status_code == 201, answer.text
        return Site(self.http, plan, name, answer.json()["token"])


class Site:
    """A client of a federation, by its token."""

    def __init__(self, http: httpx.Client, plan: FederationPlan, name: str, token: str) -> None:
        self.http, self.plan, self.name, self.token = http, plan, name, token
        self.headers = {"Authorization": f"Bearer {token}"}

    def task(self, wait_s: float = 30, after: str = "") -> TaskAnswer:
        """What to do now."""
        response = self.http.get(
            "/v1/task", params={"wait": wait_s, "after": after}, headers=self.headers, timeout=wait_s + 30
        )
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
def running(db_url: str, data_dir: Path, *options: str, ca_file: str | None = None) -> Iterator[CoordinatorProcess]:
    """A coordinator process that is gone afterwards, however the block ends."""
    coordinator = CoordinatorProcess(db_url, data_dir, *options, ca_file=ca_file)
    try:
        yield coordinator
    finally:
        if coordinator.process.poll() is None:
            coordinator.stop()

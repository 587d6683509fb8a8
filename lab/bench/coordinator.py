"""A real coordinator process to measure, and the operator's part of a federation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from lab.bench.storage import Storage
from lab.bench.usage import cpu_seconds, peak_memory_bytes
from lab.demo.processes import Processes
from shared.contract.errors import DistransError
from shared.contract.plan import FederationPlan

_NAME = "coordinator"
_TIMEOUT_S = 120.0


class MeasuredCoordinator:
    """`distrans-server serve` on loopback, in a process group that stops it."""

    def __init__(self, processes: Processes, storage: Storage) -> None:
        self.storage = storage
        arguments: list[str | Path] = ["serve", "--port", "0", "--data-dir", storage.folder]
        places = {"DISTRANS_DB": storage.database, "DISTRANS_BLOBS": storage.blobs}
        environment = {name: url for name, url in places.items() if url is not None}
        log = processes.start(_NAME, "server", arguments, **environment)
        self._pid = processes.process_id(_NAME)
        self.url = processes.wait_for(log, r"listening on (\S+)")
        processes.wait_for(log, r"(Application startup complete)")
        token = (storage.folder / "admin-token").read_text().strip()
        self._admin = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=_TIMEOUT_S,
            trust_env=False,  # no proxy: it is on this machine
        )

    def close(self) -> None:
        """Close the operator's connections."""
        self._admin.close()

    def enroll(self, plan: FederationPlan, names: Sequence[str]) -> list[str]:
        """Create a federation and enroll clients with one image of each class; return their tokens."""
        self._post("/v1/federations", plan.model_dump(mode="json"))
        tokens = []
        for name in names:
            invite = self._post(f"/v1/federations/{plan.name}/invites")["token"]
            request = {"name": name, "class_counts": dict.fromkeys(plan.classes, 1)}
            answer = self._post("/v1/join", request, {"Authorization": f"Bearer {invite}"})
            tokens.append(str(answer["token"]))
        return tokens

    def start_federation(self, name: str) -> None:
        """Start the first round."""
        self._post(f"/v1/federations/{name}/start")

    @property
    def cpu_s(self) -> float | None:
        """CPU time of the coordinator so far; None where the system does not tell."""
        return cpu_seconds(self._pid)

    @property
    def peak_memory_bytes(self) -> int | None:
        """The coordinator's largest resident size so far; None where the system does not tell."""
        return peak_memory_bytes(self._pid)

    def _post(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        try:
            response = self._admin.post(path, json=body, headers=headers)
        except httpx.HTTPError as error:
            raise DistransError(f"POST {path} failed: {error}.") from error
        if not response.is_success:
            raise DistransError(f"POST {path} failed: {response.json().get('detail', response.text)}")
        return response.json()

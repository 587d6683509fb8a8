"""LitServe with the network, the decoding and the batches of the agent; runs in LitServe's own environment.

torch and our own packages come from the bench's environment, so that both sides compute with the same code.
"""

import base64
import json
import sys
from pathlib import Path

_DESCRIPTION = json.loads(Path(sys.argv[1]).read_text())
sys.path += _DESCRIPTION["packages"]  # after LitServe's own, which therefore keeps the versions it was installed with

import litserve  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from lab.bench.predict_network import bench_model, bench_plan, decode_image  # noqa: E402


class BenchAPI(litserve.LitAPI):
    """Classifies one image per request, in batches."""

    def setup(self, device: str) -> None:
        """Build the network in the worker process."""
        del device
        torch.set_num_threads(_DESCRIPTION["threads"])
        self._plan = bench_plan(_DESCRIPTION["backbone"])
        self._model = bench_model(self._plan, _DESCRIPTION["served"])

    def decode_request(self, request: dict[str, list[str]]) -> Tensor:
        """Return the image as (C, H, W)."""
        (text,) = request["images"]
        return decode_image(base64.b64decode(text, validate=True), self._plan)

    def batch(self, inputs: list[Tensor]) -> Tensor:
        """Return the images as (B, C, H, W)."""
        return torch.stack(inputs)

    def predict(self, images: Tensor) -> Tensor:
        """Return the probabilities (B, classes)."""
        return self._model.predict(images)

    def unbatch(self, output: Tensor) -> list[Tensor]:
        """Return the probabilities of each request, (1, classes)."""
        return list(output.split(1))

    def encode_response(self, output: Tensor) -> dict[str, object]:
        """Return the three most probable classes."""
        (ranked,) = self._model.rank(output, 3)
        return {"predictions": [{"index": 0, "top_k": [one._asdict() for one in ranked]}]}


if __name__ == "__main__":
    api = BenchAPI(max_batch_size=_DESCRIPTION["max_batch"], batch_timeout=_DESCRIPTION["batch_timeout_s"])
    server = litserve.LitServer(api, accelerator="cpu", devices=1, workers_per_device=1, fast_queue=True)
    server.run(
        host="127.0.0.1",
        port=_DESCRIPTION["port"],
        num_api_servers=1,
        log_level="warning",
        access_log=False,
        generate_client_file=False,
    )

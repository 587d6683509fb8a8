"""One whole round with nothing but a generated client: `python -I one_round.py FOLDER URL ADMIN_TOKEN`.

FOLDER contains the package `coordinator_client`. Runs in the generators' environment, without the project's packages.
"""

import hashlib
import importlib.util
import io
import json
import sys

import numpy
import safetensors.numpy

folder, url, admin_token = sys.argv[1:]
sys.path.insert(0, folder)
for package in ("shared", "server", "client_agent", "lab", "torch", "pydantic_settings"):
    assert importlib.util.find_spec(package) is None, package

from coordinator_client import AuthenticatedClient  # noqa: E402
from coordinator_client.api.clients import get_me, join_federation, preview_join  # noqa: E402
from coordinator_client.api.federations import (  # noqa: E402
    create_federation,
    create_invite,
    get_federation,
    get_model,
    list_rounds,
    start_federation,
)
from coordinator_client.api.rounds import (  # noqa: E402
    get_task,
    head_update,
    patch_update,
    put_evaluation,
    put_update,
)
from coordinator_client.models import (  # noqa: E402
    EvaluationReport,
    FedAvgOptions,
    FederationPlan,
    FederationPlanPreset,
    ImagePlan,
    JoinRequest,
    JoinRequestClassCounts,
    RoundsPlan,
    TrainingReport,
)
from coordinator_client.types import File  # noqa: E402


def caller(token: str) -> AuthenticatedClient:
    """Return a client that raises on unexpected statuses."""
    return AuthenticatedClient(url, token=token, raise_on_unexpected_status=True)


def updated(model: dict[str, numpy.ndarray], site: int) -> bytes:
    """Return an update: every weight of the model, shifted by the site's number."""
    report = TrainingReport(samples=10, batches=1, loss=0.5, accuracy=0.5, seconds=0.1)
    tensors = {f"shared.{name}": value + numpy.asarray(site, value.dtype) for name, value in model.items()}
    return safetensors.numpy.save(tensors, {"report": json.dumps(report.to_dict())})


admin = caller(admin_token)
plan = FederationPlan(
    name="generated",
    classes=["cat", "dog"],
    preset=FederationPlanPreset.PAPER,
    image=ImagePlan(channels=1, height=14, width=14),
    method=FedAvgOptions(name="fedavg"),
    rounds=RoundsPlan(count=1, min_clients=2),
)
created = create_federation.sync(client=admin, body=plan)
assert created.plan.model.activation == "none", "the preset's value, which a default sent by the client would override"
start_federation.sync("generated", client=admin)

sites = []
for number in (1, 3):
    invite = create_invite.sync("generated", client=admin)
    invited = caller(invite.token)
    assert preview_join.sync(client=invited).plan.classes == ["cat", "dog"]
    counts = JoinRequestClassCounts.from_dict({"cat": 6, "dog": 4})
    request = JoinRequest(name=f"site-{number}", class_counts=counts, held_out_images=5)
    joined = join_federation.sync(client=invited, body=request)
    assert joined.plan.name == "generated"
    sites.append((number, caller(joined.token)))

for number, site in sites:
    task = get_task.sync(client=site, wait=30)
    assert task.action == "train", task
    start = get_model.sync_detailed("generated", client=site, round_=task.model.number)
    assert start.headers["ETag"] == f'"{task.model.digest}"'
    known = get_model.sync_detailed(
        "generated", client=site, round_=task.model.number, if_none_match=start.headers["ETag"]
    )
    assert known.status_code == 304
    model = safetensors.numpy.load(start.parsed.payload.read())
    body = updated(model, number)
    if number == 1:
        receipt = put_update.sync(task.round_.id, client=site, body=File(payload=io.BytesIO(body)))
    else:  # in two parts
        first = patch_update.sync_detailed(
            task.round_.id, client=site, body=File(payload=body[:1000]), upload_offset=0, upload_length=len(body)
        )
        progress = head_update.sync_detailed(task.round_.id, client=site)
        assert (first.status_code, progress.headers["Upload-Offset"]) == (204, "1000")
        receipt = patch_update.sync(
            task.round_.id, client=site, body=File(payload=body[1000:]), upload_offset=1000, upload_complete="?1"
        )
    assert receipt.digest == hashlib.sha256(body).hexdigest()

for number, site in sites:
    task = get_task.sync(client=site, wait=30)
    while task.action != "finished":
        task = get_task.sync(client=site, wait=30, after=task.ticket)
    put_evaluation.sync_detailed(1, client=site, body=EvaluationReport(samples=5, correct=number, loss_sum=1.0))
    assert get_me.sync(client=site).held_out_images == 5

result = safetensors.numpy.load(get_model.sync("generated", client=admin).payload.read())
for name, value in model.items():
    numpy.testing.assert_allclose(result[name], value + numpy.asarray(2, value.dtype), rtol=1e-6)
(round_,) = list_rounds.sync("generated", client=admin)
assert (round_.state, len(round_.uploads), round_.evaluation.accuracy) == ("done", 2, 0.4)
assert get_federation.sync("generated", client=admin).rounds_done == 1
sys.stdout.write("one round with a generated client\n")

"""The torch process against the same calls in this process, which has loaded torch."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from support.plans import small_plan
from support.tensors import assert_same_tensors
from support.waiting import eventually

from server.compute import calls
from server.compute.calls import Held, Request
from server.compute.process import TorchFailed, TorchProcess
from server.compute.torch_calls import TorchCalls
from shared.contract.errors import WeightsError
from shared.contract.plan import FederationPlan
from shared.learning.methods import server_half
from shared.learning.methods.base import ClientRecord, RoundContext
from shared.tensors.arrays import Array, Arrays
from shared.tensors.names import PERSONAL, strip_prefix
from shared.tensors.spec import Spec

HYPERNETWORK = small_plan(method={"name": "pfedhn", "hidden": 8, "hidden_layers": 1})
NETWORK = small_plan(method={"offset_aggregation": "network", "generator": {"width": 8, "hidden": 8}})
NORTH, SOUTH = ClientRecord("north", (3, 1)), ClientRecord("south", (2, 2))
ROSTER = [NORTH, SOUTH]
Uploads = list[tuple[ClientRecord, Arrays]]


@pytest.fixture(scope="module")
def process() -> Iterator[TorchProcess]:
    process = TorchProcess()
    yield process
    process.close()


def round_of(plan: FederationPlan) -> RoundContext:
    return RoundContext(ROSTER, server_half(plan).facts(ROSTER))


def uploads_for(plan: FederationPlan) -> Uploads:
    random = np.random.default_rng(0)
    entries = server_half(plan).update_spec(round_of(plan).facts).entries
    shapes = {name: entry.shape for name, entry in strip_prefix(entries, PERSONAL).items()}
    return [
        (client, {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()})
        for client in ROSTER
    ]


def arguments_of(plan: FederationPlan, **more: Any) -> dict[str, Any]:
    return {"plan": plan.model_dump_json(), "round": calls.dump_round(round_of(plan)), **more}


def after_round(process: TorchProcess, plan: FederationPlan, private: Mapping[str, Array], uploads: Any) -> Arrays:
    held = Held("first", lambda: private)
    (after,) = process.run(Request("next_private", arguments_of(plan), held, uploads)).sets
    return dict(after)


def expected_after_round(plan: FederationPlan) -> Arrays:
    half = server_half(plan)
    return half.next_private(half.initial_state().private, uploads_for(plan), round_of(plan))


@pytest.mark.parametrize("plan", [HYPERNETWORK, NETWORK], ids=["hypernetwork", "network"])
def test_calls_have_the_same_bits_as_in_this_process(process: TorchProcess, plan: FederationPlan) -> None:
    half, text = server_half(plan), plan.model_dump_json()
    shared, private = process.run(Request("initial_state", {"plan": text, "weights": None})).sets
    assert_same_tensors(shared, half.initial_state().shared)
    assert_same_tensors(private, half.initial_state().private)
    after = after_round(process, plan, private, uploads_for(plan))
    assert_same_tensors(after, expected_after_round(plan))
    for client in ROSTER:
        request = Request(
            "personal", arguments_of(plan, client=calls.dump_client(client)), Held("second", lambda: after)
        )
        (personal,) = process.run(request).sets
        (here,) = calls.run(request.call, request.arguments, after, []).sets
        assert_same_tensors(personal, here)
    facts = round_of(plan).facts
    found = process.run(Request("update_spec", {"plan": text, "facts": facts})).result
    assert calls.read_spec(found) == half.update_spec(facts)
    found = process.run(Request("model_spec", {"plan": text})).result
    assert calls.read_spec(found) == half.model_spec()
    found = process.run(Request("private_spec", {"plan": text, "found": calls.dump_spec(Spec.of(after))})).result
    assert calls.read_spec(found) == half.private_spec(Spec.of(after))


def test_tensors_it_still_has_are_not_sent_again(process: TorchProcess) -> None:
    private = dict(server_half(HYPERNETWORK).initial_state().private)
    loads = []

    def load() -> Arrays:
        loads.append(1)
        return private

    for key in ("one", "one", "other", "other", "one"):
        arguments = arguments_of(HYPERNETWORK, client=calls.dump_client(NORTH))
        process.run(Request("personal", arguments, Held(key, load)))
    assert len(loads) == 3


class Killing:
    """Uploads during which the process is killed a given number of times."""

    def __init__(self, process: TorchProcess, uploads: Uploads, times: int) -> None:
        self.process, self.uploads, self.times, self.killed = process, uploads, times, list[int]()

    def __iter__(self) -> Iterator[tuple[ClientRecord, Arrays]]:
        for place, upload in enumerate(self.uploads):
            if place == 1 and len(self.killed) < self.times:
                assert self.process.pid is not None
                self.killed.append(self.process.pid)
                os.kill(self.process.pid, signal.SIGKILL)
            yield upload


@pytest.mark.parametrize("plan", [HYPERNETWORK, NETWORK], ids=["hypernetwork", "network"])
def test_a_call_whose_process_is_killed_is_repeated_with_the_same_bits(plan: FederationPlan) -> None:
    process = TorchProcess()
    uploads = Killing(process, uploads_for(plan), times=1)
    after = after_round(process, plan, server_half(plan).initial_state().private, uploads)
    assert_same_tensors(after, expected_after_round(plan))
    assert uploads.killed != [process.pid]
    process.close()


def test_a_call_that_kills_every_process_fails_and_the_next_one_works() -> None:
    process, private = TorchProcess(), server_half(HYPERNETWORK).initial_state().private
    with pytest.raises(TorchFailed, match=r"'next_private' was killed by SIGKILL, 2 times\. Check the coordinator's"):
        after_round(process, HYPERNETWORK, private, Killing(process, uploads_for(HYPERNETWORK), times=2))
    after = after_round(process, HYPERNETWORK, private, uploads_for(HYPERNETWORK))
    assert_same_tensors(after, expected_after_round(HYPERNETWORK))
    process.close()


def test_errors_of_the_method_arrive_as_they_are(process: TorchProcess) -> None:
    file = "/does/not/exist.pth"
    with pytest.raises(WeightsError, match="does not take a weights file") as caught:
        process.run(Request("initial_state", {"plan": HYPERNETWORK.model_dump_json(), "weights": file}))
    assert caught.value.code == "invalid-weights"
    before = process.pid
    with pytest.raises(TorchFailed, match="KeyError: 'nothing'"):
        process.run(Request("nothing", {}))
    with pytest.raises(TorchFailed, match="KeyError: "):
        after_round(process, HYPERNETWORK, {"w": np.zeros(1)}, [(NORTH, {"delta.w": np.zeros(1)})])
    assert process.pid == before


def test_uploads_that_cannot_be_read_do_not_break_the_next_call(process: TorchProcess) -> None:
    def missing() -> Iterator[tuple[ClientRecord, Arrays]]:
        yield from uploads_for(NETWORK)[:1]
        raise FileNotFoundError("gone")

    private = server_half(NETWORK).initial_state().private
    with pytest.raises(FileNotFoundError, match="gone"):
        after_round(process, NETWORK, private, missing())
    assert_same_tensors(after_round(process, NETWORK, private, uploads_for(NETWORK)), expected_after_round(NETWORK))


def test_it_ends_when_it_is_idle_and_is_started_again() -> None:
    process = TorchProcess(idle_s=0.01)
    for _ in range(2):
        process.run(Request("model_spec", {"plan": NETWORK.model_dump_json()}))
        eventually(lambda: process.pid is None)


_PARENT = """
import sys
from server.compute.calls import Request
from server.compute.process import TorchProcess
process = TorchProcess()
process.run(Request("model_spec", {"plan": sys.argv[1]}))
assert "torch" not in sys.modules
print(process.pid, flush=True)
sys.stdin.read()
"""


def test_it_ends_with_a_killed_coordinator() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, NETWORK.model_dump_json()], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    assert parent.stdin is not None
    with parent, parent.stdout:
        pid = int(parent.stdout.readline())
        parent.kill()
        eventually(lambda: not _runs(pid))


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123 - /proc
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_process_with_torch_computes_by_itself() -> None:
    process = TorchProcess()
    assert TorchCalls(process).model_spec(NETWORK.model_dump_json()) == server_half(NETWORK).model_spec()
    assert process.pid is None

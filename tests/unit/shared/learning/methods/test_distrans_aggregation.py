import copy
from typing import Any

import pytest
import torch
from support.distrans import (
    ROSTER,
    SHAPE,
    embedding_of,
    everyone_gets,
    finished,
    options_of,
    plan_with,
    record,
    small_plan,
    train,
    uploads_of,
)
from support.halves import server_half
from support.tensors import assert_same_tensors

from shared.contract.plan import validate_plan
from shared.learning.generator import GeneratorTrainer
from shared.learning.methods.base import (
    RoundContext,
)
from shared.learning.model import build_double
from shared.learning.offsets import initial_offset
from shared.tensors.arrays import as_tensor
from shared.tensors.spec import Spec


class TestFacts:
    @pytest.mark.parametrize(
        ("counts", "expected"),
        [
            ([(5, 3), (4, 5)], "network"),  # DH 0
            ([(5, 3, 1, 1), (4, 5, 1, 0)], "network"),  # DH 0.25
            ([(5, 3), (0, 5)], "none"),  # DH 0.5 exactly
            ([(5, 0), (0, 5)], "none"),  # DH 1
        ],
    )
    def test_auto_selects_the_network_strictly_below_one_half(
        self, counts: list[tuple[int, ...]], expected: str
    ) -> None:
        roster = [record(str(number), *row) for number, row in enumerate(counts)]
        facts = server_half(plan_with(offset_aggregation="auto")).facts(roster)
        assert facts["offset_aggregation"] == expected

    @pytest.mark.parametrize("holders", range(2, 11))
    def test_every_threshold_is_strict(self, holders: int) -> None:
        roster = [record(str(number), int(number < holders), 1) for number in range(10)]
        for threshold, expected in ((10 - holders, "none"), (10 - holders + 1, "network")):
            plan = plan_with(offset_aggregation="auto", dh_threshold=threshold / 20)
            assert server_half(plan).facts(roster)["offset_aggregation"] == expected

    @pytest.mark.parametrize(
        ("counts", "expected"),
        [
            ([(5, 3), (4, 5), (0, 0)], "network"),  # DH 0 without the last one, 1/3 with it
            ([(5, 0), (0, 5), (0, 0)], "none"),
            ([(0, 0)], "none"),
        ],
    )
    def test_auto_ignores_clients_that_withhold_their_class_counts(
        self, counts: list[tuple[int, ...]], expected: str
    ) -> None:
        roster = [record(str(number), *row) for number, row in enumerate(counts)]
        half = server_half(plan_with(offset_aggregation="auto", dh_threshold=0.1))
        assert half.facts(roster)["offset_aggregation"] == expected

    @pytest.mark.parametrize("aggregation", ["none", "mean", "network"])
    def test_explicit_aggregation_does_not_depend_on_dh(self, aggregation: str) -> None:
        for counts in ([(5, 3), (4, 5)], [(5, 0), (0, 5)]):
            roster = [record(str(number), *row) for number, row in enumerate(counts)]
            facts = server_half(plan_with(offset_aggregation=aggregation)).facts(roster)
            assert facts["offset_aggregation"] == aggregation

    def test_shared_offset_is_aggregated_by_the_mean(self) -> None:
        plan = plan_with(offset_aggregation="auto", shared_offset=True)
        facts = server_half(plan).facts([record("a", 1, 0), record("b", 0, 1)])
        assert facts["offset_aggregation"] == "mean"


class TestNoAggregation:
    def test_offset_is_never_uploaded(self) -> None:
        plan = plan_with(offset_optimizer="adam")
        update, private = train(plan)
        assert update.personal == {}
        assert private.keys() == {"offset", "initial_offset"}
        assert update.shared.keys() == build_double(plan, 0.3).state_dict().keys()

    def test_coordinator_asks_for_the_model_only_and_keeps_no_offset(self) -> None:
        plan = small_plan()
        state, facts = finished(plan, [(client, {}) for client in ROSTER])
        entries = server_half(plan).update_spec(facts).entries
        assert entries.keys() == {f"shared.{name}" for name in state.shared}
        assert state.private == {}

    def test_every_client_receives_its_initial_offset_in_every_round(self) -> None:
        plan = small_plan()
        state, facts = finished(plan, [(client, {}) for client in ROSTER])
        for name, personal in everyone_gets(plan, state, facts).items():
            assert_same_tensors(personal, {"initial_offset": initial_offset(plan, options_of(plan), name)})


@pytest.mark.parametrize("aggregation", ["none", "mean"])
def test_clients_start_from_noise_without_the_network(aggregation: str) -> None:
    plan, before = (small_plan(offset_aggregation=aggregation, **init) for init in ({}, {"offset_init": "uniform"}))
    server = server_half(plan)
    sent = everyone_gets(plan, server.initial_state(), server.facts(ROSTER))
    for name, personal in sent.items():
        assert_same_tensors(personal, {"initial_offset": initial_offset(before, options_of(before), name)})


def test_first_offset_follows_the_aggregation_that_dh_selects() -> None:
    plan = small_plan(offset_aggregation="auto")
    server, alike, apart = (
        server_half(plan),
        [record("a", 5, 5, 5), record("b", 5, 5, 5)],
        [record("a", 5, 0, 0), record("b", 0, 5, 5)],
    )
    noise = as_tensor(initial_offset(plan, options_of(plan), "a"))
    for roster, is_noise in ((alike, False), (apart, True)):
        context = RoundContext(roster, server.facts(roster))
        found = server.personal(server.initial_state(), roster[0], context)["initial_offset"]
        assert torch.equal(found, noise) == is_noise


@pytest.mark.parametrize("aggregation", ["mean", "network"])
def test_uploaded_offset_is_the_trained_one_and_matches_the_spec(aggregation: str) -> None:
    plan = plan_with(offset_aggregation=aggregation, offset_optimizer="adam")
    update, private = train(plan)
    assert torch.equal(update.personal["offset"], private["offset"])
    sent = {f"shared.{name}": value for name, value in update.shared.items()}
    sent |= {f"personal.{name}": value for name, value in update.personal.items()}
    assert Spec.of(sent) == server_half(plan).update_spec({"offset_aggregation": aggregation})


class TestMean:
    def test_all_clients_receive_the_participants_mean(self) -> None:
        plan, uploads = small_plan(offset_aggregation="mean"), uploads_of("a", "c")
        state, facts = finished(plan, uploads)
        expected = torch.stack([personal["offset"] for _, personal in uploads]).double().mean(dim=0).float()
        for personal in everyone_gets(plan, state, facts).values():  # including b, which did not take part
            assert_same_tensors(personal, {"offset": expected})

    def test_mean_of_offsets_is_not_weighted_by_images(self) -> None:
        uploads = uploads_of("a", "b", "c")
        by_samples = validate_plan({**small_plan(offset_aggregation="mean").model_dump(), "averaging": "samples"})
        one, other = (finished(plan, uploads)[0] for plan in (small_plan(offset_aggregation="mean"), by_samples))
        assert_same_tensors(one.private, other.private)

    def test_clients_have_their_own_initial_offsets_before_the_first_mean(self) -> None:
        plan = small_plan(offset_aggregation="mean")
        server = server_half(plan)
        personal = everyone_gets(plan, server.initial_state(), server.facts(ROSTER))
        assert all(tensors.keys() == {"initial_offset"} for tensors in personal.values())
        assert not torch.equal(personal["a"]["initial_offset"], personal["b"]["initial_offset"])


class TestNetwork:
    def test_network_takes_one_sgd_step_per_client_and_generates_for_all(self) -> None:
        plan, uploads = small_plan(offset_aggregation="network"), uploads_of("a", "b", "c")
        state, facts = finished(plan, uploads)
        net = GeneratorTrainer(plan, options_of(plan).generator).net
        for client, personal in uploads:
            net.train().zero_grad()
            (net(embedding_of(client), personal["offset"]) - personal["offset"]).square().mean().backward()
            with torch.no_grad():
                for weight in net.parameters():
                    weight -= 1e-2 * weight.grad  # type: ignore[operator]
        net.eval()
        for client in ROSTER:
            found = server_half(plan).personal(state, client, RoundContext(ROSTER, facts))
            expected = net(embedding_of(client), torch.zeros(SHAPE)).detach()
            assert found.keys() == {"offset"}
            torch.testing.assert_close(found["offset"], expected, rtol=1e-5, atol=1e-6)
            assert not torch.allclose(found["offset"], uploads[0][1]["offset"])

    @pytest.mark.parametrize("generator", [{}, {"optimizer": "adam", "lr": 1e-3}, {"inputs": "embedding+offset"}])
    def test_network_keeps_learning_from_round_to_round(self, generator: dict[str, Any]) -> None:
        plan, uploads = small_plan(offset_aggregation="network", generator=generator), uploads_of("a", "b")
        trainer, state = GeneratorTrainer(plan, options_of(plan).generator), None
        for _ in range(3):
            state, facts = finished(plan, uploads, state)
            for client, personal in uploads:
                trainer.fit(embedding_of(client), personal["offset"])
        for client, personal in uploads:
            found = server_half(plan).personal(state, client, RoundContext(ROSTER, facts))["offset"]
            assert torch.equal(found, trainer.generate(embedding_of(client), personal["offset"]))

    def test_offsets_are_generated_from_the_requested_state(self) -> None:
        plan, uploads, states, facts = small_plan(offset_aggregation="network"), uploads_of("a", "b"), [], {}
        for _ in range(2):
            state, facts = finished(plan, uploads, states[-1] if states else None)
            states.append(state)
        server = server_half(plan)
        for state in (*states, *states):
            expected = server_half(plan).personal(state, ROSTER[0], RoundContext(ROSTER, facts))["offset"]
            assert torch.equal(server.personal(state, ROSTER[0], RoundContext(ROSTER, facts))["offset"], expected)
            server.finish(
                state, state.shared, uploads, RoundContext(ROSTER, facts)
            )  # must not affect the cached network
            assert torch.equal(server.personal(state, ROSTER[0], RoundContext(ROSTER, facts))["offset"], expected)

    def test_network_is_fitted_to_the_uploaded_offsets(self) -> None:
        plan = small_plan(offset_aggregation="network", generator={"steps": 20, "optimizer": "adam", "lr": 1e-2})
        client, target = ROSTER[0], 0.9 * torch.ones(SHAPE)
        state, facts = finished(plan, [(client, {"offset": target})])
        untrained = GeneratorTrainer(plan, options_of(plan).generator).generate(embedding_of(client), target)
        found = server_half(plan).personal(state, client, RoundContext(ROSTER, facts))["offset"]
        assert float((found - target).square().mean()) < 0.5 * float((untrained - target).square().mean())

    def test_clients_with_equal_class_counts_get_equal_offsets(self) -> None:
        plan, twin = small_plan(offset_aggregation="network"), record("d", *ROSTER[0].class_counts)
        roster, server = [*ROSTER, twin], server_half(plan)
        facts, start = server.facts(roster), server.initial_state()
        state = server.finish(start, start.shared, uploads_of("a", "b"), RoundContext(roster, facts))
        found = {client.id: server.personal(state, client, RoundContext(roster, facts))["offset"] for client in roster}
        assert torch.equal(found["a"], found["d"])
        assert not torch.equal(found["a"], found["b"])

    @pytest.mark.parametrize("inputs", ["embedding", "embedding+offset"])
    def test_late_client_receives_an_offset_too(self, inputs: str) -> None:
        plan = small_plan(offset_aggregation="network", generator={"inputs": inputs})
        state, facts = finished(plan, uploads_of("a", "b"))
        late = ROSTER[2]
        trainer = GeneratorTrainer(plan, options_of(plan).generator)
        for client, personal in uploads_of("a", "b"):
            trainer.fit(embedding_of(client), personal["offset"])
        untrained = GeneratorTrainer(plan, options_of(plan).generator)
        start = untrained.generate(embedding_of(late), as_tensor(initial_offset(plan, options_of(plan), late.id)))
        found = server_half(plan).personal(state, late, RoundContext(ROSTER, facts))
        assert_same_tensors(found, {"offset": trainer.generate(embedding_of(late), start)})

    def test_network_that_sees_offsets_gets_each_client_s_last_one(self) -> None:
        plan = small_plan(offset_aggregation="network", generator={"inputs": "embedding+offset"})
        first, facts = finished(plan, uploads_of("a", "b", "c"))
        newer = [(ROSTER[0], {"offset": torch.randn(SHAPE)})]
        second, _ = finished(plan, newer, first)
        trainer = GeneratorTrainer(plan, options_of(plan).generator)
        last = {client.id: personal["offset"] for client, personal in uploads_of("a", "b", "c")}
        for client, personal in [*uploads_of("a", "b", "c"), *newer]:
            trainer.fit(embedding_of(client), personal["offset"])
        last["a"] = newer[0][1]["offset"]
        for client in ROSTER:  # b and c were absent; their last offsets are kept
            found = server_half(plan).personal(second, client, RoundContext(ROSTER, facts))["offset"]
            assert torch.equal(found, trainer.generate(embedding_of(client), last[client.id]))

    def test_offsets_the_network_does_not_need_are_not_kept(self) -> None:
        state, _ = finished(small_plan(offset_aggregation="network"), uploads_of("a", "b"))
        assert state.private
        assert all(name.startswith("generator.") for name in state.private)

    def test_client_that_left_the_roster_still_counts_for_its_own_upload(self) -> None:
        plan = small_plan(offset_aggregation="network")
        server, start = server_half(plan), server_half(plan).initial_state()
        left, remaining = ROSTER[0], ROSTER[1:]
        state = server.finish(start, start.shared, uploads_of("a"), RoundContext(remaining, server.facts(remaining)))
        trainer = GeneratorTrainer(plan, options_of(plan).generator)
        trainer.fit(embedding_of(left), uploads_of("a")[0][1]["offset"])
        assert_same_tensors(state.private, {f"generator.{name}": value for name, value in trainer.state().items()})

    @pytest.mark.parametrize("mix", [1.0, 0.25])
    def test_clients_start_from_the_untrained_network_s_output(self, mix: float) -> None:
        plan = small_plan(offset_aggregation="network", generator={"mix": mix})
        server = server_half(plan)
        sent = everyone_gets(plan, server.initial_state(), server.facts(ROSTER))
        untrained = GeneratorTrainer(plan, options_of(small_plan()).generator)
        for client in ROSTER:
            expected = untrained.generate(embedding_of(client), torch.zeros(SHAPE))
            assert_same_tensors(sent[client.id], {"initial_offset": expected})

    def test_clients_start_from_noise_if_the_plan_says_so(self) -> None:
        plan = small_plan(offset_aggregation="network", offset_init="uniform")
        server = server_half(plan)
        for name, personal in everyone_gets(plan, server.initial_state(), server.facts(ROSTER)).items():
            assert_same_tensors(personal, {"initial_offset": initial_offset(plan, options_of(plan), name)})

    def test_initial_offset_from_the_generator_never_changes(self) -> None:
        plan = small_plan(offset_aggregation="network", offset_init="generator")
        server = server_half(plan)
        facts, start = server.facts(ROSTER), server.initial_state()
        state, _ = finished(plan, uploads_of("a", "b", "c"))
        untrained = GeneratorTrainer(plan, options_of(plan).generator)
        for client in ROSTER:
            expected = untrained.generate(embedding_of(client), torch.zeros(SHAPE))
            assert_same_tensors(
                server.personal(start, client, RoundContext(ROSTER, facts)), {"initial_offset": expected}
            )
            later = server.personal(state, client, RoundContext(ROSTER, {"offset_aggregation": "none"}))
            assert_same_tensors(later, {"initial_offset": expected})


@pytest.mark.parametrize(
    ("aggregation", "generator"),
    [
        ("none", {}),
        ("network", {}),
        ("network", {"inputs": "embedding+offset"}),
        ("network", {"mix": 0.0}),
        ("network", {"mix": 0.5, "inputs": "embedding+offset"}),
    ],
)
def test_no_client_receives_another_one_s_offset(aggregation: str, generator: dict[str, Any]) -> None:
    plan = small_plan(offset_aggregation=aggregation, generator=generator)
    uploads = uploads_of("a", "b", "c")
    state, facts = finished(plan, uploads)
    sent = everyone_gets(plan, state, facts)
    for client, uploaded in uploads:
        (own,) = sent[client.id].values()
        for name, personal in sent.items():
            if name != client.id:
                assert not any(torch.equal(value, uploaded["offset"]) for value in personal.values())
                assert not any(torch.equal(value, own) for value in personal.values())
        if generator.get("mix") == 0:
            assert torch.equal(own, uploaded["offset"])


@pytest.mark.parametrize(
    ("aggregation", "generator"),
    [("none", {}), ("mean", {}), ("network", {}), ("network", {"inputs": "embedding+offset", "optimizer": "adam"})],
)
def test_round_can_be_finished_again_with_the_same_result(aggregation: str, generator: dict[str, Any]) -> None:
    plan = small_plan(offset_aggregation=aggregation, generator=generator)
    first, facts = finished(plan, uploads_of("a", "b"))
    before = copy.deepcopy(first)
    once, again = (finished(plan, uploads_of("b", "c"), first)[0] for _ in range(2))
    assert_same_tensors(once.private, again.private)
    assert_same_tensors(first.private, before.private)  # the state before the round is unchanged
    assert_same_tensors(first.shared, before.shared)
    sent, sent_again = (everyone_gets(plan, once, facts) for _ in range(2))
    for name in sent:
        assert_same_tensors(sent[name], sent_again[name])

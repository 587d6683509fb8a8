"""Export and import of a federation: what is restored, and what is rejected."""

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from sqlalchemy import event
from support.desk import (
    FEDAVG,
    MEAN_OFFSETS,
    OPERATOR,
    TINY_NETWORK,
    Clock,
    Desk,
    fedavg_plan,
    measured,
    refused,
)
from support.plans import small_plan, update_body

from server.core.errors import Conflict, InvalidInput, NotFound
from server.service import archive, audit, downloads, federations
from server.service.context import Context, Identity
from server.service.measurements import evaluations, reports
from server.store import blobs
from server.store.database import Database
from shared.contract.plan import FederationPlan
from shared.learning.methods import METHODS
from shared.tensors.wire import encode


class TestArchive:
    PLAN = small_plan(method=TINY_NETWORK, rounds={"count": 4, "min_clients": 2})

    @staticmethod
    def run_rounds(desk: Desk, sites: list[Identity], numbers: range) -> list[tuple[str, ...]]:
        """Train two sites; return the digests of what they were sent and of the results."""
        trace = []
        for number in numbers:
            sent = [downloads.round_personal(desk.ctx, who, desk.round.id).digest or "" for who in sites]
            desk.run_round({sites[0]: 2 * number, sites[1]: 2 * number + 1})
            trace.append((*sent, desk.bits(number), desk.private_bits() or ""))
        return trace

    @pytest.mark.parametrize("target", ["folder", "federation.zip"])
    def test_restored_goes_on_to_the_same_bits(self, clean_db: Database, tmp_path: Path, target: str) -> None:
        original = Desk(clean_db, self.PLAN)
        sites = [original.join("north", cat=9, dog=1), original.join("south", cat=2, dog=8)]
        self.run_rounds(original, sites, range(1, 3))
        exported = archive.export(original.ctx, OPERATOR, original.name, tmp_path / target)
        copy = self.restored(clean_db, exported)
        assert (copy.view.state, copy.view.reason) == ("paused", "imported after round 2")
        assert (copy.view.rounds_done, copy.view.latest_model) == (2, 2)
        assert (copy.bits(), copy.private_bits()) == (original.bits(), original.private_bits())
        again = [copy.join("north", cat=9, dog=1), copy.join("south", cat=2, dog=8)]
        federations.resume(copy.ctx, OPERATOR, copy.name)
        assert copy.round.number == 3
        assert self.run_rounds(copy, again, range(3, 5)) == self.run_rounds(original, sites, range(3, 5))
        assert (copy.view.state, original.view.state) == ("finished", "finished")

    def restored(self, db: Database, source: Path) -> Desk:
        ctx = Context(db, Clock())
        name = archive.restore(ctx, OPERATOR, source, "copy")
        assert audit.entries(ctx)[-1].action == "federation.import"
        return Desk(db, self.PLAN.model_copy(update={"name": name}), create=False)

    def test_keeps_what_ends_a_federation_early(self, clean_db: Database, tmp_path: Path) -> None:
        original = Desk(clean_db, fedavg_plan(count=9, patience=2))
        north = original.join("north")
        for number, correct in enumerate([8, 5]):
            evaluations.submit(original.ctx, north, number, measured(correct))
            original.run_round({north: number})
        archive.export(original.ctx, OPERATOR, original.name, tmp_path / "export")
        copy = Desk(clean_db, original.plan.model_copy(update={"name": "copy"}), create=False)
        archive.restore(copy.ctx, OPERATOR, tmp_path / "export", "copy")
        assert (copy.view.best_accuracy, copy.view.best_model) == (0.8, 0)
        again = copy.join("north")
        federations.resume(copy.ctx, OPERATOR, "copy")
        for desk, who in ((original, north), (copy, again)):
            evaluations.submit(desk.ctx, who, 2, measured(5))
            desk.run_round({who: 2})
            assert (desk.view.state, desk.view.rounds_done) == ("finished", 3)

    def test_holds_what_people_want_to_see(self, clean_db: Database, tmp_path: Path) -> None:
        desk = Desk(clean_db, self.PLAN)
        sites = [desk.join("north", cat=9, dog=1), desk.join("south", cat=2, dog=8)]
        self.run_rounds(desk, sites, range(1, 2))
        target = archive.export(desk.ctx, OPERATOR, desk.name, tmp_path / "export")
        files = {str(file.relative_to(target)) for file in target.rglob("*") if file.is_file()}
        assert files == {
            "federation.json",
            "history.csv",
            "history.json",
            "model.safetensors",
            "offsets/north.safetensors",
            "offsets/south.safetensors",
            "plan.json",
            "server-state.safetensors",
        }
        assert FederationPlan.model_validate_json((target / "plan.json").read_text()) == desk.plan
        assert (target / "history.csv").read_text().count("\n") == 3
        served = downloads.serving_personal(desk.ctx, sites[0], desk.name, 1)
        exported = safetensors.torch.load((target / "offsets/north.safetensors").read_bytes())
        assert exported["offset"].equal(safetensors.torch.load(blobs.read_all(desk.db, served.id))["offset"])

    def test_leaves_out_offsets_that_only_the_sites_know(self, clean_db: Database, tmp_path: Path) -> None:
        """By default the coordinator only sends a starting offset derived from the plan, and never sees more."""
        desk = Desk(clean_db, small_plan(preset="learned-offset", rounds={"count": 5, "min_clients": 2}))
        self.run_rounds(desk, [desk.join("north"), desk.join("south")], range(1, 2))
        target = archive.export(desk.ctx, OPERATOR, desk.name, tmp_path / "export")
        assert not (target / "offsets").exists()
        (target / "offsets").mkdir()  # as written by older releases
        (target / "offsets" / "north.safetensors").write_bytes(encode({"initial_offset": torch.zeros(1, 14, 14)}))
        archive.restore(desk.ctx, OPERATOR, target, "copy")
        assert federations.show(desk.ctx, "copy").latest_model == 1

    def test_finished_stays_finished(self, clean_db: Database, tmp_path: Path) -> None:
        desk = Desk(clean_db, fedavg_plan(count=1))
        desk.run_round({desk.join("north"): 1})
        archive.export(desk.ctx, OPERATOR, desk.name, tmp_path / "export.zip")
        archive.restore(desk.ctx, OPERATOR, tmp_path / "export.zip", "copy")
        assert federations.show(desk.ctx, "copy").state == "finished"

    def test_finished_early_stays_finished_and_says_why(self, clean_db: Database, tmp_path: Path) -> None:
        desk = Desk(clean_db, fedavg_plan(count=9, target_accuracy=0.5))
        north = desk.join("north")
        evaluations.submit(desk.ctx, north, 0, measured(6))
        desk.run_round({north: 1})
        assert (desk.view.state, desk.view.rounds_done) == ("finished", 1)
        archive.export(desk.ctx, OPERATOR, desk.name, tmp_path / "export.zip")
        archive.restore(desk.ctx, OPERATOR, tmp_path / "export.zip", "copy")
        copy = federations.show(desk.ctx, "copy")
        assert (copy.state, copy.reason, copy.rounds_done) == ("finished", desk.view.reason, 1)
        assert "reached the target 0.5" in copy.reason

    def test_cancelled_stays_cancelled(self, clean_db: Database, tmp_path: Path) -> None:
        desk = Desk(clean_db)
        federations.cancel(desk.ctx, OPERATOR, desk.name)
        archive.export(desk.ctx, OPERATOR, desk.name, tmp_path / "export")
        archive.restore(desk.ctx, OPERATOR, tmp_path / "export", "copy")
        copy = federations.show(desk.ctx, "copy")
        assert (copy.state, copy.reason) == ("cancelled", "cancelled by the operator")

    def test_does_not_give_the_number_of_a_failed_round_again(self, clean_db: Database, tmp_path: Path) -> None:
        """A site that uploaded to round 3 of the original must not see another round 3."""
        desk = Desk(clean_db)
        north = desk.join("north")
        desk.run_round({north: 1})
        for _ in range(2):
            desk.let_pass(60)
            assert desk.view.state == "paused"
            federations.resume(desk.ctx, OPERATOR, desk.name)
        assert desk.round.number == 4, "it is open, so its number has not been used up"
        archive.export(desk.ctx, OPERATOR, desk.name, tmp_path / "export")
        archive.restore(desk.ctx, OPERATOR, tmp_path / "export", "copy")
        copy = Desk(clean_db, desk.plan.model_copy(update={"name": "copy"}), desk.clock, create=False)
        again = copy.join("north")
        federations.resume(copy.ctx, OPERATOR, "copy")
        assert (copy.round.number, copy.rounds()[-1].base_model) == (4, 1)
        copy.run_round({again: 5})
        rows = [(row.number, row.state) for row in copy.rounds()]
        assert rows == [(2, "failed"), (3, "failed"), (4, "done"), (5, "open")]
        assert [model.number for model in copy.models()] == [1, 4]
        assert len(reports.rounds(copy.ctx, "copy", again.client_id, 0, 10)) == 4

    @pytest.mark.parametrize("method", METHODS)
    def test_of_every_method_comes_back(self, clean_db: Database, tmp_path: Path, method: str) -> None:
        """The private state after a round matches `private_spec`."""
        tiny = {"generator": TINY_NETWORK["generator"] | {"optimizer": "adam"}} if method == "distrans" else {}
        desk = Desk(clean_db, small_plan(method={"name": method, **tiny}, rounds={"count": 3}))
        desk.run_round({desk.join("north"): 1})
        archive.export(desk.ctx, OPERATOR, desk.name, tmp_path / "export")
        archive.restore(desk.ctx, OPERATOR, tmp_path / "export", "copy")
        copy = Desk(clean_db, desk.plan.model_copy(update={"name": "copy"}), create=False)
        assert (copy.bits(), copy.private_bits()) == (desk.bits(), desk.private_bits())

    def test_refuses_server_state_that_does_not_fit_the_plan(self, clean_db: Database, tmp_path: Path) -> None:
        """At import, not as a failing aggregation rounds later."""
        desk = Desk(clean_db, self.PLAN)
        self.run_rounds(desk, [desk.join("north"), desk.join("south")], range(1, 2))
        archive.export(desk.ctx, OPERATOR, desk.name, tmp_path / "export")
        file = tmp_path / "export" / "server-state.safetensors"
        good = safetensors.torch.load(file.read_bytes())
        assert {name.partition(".")[0] for name in good} == {"generator", "offset"}
        for bad, words in (
            ({name: value for name, value in good.items() if "mlp.0" not in name}, "missing: "),
            (good | {"generator.net.extra": torch.zeros(1)}, "unexpected: "),
            (good | {"offset.of.north": torch.zeros(1, 7, 7)}, "has shape [1, 7, 7]"),
            (good | {"offset.mean": torch.full((1, 14, 14), torch.nan)}, "not finite"),
            ({name: value.double() for name, value in good.items()}, "has dtype"),
            ({}, "server-state.safetensors is missing or empty"),
            (None, "server-state.safetensors is missing or empty"),
            (b"damaged", "does not match its plan"),
        ):
            if bad is None:
                file.unlink()
            else:
                file.write_bytes(bad if isinstance(bad, bytes) else encode(bad))
            error = refused(
                InvalidInput, "not-an-export", lambda: archive.restore(desk.ctx, OPERATOR, tmp_path / "export", "copy")
            )
            assert error.message.startswith("The server state in ")
            assert words in str(error)
        assert [view.name for view in federations.list_all(desk.ctx)] == [desk.name]

    @pytest.mark.parametrize("statements", [2, 10, 22])
    def test_is_of_one_moment(self, clean_db: Database, tmp_path: Path, statements: int) -> None:
        """A round that ends during an export, after any of its statements, is exported completely or not at all."""
        desk = Desk(clean_db, small_plan(method=MEAN_OFFSETS, rounds={"count": 5}))
        north = desk.join("north")
        desk.run_round({north: 1})
        left = statements

        def publish(*_: object) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                desk.run_round({north: 2})

        event.listen(clean_db.engine, "after_cursor_execute", publish)
        target = archive.export(desk.ctx, OPERATOR, desk.name, tmp_path / "export")
        assert left <= 0
        summary = archive.Summary.model_validate_json((target / "federation.json").read_bytes())
        history = json.loads((target / "history.json").read_bytes())
        with safe_open(target / "model.safetensors", "pt") as model:
            number = int(model.metadata()["model"])
        done = sum(round_["state"] == "done" for round_ in history)
        assert {summary.model, summary.rounds_done, number, done} <= {1, 2}
        assert len({summary.model, summary.rounds_done, number, done}) == 1

    def test_with_thousands_of_classes_comes_back(self, clean_db: Database, tmp_path: Path) -> None:
        """The plan is in the model's metadata, which may be larger than what a client may send."""
        plan = small_plan(method=FEDAVG, classes=tuple(f"finding number {number:05d}" for number in range(4_000)))
        desk = Desk(clean_db, plan, start=False)
        archive.export(desk.ctx, OPERATOR, desk.name, tmp_path / "export.zip")
        archive.restore(desk.ctx, OPERATOR, tmp_path / "export.zip", "copy")
        copy = Desk(clean_db, plan.model_copy(update={"name": "copy"}), create=False)
        assert (copy.view.plan.classes, copy.bits()) == (plan.classes, desk.bits())

    def test_that_fails_leaves_nothing(self, clean_db: Database, tmp_path: Path) -> None:
        desk = Desk(clean_db)
        for target in (tmp_path / "export", tmp_path / "export.zip"):
            (tmp_path / f"{target.name}.partial").mkdir()  # left by an export that was killed
            refused(NotFound, "no-such-federation", lambda: archive.export(desk.ctx, OPERATOR, "other", target))  # noqa: B023
            archive.export(desk.ctx, OPERATOR, desk.name, target)
        assert sorted(file.name for file in tmp_path.iterdir() if "export" in file.name) == ["export", "export.zip"]

    def test_refuses_to_overwrite(self, clean_db: Database, tmp_path: Path) -> None:
        desk = Desk(clean_db)
        refused(Conflict, "target-exists", lambda: archive.export(desk.ctx, OPERATOR, desk.name, tmp_path))
        archive.export(desk.ctx, OPERATOR, desk.name, tmp_path / "export")
        refused(Conflict, "name-taken", lambda: archive.restore(desk.ctx, OPERATOR, tmp_path / "export"))

    def test_refuses_what_is_no_export(self, clean_db: Database, tmp_path: Path) -> None:
        desk = Desk(clean_db)
        archive.export(desk.ctx, OPERATOR, desk.name, tmp_path / "good")
        other = small_plan("other", method=FEDAVG, classes=("a", "b", "c"))
        faults = {
            "federation.json": (b"{}", "not-an-export"),
            "plan.json": (b"no json", "not-an-export"),
            "model.safetensors": (update_body(other, {}, 1), "not-an-export"),
        }
        for name, (data, code) in faults.items():
            bad = tmp_path / f"bad-{name}"
            shutil.copytree(tmp_path / "good", bad)
            (bad / name).write_bytes(data)
            refused(InvalidInput, code, lambda: archive.restore(desk.ctx, OPERATOR, bad, "copy"))  # noqa: B023
        (tmp_path / "bad.zip").write_bytes(b"no zip")
        refused(InvalidInput, "unreadable", lambda: archive.restore(desk.ctx, OPERATOR, tmp_path / "bad.zip"))
        refused(InvalidInput, "unreadable", lambda: archive.restore(desk.ctx, OPERATOR, tmp_path / "absent"))
        assert [view.name for view in federations.list_all(desk.ctx)] == [desk.name]

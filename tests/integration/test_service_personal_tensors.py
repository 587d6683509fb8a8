"""Personal tensors: computed once for each client, and gone with their model."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import safetensors.torch
from support.desk import (
    OPERATOR,
    TINY_NETWORK,
    Desk,
    count,
    refused,
    unreferenced_blobs,
)
from support.halves import server_half
from support.plans import small_plan

from server.core.errors import Gone, NotFound
from server.service import clients, downloads
from server.service.context import Context, Identity, round_context
from server.store import blobs
from server.store.database import Database
from server.store.tables import Blob, Personal
from shared.learning.methods.tensor_half import TensorState


class TestPersonalTensors:
    @pytest.fixture
    def desk(self, clean_db: Database) -> Desk:
        return Desk(clean_db, small_plan(method=TINY_NETWORK, rounds={"count": 5, "min_clients": 2}))

    @pytest.fixture
    def sites(self, desk: Desk) -> list[Identity]:
        """North and south after one round, so that a network generates their offsets."""
        sites = [desk.join("north", cat=9, dog=1), desk.join("south", cat=2, dog=8)]
        desk.run_round({sites[0]: 1, sites[1]: 2})
        return sites

    @staticmethod
    def expected(desk: Desk, name: str) -> dict[str, list[float]]:
        """Return what the method computes for the open round from its frozen roster."""
        context = round_context(desk.rounds()[-1])
        private = safetensors.torch.load(blobs.read_all(desk.db, desk.models()[-1].private_blob_id or ""))
        (client,) = [record for record in context.roster if record.id == name]
        tensors = server_half(desk.plan).personal(TensorState({}, private), client, context)
        return {key: value.flatten().tolist() for key, value in tensors.items()}

    @staticmethod
    def stored(desk: Desk, blob: Blob) -> dict[str, list[float]]:
        tensors = safetensors.torch.load(blobs.read_all(desk.db, blob.id))
        return {key: value.flatten().tolist() for key, value in tensors.items()}

    def test_are_made_once_whichever_process_is_asked(self, desk: Desk, sites: list[Identity]) -> None:
        round_id, url = desk.round.id, desk.db.url.render_as_string(hide_password=False)
        others = [Database(url) for _ in range(4)]
        barrier = Barrier(len(others))

        def ask(db: Database) -> tuple[str, str | None]:
            barrier.wait()
            blob = downloads.round_personal(Context(db, desk.clock), sites[0], round_id)
            return blob.id, blob.digest

        with ThreadPoolExecutor(len(others)) as pool:
            answers = set(pool.map(ask, others))
        for db in others:
            db.close()
        blob = downloads.round_personal(desk.ctx, sites[0], round_id)
        assert answers == {(blob.id, blob.digest)}
        assert count(desk.db, Personal) == [1]
        assert unreferenced_blobs(desk.db) == set()
        assert self.stored(desk, blob) == self.expected(desk, "north")

    def test_differ_from_client_to_client(self, desk: Desk, sites: list[Identity]) -> None:
        digests = {downloads.round_personal(desk.ctx, who, desk.round.id).digest for who in sites}
        assert len(digests) == 2

    def test_follow_the_roster_of_the_round(self, desk: Desk, sites: list[Identity]) -> None:
        """New class counts apply from the next round on, even if the client has not requested its tensors yet."""
        clients.update_counts(desk.ctx, sites[0], OPERATOR, {"cat": 1, "dog": 99})
        blob = downloads.round_personal(desk.ctx, sites[0], desk.round.id)
        assert self.stored(desk, blob) == self.expected(desk, "north")

    def test_for_serving_stay_the_same_while_the_model_does(self, desk: Desk, sites: list[Identity]) -> None:
        first = downloads.serving_personal(desk.ctx, sites[0], desk.name, 1)
        desk.restart()
        assert downloads.serving_personal(desk.ctx, sites[0], desk.name, 1).id == first.id

    def test_of_an_old_model_are_gone(self, desk: Desk, sites: list[Identity]) -> None:
        round_id = desk.round.id
        desk.run_round({sites[0]: 3, sites[1]: 4})
        refused(Gone, "model-superseded", lambda: downloads.round_personal(desk.ctx, sites[0], round_id))
        refused(Gone, "model-superseded", lambda: downloads.serving_personal(desk.ctx, sites[0], desk.name, 1))
        refused(NotFound, "no-such-model", lambda: downloads.serving_personal(desk.ctx, sites[0], desk.name, 99))

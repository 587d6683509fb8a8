"""Who may upload and join: client tokens and invites against real databases."""

import pytest
from support.desk import (
    OPERATOR,
    Desk,
    count,
    fedavg_plan,
    mean_bits,
    put,
    refused,
)
from support.uploads import Sites, part, whole

from server.core.errors import (
    Conflict,
    InvalidInput,
    NotAllowed,
    NotAuthenticated,
    NotFound,
)
from server.service import client_tokens, clients, enrollment, federations, invites
from server.service.uploads.resumable import status
from server.store.database import Database
from server.store.tables import Transfer, Update
from shared.contract.messages import JoinRequest


class TestWhoMayUpload:
    @pytest.mark.usefixtures("sites")
    def test_a_client_that_was_not_chosen_may_not(self, desk: Desk) -> None:
        late, body = desk.join("late"), desk.body(3)
        refused(NotAllowed, "not-a-participant", lambda: desk.put(late, body))
        refused(NotAllowed, "not-a-participant", lambda: part(desk, late, body, 0))
        refused(NotAllowed, "not-a-participant", lambda: status(desk.ctx, late, desk.round.id))

    @pytest.mark.usefixtures("sites")
    def test_a_client_of_another_federation_does_not_even_see_the_round(self, desk: Desk) -> None:
        other = Desk(desk.db, fedavg_plan("birds"), desk.clock)
        stranger, body = other.join("north"), desk.body(1)
        for round_id in (desk.round.id, 10**6):
            refused(NotFound, "no-such-round", lambda: put(desk.ctx, stranger, round_id, body))  # noqa: B023
            refused(NotFound, "no-such-round", lambda: status(desk.ctx, stranger, round_id))  # noqa: B023
        assert count(desk.db, Transfer) == [0]

    def test_a_rotated_token_replaces_the_old_one(self, desk: Desk) -> None:
        old = desk.join_token("north")
        identity = client_tokens.authenticate(desk.ctx, old)
        new = client_tokens.rotate(desk.ctx, OPERATOR, desk.name, "north").token
        refused(NotAuthenticated, "invalid-token", lambda: client_tokens.authenticate(desk.ctx, old))
        assert client_tokens.authenticate(desk.ctx, new) == identity

    def test_a_revoked_client_is_told_so(self, desk: Desk) -> None:
        token = desk.join_token("north")
        clients.revoke(desk.ctx, OPERATOR, desk.name, "north")
        refused(NotAllowed, "client-revoked", lambda: client_tokens.authenticate(desk.ctx, token))
        refused(Conflict, "client-not-active", lambda: client_tokens.rotate(desk.ctx, OPERATOR, desk.name, "north"))
        clients.revoke(desk.ctx, OPERATOR, desk.name, "north")  # idempotent

    def test_a_client_that_left_is_told_so(self, desk: Desk) -> None:
        token = desk.join_token("north")
        identity = client_tokens.authenticate(desk.ctx, token)
        clients.leave(desk.ctx, identity, OPERATOR)
        refused(NotAllowed, "client-left", lambda: client_tokens.authenticate(desk.ctx, token))
        again = client_tokens.authenticate(desk.ctx, desk.join_token("north"))
        assert again.client_id != identity.client_id
        rotated = client_tokens.rotate(desk.ctx, OPERATOR, desk.name, "north").token
        assert client_tokens.authenticate(desk.ctx, rotated) == again

    def test_an_unknown_client_cannot_be_revoked(self, desk: Desk) -> None:
        refused(NotFound, "no-such-client", lambda: clients.revoke(desk.ctx, OPERATOR, desk.name, "nobody"))

    @pytest.mark.parametrize("text", ["", "dtc", "dtc_", "dtc__", "dtc_0_x", "dti_0_x", "\0", "dtc_" + "a" * 99 + "_x"])
    def test_nonsense_is_not_a_token(self, desk: Desk, text: str) -> None:
        refused(NotAuthenticated, "invalid-token", lambda: client_tokens.authenticate(desk.ctx, text))

    def test_another_clients_secret_is_not_accepted(self, desk: Desk) -> None:
        north, south = desk.join_token("north"), desk.join_token("south")
        mixed = "_".join([*north.split("_", 2)[:2], south.split("_", 2)[2]])
        refused(NotAuthenticated, "invalid-token", lambda: client_tokens.authenticate(desk.ctx, mixed))

    def test_an_upload_under_way_ends_with_its_token(self, desk: Desk, sites: Sites) -> None:
        upload = whole(desk, sites[0], desk.body(1))
        client_tokens.rotate(desk.ctx, OPERATOR, desk.name, "north")
        refused(NotAuthenticated, "invalid-token", upload.finish)
        upload.abandon()
        assert count(desk.db, Update, Transfer) == [0, 0]

    @pytest.mark.parametrize("end", ["revoked", "left"])
    def test_an_upload_under_way_ends_with_the_clients_access(self, clean_db: Database, end: str) -> None:
        """A token is checked when a request starts; its bytes may take hours."""
        desk = Desk(clean_db, fedavg_plan(min_clients=3))
        sites = [desk.join("north"), desk.join("south"), desk.join("west")]
        bodies = [desk.body(1), desk.body(2)]
        put_, parts = whole(desk, sites[0], bodies[0]), part(desk, sites[1], bodies[1], 0)
        for who in sites[:2]:
            if end == "revoked":
                clients.revoke(desk.ctx, OPERATOR, desk.name, who.name)
            else:
                clients.leave(desk.ctx, who, OPERATOR)
        refused(NotAllowed, f"client-{end}", put_.finish)
        refused(NotAllowed, f"client-{end}", parts.finish)
        put_.abandon()
        assert (desk.round.state, desk.round.updates) == ("open", 0)
        assert desk.round.waiting_for == "waiting for 1 of 1 clients: west; deadline in 60 s"

    def test_an_update_outlives_its_client(self, desk: Desk, sites: Sites) -> None:
        bodies = [desk.body(1), desk.body(2)]
        desk.put(sites[0], bodies[0])
        clients.revoke(desk.ctx, OPERATOR, desk.name, "north")
        desk.put(sites[1], bodies[1])
        desk.aggregate()
        assert desk.bits(1) == mean_bits(bodies)


class TestInvite:
    REQUEST = JoinRequest(name="north", class_counts={"cat": 1})

    def test_works_once(self, desk: Desk) -> None:
        token = invites.create(desk.ctx, OPERATOR, desk.name, 60).token
        assert enrollment.preview(desk.ctx, token).plan == desk.plan
        enrollment.join(desk.ctx, token, self.REQUEST)
        refused(NotAllowed, "invite-used", lambda: enrollment.join(desk.ctx, token, self.REQUEST))
        refused(NotAllowed, "invite-used", lambda: enrollment.preview(desk.ctx, token))

    def test_expires(self, desk: Desk) -> None:
        token = invites.create(desk.ctx, OPERATOR, desk.name, 60).token
        desk.wait(60)
        refused(NotAllowed, "invite-expired", lambda: enrollment.join(desk.ctx, token, self.REQUEST))

    def test_is_not_used_up_by_a_join_that_is_refused(self, desk: Desk) -> None:
        desk.join("north")
        token = invites.create(desk.ctx, OPERATOR, desk.name, 60).token
        refused(Conflict, "client-name-taken", lambda: enrollment.join(desk.ctx, token, self.REQUEST))
        unknown = JoinRequest(name="south", class_counts={"fish": 1})
        refused(InvalidInput, "unknown-class", lambda: enrollment.join(desk.ctx, token, unknown))
        empty = JoinRequest(name="south", class_counts={"cat": 0})
        refused(InvalidInput, "no-data", lambda: enrollment.join(desk.ctx, token, empty))
        enrollment.join(desk.ctx, token, JoinRequest(name="south", class_counts={"cat": 1}))

    def test_of_an_ended_federation_is_refused(self, desk: Desk) -> None:
        token = invites.create(desk.ctx, OPERATOR, desk.name, 60).token
        federations.cancel(desk.ctx, OPERATOR, desk.name)
        refused(Conflict, "federation-ended", lambda: enrollment.join(desk.ctx, token, self.REQUEST))
        refused(Conflict, "federation-ended", lambda: invites.create(desk.ctx, OPERATOR, desk.name, 60))

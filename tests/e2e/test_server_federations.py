"""`distrans-server` commands on federations, clients and the audit log: what they print and how they refuse."""

import csv
import io
import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from support.desk import Desk
from support.operator_commands import PETS_PLAN, Command, Refuse, Succeed, join_pets

from server.commands.client import list_ as list_clients
from server.service import client_tokens, clients
from server.service.context import Context
from shared.contract.messages import ClientView, FederationView
from shared.contract.plan import parse_plan


class TestFederations:
    def test_commands_report_each_change_of_state(self, succeed: Succeed, pets: Context) -> None:
        assert succeed("federation", "start", "pets").splitlines() == [
            "pets: running, 0 of 2 rounds, 0 clients",
            "  waiting for clients to join: 0 of at least 2; deadline in 7 days",
        ]
        for name in ("north", "south"):
            join_pets(pets, succeed("invite", "create", "pets"), name)
        view = FederationView.model_validate_json(succeed("federation", "show", "pets", "--json"))
        assert (view.state, view.clients, view.plan) == ("running", 2, parse_plan(PETS_PLAN))
        assert view.waiting_for is not None
        assert view.round is not None
        assert view.round.facts["class_totals"] == "6,0"
        shown = succeed("federation", "show", "pets")
        assert "class_totals" not in shown, "a thousand numbers are for programs"
        connecting = "waiting for 2 of 2 clients to connect: north, south; deadline in 7 days"
        assert shown.startswith(f"pets: running, 0 of 2 rounds, 2 clients, DH 50%\n  {connecting}\n")
        assert re.search(r"│ north +│ active +│ 3 +│", shown)
        assert re.search(r"│ 1 +│ open +│ 0 of 2 +│", shown)
        assert (
            succeed("federation", "pause", "pets").splitlines()[0] == "pets: paused, 0 of 2 rounds, 2 clients, DH 50%"
        )
        assert succeed("federation", "pause", "pets").splitlines()[1:] == [
            "  waiting for the operator to resume it",
            "  paused by the operator",
        ]
        assert succeed("federation", "resume", "pets").startswith("pets: running,")
        assert succeed("federation", "cancel", "pets").splitlines()[1:] == ["  cancelled by the operator"]

    def test_rollback_pauses_the_federation_at_the_older_model(
        self, succeed: Succeed, refuses: Refuse, pets: Context
    ) -> None:
        assert refuses("federation", "rollback", "pets", "--to", "0") == (
            "Model 0 is already the newest one. There is no older model to go back to."
        )
        desk = Desk(pets.db, parse_plan(PETS_PLAN), create=False)
        succeed("federation", "start", "pets")
        sites = [desk.join(name) for name in ("north", "south")]
        desk.run_round({who: seed for seed, who in enumerate(sites)})
        assert succeed("federation", "rollback", "pets", "--to", "0").splitlines() == [
            "pets: paused, 0 of 2 rounds, 2 clients, DH 0%",
            "  waiting for the operator to resume it",
            "  rolled back to model 0",
        ]
        assert "federation.rollback" in succeed("audit", "list")

    @pytest.mark.usefixtures("pets")
    def test_list_shows_names_and_states(self, succeed: Succeed, tmp_path: Path) -> None:
        (tmp_path / "birds.toml").write_text(PETS_PLAN.replace("pets", "birds"))
        succeed("federation", "create", "birds.toml")
        views = json.loads(succeed("federation", "list", "--json"))
        assert [(view["name"], view["state"]) for view in views] == [("birds", "created"), ("pets", "created")]
        assert re.search(r"│ birds +│ created +│ 0 of 2", succeed("federation", "list"))

    @pytest.mark.usefixtures("pets")
    def test_plan_that_differs_from_the_paper_is_created_with_a_warning(self, command: Command, tmp_path: Path) -> None:
        (tmp_path / "paper.toml").write_text('preset = "paper"\n' + PETS_PLAN.replace("pets", "paper"))
        outcome = command("federation", "create", "paper.toml")
        assert (outcome.code, outcome.out.startswith("Created federation paper.")) == (0, True)
        assert outcome.err.startswith('warning: preset = "paper" with model.backbone = "lenet": the paper uses')

    @pytest.mark.usefixtures("pets")
    def test_impossible_changes_and_unknown_names_are_refused(self, refuses: Refuse) -> None:
        assert refuses("federation", "resume", "pets") == (
            "Federation 'pets' has not been started and cannot be resumed. Only a paused federation can be resumed."
        )
        for verb in ("show", "start", "pause", "resume", "cancel"):
            message = refuses("federation", verb, "atlantis")
            assert message == "There is no federation 'atlantis'. Run: distrans-server federation list"
        assert refuses("federation", "create", "plan.toml") == (
            "A federation named 'pets' already exists. Choose another name."
        )

    @pytest.mark.usefixtures("pets")
    def test_unusable_plans_are_explained(self, refuses: Refuse, tmp_path: Path) -> None:
        assert refuses("federation", "create") == (
            "No plan file was given. To get one: distrans-server federation create --example > plan.toml"
        )
        assert refuses("federation", "create", "missing.toml") == (
            "missing.toml cannot be read: No such file or directory."
        )
        assert refuses("federation", "create", tmp_path).endswith("cannot be read: Is a directory.")
        (tmp_path / "latin.toml").write_bytes(PETS_PLAN.replace("pets", "chiens-à-poils").encode("latin-1"))
        assert refuses("federation", "create", "latin.toml") == "latin.toml is not UTF-8 text."
        (tmp_path / "broken.toml").write_text("name = ")
        assert refuses("federation", "create", "broken.toml").startswith("The plan is not valid TOML: ")
        (tmp_path / "wrong.toml").write_text('name = "a b"\nclasses = ["x"]\n[rounds]\ncount = 0')
        lines = refuses("federation", "create", "wrong.toml").splitlines()
        assert lines[0] == "The plan has 3 errors:"
        assert [line.partition(":")[0] for line in lines[1:]] == ["  name", "  classes", "  rounds.count"]
        (tmp_path / "weights.toml").write_text(PETS_PLAN.replace("pets", "x") + 'model = { weights = "file" }')
        assert "needs a weights file" in refuses("federation", "create", "weights.toml")


class TestArchive:
    @pytest.mark.usefixtures("pets")
    def test_an_export_can_be_imported_under_another_name(self, succeed: Succeed, tmp_path: Path) -> None:
        for target in ("backup", "backup.zip"):
            assert succeed("federation", "export", "pets", target) == f"Wrote {target}.\n"
        files = {"federation.json", "plan.json", "history.csv", "history.json", "model.safetensors"}
        assert files <= {path.name for path in (tmp_path / "backup").iterdir()}
        with zipfile.ZipFile(tmp_path / "backup.zip") as archive:
            assert files <= set(archive.namelist())
            assert archive.read("model.safetensors") == (tmp_path / "backup" / "model.safetensors").read_bytes()
        assert safetensors.torch.load((tmp_path / "backup" / "model.safetensors").read_bytes())
        for number, source in enumerate(("backup", "backup.zip")):
            out = succeed("federation", "import", source, "--name", f"pets-{number}")
            assert out.splitlines()[0] == f"pets-{number}: paused, 0 of 2 rounds, 0 clients"
        views = json.loads(succeed("federation", "list", "--json"))
        assert [view["name"] for view in views] == ["pets", "pets-0", "pets-1"]

    @pytest.mark.usefixtures("pets")
    def test_unwritable_targets_are_refused(self, refuses: Refuse, tmp_path: Path) -> None:
        (tmp_path / "taken").mkdir()
        assert refuses("federation", "export", "pets", "taken").startswith("taken already exists.")
        assert refuses("federation", "export", "pets", "missing/x.zip") == (
            "Cannot write missing/x.zip: No such file or directory."
        )
        assert refuses("federation", "export", "pets", "plan.toml/x") == ("Cannot write plan.toml/x: Not a directory.")
        before = sorted(tmp_path.iterdir())
        for target in ("x", "x.zip"):
            assert refuses("federation", "export", "atlantis", target).startswith("There is no federation 'atlantis'.")
        assert sorted(tmp_path.iterdir()) == before

    @pytest.mark.usefixtures("pets")
    def test_unusable_sources_are_refused(self, refuses: Refuse, succeed: Succeed, tmp_path: Path) -> None:
        succeed("federation", "export", "pets", "backup")
        assert refuses("federation", "import", "backup").startswith("A federation named 'pets' already exists.")
        assert "name: must be 1 to 64 letters" in refuses("federation", "import", "backup", "--name", "a b")
        assert refuses("federation", "import", "missing.zip").startswith(
            "Cannot read missing.zip: No such file or directory."
        )
        assert refuses("federation", "import", "plan.toml") == "Cannot read plan.toml: File is not a zip file."
        assert "is not an exported federation" in refuses("federation", "import", tmp_path)
        (tmp_path / "backup" / "model.safetensors").write_bytes(b"damaged")
        assert "does not match its plan" in refuses("federation", "import", "backup", "--name", "x")


class TestClients:
    def test_clients_can_be_invited_listed_rotated_and_revoked(
        self, succeed: Succeed, refuses: Refuse, pets: Context
    ) -> None:
        """Tokens are the only output on stdout, ready for a pipe."""
        invite = succeed("invite", "create", "pets", "--hours", "1")
        assert re.fullmatch(r"dti_[0-9a-f]{32}_[\w-]{43}\n", invite)
        old = join_pets(pets, invite, "north", device="cuda:0")
        (view,) = [ClientView.model_validate(one) for one in json.loads(succeed("client", "list", "pets", "--json"))]
        assert (view.name, view.state, view.class_counts) == ("north", "active", {"cat": 3, "dog": 0})
        assert re.search(rf"│ north +│ {view.id} │", succeed("client", "list", "pets"))
        new = succeed("client", "rotate", "pets", "north")
        assert re.fullmatch(rf"dtc_{view.id}_[\w-]{{43}}\n", new)
        assert new.strip() != old
        assert client_tokens.authenticate(pets, new.strip()).name == "north"
        for _ in range(2):
            assert succeed("client", "revoke", "pets", "north") == "Revoked client north of federation pets.\n"
        assert refuses("client", "rotate", "pets", "north") == "Client 'north' is revoked."
        assert refuses("client", "revoke", "pets", "nobody") == (
            "Federation 'pets' has no client 'nobody'. Run: distrans-server client list FEDERATION"
        )
        assert refuses("client", "list", "atlantis").startswith("There is no federation 'atlantis'.")
        assert refuses("invite", "create", "atlantis").startswith("There is no federation 'atlantis'.")

    def test_hours_out_of_range_are_refused(self, command: Command) -> None:
        for hours in ("0", "9000", "soon"):
            outcome = command("invite", "create", "pets", "--hours", hours)
            assert (outcome.code, outcome.out) == (2, "")
            assert "--hours" in outcome.err

    def test_text_from_sites_is_never_markup(self, succeed: Succeed, pets: Context) -> None:
        """Brackets and colons do not turn into colors, links or emoji, and do not break the listing."""
        device = "[/bold] [red]:skull:"
        join_pets(pets, succeed("invite", "create", "pets"), "north", device=device)
        for words in (("client", "list", "pets"), ("federation", "show", "pets"), ("audit", "list")):
            out = succeed(*words)
            if words[0] != "audit":
                assert device in out


class TestTables:
    """Piped output is read by programs: it must not be cut or folded."""

    NAME = "north-" + "x" * 50
    DEVICE = "an accelerator with a name of just sixty-four printable letters."

    def test_are_not_truncated_when_piped(self, succeed: Succeed, pets: Context) -> None:
        join_pets(pets, succeed("invite", "create", "pets"), self.NAME, device=self.DEVICE)
        succeed("federation", "start", "pets")
        (client,) = clients.clients_of(pets, "pets")
        for words, cells in (
            (("client", "list", "pets"), (self.NAME, client.id, "active", self.DEVICE)),
            (("federation", "show", "pets"), (self.NAME, "active", self.DEVICE)),
            (("federation", "list"), ("waiting for clients to join: 1 of at least 2; deadline in 7 days",)),
            (("audit", "list"), (f"client:{self.NAME}", f'{{"id": "{client.id}"}}')),
        ):
            rows = [line for line in succeed(*words).splitlines() if cells[0] in line]
            assert len(rows) == 1
            assert all(cell in rows[0] for cell in cells)
            assert "…" not in rows[0]

    def test_are_folded_on_a_terminal(
        self, succeed: Succeed, pets: Context, monkeypatch: pytest.MonkeyPatch, capsys: Any
    ) -> None:
        join_pets(pets, succeed("invite", "create", "pets"), self.NAME, device=self.DEVICE)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", "80")
        list_clients("pets")
        lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
        assert max(map(len, lines)) <= 80
        assert "".join(line.split("│")[1].strip() for line in lines if line.count("│") > 1) == self.NAME

    def test_audit_log_as_json_has_every_entry(self, succeed: Succeed, pets: Context) -> None:
        join_pets(pets, succeed("invite", "create", "pets"), self.NAME)
        entries = json.loads(succeed("audit", "list", "--json"))
        assert [entry["action"] for entry in entries] == ["federation.create", "invite.create", "client.join"]
        assert entries[2]["actor"] == f"client:{self.NAME}"
        assert json.loads(succeed("audit", "list", "--json", "--federation", "atlantis")) == []


class TestAudit:
    def test_audit_log_is_listed_and_exported(self, succeed: Succeed, pets: Context, tmp_path: Path) -> None:
        join_pets(pets, succeed("invite", "create", "pets"), "north")
        listed = succeed("audit", "list")
        for action in ("federation.create", "invite.create", "client.join"):
            assert action in listed
        assert succeed("audit", "list", "--federation", "atlantis").count("federation.create") == 0
        assert succeed("audit", "export", "audit.csv") == "Wrote audit.csv.\n"
        assert succeed("audit", "export", "audit.jsonl") == "Wrote audit.jsonl.\n"
        rows = list(csv.DictReader(io.StringIO((tmp_path / "audit.csv").read_text())))
        objects = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
        assert [row["action"] for row in rows] == ["federation.create", "invite.create", "client.join"]
        assert [{key: str(value) for key, value in one.items()} for one in objects] == rows
        assert rows[0]["actor"].startswith("operator:")
        assert rows[0]["address"] == "command line"

    @pytest.mark.usefixtures("pets")
    def test_an_unwritable_file_is_refused(self, refuses: Refuse) -> None:
        assert refuses("audit", "export", "missing/audit.csv") == (
            "missing/audit.csv cannot be written: No such file or directory."
        )

"""`distrans-server` as an operator types it: what it prints, what it leaves behind, how it refuses."""

import csv
import io
import json
import logging
import os
import re
import shlex
import signal
import socket
import stat
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.torch
import trustme
import typer.main
from alembic.script import ScriptDirectory
from sqlalchemy import text
from support.commands import Outcome, server_command
from support.coordinator import CoordinatorProcess
from support.databases import new_postgres_database
from support.plans import small_plan
from support.processes import LoggedProcess
from support.service import Desk

from server import __main__ as program
from server.commands.client import list_ as list_clients
from server.commands.place import upgrade_command
from server.serve import configure_logging
from server.service import enrolment
from server.service.context import Context
from server.settings import find_admin_token
from server.store import schema
from server.store.session import Database
from shared.method_options import DistransOptions, GeneratorOptions
from shared.plan import FederationPlan, ImagePlan, ModelPlan, RoundsPlan, TrainingPlan, parse_plan
from shared.schemas import ClientView, FederationView, JoinRequest

PLAN = """
name = "pets"
classes = ["cat", "dog"]
image = { channels = 1, height = 14, width = 14 }
rounds = { count = 2, min_clients = 2 }
"""
GROUPS = (("db",), ("federation",), ("invite",), ("client",), ("audit",))
SIGNS_OF_A_CRASH = ("Traceback", 'File "')


Command = Callable[..., Outcome]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Command]:
    """The program's entry point in this process, in an empty folder: a process for each would load torch each time."""
    root, before = logging.getLogger(), dict(os.environ)
    handlers, level = root.handlers[:], root.level
    for name in list(os.environ):
        if name.startswith("DISTRANS_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)

    yield server_command(monkeypatch, capsys)
    root.handlers[:] = handlers
    root.setLevel(level)
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def works(command: Command) -> Callable[..., str]:
    """A command that must succeed; what it prints."""

    def run(*arguments: object) -> str:
        outcome = command(*arguments)
        assert (outcome.code, outcome.err) == (0, "")
        return outcome.out

    return run


@pytest.fixture
def refuses(command: Command) -> Callable[..., str]:
    """A command that must fail in an orderly way; what it says on stderr."""

    def run(*arguments: object) -> str:
        outcome = command(*arguments)
        assert (outcome.code, outcome.out) == (1, "")
        assert outcome.err.startswith("error: ")
        assert not any(sign in outcome.err for sign in SIGNS_OF_A_CRASH)
        return outcome.err.removeprefix("error: ").strip()

    return run


@pytest.fixture
def pets(works: Callable[..., str], tmp_path: Path) -> Iterator[Context]:
    """A federation in the default data folder, and the same database for what only sites can do."""
    works("db", "upgrade")
    (tmp_path / "plan.toml").write_text(PLAN)
    works("federation", "create", "plan.toml")
    db = Database(f"sqlite:///{tmp_path / 'distrans-data' / 'distrans.db'}")
    yield Context(db)
    db.close()


def join(ctx: Context, invite: str, name: str, **fields: str) -> str:
    """A site joins; its token."""
    request = JoinRequest(name=name, class_counts={"cat": 3}, **fields)
    return enrolment.join(ctx, invite.strip(), request).token


def all_commands(group: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command and every group of commands."""
    found = typer.main.get_command(program.app) if group is None else group
    yield path
    for name, child in getattr(found, "commands", {}).items():
        yield from all_commands(child, (*path, name))


class TestHelp:
    def test_every_command_is_there(self) -> None:
        assert {
            ("serve",),
            ("db", "backup"),
            ("db", "upgrade"),
            *(
                ("federation", verb)
                for verb in (
                    "create",
                    "list",
                    "show",
                    "start",
                    "pause",
                    "resume",
                    "cancel",
                    "rollback",
                    "export",
                    "import",
                    "delete",
                )
            ),
            *(("invite", verb) for verb in ("create", "list", "revoke")),
            *(("client", verb) for verb in ("list", "revoke", "rotate")),
            *(("audit", verb) for verb in ("list", "export")),
        } == {path for path in all_commands() if path and path not in GROUPS}

    @pytest.mark.parametrize("path", list(all_commands()), ids=" ".join)
    def test_help(self, works: Callable[..., str], path: tuple[str, ...]) -> None:
        out = works(*path, "--help")
        assert re.search(rf"Usage: .*{' '.join(path)}", out)
        assert re.search(r"[A-Z][^\n]+\.", out)

    def test_nothing_is_left_behind(self, works: Callable[..., str], tmp_path: Path) -> None:
        for path in all_commands():
            works(*path, "--help")
        assert list(tmp_path.iterdir()) == []


class TestExamplePlan:
    def test_it_shows_the_defaults(self, works: Callable[..., str]) -> None:
        plan = parse_plan(works("federation", "create", "--example"))
        assert plan == FederationPlan(name="lung-nodules", classes=("benign", "malignant"))

    def test_it_shows_every_setting(self, works: Callable[..., str]) -> None:
        example = works("federation", "create", "--example")
        tables = (ImagePlan, ModelPlan, DistransOptions, GeneratorOptions, TrainingPlan, RoundsPlan)
        keys = {name for table in tables for name in table.model_fields} - {"generator"}  # which is a table
        assert keys <= set(re.findall(r"^(?:# )?(\w+) = ", example, re.MULTILINE))

    def test_its_commented_lines_are_right_too(self, works: Callable[..., str]) -> None:
        example = works("federation", "create", "--example")
        uncommented, number = re.subn(r"^# (\w+ = )", r"\1", example, flags=re.MULTILINE)
        assert number >= 5
        plan, defaults = parse_plan(uncommented), FederationPlan(name="lung-nodules", classes=("benign", "malignant"))
        assert plan.model.dense_dim == 256
        assert plan.method == defaults.method.model_copy(update={"offset_lr": 0.05})

    def test_another_preset_is_one_word_away(self, works: Callable[..., str]) -> None:
        example = works("federation", "create", "--example").replace('"learned-offset"', '"paper"', 1)
        expected = FederationPlan(name="lung-nodules", classes=("benign", "malignant"), preset="paper")
        assert parse_plan(example) == expected

    def test_it_can_be_created(self, works: Callable[..., str], tmp_path: Path) -> None:
        (tmp_path / "plan.toml").write_text(works("federation", "create", "--example"))
        works("db", "upgrade")
        assert works("federation", "create", "plan.toml") == (
            "Federation lung-nodules created. Next: distrans-server invite create lung-nodules\n"
        )


class TestDatabase:
    def test_upgrade(self, works: Callable[..., str], empty_db_url: str) -> None:
        """An empty database is brought to the newest schema; again has no effect."""
        (head,) = ScriptDirectory.from_config(schema._config()).get_heads()
        assert works("db", "upgrade", "--db", empty_db_url) == f"Schema: empty → {head}.\n"
        assert works("db", "upgrade", "--db", empty_db_url) == f"The schema is at {head} already.\n"
        assert json.loads(works("federation", "list", "--json", "--db", empty_db_url)) == []

    def test_backup(self, works: Callable[..., str], refuses: Callable[..., str], tmp_path: Path) -> None:
        works("db", "upgrade")
        assert works("db", "backup", "copy.db").startswith("Wrote copy.db, ")
        assert json.loads(works("federation", "list", "--json", "--db", f"sqlite:///{tmp_path / 'copy.db'}")) == []
        assert refuses("db", "backup", "copy.db") == "copy.db exists already. Name a new file."

    def test_the_address_can_come_from_the_environment(
        self, works: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("DISTRANS_DB", f"sqlite:///{tmp_path / 'elsewhere.db'}")
        works("db", "upgrade")
        assert (tmp_path / "elsewhere.db").exists()
        assert not (tmp_path / "distrans-data").exists()

    def test_the_folder_is_its_owners_alone(self, works: Callable[..., str], tmp_path: Path) -> None:
        works("db", "upgrade")
        assert stat.S_IMODE((tmp_path / "distrans-data").stat().st_mode) == 0o700

    def test_one_that_is_not_there_is_not_made(self, refuses: Callable[..., str], tmp_path: Path) -> None:
        """A look into the wrong folder leaves nothing behind, and says how to name the right one."""
        (tmp_path / "plan.toml").write_text(PLAN)
        advice = "Name yours with --data-dir or --db; `distrans-server serve` creates a new one."
        for words in (
            *(("federation", "list"), ("federation", "show", "pets"), ("federation", "create", "plan.toml")),
            *(
                ("invite", "create", "pets"),
                ("client", "list", "pets"),
                ("audit", "list"),
                ("audit", "export", "x.csv"),
            ),
        ):
            assert refuses(*words) == f"There is no database at distrans-data/distrans.db. {advice}"
        assert refuses("federation", "list", "--data-dir", "else where").startswith(
            "There is no database at else where/distrans.db."
        )
        assert refuses("federation", "list", "--db", "sqlite:///x.db").startswith("There is no database at x.db.")
        assert [path.name for path in tmp_path.iterdir()] == ["plan.toml"]

    def test_an_empty_one_is_refused(self, refuses: Callable[..., str], empty_db_url: str) -> None:
        if empty_db_url.startswith("sqlite"):
            Path(empty_db_url.removeprefix("sqlite:///")).touch()
        for words in (("federation", "list"), ("invite", "create", "pets"), ("audit", "list")):
            message = refuses(*words, "--db", empty_db_url)
            assert message == f"The database is empty. Run: distrans-server db upgrade --db {shlex.quote(empty_db_url)}"

    def test_an_older_schema_is_refused(self, refuses: Callable[..., str], db_url: str) -> None:
        """With the command that mends it; there is nothing to test while there is only one schema."""
        scripts = ScriptDirectory.from_config(schema._config())
        for script in scripts.walk_revisions():
            if script.revision != scripts.get_current_head():
                stamp(db_url, script.revision)
                message = refuses("federation", "list", "--db", db_url)
                assert f"has schema {script.revision}, older than" in message
                assert message.endswith(f"Run: distrans-server db upgrade --db {shlex.quote(db_url)}")

    def test_the_command_that_mends_it_names_the_same_database(
        self, command: Command, refuses: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """It can be pasted, but a password does not go into logs; what the environment says need not be repeated."""
        (tmp_path / "my data").mkdir()
        (tmp_path / "my data" / "distrans.db").touch()
        advice = "The database is empty. Run: distrans-server db upgrade"
        assert refuses("federation", "list", "--data-dir", "my data") == f"{advice} --data-dir 'my data'"
        message = refuses("federation", "list", "--db", "sqlite:///my data/distrans.db")
        assert message == f"{advice} --db 'sqlite:///my data/distrans.db'"
        monkeypatch.setenv("DISTRANS_DATA_DIR", "my data")
        assert refuses("federation", "list") == advice
        monkeypatch.setenv("DISTRANS_DB", "sqlite:///my data/distrans.db")
        assert refuses("federation", "list") == advice
        assert command("db", "upgrade").code == 0
        assert command("federation", "list").code == 0
        hidden = upgrade_command("postgresql://me:secret@host/name", Path("distrans-data"))
        assert hidden == "distrans-server db upgrade --db 'postgresql://me:***@host/name'"

    @pytest.mark.parametrize(
        "words", [("federation", "list"), ("db", "upgrade"), ("serve", "--port", "0")], ids=" ".join
    )
    def test_a_newer_schema_is_refused(self, refuses: Callable[..., str], db_url: str, words: tuple[str, ...]) -> None:
        stamp(db_url, "9999")
        assert refuses(*words, "--db", db_url) == (
            "The database has schema 9999, newer than this program knows. "
            "Install the newer release: pip install --upgrade distrans"
        )

    def test_a_postgresql_database_is_not_changed_without_being_asked(
        self, refuses: Callable[..., str], postgres_url: str
    ) -> None:
        url = new_postgres_database(postgres_url)
        assert refuses("serve", "--port", "0", "--db", url) == (
            f"The database is empty. Run: distrans-server db upgrade --db {shlex.quote(url)}"
        )

    @pytest.mark.parametrize(
        ("address", "words"),
        [
            ("nonsense", "The database address cannot be read."),
            ("mysql://host/name", "mysql is not supported. Use SQLite or PostgreSQL."),
            ("sqlite://", "SQLite needs a file."),
            ("sqlite:///:memory:", "SQLite needs a file."),
            ("sqlite:///.", "The database cannot be reached: unable to open database file."),
            ("sqlite:///text.txt", "The database cannot be reached: file is not a database."),
            ("postgresql://host:port/name", "The database address cannot be read."),
            ("postgresql://127.0.0.1:1/name", "The database cannot be reached: connection"),
            ("postgresql+asyncpg://127.0.0.1:1/name", "The database cannot be reached: connection"),
        ],
    )
    def test_addresses_that_cannot_be_used(
        self, refuses: Callable[..., str], tmp_path: Path, address: str, words: str
    ) -> None:
        (tmp_path / "text.txt").write_text("This is a text and not a database, as everybody can see.")
        for group in (("db", "upgrade"), ("federation", "list")):
            assert refuses(*group, "--db", address).startswith(words)

    def test_a_folder_that_cannot_be_made(self, refuses: Callable[..., str], tmp_path: Path) -> None:
        (tmp_path / "text.txt").touch()
        message = refuses("db", "upgrade", "--db", "sqlite:///text.txt/x.db")
        assert message.startswith("The folder text.txt cannot be created: File exists.")


def stamp(db_url: str, revision: str) -> None:
    """Let the database say that another release has made it."""
    db = Database(db_url)
    with db.write() as session:
        session.execute(text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision})
    db.close()


class TestFederations:
    def test_from_creation_to_the_end(self, works: Callable[..., str], pets: Context) -> None:
        assert works("federation", "start", "pets").splitlines() == [
            "pets: running, 0 of 2 rounds, 0 clients",
            "  waiting for clients to join: 0 of at least 2; deadline in 7 days",
        ]
        for name in ("north", "south"):
            join(pets, works("invite", "create", "pets"), name)
        view = FederationView.model_validate_json(works("federation", "show", "pets", "--json"))
        assert (view.state, view.clients, view.plan) == ("running", 2, parse_plan(PLAN))
        assert view.waiting_for is not None
        shown = works("federation", "show", "pets")
        connecting = "waiting for 2 of 2 clients to connect: north, south; deadline in 7 days"
        assert shown.startswith(f"pets: running, 0 of 2 rounds, 2 clients, DH 50%\n  {connecting}\n")
        assert re.search(r"│ north +│ active +│ 3 +│", shown)
        assert re.search(r"│ 1 +│ open +│ 0 of 2 +│", shown)
        assert works("federation", "pause", "pets").splitlines()[0] == "pets: paused, 0 of 2 rounds, 2 clients, DH 50%"
        assert works("federation", "pause", "pets").splitlines()[1:] == [
            "  waiting for the operator to resume it",
            "  paused by the operator",
        ]
        assert works("federation", "resume", "pets").startswith("pets: running,")
        assert works("federation", "cancel", "pets").splitlines()[1:] == ["  cancelled by the operator"]

    def test_rollback(self, works: Callable[..., str], refuses: Callable[..., str], pets: Context) -> None:
        assert refuses("federation", "rollback", "pets", "--to", "0") == (
            "Model 0 is the newest one already. There is no older model to go back to."
        )
        desk = Desk(pets.db, parse_plan(PLAN), create=False)
        works("federation", "start", "pets")
        sites = [desk.join(name) for name in ("north", "south")]
        desk.run_round({who: seed for seed, who in enumerate(sites)})
        assert works("federation", "rollback", "pets", "--to", "0").splitlines() == [
            "pets: paused, 0 of 2 rounds, 2 clients, DH 0%",
            "  waiting for the operator to resume it",
            "  rolled back to model 0",
        ]
        assert "federation.rollback" in works("audit", "list")

    @pytest.mark.usefixtures("pets")
    def test_list(self, works: Callable[..., str], tmp_path: Path) -> None:
        (tmp_path / "birds.toml").write_text(PLAN.replace("pets", "birds"))
        works("federation", "create", "birds.toml")
        views = json.loads(works("federation", "list", "--json"))
        assert [(view["name"], view["state"]) for view in views] == [("birds", "created"), ("pets", "created")]
        assert re.search(r"│ birds +│ created +│ 0 of 2", works("federation", "list"))

    @pytest.mark.usefixtures("pets")
    def test_wrong_states_and_names(self, refuses: Callable[..., str]) -> None:
        message = refuses("federation", "resume", "pets")
        assert message == "Federation 'pets' is created: it cannot resume now. Resume is possible when it is paused."
        for verb in ("show", "start", "pause", "resume", "cancel"):
            message = refuses("federation", verb, "atlantis")
            assert message == "There is no federation 'atlantis'. Run: distrans-server federation list"
        assert refuses("federation", "create", "plan.toml") == (
            "There is a federation 'pets' already. Choose another name."
        )

    @pytest.mark.usefixtures("pets")
    def test_plans_that_cannot_be_used(self, refuses: Callable[..., str], tmp_path: Path) -> None:
        assert refuses("federation", "create") == "Name a plan file. --example prints one to start from."
        assert refuses("federation", "create", "missing.toml") == (
            "missing.toml cannot be read: No such file or directory."
        )
        assert refuses("federation", "create", tmp_path).endswith("cannot be read: Is a directory.")
        (tmp_path / "latin.toml").write_bytes(PLAN.replace("pets", "chiens-à-poils").encode("latin-1"))
        assert refuses("federation", "create", "latin.toml") == "latin.toml is not UTF-8 text."
        (tmp_path / "broken.toml").write_text("name = ")
        assert refuses("federation", "create", "broken.toml").startswith("The plan is not valid TOML: ")
        (tmp_path / "wrong.toml").write_text('name = "a b"\nclasses = ["x"]\n[rounds]\ncount = 0')
        lines = refuses("federation", "create", "wrong.toml").splitlines()
        assert lines[0] == "The plan has 3 faults:"
        assert [line.partition(":")[0] for line in lines[1:]] == ["  name", "  classes", "  rounds.count"]
        (tmp_path / "weights.toml").write_text(PLAN.replace("pets", "x") + 'model = { weights = "file" }')
        assert "needs a file of weights" in refuses("federation", "create", "weights.toml")


class TestArchive:
    @pytest.mark.usefixtures("pets")
    def test_export_and_import(self, works: Callable[..., str], tmp_path: Path) -> None:
        """As a folder and as a zip; either comes back under another name."""
        for target in ("backup", "backup.zip"):
            assert works("federation", "export", "pets", target) == f"Wrote {target}.\n"
        files = {"federation.json", "plan.json", "history.csv", "history.json", "model.safetensors"}
        assert files <= {path.name for path in (tmp_path / "backup").iterdir()}
        with zipfile.ZipFile(tmp_path / "backup.zip") as archive:
            assert files <= set(archive.namelist())
            assert archive.read("model.safetensors") == (tmp_path / "backup" / "model.safetensors").read_bytes()
        assert safetensors.torch.load((tmp_path / "backup" / "model.safetensors").read_bytes())
        for number, source in enumerate(("backup", "backup.zip")):
            out = works("federation", "import", source, "--name", f"pets-{number}")
            assert out.splitlines()[0] == f"pets-{number}: paused, 0 of 2 rounds, 0 clients"
        views = json.loads(works("federation", "list", "--json"))
        assert [view["name"] for view in views] == ["pets", "pets-0", "pets-1"]

    @pytest.mark.usefixtures("pets")
    def test_targets_that_cannot_be_written(self, refuses: Callable[..., str], tmp_path: Path) -> None:
        (tmp_path / "taken").mkdir()
        assert refuses("federation", "export", "pets", "taken").startswith("taken exists already.")
        assert refuses("federation", "export", "pets", "missing/x.zip") == (
            "missing/x.zip cannot be written: No such file or directory."
        )
        assert refuses("federation", "export", "pets", "plan.toml/x") == (
            "plan.toml/x cannot be written: Not a directory."
        )
        before = sorted(tmp_path.iterdir())
        for target in ("x", "x.zip"):
            assert refuses("federation", "export", "atlantis", target).startswith("There is no federation 'atlantis'.")
        assert sorted(tmp_path.iterdir()) == before

    @pytest.mark.usefixtures("pets")
    def test_sources_that_cannot_be_read(
        self, refuses: Callable[..., str], works: Callable[..., str], tmp_path: Path
    ) -> None:
        works("federation", "export", "pets", "backup")
        assert refuses("federation", "import", "backup").startswith("There is a federation 'pets' already.")
        assert "name: must have 1 to 64 letters" in refuses("federation", "import", "backup", "--name", "a b")
        assert "cannot be read" in refuses("federation", "import", "missing.zip")
        assert "cannot be read" in refuses("federation", "import", "plan.toml")
        assert "is not an exported federation" in refuses("federation", "import", tmp_path)
        (tmp_path / "backup" / "model.safetensors").write_bytes(b"damaged")
        assert "does not fit its plan" in refuses("federation", "import", "backup", "--name", "x")


class TestClients:
    def test_invite_list_rotate_revoke(
        self, works: Callable[..., str], refuses: Callable[..., str], pets: Context
    ) -> None:
        """Tokens stand alone on stdout, ready for a pipe."""
        invite = works("invite", "create", "pets", "--hours", "1")
        assert re.fullmatch(r"dti_[0-9a-f]{32}_[\w-]{43}\n", invite)
        old = join(pets, invite, "north", device="cuda:0")
        (view,) = [ClientView.model_validate(one) for one in json.loads(works("client", "list", "pets", "--json"))]
        assert (view.name, view.state, view.class_counts) == ("north", "active", {"cat": 3, "dog": 0})
        assert re.search(rf"│ north +│ {view.id} │", works("client", "list", "pets"))
        new = works("client", "rotate", "pets", "north")
        assert re.fullmatch(rf"dtc_{view.id}_[\w-]{{43}}\n", new)
        assert new.strip() != old
        assert enrolment.authenticate(pets, new.strip()).name == "north"
        for _ in range(2):
            assert works("client", "revoke", "pets", "north") == "Client north of pets is revoked.\n"
        assert refuses("client", "rotate", "pets", "north") == "Client 'north' is revoked."
        assert refuses("client", "revoke", "pets", "nobody") == (
            "Federation 'pets' has no client 'nobody'. Run: distrans-server client list FEDERATION"
        )
        assert refuses("client", "list", "atlantis").startswith("There is no federation 'atlantis'.")
        assert refuses("invite", "create", "atlantis").startswith("There is no federation 'atlantis'.")

    def test_hours_out_of_range(self, command: Command) -> None:
        for hours in ("0", "9000", "soon"):
            outcome = command("invite", "create", "pets", "--hours", hours)
            assert (outcome.code, outcome.out) == (2, "")
            assert "--hours" in outcome.err

    def test_what_a_site_says_of_itself_is_text(self, works: Callable[..., str], pets: Context) -> None:
        """Brackets and colons are not taken for colours, links or emoji, and cannot stop the listing."""
        device = "[/bold] [red]:skull:"
        join(pets, works("invite", "create", "pets"), "north", device=device)
        for words in (("client", "list", "pets"), ("federation", "show", "pets"), ("audit", "list")):
            out = works(*words)
            if words[0] != "audit":
                assert device in out


class TestTables:
    """What is printed into a pipe is read by a program: nothing may be cut or folded there."""

    NAME = "north-" + "x" * 50
    DEVICE = "an accelerator with a name of just sixty-four printable letters."

    def test_are_whole_in_a_pipe(self, works: Callable[..., str], pets: Context) -> None:
        join(pets, works("invite", "create", "pets"), self.NAME, device=self.DEVICE)
        works("federation", "start", "pets")
        (client,) = enrolment.clients_of(pets, "pets")
        for words, cells in (
            (("client", "list", "pets"), (self.NAME, client.id, "active", self.DEVICE)),
            (("federation", "show", "pets"), (self.NAME, "active", self.DEVICE)),
            (("federation", "list"), ("waiting for clients to join: 1 of at least 2; deadline in 7 days",)),
            (("audit", "list"), (f"client:{self.NAME}", f'{{"id": "{client.id}"}}')),
        ):
            rows = [line for line in works(*words).splitlines() if cells[0] in line]
            assert len(rows) == 1
            assert all(cell in rows[0] for cell in cells)
            assert "…" not in rows[0]

    def test_are_folded_on_a_terminal(
        self, works: Callable[..., str], pets: Context, monkeypatch: pytest.MonkeyPatch, capsys: Any
    ) -> None:
        join(pets, works("invite", "create", "pets"), self.NAME, device=self.DEVICE)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", "80")
        list_clients("pets")
        lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
        assert max(map(len, lines)) <= 80
        assert "".join(line.split("│")[1].strip() for line in lines if line.count("│") > 1) == self.NAME

    def test_as_json(self, works: Callable[..., str], pets: Context) -> None:
        join(pets, works("invite", "create", "pets"), self.NAME)
        entries = json.loads(works("audit", "list", "--json"))
        assert [entry["action"] for entry in entries] == ["federation.create", "invite.create", "client.join"]
        assert entries[2]["actor"] == f"client:{self.NAME}"
        assert json.loads(works("audit", "list", "--json", "--federation", "atlantis")) == []


class TestAudit:
    def test_list_and_export(self, works: Callable[..., str], pets: Context, tmp_path: Path) -> None:
        join(pets, works("invite", "create", "pets"), "north")
        listed = works("audit", "list")
        for action in ("federation.create", "invite.create", "client.join"):
            assert action in listed
        assert works("audit", "list", "--federation", "atlantis").count("federation.create") == 0
        assert works("audit", "export", "audit.csv") == "Wrote audit.csv.\n"
        assert works("audit", "export", "audit.jsonl") == "Wrote audit.jsonl.\n"
        rows = list(csv.DictReader(io.StringIO((tmp_path / "audit.csv").read_text())))
        objects = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
        assert [row["action"] for row in rows] == ["federation.create", "invite.create", "client.join"]
        assert [{key: str(value) for key, value in one.items()} for one in objects] == rows
        assert rows[0]["actor"].startswith("operator:")
        assert rows[0]["address"] == "command line"

    @pytest.mark.usefixtures("pets")
    def test_a_file_that_cannot_be_written(self, refuses: Callable[..., str]) -> None:
        assert refuses("audit", "export", "missing/audit.csv") == (
            "missing/audit.csv cannot be written: No such file or directory."
        )


class TestServeRefuses:
    def test_options_that_do_not_fit(
        self, refuses: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("DISTRANS_ADMIN_TOKEN", "an-admin-token-for-tests")
        cert, key, _ = write_certificate(tmp_path)
        (tmp_path / "text.pem").write_text("This is no certificate.")
        start = ("serve", "--port", "0")
        assert refuses(*start, "--tls-cert", cert) == "--tls-cert and --tls-key go together."
        assert "--log-format is text or json" in refuses(*start, "--log-format", "xml")
        assert "--log-level is debug" in refuses(*start, "--log-level", "loud")
        for words in (
            ("--tls-cert", "missing.pem", "--tls-key", key),
            ("--tls-cert", "text.pem", "--tls-key", "text.pem"),
            ("--tls-cert", key, "--tls-key", cert),
            ("--tls-cert", tmp_path, "--tls-key", key),
        ):
            message = refuses(*start, *words)
            assert "cannot be used" in message
            assert message.endswith("Give --tls-cert and --tls-key PEM files that belong together.")

    def test_admin_tokens_that_cannot_be_used(
        self, refuses: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("DISTRANS_ADMIN_TOKEN", "short")
        message = refuses("serve", "--port", "0")
        assert message.startswith("The admin token in DISTRANS_ADMIN_TOKEN has fewer than 16 characters.")
        assert "short" not in message
        monkeypatch.delenv("DISTRANS_ADMIN_TOKEN")
        monkeypatch.setenv("DISTRANS_ADMIN_TOKEN_FILE", str(tmp_path / "missing"))
        assert "does not exist." in refuses("serve", "--port", "0")
        monkeypatch.setenv("DISTRANS_ADMIN_TOKEN_FILE", str(tmp_path))
        assert "cannot be read: Is a directory." in refuses("serve", "--port", "0")


def write_certificate(folder: Path) -> tuple[Path, Path, Path]:
    """(chain, key, authority) of a certificate for this machine."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    chain, key, root = folder / "chain.pem", folder / "key.pem", folder / "authority.pem"
    chain.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(root)
    return chain, key, root


class TestLogs:
    def test_json_has_one_object_a_line(self, capsys: pytest.CaptureFixture[str], command: Command) -> None:
        """Also for an exception, whose traceback has many lines."""
        assert command  # puts the logging of this process back
        configure_logging("json", "info")
        try:
            raise ValueError("several\nlines")
        except ValueError:
            logging.getLogger("server").exception("it failed: %s", "so\nthere")
        (line,) = capsys.readouterr().err.splitlines()
        logged = json.loads(line)
        assert (logged["message"], logged["levelname"], logged["request_id"]) == ("it failed: so\nthere", "ERROR", "-")
        assert "ValueError: several\nlines" in logged["exc_info"]


class TestServe:
    def test_a_port_that_is_taken(self, command: Command, tmp_path: Path) -> None:
        """All that a first start makes is made before it listens: the database, the token, and where it is."""
        file = tmp_path / "distrans-data" / "admin-token"
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            outcomes = [command("serve", "--port", port) for _ in range(2)]
        place = file.relative_to(tmp_path)
        assert outcomes[0].out == f"A new admin token is in {place}, readable by you alone.\n"
        assert outcomes[1].out == ""
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        for outcome in outcomes:
            assert outcome.code == 1
            assert outcome.err.splitlines()[-1] == (
                f"error: Cannot listen on 127.0.0.1:{port}: Address already in use. "
                "Is another program there? Try --port."
            )
            assert not any(sign in outcome.err for sign in SIGNS_OF_A_CRASH)
        assert command("federation", "list").code == 0

    def test_a_start_with_what_an_earlier_one_made(self, works: Callable[..., str], tmp_path: Path) -> None:
        """The console script, until Ctrl-C."""
        data = tmp_path / "data"
        token, made = find_admin_token(data, create=True)
        assert made == data / "admin-token"
        (tmp_path / "plan.toml").write_text(PLAN)
        works("db", "upgrade", "--data-dir", data)
        works("federation", "create", "plan.toml", "--data-dir", data)
        process = LoggedProcess(["distrans-server", "serve", "--port", "0", "--data-dir", data, "--log-format", "json"])
        url = json.loads(process.wait_for_line(r'^.*"listening on .*$'))["message"].split()[-1]
        headers = {"Authorization": f"Bearer {token}", "X-Request-ID": "ticket-1"}
        with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as http:
            assert [view["name"] for view in http.get("/v1/federations").json()] == ["pets"]
        process.process.send_signal(signal.SIGINT)
        assert process.wait() == 0
        logged = [json.loads(line) for line in process.lines]
        assert {"asctime", "levelname", "name", "request_id", "message"} <= set.intersection(*map(set, logged))
        (access,) = [line for line in logged if line["request_id"] == "ticket-1"]
        assert (access["method"], access["path"], access["status"]) == ("GET", "/v1/federations", 200)
        assert not [line for line in logged if line["levelname"] in ("ERROR", "CRITICAL") or "exc_info" in line]
        assert token not in "\n".join(process.lines)
        assert made.read_text().strip() == token

    def test_several_processes_with_tls(self, postgres_url: str, tmp_path: Path) -> None:
        db_url = new_postgres_database(postgres_url)
        db = Database(db_url)
        schema.upgrade(db)
        db.close()
        chain, key, authority = write_certificate(tmp_path)
        options = ("--workers", "2", "--tls-cert", str(chain), "--tls-key", str(key))
        coordinator = CoordinatorProcess(db_url, tmp_path / "data", *options, ca_file=str(authority))
        assert coordinator.url.startswith("https://")
        plan = small_plan(rounds={"min_clients": 2})
        coordinator.create(plan)
        sites = [coordinator.join(plan, name, {"cat": 1}) for name in ("north", "south")]
        assert [site.task().action for site in sites] == ["train", "train"]
        with httpx.Client(trust_env=False) as stranger, pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY"):
            stranger.get(f"{coordinator.url}/healthz")
        give_up_at = time.monotonic() + 60
        while sum("Application startup complete" in line for line in coordinator.lines) < 2:
            assert coordinator.http.get("/healthz").status_code == 200  # the pace of this loop
            assert time.monotonic() < give_up_at
        assert coordinator.stop() == 0
        assert len([line for line in coordinator.lines if "Started server process" in line]) == 2
        assert not [line for line in coordinator.lines if "Traceback" in line or " ERROR " in line]

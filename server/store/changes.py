"""Announces the changes that agents wait for: to this process, and through PostgreSQL's NOTIFY to all others."""

import logging
import selectors
import socket
import threading
from typing import cast

import psycopg
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from server.store.database import Database, after_commit

_CHANNEL = "distrans_changes"
_IS_ANNOUNCED = "is_announced"  # key of Session.info
_RETRY_S = 1.0
logger = logging.getLogger(__name__)


def announce_change(session: Session) -> None:
    """Set `Database.change_committed` once this is committed, on PostgreSQL in every process that listens."""
    if session.info.get(_IS_ANNOUNCED):
        return
    session.info[_IS_ANNOUNCED] = True  # a session of `Database.write` lasts for one transaction
    after_commit(session, lambda db: db.change_committed.set())
    connection = session.connection()
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"NOTIFY {_CHANNEL}")


class ChangeListener:
    """A thread that sets `Database.change_committed` when a process on the same PostgreSQL database announces a change.

    After an outage it connects again. Whoever waits for changes should also poll: notifications of other processes may
    be lost meanwhile, and a connection pooler may never deliver any.
    """

    def __init__(self, db: Database) -> None:
        self._db = db
        self.is_listening = False
        self._stopping = threading.Event()
        self._stop_seen, self._stop_sent = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="listener", daemon=True)

    def start(self) -> None:
        """Start listening."""
        self._thread.start()

    def stop(self) -> None:
        """Stop listening."""
        self._stopping.set()
        self._stop_sent.close()  # the other end becomes readable
        self._thread.join()
        self._stop_seen.close()

    def _run(self) -> None:
        is_failing = False
        while not self._stopping.is_set():
            try:
                self._listen()
            except (psycopg.Error, SQLAlchemyError) as error:
                if self.is_listening or not is_failing:
                    logger.warning("listening for changes failed, polling until it works again: %s", error)
                is_failing = True
            finally:
                self.is_listening = False
            self._stopping.wait(_RETRY_S)

    def _listen(self) -> None:
        """Listen until told to stop; raise if the connection breaks."""
        pooled = self._db.engine.raw_connection()
        connection = cast(psycopg.Connection, pooled.driver_connection)
        pooled.detach()  # kept for as long as this process runs, it must not take the place of another one
        with connection, selectors.DefaultSelector() as selector:
            connection.autocommit = True
            connection.execute(f"LISTEN {_CHANNEL}")
            for source in (connection, self._stop_seen):
                selector.register(source, selectors.EVENT_READ)
            self.is_listening = True
            self._db.change_committed.set()  # something may have been announced before
            while True:
                selector.select()
                if self._stopping.is_set():
                    return
                if list(connection.notifies(timeout=0)):
                    self._db.change_committed.set()

"""The part of a service that survives a kill: sessions, models, requests, checkpoints.

A request is written before it is acknowledged, and its answer before a client can read it. A model
on disk is a snapshot and the requests since, which are computed again after a restart.
"""

import fcntl
import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

Status = Literal["queued", "done", "failed"]

_TABLES = """
CREATE TABLE IF NOT EXISTS made_with (name TEXT PRIMARY KEY, value TEXT);
CREATE TABLE IF NOT EXISTS sessions (
  id TEXT PRIMARY KEY, owner TEXT, created REAL, content TEXT);
CREATE TABLE IF NOT EXISTS models (
  id TEXT PRIMARY KEY, session TEXT, owner TEXT, created REAL, used REAL, content TEXT,
  snapshot INTEGER DEFAULT -1);
CREATE TABLE IF NOT EXISTS samplers (
  id TEXT PRIMARY KEY, session TEXT, owner TEXT, created REAL, path TEXT, next_clone INTEGER);
CREATE TABLE IF NOT EXISTS requests (
  id TEXT PRIMARY KEY, target TEXT, seq INTEGER, owner TEXT, kind TEXT, body BLOB, status TEXT,
  answer BLOB, form TEXT, created REAL);
CREATE INDEX IF NOT EXISTS by_target ON requests (target, seq);
CREATE TABLE IF NOT EXISTS checkpoints (
  path TEXT PRIMARY KEY, model TEXT, owner TEXT, kind TEXT, created REAL, expires REAL,
  size INTEGER, public INTEGER, content TEXT);
"""


class Store:
    """The tables, in one SQLite file. Any thread may call it; each call is one transaction."""

    def __init__(self, file: Path) -> None:
        """Opens the file, which is created if it does not exist.

        Raises:
          ValueError: if another process has opened a file in the same directory.
        """
        self._lock, self._directory = threading.Lock(), str(file.parent)
        self._alone = os.open(file.parent, os.O_RDONLY)
        try:
            fcntl.flock(self._alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._alone)
            raise ValueError(
                f"state_dir = {self._directory!r} belongs to a server that runs; end that one, or "
                "choose another directory"
            ) from None
        self._db = sqlite3.connect(file, check_same_thread=False, isolation_level=None)
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.executescript(_TABLES)

    def claim(self, given: Mapping[str, str]) -> None:
        """Notes what clients' models are made with: "precision", and digests of the base's files
        by their names.

        Raises:
          ValueError: if there are models or sampling clients that were made with something else.
        """
        with self.transaction() as db:
            known = dict(db.execute("SELECT name, value FROM made_with").fetchall())
            several = "SELECT EXISTS (SELECT 1 FROM models) OR EXISTS (SELECT 1 FROM samplers)"
            (used,) = db.execute(several).fetchone()
            changed = [name for name in {**known, **given} if known.get(name) != given.get(name)]
            if known and used and changed:
                was = f"; precision was {known['precision']!r}" if "precision" in changed else ""
                raise ValueError(
                    f"state_dir = {self._directory!r} has models or sampling clients that were "
                    f"made with another {', '.join(changed)}{was}; start the server as before, or "
                    "choose another directory"
                )
            db.execute("DELETE FROM made_with")
            db.executemany("INSERT INTO made_with VALUES (?, ?)", given.items())

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._db.close()
            os.close(self._alone)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Runs the block as one transaction, which an error undoes."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def all(self, query: str, *values: Any) -> list[dict[str, Any]]:
        """Returns the rows of a query."""
        with self._lock:
            return [dict(row) for row in self._db.execute(query, values)]

    def one(self, query: str, *values: Any) -> dict[str, Any] | None:
        """Returns the first row of a query, None without any."""
        return next(iter(self.all(query, *values)), None)

    def model(self, model: str) -> dict[str, Any]:
        """Returns the row of a model, which exists."""
        row = self.one("SELECT * FROM models WHERE id = ?", model)
        assert row is not None
        return row

    def insert(self, table: str, **values: Any) -> bool:
        """Inserts a row unless one with its key exists; returns True if it is new."""
        names, marks = ", ".join(values), ", ".join("?" * len(values))
        with self.transaction() as db:
            text = f"INSERT OR IGNORE INTO {table} ({names}) VALUES ({marks})"
            return db.execute(text, tuple(values.values())).rowcount > 0

    def update(self, table: str, key: str, **values: Any) -> None:
        """Changes columns of the row with this key."""
        name = "path" if table == "checkpoints" else "id"
        sets = ", ".join(f"{column} = ?" for column in values)
        with self.transaction() as db:
            db.execute(f"UPDATE {table} SET {sets} WHERE {name} = ?", (*values.values(), key))

    def accept(
        self, request: str, *, target: str, seq: int, owner: str, kind: str, body: bytes
    ) -> bool:
        """Writes a request; returns False if it was accepted before."""
        return self.insert(
            "requests",
            id=request,
            target=target,
            seq=seq,
            owner=owner,
            kind=kind,
            body=body,
            status="queued",
            created=time.time(),
        )

    def finish(self, request: str, answer: bytes, *, form: str, status: Status = "done") -> None:
        """Writes the answer to a request; the first one stays."""
        with self.transaction() as db:
            db.execute(
                "UPDATE requests SET status = ?, answer = ?, form = ? "
                "WHERE id = ? AND status = 'queued'",
                (status, answer, form, request),
            )

    def queued(self, request: str) -> bool:
        """Tells whether a request was accepted and has no answer."""
        found = self.one("SELECT status FROM requests WHERE id = ?", request)
        return found is not None and found["status"] == "queued"

    def cover(self, model: str, seq: int) -> None:
        """Notes that a model's snapshot includes its requests up to `seq`, whose bodies go."""
        with self.transaction() as db:
            db.execute("UPDATE models SET snapshot = ? WHERE id = ?", (seq, model))
            db.execute(
                "UPDATE requests SET body = NULL WHERE target = ? AND seq <= ?", (model, seq)
            )

    def forget_answers(self, *, before: float) -> None:
        """Deletes the answers to requests from before this time; ids stay, so that a repeated
        request is not computed again."""
        with self.transaction() as db:
            db.execute(
                "UPDATE requests SET answer = NULL WHERE status = 'done' AND created < ? "
                "AND answer IS NOT NULL",
                (before,),
            )
            db.execute(
                "UPDATE requests SET body = NULL WHERE kind = 'sample' AND status != 'queued' "
                "AND created < ? AND body IS NOT NULL",
                (before,),
            )


def dumps(content: Mapping[str, Any]) -> str:
    """Encodes a column that holds an object."""
    return json.dumps(content, separators=(",", ":"))

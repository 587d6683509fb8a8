"""An operator's commands in an empty folder, and what only sites can do to the same database."""

from collections.abc import Callable, Iterator
from pathlib import Path

from support.commands import Outcome

from server.service import enrollment
from server.service.context import Context
from server.store.database import Database
from shared.contract.messages import JoinRequest

PETS_PLAN = """
name = "pets"
classes = ["cat", "dog"]
image = { channels = 1, height = 14, width = 14 }
rounds = { count = 2, min_clients = 2 }
"""
CRASH_SIGNS = ("Traceback", 'File "')
Command = Callable[..., Outcome]
Succeed = Callable[..., str]  # runs a command that must succeed; returns its output
Refuse = Callable[..., str]  # runs a command that must fail; returns its error message


def pets_federation(succeed: Succeed, folder: Path) -> Iterator[Context]:
    """Create a federation in the default data folder; yield its database."""
    succeed("db", "upgrade")
    (folder / "plan.toml").write_text(PETS_PLAN)
    succeed("federation", "create", "plan.toml")
    db = Database(f"sqlite:///{folder / 'distrans-data' / 'distrans.db'}")
    yield Context(db)
    db.close()


def join_pets(ctx: Context, invite: str, name: str, **fields: str) -> str:
    """Enroll a site; return its token."""
    request = JoinRequest(name=name, class_counts={"cat": 3}, **fields)
    return enrollment.join(ctx, invite.strip(), request).token

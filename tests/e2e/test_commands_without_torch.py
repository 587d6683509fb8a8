"""Commands that only read or print start quickly: they work without torch and torchvision."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.desk import Desk, fedavg_plan, measured

from client_agent.settings import Identity
from client_agent.state.decisions import GateDecision
from client_agent.state.folder import StateFolder
from client_agent.state.kept_models import Bundle
from client_agent.state.records import CandidateRecord, ClassScores, Score, SiteReport
from client_agent.status import HoldoutSizes
from server.service.measurements import evaluations
from server.store.database import Database
from server.store.schema import upgrade
from shared.contract.measurements import Evaluation, PairedCounts
from shared.http.client_connection import Connection
from shared.learning.verdict import reach_verdict, wilson

SCORE = Score(correct=3, samples=4, accuracy=0.75, interval=wilson(3, 4))
REPORT = SiteReport(
    holdout=HoldoutSizes(validation=4, test=4, is_split=False),
    losses={},
    served=SCORE,
    federation=SCORE,
    alone=SCORE,
    verdict=reach_verdict(PairedCounts(samples=4, both=3, only_served=0, only_alone=0, neither=1), "alone"),
    classes=[ClassScores(label="cat", images=4, sensitivity=0.75, specificity=None, auc=None)],
)
# Runs the program once per list of arguments in one process; prints each outcome as a line of JSON.
_PROGRAM = """
import contextlib, importlib, io, json, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torchvision"):
            raise ImportError(f"{name} is not for this command")

sys.meta_path.insert(0, Refuse())
main = importlib.import_module(sys.argv[1] + ".__main__").main
for arguments in json.loads(sys.argv[2]):
    sys.argv, written = ["program", *arguments], io.StringIO()
    try:
        with contextlib.redirect_stdout(written):
            main()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    print(json.dumps([code, written.getvalue()]))
"""


def without_torch(package: str, folder: Path, *commands: str) -> dict[str, str]:
    """Run commands that must succeed; return what each prints."""
    words = json.dumps([command.split() for command in commands])
    result = subprocess.run(
        [sys.executable, "-c", _PROGRAM, package, words],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if not name.startswith("DISTRANS_")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    outcomes = [json.loads(line) for line in result.stdout.splitlines()]
    failed = [command for command, (code, _) in zip(commands, outcomes, strict=True) if code]
    assert not failed, result.stderr
    return {command: printed for command, (_, printed) in zip(commands, outcomes, strict=True)}


def test_coordinator_commands_do_not_load_torch(tmp_path: Path) -> None:
    (tmp_path / "distrans-data").mkdir()
    db = Database(f"sqlite:///{tmp_path / 'distrans-data' / 'distrans.db'}")
    upgrade(db)
    desk = Desk(db, fedavg_plan(min_clients=5), start=False)
    north, _ = [desk.join(name, cat=30) for name in ("north", "south")]
    paired = PairedCounts(samples=30, both=10, only_served=15, only_alone=1, neither=4)
    evaluations.submit(desk.ctx, north, 0, measured(25, samples=30, paired=paired))
    db.close()
    printed = without_torch(
        "server",
        tmp_path,
        *("--help", "--version", "federation create --help", "federation create --example"),
        *("federation list", "federation show pets", "federation show pets --json", "client list pets"),
        *("invite create pets", "client rotate pets north", "client revoke pets south"),
        *(f"federation {verb} pets" for verb in ("start", "pause", "resume", "cancel")),
        *("audit list", "audit export audit.csv", "db upgrade", "db backup copy.db"),
    )
    assert "north" in printed["client list pets"]
    assert "Joining pays off at 1 of 1 site; 1 more does not share its verdict." in printed["federation show pets"]
    assert json.loads(printed["federation show pets --json"])["clients"] == 2
    assert "cancelled" in printed["federation cancel pets"]
    assert "federation.resume" in (tmp_path / "audit.csv").read_text()


def test_agent_commands_that_only_read_do_not_load_torch(tmp_path: Path) -> None:
    state, scores = StateFolder(tmp_path / "distrans-agent"), Evaluation(samples=4, correct=3, loss_sum=1.0)
    connection = Connection(server="http://127.0.0.1:1")
    state.create(
        Identity(
            client_id="1",
            name="north",
            token="secret",
            federation="pets",
            plan=fedavg_plan(),
            connection=connection,
            data="images",
        )
    )
    bundle = Bundle(3, "d" * 64, {"w": torch.ones(3)}, {}, {}, {})
    state.models.save(bundle, keep=2)
    state.models.add_decision(
        GateDecision(
            model=3, digest=bundle.digest, fingerprint=bundle.fingerprint, with_offset=scores, without_offset=None
        )
    )
    record = CandidateRecord(name="alone", members=(), report=REPORT)
    name = state.models.save_record(bundle.key, record, {})
    state.models.add_decision(state.models.history()[-1].model_copy(update={"record": name, "candidate": "alone"}))
    commands = ("--help", "--version", "run --help", "status", "status --json", "status --classes", "unpin")
    printed = without_torch("client_agent", tmp_path, *commands)
    assert "north" in printed["status"]
    assert "This site does better alone; its own model is served" in printed["status"]
    assert "sensitivity" in printed["status --classes"]
    assert json.loads(printed["status --json"])["history"][0]["with_offset"] == pytest.approx(0.75)


def test_lab_help_does_not_load_torch(tmp_path: Path) -> None:
    without_torch("lab", tmp_path, "--help", "--version", "demo --help")

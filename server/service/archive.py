"""A federation as a folder or a zip: model, plan, history, offsets; and back."""

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import safetensors.torch
from pydantic import ValidationError
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError

from server.core.errors import Conflict, InvalidInput
from server.service import history, reports
from server.service.context import Actor, Context, client_record, facts_of, half_of, load_roster, plan_of, record
from server.service.federations import load, show
from server.service.progress import latest_model
from server.service.tasks import serving_basis
from server.store import blobs
from server.store.tables import Blob, Client, Federation, Model
from shared.methods.base import ServerState, Tensors
from shared.plan import FederationPlan, validate_plan
from shared.problems import WireError
from shared.wire import Spec, decode, encode

FORMAT = 1
_MAX_FILE_BYTES = 8 * 1024**3


def export(ctx: Context, actor: Actor, name: str, target: Path) -> Path:
    """Write the federation to a new folder, or to a zip when the target ends in .zip."""
    if target.exists():
        raise Conflict("target-exists", f"{target} exists already.", next_step="Name a new folder or .zip file.")
    with ctx.db.read() as session:
        load(session, name)  # a wrong name must leave no file behind
    try:
        _write(_files(ctx, name), target)
    except OSError as error:
        raise InvalidInput("unwritable", f"{target} cannot be written: {error.strerror}.") from error
    with ctx.db.write() as session:
        record(session, ctx, actor, "federation.export", name)
    return target


def _write(files: Iterator[tuple[str, bytes]], target: Path) -> None:
    if target.suffix == ".zip":
        partial = target.with_suffix(".zip.partial")
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:
            for file_name, data in files:
                archive.writestr(file_name, data)
        partial.replace(target)
        return
    for file_name, data in files:
        file = target / file_name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


def _files(ctx: Context, name: str) -> Iterator[tuple[str, bytes]]:
    view = show(ctx, name)
    with ctx.db.read() as session:
        federation = load(session, name)
        model = latest_model(session, federation)
        facts_json, roster_json = serving_basis(session, federation)
        csv = history.metrics_csv(session, federation)
        names = {row.id for row in load_roster(roster_json)}
        query = select(Client).where(Client.federation_id == federation.id).order_by(Client.joined_at)
        clients = {row.name: client_record(row) for row in session.execute(query).scalars() if row.name in names}
    private: Tensors = {}
    if model.private_blob_id:
        private_bytes = blobs.read_all(ctx.db, model.private_blob_id)
        private = safetensors.torch.load(private_bytes)
        yield "server-state.safetensors", private_bytes
    rounds = [round_.model_dump() for round_ in reports.rounds(ctx, name, None, 0, 1_000_000)]
    summary = {
        "format": FORMAT,
        "model": model.number,
        "rounds_done": view.rounds_done,
        "state": view.state,
        "best_accuracy": view.best_accuracy,
        "best_model": view.best_model,
        "stale_rounds": federation.stale_rounds,
    }
    yield "federation.json", json.dumps(summary, indent=2).encode()
    yield "plan.json", plan_of(federation.plan).model_dump_json(indent=2).encode()
    yield "history.csv", csv.encode()
    yield "history.json", json.dumps(rounds, indent=2).encode()
    yield "model.safetensors", blobs.read_all(ctx.db, model.blob_id)
    half, roster, facts = half_of(federation.plan), load_roster(roster_json), facts_of(facts_json)
    for client_name, client in sorted(clients.items()):
        tensors = half.personal(ServerState({}, private), client, roster, facts)
        if tensors:
            yield f"offsets/{client_name}.safetensors", encode(tensors)


def restore(ctx: Context, actor: Actor, source: Path, new_name: str | None = None) -> str:
    """Bring an exported federation back, paused or finished; sites join it again with new invites. Its name."""
    files = _read(source)
    try:
        summary = json.loads(files["federation.json"])
        plan = FederationPlan.model_validate_json(files["plan.json"])
        if summary["format"] != FORMAT:
            raise InvalidInput("unknown-format", f"{source} was written in format {summary['format']}, not {FORMAT}.")
        number, done = int(summary["model"]), int(summary["rounds_done"])
    except (KeyError, ValueError, TypeError, ValidationError) as error:
        raise InvalidInput("not-an-export", f"{source} is not an exported federation: {error}.") from error
    if new_name:
        plan = validate_plan(plan.model_dump() | {"name": new_name})
    plan_json, now = plan.model_dump_json(), ctx.clock()
    start = half_of(plan_json).initial_state()
    try:
        shared, _ = decode(files.get("model.safetensors", b""), Spec.of(start.shared))
    except WireError as error:
        raise InvalidInput("not-an-export", f"The model in {source} does not fit its plan: {error}") from error
    model_id = blobs.store(ctx.db, encode(shared, {"plan": plan_json, "model": str(number)}), now)
    private_bytes = files.get("server-state.safetensors")
    private_id = blobs.store(ctx.db, private_bytes, now) if private_bytes else None
    finished = done >= plan.rounds.count
    try:
        with ctx.db.write() as session:
            federation = Federation(
                name=plan.name,
                plan=plan_json,
                state="finished" if finished else "paused",
                reason=f"imported after round {number}",
                created_at=now,
                state_since=now,
                completed_rounds=done,
                best_accuracy=summary.get("best_accuracy"),
                best_model=summary.get("best_model"),
                stale_rounds=summary.get("stale_rounds", 0),
                version=0,
            )
            session.add(federation)
            session.flush()
            session.add(
                Model(
                    federation_id=federation.id,
                    number=number,
                    blob_id=session.get_one(Blob, model_id).id,
                    private_blob_id=private_id,
                    created_at=now,
                )
            )
            record(session, ctx, actor, "federation.import", plan.name)
    except IntegrityError as error:
        raise Conflict(
            "name-taken", f"There is a federation {plan.name!r} already.", next_step="Choose another with --name."
        ) from error
    return plan.name


def _read(source: Path) -> dict[str, bytes]:
    wanted = ("federation.json", "plan.json", "model.safetensors", "server-state.safetensors")
    try:
        if source.is_dir():
            return {name: (source / name).read_bytes() for name in wanted if (source / name).is_file()}
        with zipfile.ZipFile(source) as archive:
            infos = [info for info in archive.infolist() if info.filename in wanted]
            if any(info.file_size > _MAX_FILE_BYTES for info in infos):
                raise InvalidInput("too-large", f"{source} holds a file of more than {_MAX_FILE_BYTES} bytes.")
            return {info.filename: archive.read(info) for info in infos}
    except (OSError, zipfile.BadZipFile) as error:
        raise InvalidInput("unreadable", f"{source} cannot be read: {error}.") from error

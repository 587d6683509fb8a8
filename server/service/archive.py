"""Exports a federation to a folder or zip (model, plan, history, offsets), and imports it again."""

import json
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError

from server.compute.initial_weights import MAX_FILE_BYTES
from server.compute.torch_calls import torch_calls
from server.core.errors import Conflict, Gone, InvalidInput
from server.core.lifecycle import ENDED, FederationState
from server.service.audit import record_action
from server.service.context import Actor, Context, client_record, plan_of
from server.service.federations import name_taken, show
from server.service.measurements import reports
from server.service.measurements.metrics_csv import metrics_csv
from server.service.method_calls import personal_tensors
from server.service.queries import latest_model, load_federation, serving_context
from server.service.retention import require_blob_id
from server.store import blobs
from server.store.objects.store import ObjectMissing
from server.store.tables import Client, Federation, Model, Round
from shared.contract.errors import WireError
from shared.contract.plan import read_stored_plan, validate_plan
from shared.tensors.arrays import Arrays
from shared.tensors.checker import claimed_spec
from shared.tensors.wire import Encoded, decode, encode

FORMAT = 1
_SEEDED = {"initial_offset"}  # derived from the plan and the client's name; its trained value never leaves the site
Parsed = TypeVar("Parsed", bound=BaseModel)
_Count = Annotated[int, Field(ge=0, lt=2**31)]


class Summary(BaseModel):
    """Contents of federation.json."""

    model_config = ConfigDict(frozen=True)
    format: int
    model: _Count
    rounds_done: _Count
    failed_since: int = Field(0, ge=0, le=10_000, description="Rounds that failed after the newest model.")
    state: FederationState
    reason: str = Field("", max_length=10_000)
    best_accuracy: float | None = Field(None, ge=0, le=1)
    best_model: _Count | None = None
    stale_rounds: _Count = 0
    server_state: bool = Field(False, description="Whether there is a server-state.safetensors.")


def export(ctx: Context, actor: Actor, name: str, target: Path) -> Path:
    """Write a snapshot of the federation to a new folder, or to a zip file if the target ends in .zip.

    The target appears only once it is complete.
    """
    if target.exists():
        raise Conflict("target-exists", f"{target} already exists.", next_step="Choose a new folder or .zip file.")
    partial = target.with_name(target.name + ".partial")
    try:
        with ctx.db.snapshot() as moment:
            _write(_files(replace(ctx, db=moment), name), partial, as_zip=target.suffix == ".zip")
        partial.replace(target)
    except OSError as error:
        raise InvalidInput("unwritable", f"Cannot write {target}: {error.strerror}.") from error
    except ObjectMissing as error:  # the snapshot covers rows, not objects
        raise Gone(
            "tensors-dropped",
            f"The export needs object {error.key}, which is not in the object store.",
            next_step="Export again: a round that just ended may have removed it.",
        ) from error
    finally:
        with suppress(OSError):
            _delete(partial)
    with ctx.db.write() as session:
        record_action(session, ctx, actor, "federation.export", name)
    return target


def _write(files: Iterator[tuple[str, bytes]], target: Path, *, as_zip: bool) -> None:
    _delete(target)  # left by an export that was killed
    if as_zip:
        with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
            for file_name, data in files:
                archive.writestr(file_name, data)
        return
    for file_name, data in files:
        file = target / file_name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


def _delete(partial: Path) -> None:
    if partial.is_dir():
        shutil.rmtree(partial)
    else:
        partial.unlink(missing_ok=True)


def _files(ctx: Context, name: str) -> Iterator[tuple[str, bytes]]:
    """Yield all files of an export; `ctx` must be on a snapshot so that they are consistent."""
    view = show(ctx, name)
    with ctx.db.read() as session:
        federation = load_federation(session, name)
        model = latest_model(session, federation)
        model_id = require_blob_id(session, model)
        context = serving_context(session, federation)
        names = {client.id for client in context.roster}
        query = select(Client).where(Client.federation_id == federation.id).order_by(Client.joined_at)
        clients = {row.name: client_record(row) for row in session.execute(query).scalars() if row.name in names}
        failed = select(func.count()).where(
            Round.federation_id == federation.id, Round.number > model.number, Round.state == "failed"
        )
        summary = Summary(
            format=FORMAT,
            model=model.number,
            rounds_done=view.rounds_done,
            failed_since=session.execute(failed).scalar_one(),
            state=view.state,
            reason=federation.reason,
            best_accuracy=view.best_accuracy,
            best_model=view.best_model,
            stale_rounds=federation.stale_rounds,
            server_state=model.private_blob_id is not None,
        )
    if model.private_blob_id:
        yield "server-state.safetensors", blobs.read_all(ctx.db, model.private_blob_id)
    rounds = [round_.model_dump() for round_ in reports.rounds(ctx, name, None, 0, 1_000_000)]
    yield "federation.json", summary.model_dump_json(indent=2).encode()
    yield "plan.json", plan_of(federation.plan).model_dump_json(indent=2).encode()
    yield "history.csv", "".join(metrics_csv(ctx, name, None)).encode()
    yield "history.json", json.dumps(rounds, indent=2).encode()
    yield "model.safetensors", blobs.read_all(ctx.db, model_id)
    for client_name, client in sorted(clients.items()):
        tensors = personal_tensors(ctx.db, federation.plan, model.private_blob_id, client, context)
        if tensors.keys() - _SEEDED:
            yield f"offsets/{client_name}.safetensors", encode(tensors)


def restore(ctx: Context, actor: Actor, source: Path, new_name: str | None = None) -> str:
    """Import an exported federation and return its name. It is paused unless it had ended; sites join again.

    History stays in the archive, but numbers of rounds that failed after the newest model are not reused.
    """
    files = _read(source)
    summary = _parsed(Summary.model_validate_json, files, "federation.json", source)
    if summary.format != FORMAT:
        raise InvalidInput("unknown-format", f"{source} has format {summary.format}; this release reads {FORMAT}.")
    plan = _parsed(read_stored_plan, files, "plan.json", source)
    if new_name:
        plan = validate_plan(plan.model_dump() | {"name": new_name})
    plan_json, now, number = plan.model_dump_json(), ctx.clock(), summary.model
    shared, private = _tensors(files, summary, plan_json, source)
    model_id = blobs.store(ctx.db, Encoded(shared, {"plan": plan_json, "model": str(number)}))
    private_id = blobs.store(ctx.db, Encoded(private)) if private else None
    ended = summary.state in ENDED
    try:
        with ctx.db.write() as session:
            federation = Federation(
                name=plan.name,
                plan=plan_json,
                state=summary.state if ended else "paused",
                reason=summary.reason if ended else f"imported after round {number}",
                created_at=now,
                state_since=now,
                completed_rounds=summary.rounds_done,
                best_accuracy=summary.best_accuracy,
                best_model=summary.best_model,
                stale_rounds=summary.stale_rounds,
                version=0,
            )
            session.add(federation)
            session.flush()
            session.add(
                Model(
                    federation_id=federation.id,
                    number=number,
                    blob_id=model_id,
                    private_blob_id=private_id,
                    rounds_done=summary.rounds_done,
                    created_at=now,
                )
            )
            session.add_all(
                Round(
                    federation_id=federation.id,
                    number=number + place,
                    base_model=number,
                    state="failed",
                    reason="failed before the federation was exported",
                    facts="{}",
                    roster="[]",
                    opened_at=now,
                    closed_at=now,
                )
                for place in range(1, summary.failed_since + 1)
            )
            record_action(session, ctx, actor, "federation.import", plan.name)
    except IntegrityError as error:
        raise name_taken(plan.name, "Choose another name with --name.") from error
    return plan.name


def _parsed(parse: Callable[[bytes], Parsed], files: dict[str, bytes], name: str, source: Path) -> Parsed:
    try:
        return parse(files.get(name, b""))
    except ValidationError as error:
        place, what = error.errors()[0]["loc"], error.errors()[0]["msg"]
        raise InvalidInput(
            "not-an-export",
            f"{source} is not an exported federation: {'.'.join(map(str, (name, *place)))}: {what}.",
            next_step="Use a folder or .zip file written by `federation export`.",
        ) from error


def _tensors(files: dict[str, bytes], summary: Summary, plan_json: str, source: Path) -> tuple[Arrays, Arrays]:
    """Return the model and the private state; raise unless they fit the plan's method."""
    place, data = "model", files.get("model.safetensors", b"")
    try:
        shared, _ = decode(data, torch_calls().model_spec(plan_json).of_model())
        place, data = "server state", files.get("server-state.safetensors", b"")
        private: Arrays = {}
        if data:
            private, _ = decode(data, torch_calls().private_spec(plan_json, claimed_spec(data)))
        if summary.server_state and not private:
            raise WireError("server-state.safetensors is missing or empty.")
    except WireError as error:
        raise InvalidInput("not-an-export", f"The {place} in {source} does not match its plan: {error}") from error
    return shared, private


def _read(source: Path) -> dict[str, bytes]:
    wanted = ("federation.json", "plan.json", "model.safetensors", "server-state.safetensors")
    try:
        if source.is_dir():
            return {name: (source / name).read_bytes() for name in wanted if (source / name).is_file()}
        with zipfile.ZipFile(source) as archive:
            infos = [info for info in archive.infolist() if info.filename in wanted]
            if any(info.file_size > MAX_FILE_BYTES for info in infos):
                raise InvalidInput("too-large", f"{source} contains a file larger than {MAX_FILE_BYTES} bytes.")
            return {info.filename: archive.read(info) for info in infos}
    except (OSError, zipfile.BadZipFile) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise InvalidInput("unreadable", f"Cannot read {source}: {cause}.") from error

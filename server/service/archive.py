"""A federation as a folder or a zip: model, plan, history, offsets; and back."""

import json
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar

import safetensors.torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError

from server.core.errors import Conflict, Gone, InvalidInput
from server.core.rounds import ENDED, FederationState
from server.service import reports
from server.service.context import Actor, Context, client_record, facts_of, half_of, load_roster, plan_of, record
from server.service.federations import load, show
from server.service.models import blob_of
from server.service.progress import latest_model
from server.service.tasks import serving_basis
from server.store import blobs
from server.store.objects import ObjectMissing
from server.store.tables import Client, Federation, Model, Round
from shared.methods.base import ServerHalf, ServerState, Tensors
from shared.plan import read_stored_plan, validate_plan
from shared.problems import WireError
from shared.wire import Spec, decode, encode

FORMAT = 1
_SEEDED = {"initial_offset"}  # follows from the plan and the client's name; what became of it only the site knows
_MAX_FILE_BYTES = 8 * 1024**3
Parsed = TypeVar("Parsed", bound=BaseModel)
_Count = Annotated[int, Field(ge=0, lt=2**31)]


class Summary(BaseModel):
    """federation.json: how the federation stood."""

    model_config = ConfigDict(frozen=True)
    format: int
    model: _Count
    rounds_done: _Count
    failed_since: int = Field(0, ge=0, le=10_000, description="Rounds that failed after the one that made the model.")
    state: FederationState
    reason: str = Field("", max_length=10_000)
    best_accuracy: float | None = Field(None, ge=0, le=1)
    best_model: _Count | None = None
    stale_rounds: _Count = 0
    server_state: bool = Field(False, description="Whether server-state.safetensors belongs to it.")


def export(ctx: Context, actor: Actor, name: str, target: Path) -> Path:
    """Write the federation, as it is at one moment, to a new folder, or to a zip when the target ends in .zip.

    The target is there only once it is whole.
    """
    if target.exists():
        raise Conflict("target-exists", f"{target} exists already.", next_step="Name a new folder or .zip file.")
    partial = target.with_name(target.name + ".partial")
    try:
        with ctx.db.snapshot() as moment:
            _write(_files(replace(ctx, db=moment), name), partial, as_zip=target.suffix == ".zip")
        partial.replace(target)
    except OSError as error:
        raise InvalidInput("unwritable", f"{target} cannot be written: {error.strerror}.") from error
    except ObjectMissing as error:  # the snapshot keeps rows, not objects
        raise Gone(
            "tensors-dropped",
            f"The object {error.key}, which the export needs, is not in the object store.",
            next_step="A round that ended meanwhile may have removed it: export again.",
        ) from error
    finally:
        with suppress(OSError):
            _discard(partial)
    with ctx.db.write() as session:
        record(session, ctx, actor, "federation.export", name)
    return target


def _write(files: Iterator[tuple[str, bytes]], target: Path, *, as_zip: bool) -> None:
    _discard(target)  # left over from an export that was killed
    if as_zip:
        with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
            for file_name, data in files:
                archive.writestr(file_name, data)
        return
    for file_name, data in files:
        file = target / file_name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


def _discard(partial: Path) -> None:
    if partial.is_dir():
        shutil.rmtree(partial)
    else:
        partial.unlink(missing_ok=True)


def _files(ctx: Context, name: str) -> Iterator[tuple[str, bytes]]:
    """All files of an export; `ctx` must be on a snapshot, or they may not fit together."""
    view = show(ctx, name)
    with ctx.db.read() as session:
        federation = load(session, name)
        model = latest_model(session, federation)
        model_id = blob_of(session, model)
        facts_json, roster_json = serving_basis(session, federation)
        names = {row.id for row in load_roster(roster_json)}
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
    private: Tensors = {}
    if model.private_blob_id:
        private_bytes = blobs.read_all(ctx.db, model.private_blob_id)
        private = safetensors.torch.load(private_bytes)
        yield "server-state.safetensors", private_bytes
    rounds = [round_.model_dump() for round_ in reports.rounds(ctx, name, None, 0, 1_000_000)]
    yield "federation.json", summary.model_dump_json(indent=2).encode()
    yield "plan.json", plan_of(federation.plan).model_dump_json(indent=2).encode()
    yield "history.csv", "".join(reports.metrics_csv(ctx, name, None)).encode()
    yield "history.json", json.dumps(rounds, indent=2).encode()
    yield "model.safetensors", blobs.read_all(ctx.db, model_id)
    half, roster, facts = half_of(federation.plan), load_roster(roster_json), facts_of(facts_json)
    for client_name, client in sorted(clients.items()):
        tensors = half.personal(ServerState({}, private), client, roster, facts)
        if tensors.keys() - _SEEDED:
            yield f"offsets/{client_name}.safetensors", encode(tensors)


def restore(ctx: Context, actor: Actor, source: Path, new_name: str | None = None) -> str:
    """Bring an exported federation back: ended as it was, else paused; sites join it again with new invites. Its name.

    History stays in the archive, but the number of a round that failed since the last model is not given again.
    """
    files = _read(source)
    summary = _parsed(Summary.model_validate_json, files, "federation.json", source)
    if summary.format != FORMAT:
        raise InvalidInput("unknown-format", f"{source} was written in format {summary.format}, not {FORMAT}.")
    plan = _parsed(read_stored_plan, files, "plan.json", source)
    if new_name:
        plan = validate_plan(plan.model_dump() | {"name": new_name})
    plan_json, now, number = plan.model_dump_json(), ctx.clock(), summary.model
    shared, private = _tensors(files, summary, half_of(plan_json), source)
    model_id = blobs.store(ctx.db, encode(shared, {"plan": plan_json, "model": str(number)}))
    private_id = blobs.store(ctx.db, encode(private)) if private else None
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
                    reason="it failed before the federation was exported",
                    facts="{}",
                    roster="[]",
                    opened_at=now,
                    closed_at=now,
                )
                for place in range(1, summary.failed_since + 1)
            )
            record(session, ctx, actor, "federation.import", plan.name)
    except IntegrityError as error:
        raise Conflict(
            "name-taken", f"There is a federation {plan.name!r} already.", next_step="Choose another with --name."
        ) from error
    return plan.name


def _parsed(parse: Callable[[bytes], Parsed], files: dict[str, bytes], name: str, source: Path) -> Parsed:
    try:
        return parse(files.get(name, b""))
    except ValidationError as error:
        place, what = error.errors()[0]["loc"], error.errors()[0]["msg"]
        raise InvalidInput(
            "not-an-export",
            f"{source} is not an exported federation: {'.'.join(map(str, (name, *place)))}: {what}.",
            next_step="Name a folder or a .zip that `federation export` wrote.",
        ) from error


def _tensors(files: dict[str, bytes], summary: Summary, half: ServerHalf, source: Path) -> tuple[Tensors, Tensors]:
    """The model and the private state, if they are what the plan's method works with."""
    place, data = "model", files.get("model.safetensors", b"")
    try:
        shared, _ = decode(data, Spec.of(half.initial_state().shared).of_model())
        place, data = "server state", files.get("server-state.safetensors", b"")
        private: Tensors = {}
        if data:
            private, _ = decode(data, half.private_spec(Spec.of(safetensors.torch.load(data))))
        if summary.server_state and not private:
            raise WireError("server-state.safetensors is missing or empty.")
    except (WireError, SafetensorError) as error:
        raise InvalidInput("not-an-export", f"The {place} in {source} does not fit its plan: {error}") from error
    return shared, private


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

"""`distrans-agent predict`, `pin`, `unpin` and `export`: commands about the models that a site keeps."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from client_agent.commands.options import STATE, Json, State
from client_agent.commands.output import out
from shared.contract.errors import DistransError


def predict(
    images: Annotated[
        list[Path], typer.Argument(metavar="IMAGE", help="Image files: PNG, JPEG, TIFF, BMP, GIF, WebP, PNM.")
    ],
    state: State = STATE,
    top_k: Annotated[int, typer.Option(min=1, metavar="NUMBER", help="Number of classes to list per image.")] = 3,
    as_json: Json = False,
) -> None:
    """Classify images with the model that /predict would use. The agent need not be running."""
    from client_agent.data.images import TRAINING_FORMATS, decode, to_tensor
    from client_agent.serving.model import load_served
    from client_agent.state.folder import StateFolder
    from shared.learning.runtime import Runtime

    folder = StateFolder(state)
    identity = folder.identity()
    _, model = load_served(folder, identity, Runtime(), folder.load_prior())
    title = f"Model {model.key.number} as {model.candidate.name}"
    table = Table("image", "class", "probability", "runners-up", title=title)
    answers = []
    for path in images:
        try:
            tensor = to_tensor(decode(path, TRAINING_FORMATS), identity.plan.image)
        except DistransError as error:
            raise DistransError(f"{path}: {error}") from error
        (ranked,) = model.rank(model.predict(tensor[None]), top_k)
        top = [{"label": one.label, "probability": one.probability} for one in ranked]
        answers.append({"image": str(path), "top_k": top})
        rest = ", ".join(f"{one.label} {one.probability:.1%}" for one in ranked[1:])
        table.add_row(str(path), ranked[0].label, f"{ranked[0].probability:.1%}", rest)
    if as_json:
        about = {"model": model.key.number, "candidate": model.candidate.name, "prior": model.applied_prior()}
        typer.echo(json.dumps({**about, "predictions": answers}, indent=2))
    else:
        out.print(table)


def pin(
    number: Annotated[int, typer.Argument(metavar="ROUND", help="Number of a kept model, such as 4.")],
    state: State = STATE,
) -> None:
    """Make /predict use one of the kept models until unpinned. A running agent switches at once."""
    from client_agent.state.folder import StateFolder

    StateFolder(state).models.pin(number)
    out.print(f"/predict is pinned to model {number}.")


def unpin(state: State = STATE) -> None:
    """Let /predict follow the newest approved model again."""
    from client_agent.state.folder import StateFolder

    StateFolder(state).models.pin(None)
    out.print("/predict follows the newest approved model.")


def export(
    target: Annotated[
        Path, typer.Argument(metavar="FILE", help="Target: .safetensors for tensors, .pt2 for a torch.export program.")
    ],
    state: State = STATE,
    number: Annotated[
        int | None,
        typer.Option("--round", metavar="ROUND", help="Number of a kept model (default: the one /predict would use)."),
    ] = None,
) -> None:
    """Write what this site serves to a single file: all of its models, the offset, the prior and the temperature."""
    from client_agent.serving.export import export_program, export_safetensors
    from client_agent.serving.model import load_model, load_served
    from client_agent.state.folder import StateFolder
    from shared.learning.runtime import Runtime

    writers = {".safetensors": export_safetensors, ".pt2": export_program}
    if target.suffix not in writers:
        raise DistransError(f"{target} must end in .safetensors or .pt2.")
    if not target.parent.is_dir():  # before spending seconds on building the program
        raise DistransError(f"{target.parent} is not a folder.", next_step="Create it, or use another path.")
    folder = StateFolder(state)
    identity = folder.identity()
    prior = folder.load_prior()
    if number is None:
        bundle, model = load_served(folder, identity, Runtime(), prior)
    else:
        bundle, model = load_model(folder, identity, folder.models.find(number), Runtime(), prior)
    try:
        writers[target.suffix](identity, bundle, model, target)
    except OSError as error:
        raise DistransError(
            f"{target} cannot be written: {error.strerror}.", next_step="Use a path that you may write to."
        ) from error
    out.print(f"Wrote model {bundle.number} as {model.candidate.name} to {target}.", highlight=False)

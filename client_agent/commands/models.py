"""`distrans-agent predict`, `pin`, `unpin` and `export`: what to do with the models that a site keeps."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from client_agent.commands.arguments import STATE, Json, State
from client_agent.commands.output import out
from shared.problems import DistransError


def predict(
    images: Annotated[list[Path], typer.Argument(help="PNG or JPEG files.")],
    state: State = STATE,
    top_k: Annotated[int, typer.Option(min=1, help="Classes to list for each image.")] = 3,
    as_json: Json = False,
) -> None:
    """Classify images with the model that /predict would serve; needs no running agent."""
    from client_agent import serving
    from client_agent.images import TRAINING_FORMATS, decode, to_tensor
    from client_agent.state import StateFolder
    from shared.runtime import Runtime

    folder = StateFolder(state)
    identity = folder.identity()
    _, model = serving.load_served(folder, identity, Runtime())
    table = Table("image", "class", "probability", "then", title=f"Model {model.number} with this site's offset")
    answers = []
    for path in images:
        try:
            tensor = to_tensor(decode(path, TRAINING_FORMATS), identity.plan.image)
        except DistransError as error:
            raise DistransError(f"{path}: {error}") from error
        values, places = model.own(tensor[None]).softmax(dim=1)[0].topk(min(top_k, len(model.classes)))
        ranked = [(model.classes[int(place)], float(value)) for value, place in zip(values, places, strict=True)]
        answers.append(
            {"image": str(path), "top_k": [{"label": label, "probability": value} for label, value in ranked]}
        )
        rest = ", ".join(f"{label} {value:.1%}" for label, value in ranked[1:])
        table.add_row(str(path), ranked[0][0], f"{ranked[0][1]:.1%}", rest)
    if as_json:
        typer.echo(json.dumps({"model": model.number, "predictions": answers}, indent=2))
    else:
        out.print(table)


def pin(number: Annotated[int, typer.Argument(help="A model that is kept; see status.")], state: State = STATE) -> None:
    """Make /predict answer with an older model, until `unpin`; a running agent follows at once."""
    from client_agent.state import StateFolder

    StateFolder(state).pin(number)
    out.print(f"/predict is pinned to model {number}.")


def unpin(state: State = STATE) -> None:
    """Let /predict follow the newest model again."""
    from client_agent.state import StateFolder

    StateFolder(state).pin(None)
    out.print("/predict follows the newest model.")


def export(
    target: Annotated[Path, typer.Argument(help="A file ending in .safetensors or .pt2 (torch.export).")],
    state: State = STATE,
    number: Annotated[
        int | None, typer.Option("--round", help="Another model than the one that /predict serves.")
    ] = None,
) -> None:
    """Write model and offset as one file."""
    from client_agent.export import export_program, export_safetensors
    from client_agent.serving import load_served
    from client_agent.state import StateFolder
    from shared.runtime import Runtime

    writers = {".safetensors": export_safetensors, ".pt2": export_program}
    if target.suffix not in writers:
        raise DistransError(f"{target} must end in .safetensors or .pt2.")
    if not target.parent.is_dir():  # before seconds go into building the program
        raise DistransError(f"{target.parent} is not a folder.", next_step="Create it, or name another file.")
    folder = StateFolder(state)
    identity = folder.identity()
    bundle = load_served(folder, identity, Runtime())[0] if number is None else folder.load_bundle(number)
    try:
        writers[target.suffix](identity, bundle, target)
    except OSError as error:
        raise DistransError(
            f"{target} cannot be written: {error.strerror}.", next_step="Name a file in a folder that you may write to."
        ) from error
    out.print(f"Wrote model {bundle.number} with this site's offset to {target}.")

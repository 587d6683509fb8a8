"""The REST APIs as Markdown, from the OpenAPI documents of the programs."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

Json = Mapping[str, Any]
_COMMON = {"400", "422", "429", "500", "503", "507"}  # explained once, at the top of the page


def coordinator_document() -> Json:
    """Return the OpenAPI document of a coordinator."""
    from server.http.app import create_app
    from server.service.settings import Settings
    from server.store.database import Database
    from server.store.schema import upgrade

    with TemporaryDirectory() as folder:
        url = f"sqlite:///{Path(folder) / 'empty.db'}"
        db = Database(url)
        upgrade(db)
        db.close()
        app = create_app(Settings(url, "never-used-admin-token", None))
        document = app.openapi()
        app.state.ctx.db.close()
    return document


def agent_document() -> Json:
    """Return the OpenAPI document of an agent's web service."""
    from client_agent.serving.queue import PredictionQueue
    from client_agent.settings import ServeOptions
    from client_agent.web.app import create_app
    from client_agent.web.site import Site
    from shared.contract.plan import validate_plan

    plan = validate_plan({"name": "any", "classes": ["a", "b"]})
    queue = PredictionQueue(max_waiting=1, max_batch=1, threads=1)  # only requests use it
    return create_app(plan, queue, ServeOptions(), Site(dict)).openapi()


def render_api(document: Json) -> str:
    """Return a section per group of calls and one for the JSON objects, at the second level of headings."""
    parts = []
    for tag in document["tags"]:
        parts.append(f"## {tag['name'].capitalize()}\n\n{tag['description']}\n")
        parts += [
            _operation(f"{method.upper()} {path}", operation)
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
            if tag["name"] in operation.get("tags", ())
        ]
    parts.append("## Objects\n")
    parts += [_schema(name, schema) for name, schema in sorted(document["components"]["schemas"].items())]
    return "\n".join(parts)


def _operation(call: str, operation: Json) -> str:
    lines = [f"### `{call}`", "", operation["description"], "", f"Operation id: `{operation['operationId']}`", ""]
    if parameters := operation.get("parameters"):
        rows = [
            (
                f"`{item['name']}`",
                item["in"],
                _type(item["schema"]),
                _yes(item.get("required")),
                item.get("description"),
            )
            for item in parameters
        ]
        lines += _table(("parameter", "in", "type", "required", "meaning"), rows)
    if body := operation.get("requestBody"):
        lines += ["Body:", "", *(f"- `{kind}`: {_content(item)}" for kind, item in body["content"].items()), ""]
    answers, problems = [], []
    for status, answer in operation["responses"].items():
        if status < "400":
            types = dict.fromkeys(map(_content, answer.get("content", {}).values()))
            answers.append(": ".join(filter(None, [status, " or ".join(types)])))
        elif status not in _COMMON:
            problems.append(status)
    lines += [f"Returns {', '.join(answers)}", ""]
    if problems:
        lines += [f"Problems: {', '.join(problems)}", ""]
    return "\n".join(lines)


def _schema(name: str, schema: Json) -> str:
    lines = [f"### {name}", "", schema.get("description", ""), ""]
    required = schema.get("required", ())
    rows = [
        (f"`{key}`", _type(item), _yes(key in required), item.get("description"))
        for key, item in schema.get("properties", {}).items()
    ]
    return "\n".join(lines + _table(("field", "type", "required", "meaning"), rows))


def _content(item: Json) -> str:
    return _type(item["schema"]) if "schema" in item else "bytes"


def _type(schema: Json) -> str:
    """Return a schema in a few words, with links to named ones."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(map(_type, options)))
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = str(schema.get("type", "any"))
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if kind == "string" and schema.get("format") == "binary":
        return "bytes"
    return " ".join([kind, *_bounds(schema)])


def _bounds(schema: Json) -> Iterator[str]:
    for key, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<")):
        if key in schema:
            yield f"{sign} {schema[key]:g}"
    if "maxLength" in schema:
        yield f"≤ {schema['maxLength']} characters"


def _yes(value: bool | None) -> str:
    return "yes" if value else ""


def _table(head: tuple[str, ...], rows: Sequence[tuple[str | None, ...]]) -> list[str]:
    if not rows:
        return []
    cells = [" | ".join(" ".join((cell or "").split()).replace("|", "\\|") for cell in row) for row in rows]
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {row} |" for row in cells), ""]

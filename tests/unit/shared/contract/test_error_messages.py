"""Invalid plans and bodies get readable messages with the value and a suggestion, not pydantic's own."""

import math
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, StringConstraints, TypeAdapter, ValidationError

from shared.contract.error_messages import describe_error
from shared.contract.errors import PlanError
from shared.contract.messages import Digest, JoinRequest, RollbackRequest, ShortText
from shared.contract.method_options import METHOD_NAMES, MethodOptions
from shared.contract.plan import FederationPlan, parse_plan, validate_plan

MINIMAL: dict[str, Any] = {"name": "birds", "classes": ["owl", "finch"]}
PYDANTIC = re.compile(
    "(Input|String|List|Tuple|Dictionary|Value|Field|Extra inputs|Unable|Object|Number)s? "
    "(should|error|required|are not|to |missing)|valid (integer|number|string|boolean|list|tuple|dictionary|object)"
)


def errors_of(data: Any) -> list[str]:
    with pytest.raises(PlanError) as caught:
        validate_plan(data)
    return [line.strip() for line in caught.value.message.splitlines()[1:]]


@pytest.mark.parametrize(
    ("table", "key", "value", "expected"),
    [
        ("image", "hight", 32, "image.hight: unknown setting; did you mean height?"),
        ("image", "Height", 32, "image.Height: unknown setting; did you mean height?"),
        ("image", "height", 0, "image.height: must be at least 1, but is 0"),
        ("image", "height", 5000, "image.height: must be at most 4096, but is 5000"),
        ("image", "height", 64.5, "image.height: must be a whole number, but is 64.5"),
        ("image", "height", "tall", "image.height: must be a whole number, but is 'tall'"),
        ("image", "height", None, "image.height: must be a whole number, but is empty"),
        pytest.param(
            "image",
            "height",
            10**5000,
            "image.height: must be at most 4096, but is a number with more than 60 digits",
            id="huge",
        ),
        ("image", "mean", 0.5, "image.mean: must be a list, but is 0.5"),
        ("image", "mean", ["x"], "image.mean.0: must be a number, but is 'x'"),
        ("image", "std", [0], "image.std.0: must be greater than 0, but is 0"),
        ("model", "backbone", "lenett", "model.backbone: unknown backbone 'lenett'; did you mean 'lenet'? Use one of "),
        ("model", "backbone", "x" * 201, "model.backbone: must have at most 200 characters, but has 201"),
        ("model", "backbone", 5, "model.backbone: must be text, but is 5"),
        (
            "model",
            "weights",
            "imagenett",
            "model.weights: unknown value 'imagenett'; did you mean 'imagenet'? Valid values: ",
        ),
        ("model", "weights", 3, "model.weights: must be one of random, imagenet, file, but is 3"),
        ("method", "name", "fedvag", "method: unknown value 'fedvag'; did you mean 'fedavg'? Valid values: distrans, "),
        ("method", "name", "zzz", "method: must be one of distrans, fedavg, "),
        ("method", "alpa", 0.3, "method.alpa: unknown setting; did you mean alpha?"),
        ("method", "shared_offset", "maybe", "method.shared_offset: must be true or false, but is 'maybe'"),
        ("method", "generator", {"widht": 8}, "method.generator.widht: unknown setting; did you mean width?"),
        ("training", "momentum", 1.0, "training.momentum: must be less than 1, but is 1.0"),
        ("training", "lr", math.inf, "training.lr: must be a finite number, but is inf"),
        ("rounds", "count", 0, "rounds.count: must be at least 1, but is 0"),
        ("rounds", "epochs", 3, "rounds.epochs: unknown setting; did you mean training.epochs?"),
    ],
)
def test_invalid_setting_gets_a_readable_message(table: str, key: str, value: Any, expected: str) -> None:
    (line,) = errors_of({**MINIMAL, table: {key: value}})
    assert line.startswith(expected) if expected.endswith(" ") else line == expected


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"name": "two words"}, "name: must be 1 to 64 letters, digits, dots, dashes and underscores, starting with "),
        ({"classes": ["owl"]}, "classes: must have at least 2 entries, but has 1"),
        ({"classes": ["owl", ""]}, "classes.1: must have at least 1 character, but has 0"),
        ({"classes": ["owl", "x" * 129]}, "classes.1: must have at most 128 characters, but has 129"),
        (
            {"classes": [str(number) for number in range(100_001)]},
            "classes: must have at most 100,000 entries, but has ",
        ),
        ({"preset": "learnt-offset"}, "preset: unknown value 'learnt-offset'; did you mean 'learned-offset'? "),
        ({"images": {}}, "images: unknown setting; did you mean image?"),
        ({"lr": 0.1}, "lr: unknown setting; did you mean training.lr?"),
        ({"image": 3}, "image: must be a table, but is 3"),
        ({"method": "fedavg"}, "method: must be a table, but is 'fedavg'"),
    ],
)
def test_invalid_plan_gets_a_readable_message(data: dict[str, Any], expected: str) -> None:
    (line,) = errors_of({**MINIMAL, **data})
    assert line.startswith(expected)


def places(model: type[BaseModel] = FederationPlan, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every setting, for every method."""
    for name, field in model.model_fields.items():
        yield (*path, name)
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from places(kind, (*path, name))


def plan_with(path: tuple[str, ...], value: Any, method: str) -> dict[str, Any]:
    data: dict[str, Any] = {**MINIMAL, "method": {"name": method}}
    table = data
    for part in path[:-1]:
        table = table.setdefault(part, {})
    table[path[-1]] = value
    return data


WRONG = [
    "",
    "x y",
    "x" * 500,
    "\ud800",
    -1,
    0,
    1.5,
    1e308,
    10**100,
    math.nan,
    math.inf,
    True,
    None,
    [],
    [None],
    {},
    {"a": 1},
]


def message_about(data: dict[str, Any]) -> str:
    """Return the error message for a plan, or an empty string if it is valid."""
    try:
        validate_plan(data)
    except PlanError as error:
        return error.message
    return ""


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_no_setting_leaks_a_message_of_pydantic(method: str) -> None:
    found = 0
    for path in dict.fromkeys(places()):
        for value in WRONG:
            message = message_about(plan_with(path, value, method))
            assert not PYDANTIC.search(message), message
            assert "cannot be used" not in message, message
            assert all(len(line) <= 302 for line in message.splitlines())
            found += bool(message)
    assert found > 100


class _Others(BaseModel):
    texts: dict[str, int] = {}
    short: ShortText = ""
    digest: Digest = "0" * 64
    either: Literal["a"] | None = None
    code: Annotated[str, StringConstraints(pattern="^[0-9]+$")] = "1"


@pytest.mark.parametrize(
    ("kind", "data", "expected"),
    [
        (_Others, {"texts": 3}, "must be a table, but is 3"),
        (_Others, {"short": "ä"}, "must contain only printable ASCII characters, but is 'ä'"),
        (_Others, {"digest": "F"}, "must be 64 lowercase hexadecimal digits, but is 'F'"),
        (_Others, {"code": "x"}, "must match ^[0-9]+$, but is 'x'"),
        (_Others, {"either": "b"}, "must be one of a, but is 'b'"),
        (JoinRequest, {"class_counts": {}}, "is missing"),
        (JoinRequest, {"name": "a", "class_counts": {"cat": True}}, "must be a whole number, but is true"),
        (JoinRequest, {"name": "a", "class_counts": {}, "nmae": 1}, "unknown setting; did you mean name?"),
        (RollbackRequest, {"to": "5"}, "must be a whole number, but is '5'"),
        (MethodOptions, {}, "has no name"),
    ],
)
def test_invalid_body_gets_a_readable_message(kind: Any, data: Any, expected: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(kind).validate_python(data)
    (found,) = caught.value.errors()
    assert describe_error(found, kind if isinstance(kind, type) else None) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('name = "a"\nclasses 3', "line 2, column 9: expected '=' after a key in a key/value pair"),
        ("name = ", "invalid value"),
        ('name = "a', "unterminated string"),
    ],
)
def test_toml_syntax_error_names_line_and_column(text: str, expected: str) -> None:
    with pytest.raises(
        PlanError, match=r"^The plan is not valid TOML: (line \d+, column \d+|end of document): "
    ) as caught:
        parse_plan(text)
    assert expected in caught.value.message
    assert caught.value.message.count(".") == 1  # one sentence


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("seed = " + "9" * 5000, "a number has too many digits", id="digits"),
        pytest.param("seed = " + "[" * 5000, "it is nested too deeply", id="nesting"),
    ],
)
def test_limits_of_python_s_parser_get_a_readable_message(text: str, expected: str) -> None:
    with pytest.raises(PlanError, match=f"^The plan is not valid TOML: {expected}.$"):
        parse_plan(text)

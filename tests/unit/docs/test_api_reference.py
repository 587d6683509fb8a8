"""The reference pages show what an OpenAPI document says."""

from docs._tools.api_reference import render_api

PROBLEM = {"content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}}
THING = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Thing"}}}}
DOCUMENT = {
    "tags": [{"name": "things", "description": "What there is."}],
    "paths": {
        "/things/{name}": {
            "put": {
                "tags": ["things"],
                "description": "Store a thing.",
                "operationId": "putThing",
                "parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}],
                "requestBody": THING,
                "responses": {"200": THING, "201": {}, "404": PROBLEM, "500": PROBLEM},
            }
        }
    },
    "components": {
        "schemas": {
            "Thing": {
                "description": "One | thing.",
                "required": ["size"],
                "properties": {
                    "size": {"type": "integer", "minimum": 1, "description": "In\nmeters."},
                    "kind": {"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}]},
                },
            }
        }
    },
}


def test_calls_have_their_parameters_bodies_answers_and_own_problems() -> None:
    page = render_api(DOCUMENT)
    assert "### `PUT /things/{name}`\n\nStore a thing.\n\nOperation id: `putThing`" in page
    assert "| `name` | path | string | yes |  |" in page
    assert "Body:\n\n- `application/json`: [Thing](#thing)\n" in page
    assert "Returns 200: [Thing](#thing), 201\n" in page
    assert "Problems: 404\n" in page  # 500 is possible everywhere


def test_objects_have_a_row_per_field() -> None:
    page = render_api(DOCUMENT)
    assert "| `size` | integer ≥ 1 | yes | In meters. |" in page
    assert "| `kind` | `a`, `b` or null |  |  |" in page

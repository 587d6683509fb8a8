"""Collect every error code from the source, with the messages, next steps and HTTP statuses it appears with.

A code is either a class constant (`code = "invalid-plan"`) or the `code` argument of a call: every function and class
that has a parameter of that name is followed, also through wrappers that pass it on.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path

PACKAGES = ("shared", "server", "client_agent", "lab")
# Codes that the source computes, by the expression. A new computed code fails the build until it is listed here.
COMPUTED = {
    "http_problem:code": ("bad-request", "method-not-allowed", "not-found"),  # the phrase of the HTTP status
    "f'client-{state}'": ("client-left", "client-revoked"),
    "_failed_head:code": ("invalid-token", "no-such-round", "not-a-participant", "round-closed", "unknown"),
}
_MESSAGE_PARAMETERS = ("message", "detail")
_GAP = "…"


class UnknownCode(Exception):
    """A code argument that cannot be read from the source."""


@dataclass
class ErrorCode:
    """What the source says about one code."""

    statuses: set[int] = field(default_factory=set)
    messages: list[str] = field(default_factory=list)
    next_steps: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)


@dataclass
class _Callable:
    """A function or class that takes an error code, and what it adds to it."""

    parameters: list[str]
    status: int | None = None
    next_step: str = ""


@dataclass(frozen=True)
class _Call:
    """A call with everything around it that is needed to read its arguments."""

    node: ast.Call
    path: Path
    scope: ast.FunctionDef | ast.AsyncFunctionDef | None
    owner: ast.ClassDef | None


def collect_error_codes(root: Path, statuses: Mapping[str, int]) -> dict[str, ErrorCode]:
    """Return all codes by name; `statuses` maps names of error classes to the HTTP statuses they are answered with."""
    return _Collector(root, statuses).collect()


class _Collector:
    def __init__(self, root: Path, statuses: Mapping[str, int]) -> None:
        self._root, self._statuses = root, statuses
        self._trees = {
            path: ast.parse(path.read_text()) for package in PACKAGES for path in sorted((root / package).rglob("*.py"))
        }
        self._classes = {
            node.name: node
            for tree in self._trees.values()
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
        }
        self._constants = {name: code for name, node in self._classes.items() if (code := _code_constant(node))}
        self._callables = self._find_callables()
        self._codes: dict[str, ErrorCode] = {}

    def collect(self) -> dict[str, ErrorCode]:
        for code in self._constants.values():
            self._codes.setdefault(code, ErrorCode())
        calls = [call for path, tree in self._trees.items() for call in _calls(tree, path)]
        for call in calls:
            self._learn_wrapper(call)
        for call in calls:
            self._record(call)
        return dict(sorted(self._codes.items()))

    def _find_callables(self) -> dict[str, _Callable]:
        found: dict[str, _Callable] = {}
        for tree in self._trees.values():
            for node in ast.walk(tree):
                if (
                    isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                    and node.name != "__init__"
                    and "code" in _parameters(node)
                ):
                    found[node.name] = _Callable(_parameters(node))
        for name in self._classes:
            if (init := self._init_of(name)) is not None and "code" in _parameters(init):
                found[name] = _Callable(_parameters(init), self._status_of(name))
        return found

    def _init_of(self, name: str) -> ast.FunctionDef | None:
        for node in self._lineage(name):
            for part in node.body:
                if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                    return part
        return None

    def _lineage(self, name: str) -> Iterator[ast.ClassDef]:
        """Yield a class and its ancestors, nearest first."""
        if (node := self._classes.get(name)) is not None:
            yield node
            for base in node.bases:
                yield from self._lineage(_name(base))

    def _status_of(self, name: str) -> int | None:
        return next((self._statuses[node.name] for node in self._lineage(name) if node.name in self._statuses), None)

    def _code_of(self, name: str) -> str | None:
        """Return the code constant of a class, or None if its instances are given theirs."""
        for node in self._lineage(name):
            if node.name in self._callables:
                return None
            if node.name in self._constants:
                return self._constants[node.name]
        return None

    def _target(self, call: _Call) -> str:
        """Return the name of what is called; for `super().__init__` in a class, its base class."""
        function = call.node.func
        if isinstance(function, ast.Attribute) and function.attr == "__init__" and call.owner and call.owner.bases:
            return _name(call.owner.bases[0])
        if _name(function) == "partial" and call.node.args:
            return _name(call.node.args[0])
        return _name(function)

    def _arguments(self, call: _Call, parameters: Sequence[str]) -> dict[str, ast.expr]:
        positional = call.node.args[1:] if _name(call.node.func) == "partial" else call.node.args
        named = {keyword.arg: keyword.value for keyword in call.node.keywords if keyword.arg}
        return dict(zip(parameters, positional, strict=False)) | named

    def _learn_wrapper(self, call: _Call) -> None:
        """Note the status and next step that a function or class adds to a code that it passes on."""
        target = self._callables.get(self._target(call))
        wrapper = self._callables.get(_wrapper_name(call))
        if target is None or wrapper is None or wrapper is target:
            return
        arguments = self._arguments(call, target.parameters)
        if _name(arguments.get("code")) == "code":
            wrapper.status = wrapper.status or _status(arguments.get("status"))
            wrapper.next_step = wrapper.next_step or _text(arguments.get("next_step"), call)

    def _record(self, call: _Call) -> None:
        name = self._target(call)
        is_super = _name(call.node.func) == "__init__" and call.owner is not None
        raised = call.owner.name if is_super and call.owner else name  # the class whose error this is
        if (target := self._callables.get(name)) is not None:
            arguments = self._arguments(call, target.parameters)
            codes = self._resolve(arguments.get("code"), call)
            status = _status(arguments.get("status")) or self._status_of(raised) or target.status
            default_step = target.next_step
        elif name in self._classes and (code := self._code_of(raised)):
            arguments = self._arguments(call, ["message"] if self._takes_message(name) else [])
            codes, status, default_step = [code], self._status_of(raised), ""
        else:
            return
        message = next((_text(arguments[key], call) for key in _MESSAGE_PARAMETERS if key in arguments), "")
        for code in codes:
            self._add(code, call, message, _text(arguments.get("next_step"), call) or default_step, status)

    def _takes_message(self, name: str) -> bool:
        init = self._init_of(name)
        return init is not None and _parameters(init)[:1] == ["message"]

    def _add(self, code: str, call: _Call, message: str, next_step: str, status: int | None) -> None:
        entry = self._codes.setdefault(code, ErrorCode())
        place = call.path.relative_to(self._root).as_posix()
        for value, values in ((message, entry.messages), (next_step, entry.next_steps), (place, entry.places)):
            if value.strip(f" .:{_GAP}") and value not in values:
                values.append(value)
        if status is not None:
            entry.statuses.add(status)

    def _resolve(self, code: ast.expr | None, call: _Call) -> Sequence[str]:
        """Return the codes that the argument can stand for; none where it only hands on another's."""
        if isinstance(code, ast.Constant) and isinstance(code.value, str):
            return [code.value]
        if isinstance(code, ast.Attribute):
            constant = self._constants.get(_name(code.value))
            return [constant] if constant and code.attr == "code" else []  # otherwise the code of an error at hand
        if code is None or (isinstance(code, ast.Name) and call.scope and code.id in _parameters(call.scope)):
            return []
        text = ast.unparse(code)
        key = f"{call.scope.name}:{text}" if isinstance(code, ast.Name) and call.scope else text
        if key not in COMPUTED:
            raise UnknownCode(f"{call.path}:{call.node.lineno}: list the values of {text} as {key!r} in COMPUTED")
        return COMPUTED[key]


def _calls(tree: ast.AST, path: Path) -> Iterator[_Call]:
    def visit(
        node: ast.AST, scope: ast.FunctionDef | ast.AsyncFunctionDef | None, owner: ast.ClassDef | None
    ) -> Iterator[_Call]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                yield _Call(child, path, scope, owner)
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from visit(child, child, owner)
            else:
                yield from visit(child, scope, child if isinstance(child, ast.ClassDef) else owner)

    return visit(tree, None, None)


def _wrapper_name(call: _Call) -> str:
    if call.scope is None:
        return ""
    return call.owner.name if call.owner and call.scope.name == "__init__" else call.scope.name


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return names[1:] if names[:1] == ["self"] else names


def _code_constant(node: ast.ClassDef) -> str | None:
    for part in node.body:
        if isinstance(part, ast.Assign) and [_name(target) for target in part.targets] == ["code"]:
            return str(ast.literal_eval(part.value))
    return None


def _name(node: ast.AST | None) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _status(node: ast.expr | None) -> int | None:
    name = _name(node)
    return HTTPStatus[name].value if name in HTTPStatus.__members__ else None


def _text(node: ast.expr | None, call: _Call) -> str:
    """Return a text as a template: what is filled in at run time is an ellipsis."""
    if isinstance(node, ast.Constant):
        return str(node.value or "")
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else _GAP for part in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left, call) + _text(node.right, call)
    if isinstance(node, ast.IfExp):
        return " / ".join(filter(None, (_text(node.body, call), _text(node.orelse, call))))
    if isinstance(node, ast.Name):
        return _text(_assigned(node.id, call), call)
    return _GAP if node is not None else ""


def _assigned(name: str, call: _Call) -> ast.expr | None:
    """Return the value that the enclosing function gives a name, if it is a plain text."""
    for node in ast.walk(call.scope) if call.scope else ():
        if isinstance(node, ast.Assign) and [_name(target) for target in node.targets] == [name]:
            return node.value if isinstance(node.value, ast.Constant | ast.JoinedStr) else None
    return None

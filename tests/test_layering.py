"""The house: who may import what, who reads the environment, how long a module may be. Read from the source by ast."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "torch_bps"
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
MAX_LINES = 400

# part -> what it may import: parts of ours, and other people's packages. The standard library is everybody's.
OURS = {
    "errors.py": set(),
    "topology.py": {"errors.py"},
    "interfaces.py": {"errors.py"},
    "affinity.py": set(),
    "config.py": {"errors.py", "topology.py"},
    "wire": {"errors.py", "wire"},
    "transport": {"errors.py", "topology.py", "interfaces.py", "config.py", "wire", "transport"},
    "server": {
        "errors.py",
        "topology.py",
        "interfaces.py",
        "affinity.py",
        "config.py",
        "wire",
        "transport",
        "server",
        "__init__.py",
    },
    "core": {
        "errors.py",
        "topology.py",
        "interfaces.py",
        "affinity.py",
        "config.py",
        "wire",
        "transport",
        "local",
        "core",
        "__init__.py",
    },
    "local": {"errors.py", "wire", "transport", "local"},
    "backend": {"errors.py", "topology.py", "config.py", "wire", "core", "backend", "__init__.py"},
    "bench": {"errors.py", "topology.py", "config.py", "theory", "bench", "__init__.py"},
    "theory": {"errors.py", "core", "theory"},
    "cli": {"errors.py", "config.py", "server", "core", "bench", "theory", "cli", "__init__.py"},
    "data": set(),
    "_autoload.py": {"errors.py", "backend"},
    "__init__.py": {"errors.py", "_autoload.py", "backend"},
}
THEIRS = {
    "wire": {"msgspec"},
    "transport": {"numpy"},
    "server": {"numpy"},
    "core": {"msgspec"},
    "local": {"numpy"},
    "backend": {"torch"},
    "bench": {"torch"},
    "theory": {"msgspec"},
    "data": {"numpy"},
}
ALSO = {
    # the adds, and the words for a disagreement, are the engine's
    "local/exchange.py": {"server"},
    "local/lane.py": {"server"},
    "local/statement.py": {"server"},
    # one rank's own service runs inside core's process
    "core/local.py": {"server"},
    "core/runtime.py": {"server"},
    # files of the zmq transport
    **{module: {"zmq"} for module in MODULES if module.startswith("transport/zmq")},
}
LAZILY = {
    "_autoload.py": {"torch"},
    "__init__.py": {"torch"},
    "server/announce.py": {"torch"},  # the Store's protocol
    "server/reducer.py": {"torch"},  # adds halves where it is there
}
DISTRIBUTED = {"_autoload.py", "__init__.py", "server/announce.py"}


@dataclass(frozen=True)
class Import:
    """An import at run time: `lazy` inside a function."""

    name: str
    line: int
    lazy: bool


def parse(module: str) -> ast.Module:
    return ast.parse((PACKAGE / module).read_text(), module)


def imports(tree: ast.Module) -> list[Import]:
    return list(_imports(tree, lazy=False))


def _imports(node: ast.AST, lazy: bool) -> Iterator[Import]:
    match node:
        case ast.Import(names=names):
            for alias in names:
                yield Import(alias.name, node.lineno, lazy)
        case ast.ImportFrom(module=module, names=names, level=level):
            assert level == 0, f"line {node.lineno}: imports are absolute"
            for alias in names:
                yield Import(f"{module}.{alias.name}", node.lineno, lazy)
        case (
            ast.Call(func=ast.Name(id="import_module" | "__import__"))
            | ast.Call(func=ast.Attribute(attr="import_module"))
        ):
            for text in ast.walk(node):
                if isinstance(text, ast.Constant) and isinstance(text.value, str) and "." in text.value:
                    yield Import(text.value, node.lineno, lazy)
        case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=orelse):
            for child in orelse:
                yield from _imports(child, lazy)
            return
    inside = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, inside)


def part_of(name: str) -> str:
    """Return the part of the house that an imported name of ours lies in: "core", "errors.py", ..."""
    first = name.split(".")[1] if "." in name else ""
    if first and (PACKAGE / first).is_dir():
        return first
    return f"{first}.py" if (PACKAGE / f"{first}.py").is_file() else "__init__.py"


def home_of(module: str) -> str:
    return module.split("/")[0]


def wrong_imports(module: str, tree: ast.Module) -> list[str]:
    """Return a line for each import that the module may not have."""
    part, also, lazily = home_of(module), ALSO.get(module, set()), LAZILY.get(module, set())
    wrong = []
    for item in imports(tree):
        top = item.name.split(".")[0]
        if top == "torch_bps":
            allowed = part_of(item.name) in OURS[part] | also
        elif top in sys.stdlib_module_names:
            allowed = True
        else:
            allowed = top in THEIRS.get(part, set()) | also or (item.lazy and top in lazily)
        if item.name.startswith("torch.") and "distributed" in item.name:
            allowed = allowed and (part in ("backend", "bench") or module in DISTRIBUTED)
        if not allowed:
            wrong.append(f"{module}:{item.line} imports {item.name}{' in a function' if item.lazy else ''}")
    return wrong


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module: str) -> None:
    assert wrong_imports(module, parse(module)) == []


def test_every_part_has_its_rule() -> None:
    assert {home_of(module) for module in MODULES} == set(OURS)
    for named in (ALSO, LAZILY, DISTRIBUTED):
        assert set(named) <= set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_only_config_reads_the_environment(module: str) -> None:
    readers = []
    for node in ast.walk(parse(module)):
        match node:
            case ast.Attribute(attr="environ" | "environb" | "getenv" | "putenv" | "unsetenv"):
                readers.append(node.lineno)
            case ast.ImportFrom(module="os", names=names) if {alias.name for alias in names} & {"environ", "getenv"}:
                readers.append(node.lineno)
    assert not readers or module == "config.py", f"{module} reads the environment in lines {readers}"


@pytest.mark.parametrize("module", MODULES)
def test_modules_are_short_and_say_what_they_are(module: str) -> None:
    assert ast.get_docstring(parse(module)), f"{module} has no docstring"
    assert len((PACKAGE / module).read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("core/plan.py", "import torch", True),
        ("core/plan.py", "def f():\n    import torch.distributed", True),
        ("core/plan.py", "from torch_bps.server.service import Service", True),
        ("core/local.py", "from torch_bps.server.service import Service", False),
        ("core/plan.py", "from torch_bps import server", True),
        ("core/plan.py", "if TYPE_CHECKING:\n    from torch_bps.server.service import Service", False),
        ("core/plan.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import torch", True),
        ("core/plan.py", "from torch_bps.backend import work", True),
        ("server/engine.py", "from torch_bps.core.plan import Plane", True),
        ("server/engine.py", "importlib.import_module('torch_bps.backend.work')", True),
        ("server/reducer.py", "import torch", True),
        ("server/reducer.py", "def f():\n    import torch", False),
        ("server/reducer.py", "def f():\n    import torch.distributed", True),
        ("server/announce.py", "def f():\n    from torch._C import _distributed_c10d", False),
        ("transport/tcp.py", "import zmq", True),
        ("transport/zmq.py", "import zmq.utils", False),
        ("transport/tcp.py", "from torch_bps.core import link", True),
        ("wire/ops.py", "import numpy", True),
        ("wire/ops.py", "import struct, msgspec", False),
        ("backend/work.py", "from torch_bps.server import engine", True),
        ("backend/work.py", "try:\n    import numpy\nexcept ImportError:\n    pass", True),
    ],
)
def test_the_rules_can_be_broken(module: str, source: str, found: bool) -> None:
    assert bool(wrong_imports(module, ast.parse(source))) == found

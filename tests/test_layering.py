"""Dependencies point one way (ARCHITECTURE, "The house"): read from the sources, nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "torch_bps"
MAX_LINES = 400
SOURCES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))

# layer: what of ours it may import, beside itself; longest prefix wins. "" is the package's own __init__.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "": ("_autoload", "backend.options", "errors"),
    "_autoload": ("backend.create", "errors"),
    "errors": (),
    "topology": ("errors",),
    "config": ("errors", "topology"),
    "data": (),
    "wire": ("errors",),
    "transport": ("config", "errors", "wire"),
    "server": ("", "config", "errors", "topology", "transport", "wire"),
    "core": ("", "config", "errors", "topology", "transport", "wire"),
    "core.local": ("config", "core", "errors", "server.engine", "server.service", "topology", "transport", "wire"),
    "backend": ("", "config", "core", "errors", "topology", "wire"),
    "cli": ("", "config", "core", "errors", "server", "topology", "transport", "wire"),
}
TORCH_AT_TOP = ("backend",)
DISTRIBUTED = {
    "__init__.py": "the errors' base class must be loaded before them",
    "_autoload.py": "registers the backend",
    "core/rendezvous.py": "the Store",
    "server/announce.py": "writes a dedicated server's address into the job's Store; only with --rdzv-endpoint",
}
ZMQ = ("transport/zmq.py",)
ENVIRON = ("config.py",)


@dataclass(frozen=True)
class Import:
    """One imported module; `at_top`: it happens when the file is imported; `for_types`: never at run time."""

    module: str
    line: int
    at_top: bool
    for_types: bool


def imports_of(source: str, package: str = "") -> list[Import]:
    """Return what a source imports; `from a import b` counts as a and as a.b, for b may be a module."""
    return list(_walk(ast.parse(source), package, at_top=True, for_types=False))


def _walk(node: ast.AST, package: str, at_top: bool, for_types: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, at_top, for_types)
        elif isinstance(child, ast.ImportFrom):
            module = child.module or ""
            if child.level:
                parents = package.split(".")
                module = ".".join([*parents[: len(parents) - child.level + 1], *([module] if module else [])])
            yield Import(module, child.lineno, at_top, for_types)
            for alias in child.names:
                yield Import(f"{module}.{alias.name}", child.lineno, at_top, for_types)
        elif isinstance(child, ast.If) and _is_type_checking(child.test):
            for statement in child.body:
                yield from _walk(ast.Module([statement], []), package, at_top, for_types=True)
            for statement in child.orelse:
                yield from _walk(ast.Module([statement], []), package, at_top, for_types)
        else:
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from _walk(child, package, at_top and not inside, for_types)


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def environ_lines(source: str) -> list[int]:
    """Return where a source reads or changes the environment."""
    names = ("environ", "environb", "getenv", "putenv", "unsetenv")
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and any(name.name in names for name in node.names))
    ]


def module_of(path: str) -> str:
    """Return a source's name inside the package: "core.local", "" for the package itself."""
    parts = path.removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_within(module: str, layer: str) -> bool:
    return module == layer or module.startswith(f"{layer}.")


def layer_of(module: str) -> str:
    """Return the longest entry of MAY_IMPORT that a module is within."""
    return max((layer for layer in MAY_IMPORT if module == layer or (layer and is_within(module, layer))), key=len)


MODULES = frozenset(module_of(path) for path in SOURCES)


def ours(imported: Import) -> str | None:
    """Return the module of ours that is imported, None for others (and for names in a module)."""
    if not is_within(imported.module, "torch_bps"):
        return None
    name = imported.module.removeprefix("torch_bps").removeprefix(".")
    return name if name in MODULES else None


def forbidden(path: str, source: str) -> list[str]:
    """Return a line for each rule that a source breaks."""
    module = module_of(path)
    layer = layer_of(module)
    home = layer.partition(".")[0]
    package = "torch_bps." + module if path.endswith("__init__.py") else f"torch_bps.{module}".rpartition(".")[0]
    found = []
    imports = imports_of(source, package.rstrip("."))
    modules_of_line = {(imported.line, ours(imported)) for imported in imports}
    for imported in imports:
        what = f"{path}:{imported.line} imports {imported.module}"
        name = ours(imported)
        if name is not None and not (layer and is_within(name, home)) and name != module:
            if name == "" and any(line == imported.line and other for line, other in modules_of_line):
                continue  # `from torch_bps import config` is about config alone
            allowed = any(name == other or (other and is_within(name, other)) for other in MAY_IMPORT[layer])
            for_types = imported.for_types and (home, name.partition(".")[0]) in FOR_TYPES
            if not allowed and not for_types:
                found.append(f"{what}: {layer or 'the package'} may import {', '.join(MAY_IMPORT[layer]) or 'nothing'}")
        if imported.for_types:
            continue
        if is_within(imported.module, "torch") and imported.at_top and home not in TORCH_AT_TOP:
            found.append(f"{what} at top level")
        if is_within(imported.module, "torch.distributed") and home != "backend" and path not in DISTRIBUTED:
            found.append(what)
        if is_within(imported.module, "zmq") and path not in ZMQ:
            found.append(what)
    if path not in ENVIRON:
        found += [f"{path}:{line} uses the environment" for line in environ_lines(source)]
    return found


FOR_TYPES = {("core", "server"), ("_autoload", "errors")}
"""(importer, imported) that may meet under TYPE_CHECKING only: core.local is handed the server's slots"""


@pytest.mark.parametrize("path", SOURCES)
def test_a_source_imports_only_what_its_layer_may(path: str) -> None:
    assert forbidden(path, (PACKAGE / path).read_text()) == []


@pytest.mark.parametrize("path", SOURCES)
def test_a_source_is_short(path: str) -> None:
    assert (PACKAGE / path).read_text().count("\n") <= MAX_LINES


def test_every_layer_and_exception_is_in_use() -> None:
    layers = {layer_of(module) for module in MODULES}
    assert layers == set(MAY_IMPORT)
    assert set(DISTRIBUTED) | set(ZMQ) | set(ENVIRON) <= set(SOURCES)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("wire/header.py", "import torch_bps.config"),
        ("wire/header.py", "from torch_bps import config"),
        ("wire/header.py", "from ..transport import base"),
        ("wire/header.py", "def f():\n    from torch_bps.core.plan import Plane"),
        ("transport/tcp.py", "from torch_bps.core import plan"),
        ("transport/tcp.py", "from torch_bps.topology import split_address"),
        ("transport/tcp.py", "import zmq"),
        ("transport/tcp.py", "def f():\n    import zmq.utils"),
        ("core/client.py", "from torch_bps.server.service import Service"),
        ("core/client.py", "def f():\n    import torch_bps.server.engine"),
        ("core/local.py", "from torch_bps.server.membership import Membership"),
        ("core/client.py", "from torch_bps.backend import work"),
        ("core/client.py", "try:\n    import torch\nexcept ImportError:\n    pass"),
        ("core/client.py", "def f():\n    import torch.distributed as dist"),
        ("core/client.py", "def f():\n    from torch.distributed import TCPStore"),
        ("core/client.py", "def f():\n    from torch import distributed"),
        ("server/engine.py", "from torch_bps.core.placement import Placement"),
        ("server/engine.py", "from torch_bps.backend.work import WorkBytePS"),
        ("server/engine.py", "class A:\n    import torch"),
        ("backend/work.py", "from torch_bps.server import engine"),
        ("backend/work.py", "if TYPE_CHECKING:\n    from torch_bps.server.engine import Engine"),
        ("backend/work.py", "import os\nos.environ['A']"),
        ("backend/work.py", "from os import getenv"),
        ("config.py", "from torch_bps.core import topology"),
    ],
)
def test_the_rules_notice(path: str, source: str) -> None:
    assert forbidden(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("core/client.py", "def f():\n    import torch"),
        ("core/client.py", "if TYPE_CHECKING:\n    import torch"),
        ("core/local.py", "from torch_bps.server.service import Service"),
        ("core/local.py", "if TYPE_CHECKING:\n    from torch_bps.server.slots import Slot"),
        ("core/rendezvous.py", "def f():\n    import torch.distributed"),
        ("core/client.py", "from . import plan\nfrom .plan import Plane\nfrom torch_bps.wire import ops"),
        ("backend/work.py", "import torch.distributed as dist\nfrom torch_bps import core"),
        ("config.py", "import os\nos.environ"),
        ("transport/zmq.py", "import zmq"),
    ],
)
def test_the_rules_allow(path: str, source: str) -> None:
    assert forbidden(path, source) == []

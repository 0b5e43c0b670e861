"""What `import torch` runs: quick, silent, harmless; and what a missing dependency looks like."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from torch_bps import _autoload
from torch_bps.errors import BytePSError


def python(code: str, **env: str) -> str:
    """Run `code` in a new interpreter, without the installed package's entry point, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(filter(None, sys.path)), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **env},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_us_first_does_not_import_torch():
    assert python("import torch_bps, sys; print('torch' in sys.modules, torch_bps.__version__)") == "False 0.1.0"


def test_importing_us_after_torch_registers():
    code = "import torch; import torch_bps; print(torch.distributed.is_backend_available('byteps'))"
    assert python(code) == "True"


def test_importing_us_before_torch():
    code = (
        "import torch_bps; torch_bps.register(); import torch; "
        "print(torch.distributed.is_backend_available('byteps'), "
        "issubclass(torch_bps.BytePSError, torch.distributed.DistBackendError))"
    )
    assert python(code) == "True True"


def test_importing_the_backend_registers():
    code = "import torch_bps.backend, torch; print(torch.distributed.is_backend_available('byteps'))"
    assert python(code) == "True"


def test_entry_point_imports_next_to_nothing():
    code = (
        "import torch, sys; before = set(sys.modules); from torch_bps import _autoload; _autoload.register(); "
        "print(sorted(set(sys.modules) - before))"
    )
    assert python(code) == "['torch_bps', 'torch_bps._autoload']"


def test_register_is_quick_and_may_be_repeated():
    plugins = dict(dist.Backend._plugins)
    best_s = 1.0
    for _ in range(10):
        dist.Backend._plugins.pop("BYTEPS", None)
        began = time.thread_time()
        _autoload.register()
        best_s = min(best_s, time.thread_time() - began)
    assert best_s < 1e-3
    _autoload.register()
    assert dist.Backend._plugins.keys() == plugins.keys() | {"BYTEPS"}
    assert dist.Backend.backend_capability["byteps"] == ["cpu", "cuda"]
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
    assert dist.Backend.backend_list.count("byteps") == 1


def test_register_never_raises(monkeypatch):
    def broken(*args: object, **kwargs: object) -> None:
        raise TypeError("another signature")

    monkeypatch.delitem(dist.Backend._plugins, "BYTEPS", raising=False)
    monkeypatch.setattr(dist.Backend, "register_backend", broken)
    _autoload.register()
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    _autoload.register()


def test_a_missing_dependency_shows_when_a_group_is_made():
    """`import torch` works, and init_process_group says what to install."""
    code = """
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "zmq":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
import torch, torch.distributed as dist
import torch_bps
try:
    dist.init_process_group("byteps", store=dist.HashStore(), rank=0, world_size=2)
except torch_bps.BytePSError as error:
    print(error)
"""
    assert python(code).endswith("the Python package 'pyzmq' is missing\nhint: pip install pyzmq")


def test_a_broken_dependency(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_bps.backend.create", None)  # then importing it raises ModuleNotFoundError
    with pytest.raises(BytePSError, match="cannot start") as caught:
        _autoload._create(None, None)
    assert "pip install --force-reinstall torch_bps" in str(caught.value)
    assert isinstance(caught.value.__cause__, ImportError)
    error = _autoload._broken(ModuleNotFoundError("No module named 'msgspec'", name="msgspec.json"))
    assert "'msgspec' is missing\nhint: pip install msgspec" in str(error)
    error = _autoload._broken(OSError("libzmq.so.5: cannot open shared object file"))
    assert "OSError: libzmq.so.5: cannot open shared object file" in str(error)


def test_public_names():
    import torch_bps

    for name in torch_bps.__all__:
        assert getattr(torch_bps, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        torch_bps.nothing  # noqa: B018

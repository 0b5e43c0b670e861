"""What rig.start_ranks runs in each process: `python -m tests.integration.rank FOLDER`."""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any


def main(folder: Path) -> None:
    faulthandler.enable()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    module, name, args, backend, store, group_timeout_s = pickle.loads((folder / "task").read_bytes())
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    value: Any = None
    error: BaseException | None = None
    try:
        function = getattr(importlib.import_module(module), name)
        if backend is None:
            value = function(rank, world_size, *args)
        else:
            import torch.distributed as dist

            where = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": world_size}
            dist.init_process_group(
                backend, timeout=timedelta(seconds=group_timeout_s), **(where if store == "file" else {})
            )
            value = function(rank, world_size, *args)
            dist.destroy_process_group()
    except BaseException as raised:
        error = raised
        raise
    finally:
        partial = folder / f"partial-{rank}"
        partial.write_bytes(_dump(value, error))
        partial.rename(folder / f"result-{rank}")


def _dump(value: object, error: BaseException | None) -> bytes:
    try:
        dumped = pickle.dumps((value, error))
        pickle.loads(dumped)
    except Exception as problem:
        return pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}") if error else problem))
    return dumped


if __name__ == "__main__":
    main(Path(sys.argv[1]))

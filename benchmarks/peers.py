"""Collectives of other libraries as cases of `byteps bench`, so that they take turns with backends in one run.

    mpirun -np 2 python benchmarks/peers.py all_reduce --backend byteps,openmpi,gloo

Started by mpirun, called by local.py where the library is installed. Open MPI goes through mpi4py, on the same memory,
in place. Horovod has not run here: its last release does not build for today's torch.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torch_bps.bench.__main__ import main as bench
from torch_bps.bench.cases import Case


class OpenMpi(Case):
    """mpi4py on the tensors' memory."""

    _OPS = {"sum": "SUM", "min": "MIN", "max": "MAX"}

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        from mpi4py import MPI

        self._world = MPI.COMM_WORLD
        self._in_place = MPI.IN_PLACE
        self._mpi_op = getattr(MPI, self._OPS[self._redop])  # MPI has no average
        self._mpi_input, self._mpi_output = self._input.numpy(), self._output.numpy()

    def _all_reduce(self) -> None:
        self._world.Allreduce(self._in_place, self._mpi_input, self._mpi_op)

    def _broadcast(self) -> None:
        self._world.Bcast(self._mpi_input, 0)

    def _all_gather(self) -> None:
        self._world.Allgather(self._mpi_input, self._mpi_output)

    def _reduce_scatter(self) -> None:
        self._world.Reduce_scatter_block(self._mpi_input, self._mpi_output, self._mpi_op)

    def _all_to_all(self) -> None:
        self._world.Alltoall(self._mpi_input, self._mpi_output)


class Horovod(Case):
    """Horovod's calls in place; it has none for the other collectives."""

    COLLECTIVES = ("all_reduce", "broadcast")

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        import horovod.torch as hvd

        hvd.init()
        self._horovod = hvd

    def _all_reduce(self) -> None:
        self._horovod.allreduce_(self._input, op=self._horovod.Sum)

    def _broadcast(self) -> None:
        self._horovod.broadcast_(self._input, root_rank=0)


PEERS: dict[str, type[Case]] = {"openmpi": OpenMpi, "horovod": Horovod}
_MODULES = {"openmpi": "mpi4py", "horovod": "horovod"}


def why_not(peer: str) -> str:
    """Return why a peer cannot be measured here, "" if it can."""
    if importlib.util.find_spec(_MODULES[peer]) is None:
        return f"{peer}: the Python package {_MODULES[peer]} is not installed"
    if launcher() is None:
        return f"{peer}: mpirun is not installed"
    return ""


def launcher() -> str | None:
    """Return mpirun: that beside this Python, which a wheel brings, else the first on the path."""
    return shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")


def main() -> int:
    """Be a rank that mpirun has started; returns the exit code."""
    for name, variable in (("RANK", "RANK"), ("WORLD_SIZE", "SIZE"), ("LOCAL_RANK", "LOCAL_RANK")):
        os.environ[name] = os.environ[f"OMPI_COMM_WORLD_{variable}"]
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    return bench(peers=PEERS)


if __name__ == "__main__":
    sys.exit(main())

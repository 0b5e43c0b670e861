"""`byteps COMMAND`: a thin dispatcher; each command is the `main` of the module that does the work."""

from __future__ import annotations

import sys

import torch_bps

_USAGE = """\
usage: byteps COMMAND [options]

commands:
  server    run a summation server (byteps server --help)
  bench     measure collectives, beside other backends (byteps bench --help)
  tune      try settings on the cluster, and say which to put down (byteps tune --help)
  plan      what servers gain for so many nodes and links (byteps plan --help)
  version   print the version
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    if command == "server":
        from torch_bps.server.__main__ import main as server_main

        return server_main(rest)
    if command == "bench":
        from torch_bps.bench.__main__ import main as bench_main

        return bench_main(rest)
    if command == "tune":
        from torch_bps.bench.tune import main as tune_main

        return tune_main(rest)
    if command == "plan":
        from torch_bps.cli.plan import main as plan_main

        return plan_main(rest)
    if command in ("version", "--version"):
        print(f"torch_bps {torch_bps.__version__}")
        return 0
    if command in ("-h", "--help", "help"):
        print(_USAGE, end="")
        return 0
    print(f"byteps: unknown command {command!r}\n\n{_USAGE}" if command else _USAGE, end="", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())

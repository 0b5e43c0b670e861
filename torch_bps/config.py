"""All settings: one frozen Config, and the only reader of the environment in the package.

Precedence: options (pg_options) > environment > default. `python -m torch_bps.config` prints docs/settings.md.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from torch_bps.errors import ConfigError
from torch_bps.topology import split_address

log = logging.getLogger("torch_bps.config")

PREFIX: Final = "BYTEPS_"
_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_OBSOLETE: Final = frozenset(
    f"BYTEPS_{name}"
    for name in [
        "LOCAL_RANK",
        "LOCAL_SIZE",
        "GLOBAL_RANK",
        "KEY_HASH_FN",
        "BUILT_IN_HASH_COEF",
        "MIXED_MODE_BOUND",
        "ENABLE_ASYNC",
        "THREADPOOL_SIZE",
        "PCIE_SWITCH_SIZE",
        "REDUCE_ROOTS",
        "NCCL_GROUP_SIZE",
        "NCCL_NUM_RINGS",
        "SOCKET_PATH",
        "OMP_THREAD_PER_GPU",
        "SERVER_ENGINE_BLOCKING",
        "SERVER_ENABLE_SCHEDULE",
        "ZMQ_MAX_SOCKET",
        "ZMQ_NTHREADS",
        "ENABLE_IPC",
        "TELEMETRY_ON",
        "TRACE_ON",
        "TRACE_DIR",
        "ENABLE_GDB",
        "MIN_COMPRESS_BYTES",
    ]
)
"""settings of the original BytePS that have no meaning here"""


def _setting(
    default: Any,
    text: str,
    parse: Callable[[str], Any],
    allowed: str,
    valid: Callable[[Any], bool] = lambda value: True,
    original: str = "",
) -> Any:
    """Return a dataclass field with what a setting needs; `original` says what the original BytePS had."""
    metadata = {"text": text, "parse": parse, "allowed": allowed, "valid": valid, "original": original}
    return field(default=default, metadata=metadata)


def _integer(text: str) -> int:
    return int(text)


def _number(text: str) -> float:
    return float(text)


def _nbytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(text)
    return int(match[1]) * _UNITS[match[2].upper()]


def _boolean(text: str) -> bool:
    value = text.strip().lower()
    if value in ("1", "true", "on", "yes"):
        return True
    if value in ("0", "false", "off", "no", ""):
        return False
    raise ValueError(text)


def _text(text: str) -> str:
    return text.strip()


def _addresses(text: str) -> tuple[str, ...]:
    addresses = tuple(part.strip() for part in text.split(",") if part.strip())
    for address in addresses:
        if ";" in address or " " in address:
            raise ValueError(f"{address!r}: separate servers with commas")
        if split_address(address)[1] == 0:
            raise ValueError(address)  # nobody can be reached at port 0
    if text.strip() and not addresses:
        raise ValueError(text)
    return addresses


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


_CREDIT = 16
_BYTES = "bytes, as 1048576, 1024K or 1M"
_BOOLEAN = "1 or 0"


@dataclass(frozen=True)
class Config:
    """Settings. Made by `load`; every field is BYTEPS_ + its name in capitals, unless ENV says otherwise."""

    servers: tuple[str, ...] = _setting(
        (), "long-lived summation servers to use", _addresses, "HOST:PORT,HOST:PORT,... ([IPV6]:PORT)"
    )
    num_servers: int = _setting(
        0, "how many dedicated servers to wait for (`byteps server --rdzv-endpoint`)", _integer, "0 to 4096",
        lambda value: 0 <= value <= 4096,
    )  # fmt: skip
    force_distributed: bool = _setting(
        False, "push through servers on one node too; every rank pushes for itself", _boolean, _BOOLEAN,
        original="same name and meaning",
    )  # fmt: skip
    enable_mixed_mode: bool = _setting(
        False, "use co-located servers beside the dedicated ones", _boolean, _BOOLEAN, original="same name and meaning"
    )
    transport: str = _setting(
        "auto", "how data travels to servers", _text, "auto, shm, tcp or zmq",
        lambda value: value in ("auto", "shm", "tcp", "zmq"),
    )  # fmt: skip
    local_boards: bool = _setting(
        True, "ranks of one node sum from memory to memory; 0: through each other's IO threads", _boolean, _BOOLEAN
    )
    lanes: int = _setting(
        2,
        "data connections to each server, and one for urgent frames (tcp)",
        _integer,
        "1 to 64",
        lambda v: 1 <= v <= 64,
    )
    partition_bytes: int = _setting(
        1 << 20, "largest partition", _nbytes, f"4K to 512M, {_BYTES}", lambda value: 4096 <= value <= 1 << 29,
        original="same name and meaning, default 4096000",
    )  # fmt: skip
    scheduling_credit: int = _setting(
        0, "partitions of a rank in flight until their result is back; 0: 3 a server, 6 at least", _integer,
        "0 to 65536", lambda value: 0 <= value <= 65536,
        original="same name; there it was off by default and given back earlier",
    )  # fmt: skip
    priority: int = _setting(
        0, "of calls outside `torch_bps.priority`: smaller is sooner, also among the jobs of a server", _integer,
        "-1000000 to 1000000", lambda value: -1_000_000 <= value <= 1_000_000,
    )  # fmt: skip
    server_engine_thread: int = _setting(
        2, "threads that add, in a server", _integer, "1 to 64", lambda value: 1 <= value <= 64,
        original="same name and meaning, default 4",
    )  # fmt: skip
    heartbeat_timeout_s: float = _setting(
        15.0, "seconds of silence after which a peer is lost; 0 = never", _number, "0, or 1 to 86400",
        lambda value: value == 0 or 1 <= value <= 86400,
    )  # fmt: skip
    stall_warning_s: float = _setting(
        10.0, "seconds after which a warning says what an operation waits for", _number, "0.1 to 86400",
        lambda value: 0.1 <= value <= 86400,
    )  # fmt: skip
    node_id: str = _setting(
        "", "overrides the host's identity: ranks with equal ids share memory, others do not", _text, "any text"
    )
    interfaces: tuple[str, ...] = _setting(
        (), "network interfaces: servers listen on each, lanes go out of each in turn; not set: by route", _names,
        "names, as eth0 or eth0,eth1", original="DMLC_INTERFACE, one",
    )  # fmt: skip
    nic_gbps: float = _setting(
        0.0, "rate of this host's links together, Gbit/s; set on every host and server, the load is shared accordingly",
        _number, "0 (not set), or 0.001 to 100000", lambda value: value == 0 or 0.001 <= value <= 100000,
    )  # fmt: skip
    numa_on: bool = _setting(
        True, "IO and engine threads stay on the NUMA node of the network interface", _boolean, _BOOLEAN,
        original="same name; there it bound whole processes",
    )  # fmt: skip
    socket_buffer_bytes: int = _setting(
        0, "size of TCP socket buffers; 0 = the kernel's choice", _nbytes, f"0 to 1G, {_BYTES}",
        lambda value: 0 <= value <= 1 << 30,
    )  # fmt: skip
    shared_memory_bytes: int = _setting(
        8 << 30, "upper bound of the shared memory of one process", _nbytes, f"64M or more, {_BYTES}",
        lambda value: value >= 64 << 20,
    )  # fmt: skip
    log_level: str = _setting(
        "", "level of the logger torch_bps", lambda text: text.strip().upper(), "DEBUG, INFO, WARNING or ERROR",
        lambda value: value in ("", "DEBUG", "INFO", "WARNING", "ERROR"), original="same name",
    )  # fmt: skip
    origins: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """field -> "env" or "option"; those not in it have their default"""

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, **options: object) -> Config:
        """Read the settings.

        Args:
            environ: instead of os.environ.
            options: fields that win over the environment.

        Raises:
            ConfigError: a value is not allowed, or an option is unknown; the message names it and what is allowed.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        origins: dict[str, str] = {}
        for name, setting in _FIELDS.items():
            variable = env_name(name)
            if name in options:
                values[name] = _checked(setting, options[name], f"the option {name}={options[name]!r}")
                origins[name] = "option"
            elif variable in environ:
                values[name] = _parsed(setting, variable, environ[variable])
                origins[name] = "env"
        unknown = [name for name in options if name not in _FIELDS]
        if unknown:
            raise ConfigError(f"there is no option {unknown[0]!r}", hint=_suggestion(unknown[0], list(_FIELDS)))
        _warn_unknown(environ)
        config = cls(**values, origins=origins)
        if config.log_level:
            logging.getLogger("torch_bps").setLevel(config.log_level)
        return config

    def origin(self, name: str) -> str:
        """Return where a field's value comes from: default, env or option."""
        return self.origins.get(name, "default")

    @property
    def credit_bytes(self) -> int:
        """Bytes that may be in flight; a group whose credit is counted charges its partitions accordingly."""
        return (self.scheduling_credit or _CREDIT) * self.partition_bytes


_FIELDS: Final = {setting.name: setting for setting in dataclasses.fields(Config) if "parse" in setting.metadata}
_ENV: Final = {
    "heartbeat_timeout_s": "BYTEPS_HEARTBEAT_TIMEOUT",
    "interfaces": "BYTEPS_INTERFACE",
    "stall_warning_s": "BYTEPS_STALL_WARNING",
}
_warned: set[str] = set()


def env_name(name: str) -> str:
    """Return the environment variable of a field."""
    return _ENV.get(name, PREFIX + name.upper())


def under_torchrun() -> bool:
    """Return whether this process is a rank of a job already."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def child_environment(prepend_pythonpath: str) -> dict[str, str]:
    """Return this process's environment for a child that must find the package at `prepend_pythonpath`."""
    path = os.pathsep.join(filter(None, (prepend_pythonpath, os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path}


def quiet_torch() -> None:
    """Spare the user the pages that torch, imported after this, prints when a Store has gone."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _parsed(setting: dataclasses.Field[Any], variable: str, text: str) -> Any:
    what = f"{variable}={text!r}"
    try:
        value = setting.metadata["parse"](text)
    except ValueError as error:
        detail = f" ({error})" if setting.name == "servers" else ""
        raise ConfigError(f"{what} cannot be read{detail}", hint=f"allowed: {setting.metadata['allowed']}") from None
    return _checked(setting, value, what)


def _checked(setting: dataclasses.Field[Any], value: Any, what: str) -> Any:
    default: Any = setting.default
    if isinstance(default, tuple) and isinstance(value, (list, tuple, str)):
        text = value if isinstance(value, str) else ",".join(map(str, value))
        try:
            value = setting.metadata["parse"](text)
        except ValueError as error:
            raise ConfigError(f"{what}: {error}", hint=f"allowed: {setting.metadata['allowed']}") from None
    elif isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    elif isinstance(default, int) and not isinstance(default, bool) and isinstance(value, str):
        return _parsed(setting, setting.name, value)
    elif isinstance(default, str) and isinstance(value, str):
        value = setting.metadata["parse"](value)
    if type(value) is not type(default):
        raise ConfigError(
            f"{what} is a {type(value).__name__}, not a {type(default).__name__}",
            hint=f"allowed: {setting.metadata['allowed']}",
        )
    if not setting.metadata["valid"](value):
        wrong = "is unknown" if isinstance(value, str) else "is out of range"
        raise ConfigError(f"{what} {wrong}", hint=f"allowed: {setting.metadata['allowed']}")
    if setting.name == "partition_bytes":
        value = -(-value // 64) * 64
    return value


def _warn_unknown(environ: Mapping[str, str]) -> None:
    known = [env_name(name) for name in _FIELDS]
    for variable in environ:
        if not variable.startswith(PREFIX) or variable in known or variable in _warned:
            continue
        _warned.add(variable)
        if variable in _OBSOLETE:
            log.warning("%s is a setting of the original BytePS; it has no meaning any more", variable)
        else:
            log.warning("%s is no setting of torch_bps; %s", variable, _suggestion(variable, known))


def _suggestion(name: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(name, known, 1, 0.5)
    return f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join(known)}"


def settings_page() -> str:
    """Return docs/settings.md."""
    lines = [
        "# Settings",
        "",
        "Generated by `python -m torch_bps.config`. Nothing needs to be set. An option given in code wins over the "
        "environment:",
        '`init_process_group("byteps", pg_options=torch_bps.Options(lanes=4))`. Where ranks differ in what must agree '
        "(partitions, credit, servers), rank 0's value counts.",
        "",
        "| variable | option | default | allowed | meaning | in the original BytePS |",
        "|---|---|---|---|---|---|",
    ]
    for name, setting in _FIELDS.items():
        meta = setting.metadata
        default = setting.default
        shown = {True: "1", False: "0"}.get(default, str(default)) if isinstance(default, bool) else str(default)
        shown = f"`{shown}`" if default not in ("", ()) else "not set"
        cells = [f"`{env_name(name)}`", f"`{name}`", shown, meta["allowed"], meta["text"], meta["original"] or "-"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(settings_page(), end="")

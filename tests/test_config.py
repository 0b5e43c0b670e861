"""Config: every field from every origin, what is refused and how that is said, and the page that is made of it."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torch_bps import config
from torch_bps.config import Config, env_name
from torch_bps.errors import ConfigError

ROOT = Path(__file__).parents[1]

# field: (variable, default, text in the environment, its value, an option's value, refused texts, refused options)
FIELDS: dict[str, tuple[str, Any, str, Any, Any, list[str], list[Any]]] = {
    "servers": ("BYTEPS_SERVERS", (), "a:1,[::1]:2", ("a:1", "[::1]:2"), ("b:3",), ["a", "a:0", ","], [["a"], 5]),
    "num_servers": ("BYTEPS_NUM_SERVERS", 0, "4096", 4096, 3, ["-1", "4097", "x", "1.5", ""], [-1, True, 1.0, "x"]),
    "force_distributed": ("BYTEPS_FORCE_DISTRIBUTED", False, "1", True, True, ["2", "y"], [1, "1", None]),
    "enable_mixed_mode": ("BYTEPS_ENABLE_MIXED_MODE", False, "true", True, True, ["maybe"], [0]),
    "transport": ("BYTEPS_TRANSPORT", "auto", " tcp ", "tcp", "zmq", ["rdma", "TCP", ""], ["rdma", 1]),
    "local_boards": ("BYTEPS_LOCAL_BOARDS", True, "0", False, False, ["2", "x"], [0, "1"]),
    "lanes": ("BYTEPS_LANES", 2, "64", 64, 1, ["0", "65", "two"], [0, 65, 2.0]),
    "partition_bytes": ("BYTEPS_PARTITION_BYTES", 1 << 20, "4M", 4 << 20, 8192, ["4095", "2G", "M"], [64, "x"]),
    "scheduling_credit": ("BYTEPS_SCHEDULING_CREDIT", 0, "65536", 65536, 1, ["-1", "65537"], [-1]),
    "priority": ("BYTEPS_PRIORITY", 0, "-3", -3, 5, ["soon", "1000001"], [-1000001, True]),
    "server_engine_thread": ("BYTEPS_SERVER_ENGINE_THREAD", 2, "64", 64, 1, ["0", "65"], [0]),
    "heartbeat_timeout_s": ("BYTEPS_HEARTBEAT_TIMEOUT", 15.0, "0", 0.0, 2, ["0.5", "-1", "nan", "inf", "x"], [0.5]),
    "stall_warning_s": ("BYTEPS_STALL_WARNING", 10.0, "0.1", 0.1, 3.5, ["0", "86401", "soon"], [0, True, "3"]),
    "node_id": ("BYTEPS_NODE_ID", "", " rack 1 ", "rack 1", "n", [], [7]),
    "interfaces": ("BYTEPS_INTERFACE", (), "eth0, eth1", ("eth0", "eth1"), ("lo",), [], [0]),
    "nic_gbps": ("BYTEPS_NIC_GBPS", 0.0, "25", 25.0, 100, ["-1", "nan", "inf", "1e-9", "fast"], [-1, "25"]),
    "numa_on": ("BYTEPS_NUMA_ON", True, "0", False, False, ["maybe"], [0]),
    "socket_buffer_bytes": ("BYTEPS_SOCKET_BUFFER_BYTES", 0, "1G", 1 << 30, 4096, ["-1", "1025M"], [-1]),
    "shared_memory_bytes": ("BYTEPS_SHARED_MEMORY_BYTES", 8 << 30, "64M", 64 << 20, 1 << 30, ["63M", "all"], [1]),
    "log_level": ("BYTEPS_LOG_LEVEL", "", "debug", "DEBUG", "error", ["loud"], ["LOUD", 10]),
}
ORIGINAL_NAMES = ["BYTEPS_LOCAL_RANK", "BYTEPS_KEY_HASH_FN", "BYTEPS_ENABLE_ASYNC", "BYTEPS_TRACE_ON"]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(config, "_warned", set())
    logger = logging.getLogger("torch_bps")
    level = logger.level
    yield
    logger.setLevel(level)


def test_every_field_is_in_the_table() -> None:
    assert list(FIELDS) == [field.name for field in dataclasses.fields(Config) if field.name != "origins"]
    assert len(FIELDS) <= 30


@pytest.mark.parametrize("name", FIELDS)
def test_default_environment_and_option(name: str) -> None:
    variable, default, text, value, option, *_ = FIELDS[name]
    assert env_name(name) == variable

    settings = Config.load({})
    assert getattr(settings, name) == default
    assert type(getattr(settings, name)) is type(default)
    assert settings.origin(name) == "default"

    settings = Config.load({variable: text})
    assert getattr(settings, name) == value
    assert type(getattr(settings, name)) is type(default)
    assert settings.origin(name) == "env"

    settings = Config.load({variable: text}, **{name: option})
    wanted = option.upper() if name == "log_level" else option
    assert getattr(settings, name) == wanted
    assert type(getattr(settings, name)) is type(default)
    assert settings.origin(name) == "option"
    assert all(settings.origin(other) == "default" for other in FIELDS if other != name)


def allowed(name: str) -> str:
    return {field.name: field.metadata for field in dataclasses.fields(Config)}[name]["allowed"]


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, row in FIELDS.items() for text in row[5]])
def test_a_bad_variable_names_itself_its_value_and_what_is_allowed(name: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load({FIELDS[name][0]: text})
    first, *_, hint = str(caught.value).splitlines()
    assert f"{FIELDS[name][0]}={text!r}" in first
    assert hint == f"hint: allowed: {allowed(name)}"


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, row in FIELDS.items() for value in row[6]])
def test_a_bad_option_names_itself_its_value_and_what_is_allowed(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load({}, **{name: value})
    first, *_, hint = str(caught.value).splitlines()
    assert f"{name}={value!r}" in first
    assert hint == f"hint: allowed: {allowed(name)}"


def test_an_option_hides_a_bad_variable() -> None:
    assert Config.load({"BYTEPS_LANES": "many"}, lanes=3).lanes == 3


def test_an_unknown_option_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"no option 'lane'\nhint: did you mean lanes\?"):
        Config.load({}, lane=3)
    with pytest.raises(ConfigError, match="known are servers, num_servers"):
        Config.load({}, zzzzzzzz=3)


def test_config_is_frozen_and_read_from_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BYTEPS_LANES", "7")
    settings = Config.load()
    assert settings.lanes == 7
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.lanes = 8  # type: ignore[misc]


# ---- kinds of values


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1048576", 1 << 20),
        ("4M", 4 << 20),
        ("4m", 4 << 20),
        ("64K", 64 << 10),
        ("64 k", 64 << 10),
        ("1MiB", 1 << 20),
        (" 1 MiB ", 1 << 20),
        ("512M", 1 << 29),
        ("8192B", 8192),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert Config.load({"BYTEPS_PARTITION_BYTES": text}).partition_bytes == nbytes
    assert Config.load({}, partition_bytes=text).partition_bytes == nbytes


@pytest.mark.parametrize("text", ["", "M", "4T", "4.5M", "-4M", "0x100000", "4M4K", "4 M B", "1e6"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match=r"BYTEPS_PARTITION_BYTES=.* cannot be read"):
        Config.load({"BYTEPS_PARTITION_BYTES": text})


@pytest.mark.parametrize(("nbytes", "rounded"), [(4096, 4096), (4097, 4160), (1 << 29, 1 << 29), (4096000, 4096000)])
def test_partitions_are_whole_cache_lines(nbytes: int, rounded: int) -> None:
    assert Config.load({"BYTEPS_PARTITION_BYTES": str(nbytes)}).partition_bytes == rounded
    assert Config.load({}, partition_bytes=nbytes).partition_bytes == rounded


def test_credit_in_bytes() -> None:
    assert Config.load({}, partition_bytes=8192, scheduling_credit=3).credit_bytes == 3 * 8192
    assert Config.load({}, partition_bytes=8192).credit_bytes == 16 * 8192


@pytest.mark.parametrize("text", ["1", "true", "True", "ON", "yes", " 1 "])
def test_true(text: str) -> None:
    assert Config.load({"BYTEPS_FORCE_DISTRIBUTED": text}).force_distributed is True


@pytest.mark.parametrize("text", ["0", "false", "FALSE", "off", "no", "", " "])
def test_false(text: str) -> None:
    assert Config.load({"BYTEPS_FORCE_DISTRIBUTED": text}, lanes=1).force_distributed is False


@pytest.mark.parametrize(
    ("text", "servers"),
    [
        ("", ()),
        (" ", ()),
        ("host:9000", ("host:9000",)),
        ("10.0.0.1:1, 10.0.0.2:65535 ,", ("10.0.0.1:1", "10.0.0.2:65535")),
        ("[fe80::1%eth0]:5,[::1]:9", ("[fe80::1%eth0]:5", "[::1]:9")),
    ],
)
def test_servers(text: str, servers: tuple[str, ...]) -> None:
    assert Config.load({"BYTEPS_SERVERS": text}).servers == servers
    assert Config.load({}, servers=text).servers == servers
    assert Config.load({}, servers=list(servers)).servers == servers
    assert Config.load({}, servers=servers).servers == servers


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("good:1,host", "'host' is no HOST:PORT"),
        (":80", "':80' is no HOST:PORT"),
        ("[]:80", r"'\[\]:80' is no HOST:PORT"),
        ("host:", "'' is no port"),
        ("host:http", "'http' is no port"),
        ("host:65536", "'65536' is no port"),
        ("host:-1", "'-1' is no port"),
        ("::1:80", r"an IPv6 address needs brackets, \[::1\]:80"),
        ("zmq://host:80", "'zmq://host:80'"),
    ],
)
def test_malformed_servers(text: str, why: str) -> None:
    for load in (lambda: Config.load({"BYTEPS_SERVERS": text}), lambda: Config.load({}, servers=[text])):
        with pytest.raises(ConfigError, match=why) as caught:
            load()
        assert "HOST:PORT,HOST:PORT" in caught.value.hint


def test_the_log_level_is_that_of_the_packages_logger_and_of_no_other() -> None:
    root = logging.getLogger().level
    Config.load({"BYTEPS_LOG_LEVEL": "error"})
    assert logging.getLogger("torch_bps").level == logging.ERROR
    assert logging.getLogger().level == root
    Config.load({})
    assert logging.getLogger("torch_bps").level == logging.ERROR  # not set: left as the program has it


# ---- unknown variables


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "torch_bps.config"]


def test_an_unknown_variable_warns_once_with_the_nearest_name(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"BYTEPS_PARTITON_BYTES": "1", "BYTEPSX": "1", "DMLC_ROLE": "worker", "byteps_lanes": "1"}
    for _ in range(2):
        Config.load(environ)
    (text,) = warnings(caplog)
    assert "BYTEPS_PARTITON_BYTES" in text
    assert "did you mean BYTEPS_PARTITION_BYTES?" in text


def test_an_unknown_variable_like_no_other_lists_all(caplog: pytest.LogCaptureFixture) -> None:
    Config.load({"BYTEPS_QQQQQQQQQQQQQQQQQQQQ": "1"})
    (text,) = warnings(caplog)
    assert "BYTEPS_QQQQQQQQQQQQQQQQQQQQ is no setting" in text


@pytest.mark.parametrize("variable", ORIGINAL_NAMES)
def test_a_variable_of_the_original_says_so(variable: str, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        Config.load({variable: "1"})
    (text,) = warnings(caplog)
    assert text.startswith(f"{variable} is a setting of the original BytePS")


def test_known_variables_do_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    Config.load({row[0]: row[2] for row in FIELDS.values()})
    assert not warnings(caplog)


def test_no_setting_is_also_called_obsolete() -> None:
    assert not config._OBSOLETE & {env_name(name) for name in FIELDS}


# ---- the page, and children


def test_the_settings_page_is_what_the_module_prints() -> None:
    page = (ROOT / "docs/settings.md").read_text()
    assert page == config.settings_page()
    done = subprocess.run(
        [sys.executable, "-m", "torch_bps.config"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == page
    assert not done.stderr
    for name, (variable, *_) in FIELDS.items():
        assert f"| `{variable}` | `{name}` | " in page


def test_a_child_finds_the_package_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "later")
    monkeypatch.setenv("BYTEPS_LANES", "3")
    environment = config.child_environment("first")
    assert environment["PYTHONPATH"] == f"first{os.pathsep}later"
    assert environment["BYTEPS_LANES"] == "3"
    monkeypatch.delenv("PYTHONPATH")
    assert config.child_environment("first")["PYTHONPATH"] == "first"

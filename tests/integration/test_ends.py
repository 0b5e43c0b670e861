"""How jobs end: in order, by exception, by signal, by forgetting; what is left then, and what the others are told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.integration import jobs
from tests.integration.rig import alive, run_ranks, start_ranks
from torch_bps.core import runtime
from torch_bps.errors import BytePSError, MismatchError, OperationTimeout, PeerLostError

MODES = {
    "shm": {},
    "server": {"BYTEPS_FORCE_DISTRIBUTED": "1"},
    "tcp": {"BYTEPS_FORCE_DISTRIBUTED": "1", "BYTEPS_TRANSPORT": "tcp"},
}
modes = pytest.mark.parametrize("mode", MODES)
HIERARCHICAL = "hierarchical"  # two nodes, the second of one rank


def env_of(mode: str, rank: int) -> dict[str, str]:
    return {"BYTEPS_NODE_ID": str(rank // 2)} if mode == HIERARCHICAL else MODES[mode]


@pytest.mark.parametrize("mode", [*MODES, HIERARCHICAL])
def test_destroy_leaves_nothing_and_may_be_repeated(mode: str) -> None:
    size = 3 if mode == HIERARCHICAL else 2
    results = run_ranks(jobs.open_and_destroy, size, 4, env=lambda rank: env_of(mode, rank))
    for result in results:
        _first, *after = result.value
        for left in after:
            assert left["threads"] == []
            assert left["memfds"] == []
            assert left["children"] == []
        # what torch itself keeps (its store's connection) is opened once
        assert len(after[-1]["fds"]) == len(after[0]["fds"]), (after[0]["fds"], after[-1]["fds"])
        assert not any("memfd" in fd for fd in after[-1]["fds"])


def forget(rank: int, world_size: int) -> int:
    dist.init_process_group("byteps")
    dist.all_reduce(torch.ones(1000))
    dist.new_group([0, 1])
    return 7


@modes
def test_a_script_that_forgets_to_destroy_exits(mode: str) -> None:
    started = time.monotonic()
    results = run_ranks(forget, 2, env=MODES[mode], fresh=True)
    assert [result.value for result in results] == [7, 7]
    assert time.monotonic() - started < 30


def raise_on_one(rank: int, world_size: int) -> None:
    dist.init_process_group("byteps", timeout=timedelta(seconds=60))
    dist.all_reduce(torch.ones(1000))
    if rank == 1:
        raise KeyError("a bug of the user's")
    dist.all_reduce(torch.ones(1000))


@modes
def test_an_exception_on_one_rank_ends_all_with_a_reason(mode: str) -> None:
    results = run_ranks(raise_on_one, 2, env=MODES[mode], check=False, timeout_s=30, fresh=True)
    assert isinstance(results[1].error, KeyError)
    assert results[1].exitcode == 1
    assert results[0].exitcode == 1
    assert isinstance(results[0].error, PeerLostError)
    text = str(results[0].error)
    assert "rank 1" in text
    assert "all_reduce" in text
    assert not results[0].orphans
    assert not results[1].orphans


def leave_early(rank: int, world_size: int) -> tuple[float, str]:
    """Rank 0 destroys its group while the other has begun an operation more."""
    dist.init_process_group("byteps", timeout=timedelta(seconds=60))
    dist.all_reduce(torch.ones(1000))
    text = ""
    if rank == 0:
        time.sleep(0.5)  # until the others have begun it
    else:
        try:
            dist.all_reduce(torch.ones(1000))
        except PeerLostError as error:
            text = str(error)
    started = time.monotonic()
    dist.destroy_process_group()
    return time.monotonic() - started, text


@pytest.mark.parametrize("mode", [*MODES, HIERARCHICAL])
def test_a_rank_that_leaves_early_does_not_wait_and_the_others_are_told(mode: str) -> None:
    size = 3 if mode == HIERARCHICAL else 2
    results = run_ranks(leave_early, size, env=lambda rank: env_of(mode, rank))
    assert results[0].value[0] < 5.0
    for result in results[1:]:
        assert "rank 0" in result.value[1]


def killed(rank: int, world_size: int) -> str:
    dist.init_process_group("byteps", timeout=timedelta(seconds=60))
    dist.all_reduce(torch.ones(1000))
    print("in", flush=True)
    if rank == 1:
        time.sleep(60)
    started = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1000))
    except BytePSError as error:
        return f"{type(error).__name__} after {time.monotonic() - started:.1f}: {error}"
    return "no error"


@modes
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_killed_rank_is_noticed_by_all(mode: str, world_size: int) -> None:
    with start_ranks(killed, world_size, env=MODES[mode]) as job:
        for rank in job.ranks:
            rank.wait_for("in")
        job.ranks[1].kill(signal.SIGKILL)
        results = job.results(30)
    for result in results:
        if result.rank == 1:
            continue
        assert result.value.startswith("PeerLostError"), result.value
        assert "rank 1" in result.value
        assert not result.orphans


def frozen(rank: int, world_size: int) -> str:
    return killed(rank, world_size)


def test_a_frozen_rank_is_noticed_by_its_silence() -> None:
    with start_ranks(frozen, 2, env={"BYTEPS_HEARTBEAT_TIMEOUT": "2"}) as job:
        for rank in job.ranks:
            rank.wait_for("in")
        job.ranks[1].kill(signal.SIGSTOP)
        assert job.ranks[0].wait(time.monotonic() + 20) == 0
        job.ranks[1].kill(signal.SIGKILL)
        results = job.results(20)
    assert results[0].value.startswith("PeerLostError"), results[0]
    assert "silent" in results[0].value  # by its clients or by its service, whoever looks first


def server_pid() -> int:
    running = runtime.current()
    assert running is not None
    server = running._server
    return server.process.pid if server is not None else 0


def lose_server(rank: int, world_size: int) -> tuple[int, str]:
    dist.init_process_group("byteps", timeout=timedelta(seconds=60))
    pid = server_pid()
    try:
        dist.all_reduce(torch.ones(1000))
        if rank == 0:
            os.kill(pid, signal.SIGKILL)  # the other's first result may still be on its way
        for _ in range(1000):
            dist.all_reduce(torch.ones(1000))
            time.sleep(0.01)
    except BytePSError as error:
        return pid, f"{type(error).__name__}: {error}"
    return pid, "no error"


@pytest.mark.parametrize("transport", ["shm", "tcp", "zmq"])
def test_a_killed_server_is_noticed_by_all_ranks(transport: str) -> None:
    results = run_ranks(
        lose_server, 2, env={"BYTEPS_FORCE_DISTRIBUTED": "1", "BYTEPS_TRANSPORT": transport}, check=False, timeout_s=30
    )
    for result in results:
        assert result.value is not None, result
        assert result.value[1].startswith("PeerLostError"), result.value
        assert "server" in result.value[1]


def show_server(rank: int, world_size: int) -> None:
    dist.init_process_group("byteps")
    print(f"server {server_pid()}.", flush=True)
    time.sleep(60)


def test_a_colocated_server_ends_with_its_killed_parent() -> None:
    with start_ranks(show_server, 2, env={"BYTEPS_FORCE_DISTRIBUTED": "1"}) as job:
        pid = int(job.ranks[0].wait_for("server").split()[1].rstrip("."))
        assert alive(pid)
        job.ranks[0].kill(signal.SIGKILL)
        deadline = time.monotonic() + 10
        while alive(pid) and time.monotonic() < deadline:
            job.ranks[0].wait(time.monotonic() + 0.05)
        assert not alive(pid)


def mismatch(rank: int, world_size: int, what: str) -> str:
    dist.init_process_group("byteps", timeout=timedelta(seconds=60))
    odd = rank == 1
    tensor = torch.ones(120 + 3 * (odd and what == "size"), dtype=torch.float64 if odd and what == "dtype" else None)
    try:
        if what == "root":
            dist.broadcast(tensor, 2 if odd else 0)
        elif what == "splits":
            # rank 1 takes another number of elements from rank 0 than that gives it
            dist.all_to_all_single(torch.ones(120), tensor, [39, 40, 41] if odd else [40, 40, 40], [40, 40, 40])
        elif what == "op" and odd:
            dist.broadcast(tensor, 0)
        else:
            dist.all_reduce(tensor, dist.ReduceOp.MAX if odd and what == "kind" else dist.ReduceOp.SUM)
    except MismatchError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("mode", [*MODES, HIERARCHICAL])
@pytest.mark.parametrize("what", ["size", "dtype", "op", "kind", "root", "splits"])
def test_ranks_that_disagree_are_told_each_others_view(mode: str, what: str) -> None:
    results = run_ranks(mismatch, 3, what, env=lambda rank: env_of(mode, rank), check=False)
    for result in results:
        if what == "root" and result.value == "no error":
            assert result.rank == 2  # it needed only rank 0, and was done before rank 1 came
            continue
        views = result.value.splitlines()
        assert views[0].startswith("the ranks disagree"), result.value
        assert sum(line.strip().startswith(("rank 0: ", "rank 1: ", "rank 2: ", "node ")) for line in views) >= 2
        assert any(line.startswith("  operation: ") for line in views)  # its own view, if it came last


def mismatch_and_on(rank: int, world_size: int) -> float:
    dist.init_process_group("byteps", timeout=timedelta(seconds=20))
    for size in (3_000_000, 1000):
        with pytest.raises(MismatchError):
            dist.all_reduce(torch.ones(size + rank))
    tensor = torch.ones(2_000_000)
    for _ in range(3):
        dist.all_reduce(tensor)
    dist.barrier()
    dist.destroy_process_group()
    return float(tensor.sum())


@modes
def test_a_group_still_works_after_a_disagreement(mode: str) -> None:
    for result in run_ranks(mismatch_and_on, 3, env=MODES[mode]):
        assert result.value == 27 * 2_000_000


def late(rank: int, world_size: int) -> str:
    dist.init_process_group("byteps", timeout=timedelta(seconds=1.5))
    if rank == 1:
        time.sleep(4)
        return ""
    try:
        dist.all_reduce(torch.ones(1000))
    except OperationTimeout as error:
        return str(error)
    return "no error"


@modes
def test_a_timeout_names_who_is_missing(mode: str) -> None:
    results = run_ranks(late, 2, env=MODES[mode], check=False)
    assert "Timed out after 1." in results[0].value
    assert "waiting for ranks 1" in results[0].value
    assert "all_reduce" in results[0].value


SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("byteps")
"""


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"BYTEPS_SERVERS": "127.0.0.1:1"}, ["127.0.0.1:1", "connection refused", "BYTEPS_SERVERS"]),
        ({"BYTEPS_SERVERS": "nonsense"}, ["BYTEPS_SERVERS='nonsense'", "HOST:PORT"]),
        ({"BYTEPS_LANES": "many"}, ["BYTEPS_LANES='many'", "1 to 64"]),
        ({"BYTEPS_PARTITION_BYTES": "7"}, ["BYTEPS_PARTITION_BYTES", "out of range"]),
        ({"BYTEPS_INTERFACE": "nope0"}, ["nope0", "lo"]),
    ],
)
def test_wrong_settings_are_named(env: dict[str, str], words: list[str]) -> None:
    results = run_ranks(open_only, 2, env=env, check=False, timeout_s=40)
    for result in results:
        assert isinstance(result.error, BytePSError), result
        for word in words:
            assert word in str(result.error), str(result.error)


def open_only(rank: int, world_size: int) -> None:
    dist.init_process_group("byteps", timeout=timedelta(seconds=30))


def test_an_unknown_setting_warns_with_the_nearest_name() -> None:
    results = run_ranks(jobs.train, 2, 1, backend="byteps", env={"BYTEPS_LANE": "3"})
    assert "BYTEPS_LANE is no setting of torch_bps; did you mean BYTEPS_LANES?" in results[0].output


def interrupted(rank: int, world_size: int) -> str:
    dist.init_process_group("byteps", timeout=timedelta(seconds=60))
    print("in", flush=True)
    if rank == 1:
        time.sleep(60)
    started = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1000))
    except KeyboardInterrupt:
        return f"{time.monotonic() - started:.2f}"
    return "no error"


def test_ctrl_c_gets_through_a_wait() -> None:
    with start_ranks(interrupted, 2) as job:
        job.ranks[0].wait_for("in")
        job.ranks[1].wait_for("in")
        started = time.monotonic()
        job.ranks[0].kill(signal.SIGINT)
        assert job.ranks[0].wait(time.monotonic() + 15) == 0
        assert time.monotonic() - started < 10


def fork_workers(rank: int, world_size: int) -> list[str]:
    dist.init_process_group("byteps", timeout=timedelta(seconds=60))
    dist.all_reduce(torch.ones(1000))
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            dist.all_reduce(torch.ones(1000))
            text = "no error"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode()[:4000])
        os._exit(0)
    os.close(write)
    text = os.read(read, 4096).decode()
    os.close(read)
    os.waitpid(pid, 0)
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return [text, str(tensor[0].item())]


@modes
def test_a_forked_child_is_refused_and_harms_nothing(mode: str) -> None:
    for result in run_ranks(fork_workers, 2, env=MODES[mode]):
        assert result.value[0].startswith("ClosedError"), result.value
        assert "forked child" in result.value[0]
        assert result.value[1] == "2.0"


def killed_with_child(rank: int, world_size: int) -> str:
    dist.init_process_group("byteps", timeout=timedelta(seconds=60))
    dist.all_reduce(torch.ones(1000))
    if rank == 1:
        if os.fork() == 0:  # as a DataLoader worker: it inherits every descriptor
            time.sleep(25)
            os._exit(0)
        print("in", flush=True)
        time.sleep(60)
    started = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1000))
    except BytePSError as error:
        return f"{time.monotonic() - started:.1f} {error}"
    return "no error"


def test_a_killed_rank_with_living_children_is_noticed() -> None:
    with start_ranks(killed_with_child, 2, env={"BYTEPS_HEARTBEAT_TIMEOUT": "4"}) as job:
        job.ranks[1].wait_for("in")
        job.ranks[1].kill(signal.SIGKILL)
        assert job.ranks[0].wait(time.monotonic() + 20) is not None
        started = time.monotonic()
        job.close()
        assert time.monotonic() - started < 15


def test_a_single_process_needs_nothing(tmp_path: object) -> None:
    code = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('byteps', init_method='tcp://127.0.0.1:0', rank=0, world_size=1)\n"
        "t = torch.ones(3); dist.all_reduce(t); print(t.sum().item())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "3.0"


def test_a_failure_while_connecting_is_raised_on_all_ranks() -> None:
    def env(rank: int) -> dict[str, str]:
        return {"BYTEPS_NODE_ID": str(rank), "BYTEPS_TRANSPORT": "shm"}

    results = run_ranks(open_only, 2, env=env, check=False, timeout_s=40)
    for result in results:
        assert "BYTEPS_TRANSPORT=shm, but the server is on another node" in str(result.error), result.error

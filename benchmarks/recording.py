"""What a step did when: computing, and each bucket or partition on its way. For the timeline picture only.

No postponed annotations here: DDP looks at its hook's.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from torch_bps.core.client import Client
from torch_bps.core.flight import Task


class Recording:
    """Events between `begin` and `end`. Thread safety: `note` from any thread."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._on = False

    def note(self, row: str, name: str, begin_s: float, end_s: float) -> None:
        """Keep an event, times as of time.monotonic; dropped while not recording."""
        with self._lock:
            if self._on:
                self._events.append({"row": row, "name": name, "begin_s": begin_s, "end_s": end_s})

    def begin(self) -> None:
        """Start to record."""
        with self._lock:
            self._on = True

    def end(self) -> list[dict[str, Any]]:
        """Stop, and return the events, counted from the first one's begin."""
        with self._lock:
            self._on = False
            events, self._events = self._events, []
        zero_s = min((event["begin_s"] for event in events), default=0.0)
        for event in events:
            event["begin_s"] -= zero_s
            event["end_s"] -= zero_s
        return sorted(events, key=lambda event: event["begin_s"])


@contextmanager
def partitions(recording: Recording) -> Iterator[None]:
    """Record each partition of this process from its issue to its result: row "partition", name "operation/part"."""
    issued_s: dict[Task, float] = {}
    issue, complete = Client._issue, Client._complete

    def noted_issue(client: Client, task: Task) -> None:
        issued_s[task] = time.monotonic()
        issue(client, task)

    def noted_complete(client: Client, task: Task) -> None:
        header = task.header
        recording.note("partition", f"{header.sequence}/{header.part}", issued_s.pop(task), time.monotonic())
        complete(client, task)

    Client._issue, Client._complete = noted_issue, noted_complete  # type: ignore[method-assign]
    try:
        yield
    finally:
        Client._issue, Client._complete = issue, complete  # type: ignore[method-assign]


BucketHook = Callable[[None, dist.GradBucket], torch.futures.Future[torch.Tensor]]


def bucket_hook(recording: Recording, group: dist.ProcessGroup) -> BucketHook:
    """Return DDP's own averaging as a communication hook that records each bucket: row "bucket", number as the name."""

    def average(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        begin_s = time.monotonic()
        name = str(bucket.index())
        work = dist.all_reduce(bucket.buffer().div_(group.size()), group=group, async_op=True)
        assert work is not None

        def done(future: torch.futures.Future[Any]) -> torch.Tensor:
            recording.note("bucket", name, begin_s, time.monotonic())
            result: torch.Tensor = future.value()[0]
            return result

        return work.get_future().then(done)

    return average

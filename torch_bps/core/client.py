"""Runs operations: schedules their tasks, sends them over links, matches what comes back, watches deadlines.

    Group.submit ──reactor.call──> Client.start ──> Scheduler ──> Link.send ... on_result ──> Flight done ──> on_done

One Client a process, for all groups. Every flight ends: by its last task, a Failed from a service, a lost link, its
deadline, or the runtime's end. Must not know torch, Stores or tensors.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from torch_bps.core.failures import HINTS, missing_text, named, remember
from torch_bps.core.flight import Flight, FlightId, Task, TensorBuffer, answered_key
from torch_bps.core.link import Link
from torch_bps.core.patience import Patience
from torch_bps.core.plan import plan_other_parts
from torch_bps.core.scheduler import Scheduler
from torch_bps.core.traffic import Traffic
from torch_bps.errors import (
    BY_NAME,
    BytePSError,
    OperationTimeout,
    PeerLostError,
    ProtocolError,
    told,
)
from torch_bps.transport.base import Buffer, Reactor
from torch_bps.transport.memory import copy_bytes
from torch_bps.wire import control, ops
from torch_bps.wire.header import DONE, Header

log = logging.getLogger("torch_bps.core")

_SWEEP_S = 0.2


class Client:
    """The client of all services this process talks to.

    Thread safety: the reactor's thread, except where a method says otherwise.

    Args:
        credit_nbytes: what may be under way until its result is back (core.scheduler).
        heartbeat_timeout_s: a silent service is lost after this; 0 = never.
        stall_warning_s: say what an operation waits for after this long.
    """

    def __init__(
        self,
        reactor: Reactor,
        *,
        credit_nbytes: int,
        heartbeat_timeout_s: float,
        stall_warning_s: float,
        who: str,
    ) -> None:
        self.reactor = reactor
        self.links: dict[str, Link] = {}
        self.traffic = Traffic()
        self.who = who
        self._scheduler: Scheduler[Task] = Scheduler(credit_nbytes)
        self._patience = Patience()
        self._flights: dict[FlightId, list[Flight]] = {}
        self._failed: dict[FlightId, None] = {}
        """the last ones: answers that are still on their way are dropped"""
        self._foretold: dict[FlightId, BytePSError] = {}
        """operations that have failed on other ranks and were not started here yet"""
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._stall_warning_s = stall_warning_s
        self._sweeping = False
        self._watching = False
        self._heartbeat_s = time.monotonic()
        self.closed: BytePSError | None = None
        self.on_broken: Callable[[int, BytePSError], None] = lambda group, error: None
        """called with (group id, error) when a member is lost; core.runtime marks the group"""
        self.on_lost: Callable[[Link, BytePSError], None] = lambda link, error: None
        """called when a service is lost without a Bye; core.runtime breaks the groups that use it"""
        if heartbeat_timeout_s:
            reactor.call(self._heartbeat)

    # ---- flights

    def start(self, flight: Flight) -> None:
        """Send a flight on its way."""
        now_s = time.monotonic()
        flight.started_s = flight.asked_s = now_s
        error = self.closed or self._foretold.pop(flight.id, None) or flight.group.broken
        if error is not None:
            self._end(flight, named(error, flight, self.who))
            return
        self._flights.setdefault(flight.id, []).append(flight)
        flight.remaining = len(flight.tasks)
        for link, header in flight.declares:
            if link.closed is None:
                link.declare(header)
        if not flight.remaining:
            self._end(flight, None)
            return
        tasks, flight.tasks = flight.tasks, []  # else flight and tasks would keep each other, and the tensors, alive
        self._submit(flight, tasks)
        if not self._sweeping:
            self._sweeping = True
            self.reactor.call_later(_SWEEP_S, self._sweep)

    def _submit(self, flight: Flight, tasks: list[Task]) -> None:
        submit = self._scheduler.submit
        for task in tasks:
            if task.credit_nbytes:
                submit(flight, flight.priority, task.credit_nbytes, task, task.header.nbytes)
            else:
                self._issue(task)  # never behind pushes that may be waiting for it
        self._pump()

    def _pump(self) -> None:
        for task in self._scheduler.ready():
            self._issue(task)
        if self._scheduler.queued_nbytes and not self._watching:
            self._patience.heard_s = time.monotonic()
            self._watch()

    def _watch(self) -> None:
        self._watching = True
        self.reactor.call_later(self._patience.seconds, self._check_stall)

    def _issue(self, task: Task) -> None:
        link = task.link
        flight = task.flight
        if flight.error is not None:
            self._scheduler.done(task.credit_nbytes, task.flight.priority)
            return
        if link.closed is not None:
            self._scheduler.done(task.credit_nbytes, task.flight.priority)
            self.fail(flight.id, named(link.closed, flight, self.who))
            return
        link.tasks[task.key] = task
        flight.outstanding.add(task)
        task.issued_s = time.monotonic()
        push = task.push
        if push is None:
            link.send(task.header, None)
        else:
            self.traffic.pushed(link.transport, push.nbytes)
            link.send(task.header, TensorBuffer(push, task))

    def _check_stall(self) -> None:
        """Nothing came back for a while though tasks wait: let some go beyond the credit (core.scheduler.stalled)."""
        self._watching = False
        if not self._scheduler.queued_nbytes:
            return
        operations = [(id[:2], flights[0].priority) for id, flights in self._flights.items() if flights[0].operation]
        groups, priorities = (len(set(values)) for values in zip(*operations, strict=True)) if operations else (0, 0)
        if self._patience.is_over(time.monotonic(), groups, priorities):
            for task in self._scheduler.stalled():
                self._issue(task)
        self._watch()
        self._pump()

    def _complete(self, task: Task) -> None:
        flight = task.flight
        self.traffic.results += 1
        now_s = self._patience.heard_s = time.monotonic()
        if task.credit_nbytes:
            self._scheduler.done(task.credit_nbytes, task.flight.priority)
            self._patience.result(task.issued_s, now_s)
        del task.link.tasks[task.key]
        flight.outstanding.discard(task)
        flight.remaining -= 1
        if flight.remaining == 0:
            self._end(flight, None)
        self._pump()

    def _end(self, flight: Flight, error: BytePSError | None) -> None:
        flights = self._flights.get(flight.id)
        if flights is not None and flight in flights:  # not, if it was refused at its start
            flights.remove(flight)
            if not flights:
                del self._flights[flight.id]
        flight.error = error
        if error is None:
            self.traffic.ended(time.monotonic() - flight.started_s)
        flight.on_done(error)

    def fail(self, flight_id: FlightId, error: BytePSError, tell: bool = True) -> None:
        """Fail all flights of an operation, and tell the services so that the other ranks hear of it."""
        flights = self._flights.pop(flight_id, None)
        if flights is None:
            return
        remember(self._failed, flight_id, None)
        if tell:
            group, stream, sequence = flight_id
            message = control.Cancel(group, stream, sequence, *told(error))
            for link in flights[0].group.links():
                if link.closed is None and link.ready:
                    link.send_message(message)
        for flight in flights:
            self._drop(flight)
            flight.error = error
            flight.on_done(error)
        self._pump()

    def _drop(self, flight: Flight) -> None:
        self._scheduler.cancel(flight)
        for task in flight.outstanding:
            del task.link.tasks[task.key]
            if task.receiving is not None:
                task.receiving.divert()
                task.receiving = None
            self._scheduler.done(task.credit_nbytes, task.flight.priority)
        flight.outstanding.clear()

    def fail_group(self, group: int, error: BytePSError, tell: bool = False) -> None:
        """Fail every flight of a group."""
        for flight_id in [flight_id for flight_id in self._flights if flight_id[0] == group]:
            flight = self._flights[flight_id][0]
            self.fail(flight_id, named(error, flight, self.who), tell)

    def flight(self, flight_id: FlightId) -> Flight | None:
        """Return the flight of this rank's own operation (an uplink looks up where its sum goes)."""
        for flight in self._flights.get(flight_id, ()):
            if flight.operation is not None:
                return flight
        return None

    def close(self, error: BytePSError) -> None:
        """Fail everything that is under way; later flights fail at once."""
        self.closed = error
        for flight_id in list(self._flights):
            if flights := self._flights.get(flight_id):
                self.fail(flight_id, named(error, flights[0], self.who))

    # ---- what links report

    def on_result_header(self, link: Link, header: Header) -> Buffer | None:
        """Receive straight into the tensor."""
        task = link.tasks.get(answered_key(header))
        if task is None or task.into is None:
            return None
        if task.into.nbytes != header.nbytes:
            raise ProtocolError(f"{link.name} sent {header.nbytes} bytes for {task.into.nbytes} of {task.flight.label}")
        task.receiving = buffer = TensorBuffer(task.into, task)
        return buffer

    def on_result(self, link: Link, header: Header, buffer: Buffer | None) -> None:
        """A task's answer is here."""
        task = link.tasks.get(answered_key(header))
        if task is None:
            if buffer is not None:
                buffer.release()
            self._late(link, header)
            return
        into = task.into
        task.receiving = None  # they refer to each other
        if into is not None and buffer is not None:
            if buffer.view is not into:
                if buffer.view.nbytes != into.nbytes:
                    buffer.release()
                    raise ProtocolError(f"{link.address} sent {header.nbytes} bytes for {into.nbytes}")
                copy_bytes(into, buffer.view)
            buffer.release()
            self.traffic.pulled(link.transport, into.nbytes)
        elif (header.frame == DONE) == (into is not None) or (into is not None and into.nbytes):
            if buffer is not None:
                buffer.release()
            raise ProtocolError(f"{link.address} sent a wrong kind of answer for {task.flight.label}")
        if header.stream and header.part == 0:
            self._matched(task, header)
        else:
            self._complete(task)

    def _matched(self, task: Task, header: Header) -> None:
        """Part 0 of a message found its receiver (or its message): go on with the other parts."""
        flight = task.flight
        operation = flight.operation
        assert operation is not None
        if task.into is not None:
            operation.source = ops.split_stream(header.stream)[0]
        others = plan_other_parts(flight.group, flight, operation, header.stream, header.sequence)
        flight.remaining += len(others)
        self._complete(task)
        if others:
            self._submit(flight, others)

    def _late(self, link: Link, header: Header) -> None:
        """An answer that nobody waits for: its operation failed meanwhile, or the service is wrong."""
        if (header.group, header.stream, header.sequence) in self._failed or header.stream:
            return
        raise ProtocolError(f"{link.address} sent an answer that nobody asked for ({header})")

    def on_message(self, link: Link, message: control.AnyMessage) -> None:
        """A service says something about an operation or a group."""
        match message:
            case control.Failed():
                cls = BY_NAME.get(message.error, BytePSError)
                hint = message.hint or HINTS.get(cls, "")
                error = cls(message.text, hint=hint, server=link.address)
                if message.sequence < 0:
                    self.break_group(message.group, error)
                else:
                    flight_id = (message.group, message.stream, message.sequence)
                    flights = self._flights.get(flight_id)
                    if flights:
                        self.fail(flight_id, named(error, flights[0], self.who))
                    elif flight_id not in self._failed:
                        remember(self._foretold, flight_id, error)
            case control.Waiting(group, stream, sequence, missing):
                for flight in self._flights.get((group, stream, sequence), ()):
                    flight.missing = missing
                    if time.monotonic() - flight.started_s >= self._stall_warning_s:
                        log.warning(
                            "%s: %s has been waiting for %.0f s%s", self.who, flight.label,
                            time.monotonic() - flight.started_s, missing_text(flight),
                        )  # fmt: skip
            case _:
                raise ProtocolError(f"{link.address} sent a {type(message).__name__}, which only ranks send")

    def break_group(self, group: int, error: BytePSError) -> None:
        """A member is lost: everything pending and everything later fails."""
        self.on_broken(group, error)
        self.fail_group(group, error)

    def on_link_lost(self, link: Link, error: BytePSError) -> None:
        """A service is gone: whatever has something under way with it fails; groups that use it are broken."""
        if self.links.get(link.address) is link:
            del self.links[link.address]
        if not link.leaving:
            self.on_lost(link, error)
        for task in list(link.tasks.values()):
            self.fail(task.flight.id, named(error, task.flight, self.who))

    # ---- clocks

    def _sweep(self) -> None:
        now_s = time.monotonic()
        for flights in [list(flights) for flights in self._flights.values()]:
            for flight in flights:
                if flight.deadline_s and now_s >= flight.deadline_s:
                    self.fail(flight.id, self._timeout(flight, now_s))
                    break
                patience_s = self._stall_warning_s
                if flight.deadline_s:
                    patience_s = min(patience_s, 0.6 * (flight.deadline_s - flight.started_s))
                if now_s - flight.asked_s >= patience_s:
                    flight.asked_s = now_s
                    for link in flight.homes:
                        if link.closed is None:
                            link.send_message(control.Query(*flight.id))
        self._sweeping = bool(self._flights)
        if self._sweeping:
            self.reactor.call_later(_SWEEP_S, self._sweep)

    def _timeout(self, flight: Flight, now_s: float) -> BytePSError:
        return OperationTimeout(
            f"{flight.label} #{flight.id[2]} Timed out after {now_s - flight.started_s:.1f} s{missing_text(flight)}",
            hint="see whether that rank is stuck or slow; the limit is the `timeout` of the process group",
            rank=self.who,
            group=flight.group.name,
        )

    def _heartbeat(self) -> None:
        if self.closed is not None:
            return
        timeout_s = self._heartbeat_timeout_s
        now_s = time.monotonic()
        late = now_s - self._heartbeat_s > timeout_s / 2
        self._heartbeat_s = now_s
        for link in list(self.links.values()):
            if late:
                link.heard_s = now_s  # this process itself slept: its own clock proves nothing
            elif link.ready and now_s - link.heard_s > timeout_s:
                link.close(
                    PeerLostError(
                        f"{link.address} was silent for {now_s - link.heard_s:.0f} s",
                        hint="it is frozen, overloaded or cut off; the limit is BYTEPS_HEARTBEAT_TIMEOUT",
                        server=link.address,
                    )
                )
                continue
            if link.ready:
                link.ping()
        self.reactor.call_later(timeout_s / 5, self._heartbeat)

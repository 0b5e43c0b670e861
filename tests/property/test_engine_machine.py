"""The engine under any interleaving: groups, collectives, messages, ranks that err, give up, leave or die.

The ledger checks every instruction (each buffer accounted for once, each frame answered once, folds in contributor
order, nothing after a Drop). The machine adds: an operation that nobody disturbed is answered in full and fails for
nobody, and once all is over the engine holds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.server.ledger import Frame, Ledger, Script, by_nodes, head
from torch_bps.errors import ProtocolError
from torch_bps.server.engine import Send
from torch_bps.wire import ops
from torch_bps.wire.header import BY_NODE, DECLARE, HEADER_NBYTES, PULL, PUSH, Header, unpack

COLLECTIVES = [row.code for row in ops.ROWS if row.code not in (0, ops.SEND)]
REDUCING = [row.code for row in ops.ROWS if row.combine == ops.REDUCE]


@dataclass(eq=False)
class Operation:
    """A collective, or one message: what is still to be delivered, and whether something has disturbed it."""

    group: int
    stream: int
    sequence: int
    todo: list[tuple[int, Header]]
    disturbed: bool = False
    sent: list[Frame] = field(default_factory=list)


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(fold_at_once=False)
        self.groups = 0
        self.sizes: dict[int, int] = {}
        self.nodes: dict[int, list[int] | None] = {}
        self.uplink: dict[int, bool] = {}
        self.sequences: dict[int, int] = {}
        self.numbers: dict[tuple[int, int], int] = {}
        self.operations: list[Operation] = []

    # ---- what the ranks do

    @initialize(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=2))
    def begin(self, sizes: list[int]) -> None:
        for size in sizes:
            self.make_group(size, "flat")

    @precondition(lambda self: len(self.living()) < 3)
    @rule(size=st.integers(1, 4), kind=st.sampled_from(["flat", "nodes", "uplink"]))
    def make_group(self, size: int, kind: str) -> None:
        self.groups += 1
        group = self.groups
        nodes = [min(index // 2, 1) for index in range(size)] if kind == "nodes" else None
        self.sizes[group], self.nodes[group], self.uplink[group] = size, nodes, kind == "uplink"
        self.ledger.join(group, size, nodes=nodes, uplink=kind == "uplink")

    def living(self) -> list[int]:
        return [group for group, members in self.ledger.present.items() if members]

    @precondition(lambda self: self.living())
    @rule(data=st.data(), parts=st.integers(1, 2), home=st.booleans(), empty=st.booleans(), err=st.booleans())
    def call_collective(self, data: st.DataObject, parts: int, home: bool, empty: bool, err: bool) -> None:
        group = data.draw(st.sampled_from(self.living()))
        size, nodes = self.sizes[group], self.nodes[group]
        sequence = self.sequences[group] = self.sequences.get(group, -1) + 1
        script = Script(
            data.draw(st.sampled_from(REDUCING if self.uplink[group] else COLLECTIVES)),
            group,
            sequence,
            size,
            root=data.draw(st.integers(0, size - 1)),
            elements=0 if empty else 4,
            parts=parts,
            home=home,
            nodes=nodes,
        )
        if script.op not in REDUCING and data.draw(st.booleans()):
            script.seen = data.draw(st.sets(st.tuples(st.integers(0, 8), st.integers(0, 1))))
        frames = script.frames()
        if nodes and script.op in REDUCING:
            frames = by_nodes(frames, nodes)
        operation = Operation(group, 0, sequence, frames)
        missing = set(range(size)) - set(self.ledger.present[group])
        if missing:
            operation.todo = [pair for pair in frames if pair[0] not in missing]
            operation.disturbed = True
        if err and frames and script.op != ops.BARRIER:
            wrong = data.draw(st.integers(0, size - 1))
            mine = [position for position, pair in enumerate(operation.todo) if pair[0] == wrong]
            change = data.draw(st.sampled_from(["dtype", "total", "op"] if home else ["dtype", "total"]))
            for position in mine:
                header = operation.todo[position][1]
                if change == "op":  # noticed at the home only
                    header = head(DECLARE, ops.BARRIER, sequence, group=group, flags=header.flags)
                else:
                    header = header._replace(**{change: 5 if change == "dtype" else 4000})
                operation.todo[position] = (wrong, header)
                operation.disturbed = True
        self.operations.append(operation)

    @precondition(lambda self: any(len(self.ledger.present[group]) > 1 for group in self.living()))
    @rule(data=st.data(), parts=st.integers(1, 2), any_source=st.booleans(), half=st.booleans(), err=st.booleans())
    def call_send_and_receive(self, data: st.DataObject, parts: int, any_source: bool, half: bool, err: bool) -> None:
        group = data.draw(st.sampled_from([group for group in self.living() if len(self.ledger.present[group]) > 1]))
        if self.uplink[group]:
            return
        src, dst = data.draw(st.permutations(sorted(self.ledger.present[group])))[:2]
        stream = ops.stream_of(src, dst, 7)
        posted_stream = ops.stream_of(ops.ANY_SOURCE, dst, 7) if any_source else stream
        sent, posted = self.numbers.get((group, stream), 0), self.numbers.get((group, -dst), 0)
        total = 400 * parts
        push = head(PUSH, ops.SEND, sent, group=group, stream=stream, total=total, nbytes=400)
        pull = head(PULL, ops.SEND, posted, group=group, stream=posted_stream, total=800 if err else total)
        self.numbers[group, stream] = sent + 1
        # matching makes a message's fate depend on others': which ones fail is left to test_mailbox
        self.operations.append(Operation(group, stream, sent, [(src, push)], disturbed=True))
        if not half:
            self.numbers[group, -dst] = posted + 1
            self.operations.append(Operation(group, posted_stream, posted, [(dst, pull)], disturbed=True))

    # ---- what happens on the way

    def undelivered(self) -> list[Operation]:
        return [operation for operation in self.operations if operation.todo]

    def deliver_one(self, operation: Operation, position: int) -> None:
        index, header = operation.todo.pop(position)
        if index in self.ledger.present[header.group]:
            frame = self.ledger.send(index, header)
            operation.sent.append(frame)

    @precondition(lambda self: self.undelivered())
    @rule(data=st.data(), count=st.integers(1, 25))
    def deliver(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            if undelivered := self.undelivered():
                operation = data.draw(st.sampled_from(undelivered))
                self.deliver_one(operation, data.draw(st.integers(0, len(operation.todo) - 1)))

    @precondition(lambda self: any(frame.header.op == ops.SEND and frame.answer for frame in self.ledger.frames))
    @rule()
    def send_further_parts(self) -> None:
        for frame in list(self.ledger.frames):
            header = frame.header
            if header.op != ops.SEND or header.part or header.total != 800 or frame.answer is None:
                continue
            answer = frame.answer.header if isinstance(frame.answer, Send) else header
            key = (header.group, answer.stream, answer.sequence)
            further = head(header.frame, ops.SEND, key[2], group=key[0], stream=key[1], part=1, total=800)
            further = further._replace(nbytes=400 if header.frame == PUSH else 0)
            known = any(f.index == frame.index and f.header == further for f in self.ledger.frames)
            if not known and not any((frame.index, further) in op.todo for op in self.operations):
                self.operations.append(Operation(*key, [(frame.index, further)], disturbed=True))

    @precondition(lambda self: self.ledger.folding())
    @rule(data=st.data())
    def finish_a_fold(self, data: st.DataObject) -> None:
        self.ledger.fold_done(data.draw(st.sampled_from(self.ledger.folding())))

    @precondition(lambda self: self.ledger.uplinking())
    @rule(data=st.data(), error=st.sampled_from(["", "", "PeerLostError"]))
    def finish_an_uplink(self, data: st.DataObject, error: str) -> None:
        slot = data.draw(st.sampled_from(self.ledger.uplinking()))
        if error:
            self.disturb(slot.key[0], slot.key[2])
        self.ledger.uplink_done(slot, error)

    def disturb(self, group: int, sequence: int = -1) -> None:
        for operation in self.operations:
            if operation.group == group and sequence in (-1, operation.sequence):
                operation.disturbed = True

    @precondition(lambda self: self.undelivered())
    @rule()
    def deliver_all_of_the_oldest(self) -> None:
        operation = self.undelivered()[0]
        while operation.todo:
            self.deliver_one(operation, 0)

    @precondition(lambda self: len(self.operations) > 2)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        operation = data.draw(st.sampled_from(self.operations))
        members = self.ledger.present[operation.group]
        if operation.stream:
            src, dst, _ = ops.split_stream(operation.stream)
            members = {index: 0 for index in (src, dst) if index in members}
        if members:
            operation.disturbed = True
            index = data.draw(st.sampled_from(sorted(members)))
            operation.todo = [pair for pair in operation.todo if pair[0] != index or data.draw(st.booleans())]
            self.ledger.cancel(index, operation.group, operation.sequence, stream=operation.stream)

    @precondition(lambda self: self.living() and len(self.operations) > 3)
    @rule(data=st.data(), error=st.sampled_from([None, None, "PeerLostError"]))
    def leave(self, data: st.DataObject, error: str | None) -> None:
        group = data.draw(st.sampled_from(self.living()))
        self.leave_one(group, data.draw(st.sampled_from(sorted(self.ledger.present[group]))), error)

    def leave_one(self, group: int, index: int, error: str | None) -> None:
        for operation in self.operations:
            if operation.group == group and any(self.same_contributor(index, pair) for pair in operation.todo):
                operation.disturbed = True
        if error or len(self.ledger.present[group]) == 1:
            self.disturb(group)
        self.ledger.leave(group, index, error)

    def same_contributor(self, index: int, pair: tuple[int, Header]) -> bool:
        nodes = self.nodes[pair[1].group]
        if nodes and pair[1].flags & BY_NODE:
            return nodes[index] == nodes[pair[0]]
        return index == pair[0]

    # ---- what must be true

    @invariant()
    def undisturbed_operations_do_not_fail(self) -> None:
        failed = {(fail.group, fail.stream, fail.sequence) for fail in self.ledger.fails}
        for operation in self.operations:
            if not operation.disturbed:
                assert (operation.group, operation.stream, operation.sequence) not in failed

    def teardown(self) -> None:
        self.settle()
        for operation in self.operations:
            if not operation.disturbed:
                waiting = [frame for frame in operation.sent if not frame.answer and frame.header.frame != DECLARE]
                assert not waiting, f"no answer for {waiting} in {operation}"
        for group, members in self.ledger.present.items():
            waiting = [frame for frame in self.ledger.open_frames() if frame.header.group == group]
            waiting = [frame for frame in waiting if frame.header.op != ops.SEND]
            assert not waiting, f"somebody waits in vain: {waiting}"
            for index in sorted(members):
                self.leave_one(group, index, None)
        self.settle()
        assert self.ledger.engine.is_idle()
        assert not self.ledger.held()
        assert set(self.ledger.engine.describe().values()) == {0}
        assert not self.ledger.engine._slots

    def settle(self) -> None:
        """Deliver everything and finish all work."""
        while self.undelivered() or self.ledger.folding() or self.ledger.uplinking():
            for operation in self.undelivered():
                self.deliver_one(operation, 0)
            for slot in self.ledger.folding():
                self.ledger.fold_done(slot)
            for slot in self.ledger.uplinking():
                self.ledger.uplink_done(slot)


EngineMachine.TestCase.settings = settings(
    max_examples=settings().max_examples // 2, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow]
)
TestEngine = EngineMachine.TestCase


# ---- hostile bytes

_small = st.integers(0, 12)
_headers = st.builds(
    Header,
    st.sampled_from([PUSH, PULL, DECLARE]),
    op=st.one_of(st.integers(1, 10), st.integers(0, 255)),
    dtype=st.one_of(st.sampled_from([5, 8, 9]), st.integers(0, 255)),
    redop=st.one_of(st.just(1), st.integers(0, 255)),
    flags=st.one_of(st.integers(0, 15), st.integers(0, 255)),
    group=st.sampled_from([1, 2, 3]),
    stream=st.one_of(
        st.just(0),
        st.builds(ops.stream_of, st.integers(-1, 4), st.integers(0, 4), st.integers(0, 1)),
        st.builds(ops.stream_of, st.just(ops.ANY_SOURCE), st.integers(0, 4), st.just(0)),
        st.integers(0, 2**64 - 1),
    ),
    sequence=st.one_of(st.integers(0, 2), st.integers(0, 2**64 - 1)),
    block=st.one_of(_small, st.integers(0, 2**32 - 1)),
    part=st.one_of(st.integers(0, 1), st.integers(0, 2**32 - 1)),
    total=st.one_of(st.sampled_from([0, 8, 16]), st.integers(0, 2**64 - 1)),
    nbytes=st.one_of(st.sampled_from([0, 8, 16]), st.integers(0, 2**30)),
    root=st.one_of(st.integers(0, 3), st.integers(0, 2**32 - 1)),
    priority=st.integers(-(2**31), 2**31 - 1),
)
_events = st.one_of(
    st.tuples(st.integers(0, 2), _headers),
    st.tuples(st.integers(0, 2), st.integers(1, 2), st.integers(0, 2**64 - 1) | st.just(0), st.integers(-1, 3)),
    st.tuples(st.integers(0, 2), st.integers(1, 2), st.sampled_from([None, "PeerLostError", "nonsense"])),
)


@given(events=st.lists(_events, max_size=40))
def test_whatever_arrives_ends_in_a_protocol_error_or_a_fail(events: list[tuple[object, ...]]) -> None:
    ledger = Ledger()
    ledger.join(1, 3, nodes=[0, 0, 1])
    ledger.join(2, 2, uplink=True)
    for index, *event in events:
        try:
            match event:
                case [Header() as header]:
                    if index in ledger.present.get(header.group, {}):
                        assert unpack(header.pack()) == header
                        ledger.send(index, header)  # type: ignore[arg-type]
                    else:
                        ledger.engine.pull(index, header, None)  # type: ignore[arg-type]
                case [group, stream, sequence] if isinstance(sequence, int):
                    ledger.cancel(index, group, sequence, stream=stream)  # type: ignore[arg-type]
                case [group, error] if index in ledger.present[group]:  # type: ignore[index]
                    ledger.leave(group, index, error)  # type: ignore[arg-type]
        except ProtocolError:
            pass
        for slot in ledger.uplinking():
            ledger.uplink_done(slot)
    for group, members in ledger.present.items():
        for index in list(members):
            ledger.leave(group, index, "PeerLostError")
    assert ledger.engine.is_idle()
    assert not ledger.held()


@given(data=st.binary(min_size=HEADER_NBYTES, max_size=HEADER_NBYTES))
def test_random_bytes(data: bytes) -> None:
    ledger = Ledger()
    ledger.join(1, 2)
    try:
        header = unpack(b"BP\x01" + data[3:])._replace(group=1)
        ledger.send(0, header)
    except ProtocolError:
        pass
    ledger.leave(1, 0, "PeerLostError")
    assert not ledger.held()

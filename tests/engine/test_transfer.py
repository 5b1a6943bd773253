"""What a step exchanges with its device, and who waits for it."""

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from engine.cuda.transfer import HostBuffers, Transfers
from kernels.step_state import DecodeInputs, SlotRows, end_decode, receive_decode

# of the rows below: sequences' own, and the last for padding
NUM_SLOTS = 4
FRESH = 4


class CountedEvent:
    """An event that counts how often it was waited for."""

    def __init__(self) -> None:
        self.num_waits = 0

    def record(self) -> None:
        """It has come already."""

    def synchronize(self) -> None:
        self.num_waits += 1


def make_transfers(depth: int) -> tuple[Transfers, list[CountedEvent]]:
    events = [CountedEvent() for _ in range(depth)]
    made = iter(events)
    transfers = Transfers(torch.device("cpu"), lambda: next(made), num_numbers=9, num_rows=NUM_SLOTS, depth=depth)
    return transfers, events


def test_a_step_sends_its_first_numbers() -> None:
    """
    What lies behind stays as it was.
    """
    transfers, _ = make_transfers(depth=2)
    sent = []
    for count, number in ((9, 5), (4, 6), (7, 8)):
        transfers.begin()[:] = number
        transfers.send(count)
        sent.append(transfers.numbers.tolist())
        transfers.fetch()

    assert [[5] * 9, [6] * 4 + [5] * 5, [8] * 7 + [5] * 2] == sent


def test_buffers_are_not_waited_for_twice() -> None:
    """
    Nor before their first step; a step whose result nobody took is waited for when its buffers are to be used again.
    """
    transfers, events = make_transfers(depth=2)
    tickets = []
    for token in range(2):
        transfers.begin()
        transfers.token_ids.fill_(token)
        tickets.append(transfers.fetch())
    before = sum(event.num_waits for event in events)

    first = tickets[0].wait().tolist()
    transfers.begin()
    transfers.fetch()
    transfers.begin()

    assert (0, [0] * NUM_SLOTS) == (before, first)
    assert [1, 1] == sorted(event.num_waits for event in events)
    # buffers of the first step's, taken by the third, which nobody waited for
    assert [1] * NUM_SLOTS == tickets[1].wait().tolist()


class Device:
    """What runs there: decodes of one row that read and write the ring, of tokens that nobody else gives."""

    def __init__(self, transfers: Transfers) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype)

        self.transfers = transfers
        self.rows = SlotRows(
            num_computed=zeros(NUM_SLOTS),
            last_token=zeros(NUM_SLOTS, dtype=torch.int64),
            block_tables=zeros(NUM_SLOTS, 1000),
            positions=zeros(NUM_SLOTS),
            streams=zeros(NUM_SLOTS, 2),
            top_k=zeros(NUM_SLOTS),
            knobs=zeros(NUM_SLOTS, 6, dtype=torch.float32),
        )
        self.inputs = DecodeInputs(*(zeros(1, dtype=torch.int64) for _ in range(3)), zeros(1))
        self.num_tokens = 0

    def receive(self) -> int:
        """The slot that the step names."""
        slots = self.transfers.numbers[:1]
        receive_decode(self.transfers.ring, self.rows, slots, self.inputs, fresh_start=FRESH, block_size=1)
        return int(slots[0])

    def end(self) -> int:
        self.num_tokens += 1
        slots = self.transfers.numbers[:1]
        end_decode(self.transfers.ring, self.rows, slots, torch.tensor([self.num_tokens]))
        return self.num_tokens


class Broken(Exception):
    """A launch that came to nothing."""


class Host:
    """Launches steps of every kind, of random slots; of each comes the token that is to come, and where."""

    def __init__(self, seed: int, depth: int = 4) -> None:
        self.random = random.Random(seed)
        self.transfers, _ = make_transfers(depth)
        self.device = Device(self.transfers)
        self.num_told = 0
        self._fill = self.transfers._place_of_next.fill_
        # in its place, to count
        self.transfers._place_of_next = self  # type: ignore[assignment]

    def fill_(self, place: int) -> None:
        self.num_told += 1
        self._fill(place)

    def begin(self) -> int:
        slot = self.random.randrange(NUM_SLOTS - 1)
        numbers = self.transfers.begin()
        numbers[0], numbers[FRESH] = slot, self.random.randrange(1 << 20)
        return slot

    def decode(self) -> tuple[int, HostBuffers]:
        slot = self.begin()
        self.transfers.show_place(ends=True)
        assert slot == self.device.receive()
        token = self.device.end()
        return token, self.transfers.fetch()

    def decode_without_end(self) -> tuple[int, HostBuffers]:
        """Logits alone: what samples them hands tokens over as steps with prompts do."""
        slot = self.begin()
        self.transfers.show_place(ends=False)
        assert slot == self.device.receive()
        return self._copied()

    def prompts(self) -> tuple[int, HostBuffers]:
        slot = self.begin()
        self.transfers.send(9)
        assert slot == int(self.transfers.numbers[0])
        return self._copied()

    def fail(self) -> None:
        """At any point of a launch."""
        self.begin()
        with pytest.raises(Broken):
            self._fail(self.random.randrange(4))

    def trial(self) -> None:
        with self.transfers.trials(NUM_SLOTS - 1):
            for _ in range(self.random.randrange(1, 6)):
                assert NUM_SLOTS - 1 == self.device.receive()
                if self.random.random() < 0.7:
                    self.device.end()

    def _fail(self, far: int) -> None:
        if far > 0:
            self.transfers.show_place(ends=self.random.random() < 0.5)
        if far > 1:
            self.device.receive()
        if far > 2:
            self.device.end()
        raise Broken

    def _copied(self) -> tuple[int, HostBuffers]:
        self.device.num_tokens += 1
        self.transfers.token_ids.fill_(self.device.num_tokens)
        return self.device.num_tokens, self.transfers.fetch()

    def play(self, num_steps: int) -> Iterator[tuple[int, HostBuffers]]:
        kinds = [self.decode] * 6 + [self.decode_without_end, self.prompts]
        for _ in range(num_steps):
            if self.random.random() < 0.1:
                self.random.choice((self.fail, self.trial))()
            yield self.random.choice(kinds)()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("depth", [3, 4])
def test_steps_of_all_kinds_find_their_place(seed: int, depth: int) -> None:
    """
    Those that read and write the ring by themselves, between steps that are copied, launches that failed anywhere, and
    trials that leave the device's place wherever it is. A step's tokens are taken while the next is under way.
    """
    host = Host(seed, depth)
    last: tuple[int, HostBuffers] | None = None
    for step in host.play(300):
        if last is not None:
            assert last[0] == last[1].wait()[0]
        last = step


def test_the_device_counts_along() -> None:
    """
    It is told the place at the first decode, and at the first behind a step of another kind, as with its logits alone.
    """
    host = Host(0)
    told = []
    for kind in (host.decode, host.prompts, host.decode_without_end):
        kind()
        for _ in range(9):
            host.decode()
        told.append(host.num_told)

    assert [1, 2, 3] == told


def test_a_trial_takes_no_tokens_from_a_step_before() -> None:
    """
    Nor does it run before that step has read its numbers: its buffers are waited for.
    """
    transfers, events = make_transfers(depth=2)
    device = Device(transfers)
    transfers.begin()[:] = 1
    transfers.show_place(ends=True)
    device.receive()
    token = device.end()
    ticket = transfers.fetch()

    with transfers.trials(NUM_SLOTS - 1):
        assert 1 == sum(event.num_waits for event in events)
        for _ in range(4):
            device.receive()
            device.end()

    assert token == ticket.wait()[0]
    assert 1 == int(device.rows.num_computed.sum())
    before = sum(event.num_waits for event in events)
    for _ in events:
        transfers.begin()
    # what the trial reads is not written over before: the ticket's buffers were waited for with it
    assert before + 1 == sum(event.num_waits for event in events)

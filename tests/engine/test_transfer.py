"""What a step exchanges with its device, and who waits for it."""

import torch

from engine.cuda.transfer import Transfers


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
    transfers = Transfers(torch.device("cpu"), lambda: next(made), num_numbers=9, head_count=4, num_rows=3, depth=depth)
    return transfers, events


def test_a_step_sends_its_first_numbers() -> None:
    """
    The head alone, or more; what lies behind stays as it was.
    """
    transfers, _ = make_transfers(depth=2)
    sent = []
    for count, number in ((9, 5), (4, 6), (7, 8)):
        transfers.begin()[:] = number
        sent.append(transfers.send(count).tolist())
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

    assert (0, [0, 0, 0]) == (before, first)
    assert [1, 1] == sorted(event.num_waits for event in events)
    # buffers of the first step's, taken by the third, which nobody waited for
    assert [1, 1, 1] == tickets[1].wait().tolist()

"""The scheduler under random work: nothing leaks, nothing is lost, and every answer is the undisturbed one."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.block_manager import BlockManager
from engine.entries import Entry
from engine.grammar import AnyText
from engine.pacing import Pacing
from engine.policy import Headroom, PreemptionPolicy
from engine.prefix import blake2b_128, xxh3_128
from engine.queue_policy import QueuePolicy, Throughput
from engine.request import FinishReason, Progress, Request, Sequence, Status
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from tests.support.fake_runner import FakeRunner, Turns, answer_token

EOS_EVERY = 101


class WatchedHeadroom(Headroom):
    """Also says whether the newest step preempted because someone grew."""

    crowded = False

    def preempted(self) -> None:
        super().preempted()
        self.crowded = True

    def quiet(self) -> None:
        super().quiet()
        self.crowded = False


class WatchedPolicy(QueuePolicy):
    """Also remembers every sequence's place."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.orders: dict[Sequence, tuple[int, ...]] = {}

    def enter(self, sequence: Sequence, limit: int, step: int) -> Entry:
        entry = super().enter(sequence, limit, step)
        self.orders[sequence] = entry.order
        return entry


class WatchedThroughput(WatchedPolicy, Throughput):
    """The same of the other policy."""


@dataclass
class World:
    """One random set-up and all sequences that were given to it."""

    rng: random.Random
    blocks: BlockManager
    headroom: WatchedHeadroom
    policy: WatchedPolicy
    scheduler: Scheduler
    turns: Turns
    alive: dict[str, list[Sequence]]
    everyone: list[Sequence]
    bound: float


def is_eos(token: int) -> bool:
    return token % EOS_EVERY == 0


def ends(sequence: Sequence, max_model_len: int) -> FinishReason | None:
    if is_eos(sequence.output[-1]):
        return FinishReason.STOP
    full = len(sequence.output) >= sequence.params.max_tokens or sequence.num_known >= max_model_len
    return FinishReason.LENGTH if full else None


def undisturbed(sequence: Sequence, max_model_len: int) -> tuple[list[int], FinishReason]:
    """What a sequence gives when it runs alone with all the memory there is."""
    request, index = sequence.request, sequence.index
    output = list(sequence.resumed.token_ids)
    while len(output) < request.params.max_tokens and len(request.prompt) + len(output) < max_model_len:
        output.append(answer_token(request.request_id, index, len(request.prompt) + len(output)))
        if is_eos(output[-1]):
            return output, FinishReason.STOP
    return output, FinishReason.LENGTH


@st.composite
def policies(draw: st.DrawFn) -> WatchedPolicy:
    """First come first served, or throughput that paces or does not, and groups what is small."""
    if draw(st.booleans()):
        return WatchedPolicy()
    if draw(st.booleans()):
        # as of small models on a GPU
        return WatchedThroughput(None, group_tokens=4)
    pacing = Pacing(
        least=draw(st.sampled_from([1, 4])),
        spread=draw(st.sampled_from([1.1, 0.1])),
        margin=draw(st.sampled_from([0.125, 0.9])),
        slack=draw(st.sampled_from([8, 0])),
    )
    return WatchedThroughput(pacing, group_tokens=draw(st.sampled_from([4, 256])))


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """A set-up that shrinks to the plainest one, and a seed for what happens in it."""
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    num_blocks = draw(st.integers(10, 60))
    num_host_blocks = draw(st.sampled_from([0, 3, num_blocks, 2 * num_blocks]))
    fits = (num_blocks - 1) * block_size
    blocks = BlockManager(
        num_blocks=num_blocks,
        block_size=block_size,
        num_host_blocks=num_host_blocks,
        prefix_caching=draw(st.sampled_from([True, True, True, False])),
        hash_function=draw(st.sampled_from([xxh3_128, blake2b_128])),
    )
    # without headroom sequences evict each other all the time
    headroom = WatchedHeadroom(least=draw(st.sampled_from([0, 4, 16])))
    policy = draw(policies())
    scheduler = Scheduler(
        blocks,
        max_num_seqs=draw(st.sampled_from([1, 3, 8, 16])),
        max_num_batched_tokens=draw(st.sampled_from([1, 5, 16, 64])),
        max_model_len=draw(st.sampled_from([fits, fits // 2, fits + block_size])),
        preemption=PreemptionPolicy(draw(st.sampled_from(["auto", "swap", "recompute"])), bytes_per_token=100),
        headroom=headroom,
        policy=policy,
    )
    runner = FakeRunner(num_blocks=num_blocks, block_size=block_size, num_host_blocks=num_host_blocks)
    turns = Turns(scheduler, runner, depth=draw(st.sampled_from([2, 3, 1])), ends=ends)
    rng, bound = random.Random(draw(st.integers(0, 2**32))), draw(st.sampled_from([0.0, 0.3, 1.0]))
    return World(rng, blocks, headroom, policy, scheduler, turns, {}, [], bound)


def add_request(world: World, number: int) -> None:
    rng, longest = world.rng, world.scheduler.max_model_len
    length = rng.choice([1, longest - 1, rng.randint(1, longest - 1)] + 5 * [rng.randint(1, max(1, longest // 6))])
    # a few families of prompts, alike up to a random place
    family = np.arange(length, dtype=np.int32) + rng.choice([0, 0, 500])
    family[rng.randint(0, length) :] += number * 7
    params = SamplingParams(
        n=rng.choice([1, 1, 1, 3]),
        max_tokens=rng.choice([1, 2, rng.randint(1, 40), rng.randint(1, longest), 2 * longest]),
        prompt_logprobs=rng.choice([None] * 5 + [0]),
        # where it says so the length seems known, which it is not: some end before
        ignore_eos=rng.random() < 0.5,
    )
    request_id = f"r{number}"
    resumed: tuple[Progress, ...] = ()
    if rng.random() < 0.2:
        most = min(params.max_tokens, longest - length)
        resumed = tuple(
            Progress(_head(request_id, index, length, rng.choice([0, min(most, 7)]))) for index in range(params.n)
        )
    request = Request(
        request_id=request_id,
        prompt=family,
        params=params,
        cache_salt=rng.choice([None, None, "", "a"]),
        priority=rng.choice([0, 1, 2, 2, 2, -1, 5]),
        resumed=resumed,
    )
    submit(world, request)


def add_alike(world: World, number: int) -> None:
    """A long prompt that may begin as a less urgent one that runs, whose blocks are then both a gain and its own."""
    rng, longest = world.rng, world.scheduler.max_model_len
    prompt = np.arange(rng.randint(1, longest // 2), dtype=np.int32) + 1000 * number
    priority = rng.choice([0, 1, 2, 2])
    behind = [sequence for sequence in world.scheduler.running if sequence.request.priority > priority]
    if behind:
        prompt = np.concatenate([rng.choice(behind).request.prompt, prompt])[: longest - 1]
    submit(world, Request(f"r{number}", prompt, SamplingParams(max_tokens=rng.randint(1, 30)), priority=priority))


def submit(world: World, request: Request) -> None:
    # some cannot go on before the value of their last token is known
    grammar = AnyText(1000) if world.rng.random() < world.bound else None
    sequences = world.alive[request.request_id] = [
        Sequence(request, index, grammar) for index in range(request.params.n)
    ]
    for sequence in sequences:
        world.scheduler.add(sequence)
        world.everyone.append(sequence)


def _head(request_id: str, index: int, start: int, most: int) -> tuple[int, ...]:
    # the beginning of the undisturbed answer, as a checkpoint has it: without the end
    head: list[int] = []
    for position in range(start, start + most):
        token = answer_token(request_id, index, position)
        if is_eos(token):
            break
        head.append(token)
    return tuple(head)


def check_answer(world: World, sequence: Sequence) -> None:
    output, reason = undisturbed(sequence, world.scheduler.max_model_len)
    if sequence.finish_reason is FinishReason.ABORT or sequence.num_known < sequence.num_prompt_tokens + len(output):
        # cut short by an abort, or alone in a pool too small for it
        assert sequence.finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)
        assert output[: len(sequence.output)] == sequence.output
        if sequence.finish_reason is FinishReason.LENGTH:
            assert world.blocks.num_usable_blocks * world.blocks.block_size <= sequence.num_known
    else:
        assert output == sequence.output
        assert reason is sequence.finish_reason


def check_capacity(world: World) -> None:
    """What is said of each priority, counted one by one."""
    scheduler, blocks = world.scheduler, world.blocks
    alive = [sequence for sequence in world.everyone if not sequence.finished]

    def claim(sequence: Sequence) -> int:
        limit = min(sequence.num_prompt_tokens + sequence.params.max_tokens, scheduler.max_model_len)
        ahead = min(sequence.num_tokens + scheduler.headroom.tokens, limit - 1)
        held = len(sequence.block_table) or blocks.num_blocks_for(sequence.num_tokens)
        return max(held, blocks.num_blocks_for(ahead))

    promised = sum(claim(sequence) - len(sequence.block_table) for sequence in scheduler.running)
    wanted = sum(claim(sequence) for sequence in alive if sequence.status is not Status.RUNNING)
    idle = blocks.num_free_blocks + blocks.num_fenced_blocks
    free = idle - promised - wanted
    capacity = scheduler.capacity()
    assert max(0, free) * blocks.block_size == capacity.free_tokens
    for priority, gain in enumerate(capacity.freeable):
        behind = [sequence for sequence in alive if sequence.request.priority > priority]
        running = [sequence for sequence in behind if sequence.status is Status.RUNNING]
        had = min(blocks.num_usable_blocks - idle + promised, sum(map(claim, running)))
        had += sum(claim(sequence) for sequence in behind if sequence.status is not Status.RUNNING)
        assert (len(running), len(behind) - len(running)) == (gain.seqs, gain.passed)
        assert max(0, had + min(0, free)) * blocks.block_size == gain.tokens


def take_turn(world: World) -> None:
    """
    A turn in which the least urgent gave way first, and nobody came in who is no more urgent than they.

    Where they did not give way to one that grew, they did to one that came in.
    """
    scheduler, order = world.scheduler, world.policy.orders
    before = scheduler.running
    joined: list[Sequence] = []
    step = world.turns.take()
    scheduler.check()
    check_capacity(world)
    if step is not None:
        joined = [chunk.sequence for chunk in step.chunks if chunk.join]
    victims = [order[s] for s in before if not s.finished and s.status is not Status.RUNNING]
    if victims:
        assert all(order[s] < min(victims) for s in scheduler.running)
        assert all(s.request.priority < min(victims)[0] for s in joined)
        assert joined or world.headroom.crowded


def play(
    world: World, num_requests: int, *, add: Callable[[World, int], None] = add_request, rate: float = 0.6
) -> None:
    rng, turns = world.rng, world.turns
    number = 0
    for _ in range(100_000):
        while number < num_requests and rng.random() < rate:
            add(world, number)
            number += 1
        if world.everyone and rng.random() < 0.03:
            unfinished = [sequence for sequence in world.everyone if not sequence.finished]
            world.scheduler.abort(rng.choice(unfinished or world.everyone))
            world.scheduler.check()
        take_turn(world)
        if number == num_requests and not world.scheduler.has_work and not turns.runner.in_flight:
            break
    else:
        raise AssertionError(f"{world.scheduler.num_running} still run")
    # with nothing in flight the fences are open
    for _ in range(3):
        turns.take()


def check_end(world: World) -> None:
    world.scheduler.check()
    finished = world.turns.finished
    assert len(set(finished)) == len(finished)
    assert [] == [sequence for sequence in world.everyone if not sequence.finished]
    assert world.blocks.num_usable_blocks == world.blocks.num_free_blocks
    assert world.blocks.num_host_blocks == world.blocks.num_free_host_blocks
    for sequence in world.everyone:
        check_answer(world, sequence)


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(world=worlds(), num_requests=st.integers(6, 20))
def test_random_work_ends_as_if_it_had_run_alone(world: World, num_requests: int) -> None:
    """
    Whatever is added, aborted, preempted and late, all blocks come back and all tokens are right.
    """
    play(world, num_requests)

    check_end(world)


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(world=worlds(), num_requests=st.integers(3, 12), rate=st.sampled_from([0.1, 0.4]))
def test_who_gives_way_to_their_like_does_so_for_somebody(world: World, num_requests: int, rate: float) -> None:
    """
    Where urgent prompts begin as less urgent ones do, those go only if what they alone hold is enough.
    """
    play(world, num_requests, add=add_alike, rate=rate)

    check_end(world)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("add", "rate"), [(add_request, 0.6), (add_alike, 0.2)])
@settings(max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck))
@given(world=worlds(), num_requests=st.integers(6, 40))
def test_much_random_work_ends_as_if_it_had_run_alone(
    world: World, num_requests: int, add: Callable[[World, int], None], rate: float
) -> None:
    """
    The same for many more worlds, new ones in every run.
    """
    play(world, num_requests, add=add, rate=rate)

    check_end(world)

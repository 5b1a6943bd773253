"""Prices of preemption, and the headroom that avoids it."""

import pytest

from engine.policy import Headroom, Preemption, PreemptionPolicy


def test_auto_takes_the_cheaper_way() -> None:
    """A large model swaps over a fast bus, a small one computes again."""
    large = PreemptionPolicy("auto", bytes_per_token=131_072, copy_bytes_per_s=50e9, prefill_tokens_per_s=46e3)
    small = PreemptionPolicy("auto", bytes_per_token=46_080, copy_bytes_per_s=5e9, prefill_tokens_per_s=100e3)

    assert Preemption.SWAP is large.choose(num_slots=512, num_tokens=500, has_room=True)
    assert Preemption.RECOMPUTE is small.choose(num_slots=512, num_tokens=500, has_room=True)


@pytest.mark.parametrize("mode", ["auto", "swap", "recompute"])
def test_without_room_on_the_host_every_mode_recomputes(mode: str) -> None:
    """A swap needs host blocks."""
    assert Preemption.RECOMPUTE is PreemptionPolicy(mode).choose(num_slots=16, num_tokens=10, has_room=False)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_fixed_mode_is_kept(mode: str) -> None:
    """The price does not matter to a mode that was asked for."""
    policy = PreemptionPolicy(mode, bytes_per_token=10**9, copy_bytes_per_s=1, prefill_tokens_per_s=1)

    assert mode == policy.choose(num_slots=16, num_tokens=10, has_room=True)


def test_an_unknown_mode_is_refused() -> None:
    """The message names what was given and what is possible."""
    with pytest.raises(ValueError, match=r'"swapp"; want "auto", "swap" or "recompute"'):
        PreemptionPolicy("swapp")


def test_headroom_doubles_on_preemption_and_comes_back() -> None:
    """It stays between its bounds, whatever happens."""
    headroom = Headroom(least=16, most=100)
    grown = []
    for _ in range(4):
        headroom.preempted()
        grown.append(headroom.tokens)
    for _ in range(500):
        headroom.quiet()

    assert [32, 64, 100, 100] == grown
    assert 16 == headroom.tokens

"""What an engine counts; apart from it, so that others read it without the engine's libraries."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """
    A moment of the engine. Counters only grow.

    Args:
        kv_usage: Referenced blocks over usable blocks, 0 to 1.
        num_sheds: Times that the device was out of memory, and less was run at a time.
        prefix_hit_tokens: Prompt tokens found in the prefix cache, of prefix_query_tokens looked up.
    """

    num_running: int
    num_waiting: int
    num_swapped: int
    kv_usage: float
    prompt_tokens: int
    generated_tokens: int
    num_steps: int
    num_preemptions: int
    num_sheds: int
    prefix_hit_tokens: int
    prefix_query_tokens: int

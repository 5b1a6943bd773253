"""
Long documents: asked about part by part, and the answers asked about again, until one is left.

Level 0 has the parts of the text, each later one the answers of the level before, as many together
as fit. A text that fits is one part, and one level.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from producers.bulk.errors import SpecError
from producers.bulk.spec import MapReduce
from producers.bulk.split import Counter, gather, split

# what the model's chat template writes around the messages, and the seams between texts
MARGIN_TOKENS = 64

# a token has a byte at least, but for what a tokenizer writes out before it counts, as ligatures
_MOST_TOKENS_A_BYTE = 4

# the built-in templates whose answers about parts can be asked about again, or written one after the other
_AUTO = {"summarise": "reduce", "translate": "join"}


class TooLong(Exception):
    """Raised when the answers about a document do not get fewer in the rounds that are allowed."""


class NoRoom(Exception):
    """Raised when the template says so much around a document that no two answers would fit beside it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How long documents are treated; `context_tokens` has room for a prompt and `max_tokens` of answer."""

    counter: Counter
    settings: MapReduce
    template: str
    context_tokens: int
    max_tokens: int

    @property
    def mode(self) -> str:
        return _AUTO.get(self.template, "off") if self.settings.mode == "auto" else self.settings.mode

    def surely_fits(self, num_bytes: int) -> bool:
        """Whether a prompt fits whatever its tokens are, so that they need not be counted."""
        tokens = _MOST_TOKENS_A_BYTE * num_bytes
        in_parts = self.mode != "off" and self.settings.part_tokens is not None and tokens > self.settings.part_tokens
        return not in_parts and tokens + self.max_tokens + MARGIN_TOKENS <= self.context_tokens

    def part_tokens(self, prompt: str) -> int:
        """
        Most tokens of the text in one prompt, beside what the template says.

        Raises:
            SpecError: two answers would never fit, so that nothing can be reduced.
            NoRoom: they do not with this prompt.
        """
        most = self.context_tokens - self.max_tokens - MARGIN_TOKENS
        room = most - len(self.counter.ends(prompt))
        if self.settings.part_tokens is not None:
            most, room = min(most, self.settings.part_tokens), min(room, self.settings.part_tokens)
        least = 2 * self.max_tokens + 4 if self.mode == "reduce" else 1
        if room < least:
            message = (
                f"documents are cut into parts of {room:,} tokens, and two answers have up to {least:,}: "
                "lower options.max_tokens, or raise map_reduce.part_tokens or the workers' --max-model-len"
            )
            raise SpecError(message) if most < least else NoRoom(message)
        return room


def levels(text: str, plan: Plan, prompt: str) -> Generator[list[str], Sequence[str], None]:
    """
    The texts of each level; takes the answers about them.

    Args:
        prompt: What the template says around a text.

    Raises:
        SpecError, NoRoom: as `part_tokens`.
        TooLong: there are several still after the last level that is allowed.
    """
    if plan.mode == "off":
        yield [text]
        return
    limit = plan.part_tokens(prompt)
    texts = split(text, limit, plan.counter)
    for _ in range(plan.settings.max_levels):
        answers = yield texts
        if len(texts) == 1 or plan.mode == "join":
            return
        texts = gather([answer for answer in answers if answer] or [""], limit, plan.counter)
    raise TooLong(
        f"after {plan.settings.max_levels} levels there are {len(texts):,} parts still: raise map_reduce.max_levels, "
        "or lower options.max_tokens"
    )

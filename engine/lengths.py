"""How long answers become: learned from those that have ended, by what their prompts begin with."""

from collections import OrderedDict
from collections.abc import Hashable

from engine.request import Request

# prompts of one template begin alike
TEMPLATE_TOKENS = 16


def template(request: Request) -> Hashable:
    """What the answers of one template of one tenant have in common, besides their lengths."""
    return request.cache_salt, request.prompt[:TEMPLATE_TOKENS].tobytes()


class LearnedLengths:
    """
    A running mean of the tokens of answers, by key, and one over all.

    Args:
        weight: What the newest answer counts beside those before it.
        least: Answers of a key before its own mean is believed.
        most: Keys that are kept, those used last.
    """

    def __init__(self, *, weight: float = 0.05, least: int = 4, most: int = 4096) -> None:
        self.weight = weight
        self.least = least
        self.most = most
        self._means: OrderedDict[Hashable, tuple[int, float]] = OrderedDict()
        self._all = (0, 0.0)

    def learn(self, key: Hashable, num_tokens: int) -> None:
        """Note an answer that has ended by itself, or by its limit."""
        self._means[key] = self._with(self._means.get(key, (0, 0.0)), num_tokens)
        self._means.move_to_end(key)
        self._all = self._with(self._all, num_tokens)
        if len(self._means) > self.most:
            self._means.popitem(last=False)

    def expected(self, key: Hashable) -> float | None:
        """Tokens that an answer of this key will probably have; None as long as nothing is known."""
        for count, mean in (self._means.get(key, (0, 0.0)), self._all):
            if count >= self.least:
                return mean
        return None

    def _with(self, known: tuple[int, float], num_tokens: int) -> tuple[int, float]:
        count, mean = known
        # the first ones count alike: the mean does not hang on where it began
        weight = max(self.weight, 1 / (count + 1))
        return count + 1, mean + weight * (num_tokens - mean)

"""How long answers become: learned from those that have ended, by what their prompts begin with."""

from collections import OrderedDict, deque
from collections.abc import Hashable
from statistics import fmean

from engine.request import Request

# prompts of one template begin alike
TEMPLATE_TOKENS = 16


def template(request: Request) -> Hashable:
    """What requests of one template of one tenant have in common."""
    return request.cache_salt, request.prompt[:TEMPLATE_TOKENS].tobytes()


class LearnedLengths:
    """
    The tokens of the newest answers, by key, and of all together for a key of which too few have ended.

    Args:
        window: Answers of a key that count.
        least: Answers before anything is concluded from them.
        most: Keys that are kept, those learned of last.
    """

    def __init__(self, *, window: int = 64, least: int = 4, most: int = 1024) -> None:
        self.window = window
        self.least = least
        self.most = most
        self._by_key: OrderedDict[Hashable, deque[int]] = OrderedDict()
        self._all: deque[int] = deque(maxlen=window)

    def learn(self, key: Hashable, num_tokens: int) -> None:
        """Note an answer that has ended by itself, or by its limit."""
        answers = self._by_key.setdefault(key, deque(maxlen=self.window))
        self._by_key.move_to_end(key)
        answers.append(num_tokens)
        self._all.append(num_tokens)
        if len(self._by_key) > self.most:
            self._by_key.popitem(last=False)

    def mean(self, key: Hashable) -> float | None:
        """Tokens that an answer of this key has on average; None as long as nothing is known."""
        answers = self._answers(key)
        return fmean(answers) if answers else None

    def draw(self, key: Hashable, place: float) -> int | None:
        """
        Tokens of one of the answers, for sums over many of which not all are average; None as with `mean`.

        Args:
            place: From 0, the shortest, to below 1.
        """
        answers = self._answers(key)
        return sorted(answers)[int(place * len(answers))] if answers else None

    def _answers(self, key: Hashable) -> deque[int] | None:
        own = self._by_key.get(key)
        if own is not None and len(own) >= self.least:
            return own
        return self._all if len(self._all) >= self.least else None

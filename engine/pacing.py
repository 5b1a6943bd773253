"""When bulk work that could start at once had better wait: so that all steps are of one size."""

from math import inf

import numpy as np

from engine.entries import Queue
from engine.running import Running

# of reading all weights once; about as much as launches and small kernels of a step take where a model is large
LEAST_READ_S = 2e-3


def is_worthwhile(read_s: float) -> bool:
    """
    Whether bulk work of a model is paced.

    What is gained is arithmetic that hides behind the reading of the weights. What is lost are more steps with a
    prompt, and more that have too many sequences for the kernels of small ones; so much that small models lose.

    Args:
        read_s: What reading all weights takes a step.
    """
    return read_s >= LEAST_READ_S


class Pacing:
    """
    Spreads the start of bulk work over the steps that the longest answer takes anyway.

    A step reads all weights for one sequence as for a hundred, and computes behind that for nothing: a batch that
    begins large and ends small computes first and reads later. So no more run than would if each step until the
    last had as many (and `spread` times that, as estimates are what they are), and prompts start together, when
    `margin` of those have ended. Who would end last otherwise starts at once, and so do all where not all that
    wait would find a seat and blocks: there will be work for many steps then, or more of it elsewhere.

    Args:
        least: Sequences beside which more are started whatever the others take: so few cost a step next to nothing.
        margin: A share, below 1.
        slack: Steps before its latest start in which one that waits is started.
    """

    def __init__(self, *, least: int = 64, spread: float = 1.1, margin: float = 0.125, slack: int = 8) -> None:
        self.least = least
        self.spread = spread
        self.margin = margin
        self.slack = slack

        self._open = True
        # sequences that should run; infinite where nothing is gained by waiting
        self._target = inf
        # steps until the first of those that wait must start for all to end in time
        self._spare = 0.0
        self._num_running = 0
        # what was seen of the queue when these were found
        self._seen = -1

    @property
    def is_open(self) -> bool:
        """Whether one more may start in this step."""
        return self._open and (self._is_due or self._num_running < self._target)

    def plan(self, queue: Queue, running: Running, *, num_free_blocks: int, budget: int) -> None:
        """
        Decide for one step.

        Args:
            budget: Tokens of a step.
        """
        self._num_running = len(running)
        if not queue or not running:
            self._target = inf
        elif queue.changes != self._seen:
            self._find(queue, running, num_free_blocks, budget)
        else:
            self._spare -= 1
        self._seen = queue.changes
        self._open = self._is_due or self._num_running <= self._target * (1 - self.margin)

    def started(self) -> None:
        """Note one that has started in this step."""
        self._num_running += 1

    @property
    def _is_due(self) -> bool:
        return self._spare <= self.slack

    def _find(self, queue: Queue, running: Running, num_free_blocks: int, budget: int) -> None:
        self._target = inf
        if len(queue) > running.num_slots - len(running):
            return
        prompts, left = queue.longest_first()
        left_running = running.left()
        num_tokens_left = int(left.sum()) + int(left_running.sum())
        if int(prompts.sum()) + num_tokens_left > num_free_blocks * running.block_size:
            return
        longest = max(int(left[0]), int(left_running.max()))
        self._target = max(self.least, self.spread * num_tokens_left / longest)
        # the prompts of those before it take their time too
        self._spare = float((longest - left - np.cumsum(prompts) / budget).min())

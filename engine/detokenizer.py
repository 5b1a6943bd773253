"""Text that grows with the tokens, and the strings that end it."""

from engine.tokenizer import Tokenizer

REPLACEMENT = "�"

# tokens decoded again at each push, at most: one push costs some 8 us
_MAX_WINDOW = 16
# tokens kept when the window is cut: three may be parts of a character that is not complete,
# three before them parts of one that the cut went through, and one more restores the reading
_KEPT = 8


class IncrementalDetokenizer:
    """
    Gives the text of a growing answer piece by piece: the pieces join to the full decode.

    A token's text depends on its neighbours, so a window of the last tokens is decoded each
    time, and what it has beyond the text given before is new. Two things are held back until
    they are settled: a U+FFFD at the end, which may be a character's first bytes, and a run of
    byte tokens, which reads as characters or, if one byte is wrong, as U+FFFD throughout.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # all that is settled of the window's text was given: its first num_given characters
        self._window: list[int] = []
        self._num_given = 0

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is settled now; often one token's, or none."""
        # a token without text must not part the bytes around it, nor fill the window
        if self._skip_special_tokens and token_id in self._tokenizer.special_ids:
            return ""
        if not self._tokenizer.exists(token_id):
            return ""

        self._window.append(token_id)
        if token_id in self._tokenizer.byte_ids:
            return ""
        text = self._settled()
        given, self._num_given = self._num_given, max(self._num_given, len(text))
        if len(self._window) > _MAX_WINDOW:
            del self._window[:-_KEPT]
            self._num_given = len(self._settled())
        return text[given:]

    def finish(self) -> str:
        """Return what was held back, as it reads when nothing follows."""
        text = self._decode()
        given, self._num_given = self._num_given, max(self._num_given, len(text))
        return text[given:]

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip_special_tokens)

    def _settled(self) -> str:
        # one alone: of several, all but the last are bytes that nothing can complete any more
        return self._decode().removesuffix(REPLACEMENT)


class StopChecker:
    """
    Finds the first stop string in a growing text, and holds back what may become one.

    First is the match that ends first, and of those that end together the longest: so what is
    found depends on the text alone, not on how it came in pieces.

    Args:
        stop: Strings that end the text; empty for none.
        include_stop: Keep the match at the end of the text, instead of cutting before it.
    """

    def __init__(self, stop: tuple[str, ...], *, include_stop: bool = False) -> None:
        self._stop = stop
        self._include_stop = include_stop
        self._longest = max(map(len, stop), default=0)
        # the end of the text so far that is the beginning of a stop string
        self._held = ""
        # the stop string that was found
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """
        Add new text and return what may be shown of it and of what was held back.

        After a match nothing is returned: the text has ended.
        """
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self._stop if stop in text]
        if found:
            end, _, self.matched = min(found)
            self._held = ""
            return text[:end] if self._include_stop else text[: end - len(self.matched)]

        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def skip(self, text: str) -> str:
        """Add text in which nothing is looked for, that of tokens within min_tokens; return all there is."""
        held, self._held = self._held, ""
        return "" if self.matched is not None else held + text

    def finish(self) -> str:
        """Return what was held back: nothing follows that could complete it."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0

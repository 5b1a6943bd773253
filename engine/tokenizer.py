"""Text to token ids and back, as a Hugging Face model folder says."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from engine.chat_template import ChatTemplate
from engine.errors import InvalidText, ModelNotFound, NoChatTemplate
from engine.request import TokenIds


class Tokenizer:
    """
    The tokenizer of one model folder; safe to share between threads.

    Reads tokenizer.json, and beside it, where they are there, tokenizer_config.json,
    special_tokens_map.json and chat_template.jinja. Which special tokens go around a prompt is
    for tokenizer.json alone to say: add_bos_token and add_eos_token of the configuration do not
    count beside it, as in transformers 5.

    Raises:
        ModelNotFound: when tokenizer.json is missing or broken.
    """

    def __init__(self, folder: Path) -> None:
        config = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
        self._name = folder.name
        self._backend = _load_backend(folder / "tokenizer.json")
        # what a file says about training batches must not cut or pad a prompt
        self._backend.no_truncation()
        self._backend.no_padding()

        # one more than the largest id: vocabularies have holes
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special_tokens = _special_tokens(config)
        self.bos_token_id = self._special_id("bos_token")
        eos = self._special_id("eos_token")
        # the tokenizer's own; a model may have more in its configuration
        self.eos_token_ids: frozenset[int] = frozenset() if eos is None else frozenset({eos})

        added = self._backend.get_added_tokens_decoder()
        # ids that decode leaves out when asked to skip special tokens
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        # ids of single bytes that decode joins to characters, run by run
        self.byte_ids = self._find_byte_ids()

        source = _template_source(folder, config)
        self.chat_template = None if source is None else ChatTemplate(source, self.special_tokens)

    def to_json(self) -> str:
        """
        Write the tokenizer as a tokenizer.json, which counts as this one does.
        """
        return self._backend.to_str()

    def encode(self, text: str) -> TokenIds:
        """
        Encode a plain prompt, with the special tokens that the tokenizer puts around it.

        Raises:
            InvalidText: when the text is not Unicode.
        """
        return self._encode(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> TokenIds:
        """
        Encode a conversation up to where the answer begins; the template alone writes special tokens.

        Raises:
            NoChatTemplate: when the model has none.
            ChatTemplateFailed: when it does not take these messages.
            InvalidText: when the text is not Unicode.
        """
        return self._encode(self.render_chat(messages), add_special_tokens=False)

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """
        Write a conversation as the text that `encode_chat` encodes.
        """
        if self.chat_template is None:
            raise NoChatTemplate(f"the model {self._name} has no chat template: send a prompt instead of messages")
        return self.chat_template.render(messages)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """
        Decode to text, with U+FFFD for bytes that are no UTF-8; ids that do not exist give nothing.
        """
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def exists(self, token_id: int) -> bool:
        """Whether an id has text: below vocab_size there may be holes."""
        return self._backend.id_to_token(token_id) is not None

    def token_text(self, token_id: int) -> str:
        """
        Give one token's text as it reads after another token; a part of a character gives U+FFFD.
        """
        # after itself: alone, some decoders take the leading space off
        alone = self.decode([token_id], skip_special_tokens=False)
        return self.decode([token_id, token_id], skip_special_tokens=False)[len(alone) :]

    def _encode(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        try:
            # the batch call alone lets go of the GIL: the step loop goes on while we encode
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidText("the prompt is not Unicode text: it has a lone surrogate") from error
        return np.array(encoding.ids, dtype=np.int32)

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def _find_byte_ids(self) -> frozenset[int]:
        if "ByteFallback" not in repr(self._backend.decoder):
            return frozenset()
        ids = (self._backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(token_id for token_id in ids if token_id is not None)


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ModelNotFound(
            f"{path} is not there: the model folder needs the tokenizer.json of its Hugging Face repository"
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    # tokenizers raises plain Exception for every fault of a file
    except Exception as error:
        raise ModelNotFound(f"{path} cannot be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelNotFound(f"{path} cannot be read: {error}") from error
    return content if isinstance(content, dict) else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens, each as a string or as an object with its text in "content"."""
    tokens = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    return source if isinstance(source, str) else None

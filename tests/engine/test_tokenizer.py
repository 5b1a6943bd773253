"""Prompts and conversations become the ids that the model's own files ask for."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers

from engine.errors import ChatTemplateFailed, InvalidText, ModelNotFound, NoChatTemplate, RequestError
from engine.tokenizer import Tokenizer
from tests.support.tiny_tokenizers import (
    CHAT_TEMPLATE,
    KINDS,
    SENTENCES,
    add_bos,
    byte_fallback,
    byte_level,
    metaspace,
    save,
)

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  What is a <tool>?\n"},
]


@pytest.fixture
def chat_tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer(save(add_bos(byte_level()), tmp_path, chat_template=CHAT_TEMPLATE))


@pytest.mark.parametrize("kind", list(KINDS))
def test_encodes_and_decodes_as_transformers_does(kind: str, tmp_path: Path) -> None:
    """
    For each kind of tokenizer, ids and text are those of transformers from the same folder.
    """
    # in the files a special token is always one of the vocabulary
    names = {"bos_token": "[CLS]", "eos_token": "[CLS]"} if kind == "word-piece" else {}
    folder = save(KINDS[kind](), tmp_path, **names)
    ours, theirs = Tokenizer(folder), transformers.PreTrainedTokenizerFast.from_pretrained(folder)

    for text in (*SENTENCES, "", " ", "</s> inside", SENTENCES[0] * 40):
        ids = ours.encode(text)
        assert np.int32 == ids.dtype
        assert theirs(text)["input_ids"] == ids.tolist()
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert expected == ours.decode(ids, skip_special_tokens=skip)


def test_a_plain_prompt_gets_one_bos_and_so_does_a_chat(chat_tokenizer: Tokenizer) -> None:
    """
    Where both the template and the tokenizer write a BOS, each way in has exactly one.
    """
    bos = chat_tokenizer.bos_token_id

    assert bos is not None
    for ids in (chat_tokenizer.encode("hello"), chat_tokenizer.encode_chat(CHAT)):
        assert bos == ids[0]
        assert 1 == int((ids == bos).sum())


def test_chat_matches_transformers(chat_tokenizer: Tokenizer, tmp_path: Path) -> None:
    """
    Text and ids of a rendered conversation are those of apply_chat_template with a generation prompt.
    """
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)

    text = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text == chat_tokenizer.render_chat(CHAT)
    assert text.endswith("<|assistant|>")
    assert theirs(text, add_special_tokens=False)["input_ids"] == chat_tokenizer.encode_chat(CHAT).tolist()


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | tojson }} {{ {'<a>': 'é'} | tojson(indent=2) }}",
        "{% for m in messages %}\n    {% if loop.first %}\n {% continue %}\n  {% endif %}\n {{ m.role }}\n{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}{{ tools is none }}{{ documents is none }}",
        "{{ strftime_now('%Y') }}{{ messages[0].get('name', 'nobody') }}{{ messages[0]['content'][:2] }}",
        "{{ dict(a=1).a }}{{ messages | length }}{% if add_generation_prompt %}>{% endif %}",
    ],
)
def test_template_helpers_match_transformers(template: str, tmp_path: Path) -> None:
    """
    What templates rely on, from loop controls to tojson and block trimming, renders the same.
    """
    folder = save(byte_level(), tmp_path, chat_template=template)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    messages: list[dict[str, Any]] = [*CHAT, {"role": "user", "content": "ünï", "name": None}]

    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert expected == Tokenizer(folder).render_chat(messages)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{% for %}",
        "{{ messages[9].content.strip() }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ namespace(__init__=1) }}",
        "{% for i in range(10**9) %}x{% endfor %}",
    ],
)
def test_a_template_that_fails_fails_its_request(template: str, tmp_path: Path) -> None:
    """
    A refusal, a syntax fault or an attempt to leave the sandbox is a typed error of the request.
    """
    tokenizer = Tokenizer(save(byte_level(), tmp_path, chat_template=template))

    with pytest.raises(ChatTemplateFailed):
        tokenizer.encode_chat(CHAT)
    assert issubclass(ChatTemplateFailed, RequestError)


def test_a_refusal_says_what_the_template_said(tmp_path: Path) -> None:
    """
    The words given to raise_exception reach the caller.
    """
    tokenizer = Tokenizer(save(byte_level(), tmp_path, chat_template="{{ raise_exception('no system role') }}"))

    with pytest.raises(ChatTemplateFailed, match="no system role"):
        tokenizer.encode_chat(CHAT)


def test_messages_without_a_template_are_refused(tmp_path: Path) -> None:
    """
    A model with no template takes prompts, and says so when messages come.
    """
    tokenizer = Tokenizer(save(byte_level(), tmp_path / "base"))

    with pytest.raises(NoChatTemplate, match="base has no chat template: send a prompt"):
        tokenizer.encode_chat(CHAT)


def test_the_jinja_file_goes_before_the_config(tmp_path: Path) -> None:
    """
    chat_template.jinja wins over tokenizer_config.json, in which a list has its default entry.
    """
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    folder = save(byte_level(), tmp_path, chat_template=named)
    assert "plain" == Tokenizer(folder).render_chat(CHAT)

    (folder / "chat_template.jinja").write_text("file", encoding="utf-8")
    assert "file" == Tokenizer(folder).render_chat(CHAT)


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (False, True), (True, True), (False, False)])
def test_the_tokenizer_file_alone_decides_about_bos_and_eos(bos: bool, eos: bool, tmp_path: Path) -> None:
    """
    add_bos_token and add_eos_token change nothing beside a tokenizer.json, as in transformers.
    """
    for backend in (byte_level(), add_bos(byte_level())):
        folder = save(backend, tmp_path, add_bos_token=bos, add_eos_token=eos)
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)

        assert theirs("hello")["input_ids"] == Tokenizer(folder).encode("hello").tolist()


def test_special_ids_and_sizes(tmp_path: Path) -> None:
    """
    The vocabulary counts added tokens; BOS and EOS are found whether given as text or as objects.
    """
    tokenizer = Tokenizer(save(byte_level(), tmp_path, eos_token={"content": "</s>", "lstrip": False}))

    assert tokenizer.vocab_size == 1 + int(tokenizer.encode("<tool>")[0])
    assert (0, frozenset({1})) == (tokenizer.bos_token_id, tokenizer.eos_token_ids)
    assert not tokenizer.exists(tokenizer.vocab_size)
    assert 4 == len(tokenizer.special_ids)


def test_a_token_alone_keeps_its_leading_space(tmp_path: Path) -> None:
    """
    token_text gives a token as it reads inside a text, also where the decoder trims the first one.
    """
    for kind in (byte_level, byte_fallback, metaspace):
        tokenizer = Tokenizer(save(kind(), tmp_path / kind.__name__))
        ids = tokenizer.encode("the the the")
        assert " the" == "".join(tokenizer.token_text(int(token)) for token in ids)[-4:]
    fallback = Tokenizer(tmp_path / "byte_fallback")
    assert "�" == fallback.token_text(max(fallback.byte_ids))
    assert "<s>" == fallback.token_text(1)


def test_padding_and_truncation_of_the_file_are_ignored(tmp_path: Path) -> None:
    """
    Batch settings that were saved with a tokenizer neither cut nor pad a prompt.
    """
    backend = byte_level()
    expected = backend.encode(SENTENCES[0]).ids
    backend.enable_truncation(5)
    backend.enable_padding(length=500)

    assert expected == Tokenizer(save(backend, tmp_path)).encode(SENTENCES[0]).tolist()


def test_text_that_is_not_unicode_is_refused(chat_tokenizer: Tokenizer) -> None:
    """
    A lone surrogate, which JSON can carry, is a typed error in a prompt and in a message.
    """
    for encode in (chat_tokenizer.encode, lambda text: chat_tokenizer.encode_chat([{"role": "user", "content": text}])):
        with pytest.raises(InvalidText):
            encode(json.loads('"a\\ud800b"'))


def test_missing_or_broken_files_say_which(tmp_path: Path) -> None:
    """
    The error for the operator names the file.
    """
    with pytest.raises(ModelNotFound, match=r"tokenizer\.json is not there"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelNotFound, match=r"tokenizer\.json cannot be read"):
        Tokenizer(tmp_path)
    save(byte_level(), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelNotFound, match=r"tokenizer_config\.json cannot be read"):
        Tokenizer(tmp_path)


def test_threads_share_one_tokenizer(chat_tokenizer: Tokenizer) -> None:
    """
    Encoding and rendering from several threads at once gives each its own answer.
    """
    expected = [chat_tokenizer.encode_chat([{"role": "user", "content": "dog " * n}]).tolist() for n in range(40)]
    results: list[list[int]] = [[] for _ in range(40)]

    def encode(start: int) -> None:
        for n in range(start, 40, 4):
            results[n] = chat_tokenizer.encode_chat([{"role": "user", "content": "dog " * n}]).tolist()

    threads = [threading.Thread(target=encode, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert expected == results


@pytest.mark.parametrize("kind", KINDS)
def test_it_can_be_written_down(tmp_path: Path, kind: str) -> None:
    """
    As tokenizer.json it counts as it does itself, whoever reads it.
    """
    tokenizer = Tokenizer(save(KINDS[kind](), tmp_path))

    read = tokenizers.Tokenizer.from_str(tokenizer.to_json())

    for sentence in SENTENCES:
        assert read.encode(sentence).ids == tokenizer.encode(sentence).tolist()

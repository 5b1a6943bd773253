"""What transformers generates greedily, to compare the engine's tokens with."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

# two logits nearer than this may change places between two orders of summation
EXCUSED_GAP = 1e-4


@dataclass(frozen=True, slots=True)
class Reference:
    """Greedy tokens of one prompt, and how far the best logit was ahead at each."""

    prompt: np.ndarray
    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many answers were equal, or differed only after a near tie, or differed."""

    equal: int
    excused: int
    different: tuple[str, ...]


def load_reference(path: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


@torch.inference_mode()
def generate_reference(model: Any, prompts: Sequence[np.ndarray], max_tokens: int) -> list[Reference]:
    """
    Run each prompt alone through `generate`, greedily and without an end.
    """
    references = []
    for prompt in prompts:
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = [torch.topk(logits[0].double(), 2).values for logits in out.logits]
        tokens = tuple(out.sequences[0, len(prompt) :].tolist())
        references.append(Reference(prompt, tokens, tuple(float(top[0] - top[1]) for top in best)))
    return references


def compare(references: Sequence[Reference], answers: Sequence[Sequence[int]]) -> Verdict:
    """
    Compare token for token; a first difference at a near tie of the reference is excused.
    """
    equal = excused = 0
    different = []
    for reference, answer in zip(references, answers, strict=True):
        pairs = enumerate(zip(reference.token_ids, answer, strict=True))
        first = next((i for i, (want, got) in pairs if want != got), None)
        if first is None:
            equal += 1
        elif reference.gaps[first] < EXCUSED_GAP:
            excused += 1
        else:
            different.append(
                f"prompt of {len(reference.prompt)}: token {first} is {answer[first]}, "
                f"want {reference.token_ids[first]} (ahead by {reference.gaps[first]:.2g})"
            )
    return Verdict(equal, excused, tuple(different))

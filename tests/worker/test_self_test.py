"""What a worker asks of its engine before its first job."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import DeviceLost
from engine.request import FinishReason, StepOutputs
from pagemill.client import Client
from tests.support.services import worker_process
from tests.support.tiny_models import save_tiny_writer
from worker.fake_engine import FakeEngine
from worker.self_test import SelfTestFailed, self_test


class Faulty(FakeEngine):
    """Answers with what the test makes of its answers."""

    num_answers = 0

    def step(self) -> StepOutputs:
        outputs = super().step()
        self.num_answers += len(outputs.finished)
        return self.spoil(outputs)

    def spoil(self, outputs: StepOutputs) -> StepOutputs:
        return outputs


class NotFinite(Faulty):
    def spoil(self, outputs: StepOutputs) -> StepOutputs:
        (output,) = outputs.finished
        (completion,) = output.completions
        bad = replace(completion, finish_reason=FinishReason.ERROR, token_ids=())
        return StepOutputs(finished=(replace(output, completions=(bad,)),))


class Unsteady(Faulty):
    def spoil(self, outputs: StepOutputs) -> StepOutputs:
        (output,) = outputs.finished
        (completion,) = output.completions
        other = replace(completion, token_ids=(self.num_answers, 7, 7, 7))
        return StepOutputs(finished=(replace(output, completions=(other,)),))


class Silent(Faulty):
    def spoil(self, outputs: StepOutputs) -> StepOutputs:  # noqa: ARG002
        return StepOutputs()


class Lost(Faulty):
    def step(self) -> StepOutputs:
        raise DeviceLost("CUDA error: an illegal memory access was encountered")


def test_an_engine_that_computes_passes_and_keeps_nothing() -> None:
    """
    Two answers of four tokens each, one after the other, and the engine is as empty as before.
    """
    engine = FakeEngine()

    self_test(engine, engine.tokenizer)

    assert 8 == engine.stats().generated_tokens
    assert not engine.has_work
    assert engine.kv_tokens == engine.capacity().free_tokens


def test_a_short_model_is_asked_for_less() -> None:
    """
    The prompt is cut to what the model takes.
    """
    engine = FakeEngine(max_model_len=4)

    self_test(engine, engine.tokenizer)

    assert 2 == engine.stats().generated_tokens


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (NotFinite(), "not finite"),
        (Unsteady(), "faulty"),
        (Silent(), "no answer"),
        (Lost(), "illegal memory access"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_engine_that_does_not_compute_well_is_no_start(engine: FakeEngine, said: str) -> None:
    """
    Such a worker takes no job: it says what is the matter, as for all that keeps it from starting.
    """
    with pytest.raises(SelfTestFailed, match=said):
        self_test(engine, engine.tokenizer)


def test_a_worker_with_damaged_weights_takes_no_job(
    server_url: str, queue: str, client: Client, tmp_path: Path
) -> None:
    """
    It finds that out before its first pull, ends with the reason, and is not tried again.
    """
    model, log = tmp_path / "model", tmp_path / "log"
    save_tiny_writer(model)
    damage(model / "model.safetensors")
    job_id = client.submit(prompt="waits", options={"max_tokens": 4}).job_id
    flags = ("--model", str(model), "--dtype", "float32", "--kv-cache-bytes", "64MiB")
    with worker_process(log, *flags, "--redis-url", server_url, "--queue", queue) as worker:
        assert 1 == worker.wait()
    status = client.status(job_id)

    assert "not finite" in log.read_text().splitlines()[-1]
    assert 1 == sum(event["event"] == "supervisor.started" for event in worker.events())
    assert ("queued", 0) == (status.state, status.attempt)


def damage(weights: Path) -> None:
    """Make one tensor of many unusable."""
    tensors = load_file(weights)
    tensors["model.layers.1.mlp.up_proj.weight"].fill_(torch.nan)
    save_file(tensors, weights, metadata={"format": "pt"})

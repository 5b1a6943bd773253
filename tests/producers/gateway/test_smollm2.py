from pathlib import Path

import pytest

from tests.e2e.gateway import run


@pytest.mark.slow
def test_the_official_client_does_all_with_a_real_model(tmp_path: Path) -> None:
    """
    Gateway, worker with SmolLM2 and server are processes; prompts have the tokens that transformers counts.
    """
    counts = run(tmp_path)

    assert (2, 2, 12) == (counts["chats"], counts["batches"], counts["lines"])

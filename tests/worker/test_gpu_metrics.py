"""Where there is no GPU, or no driver; tests/gpu has the rest."""

import pytest

from worker.engine_build import gpu_in_use
from worker.gpu_metrics import GpuCollector


@pytest.mark.parametrize("uuid", ["", "GPU-00000000-0000-0000-0000-000000000000"])
def test_without_a_driver_the_names_are_there_without_values(uuid: str) -> None:
    """
    For an engine on a CPU, and where the driver's library cannot be loaded.
    """
    families = list(GpuCollector(lambda: uuid, library="libno-such-driver.so.1").collect())

    assert "pagemill_gpu_utilization_ratio" in {family.name for family in families}
    assert [] == [sample for family in families for sample in family.samples]


def test_a_process_that_computes_on_no_gpu_names_none() -> None:
    """
    Whether torch is loaded or not.
    """
    assert "" == gpu_in_use()

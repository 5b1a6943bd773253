"""What the driver says of the GPU that an engine computes on."""

import time

import torch

from worker.engine_build import gpu_in_use
from worker.gpu_metrics import GpuCollector


def readings(collector: GpuCollector) -> dict[str, float]:
    return {sample.name: sample.value for family in collector.collect() for sample in family.samples}


def test_the_gpu_of_this_process_is_found_and_read() -> None:
    """
    Under the name that CUDA has for it: busy while it computes, with the memory that it has, and what it draws.
    """
    matrix = torch.randn(8192, 8192, device="cuda")
    collector = GpuCollector(gpu_in_use)
    before = readings(collector)
    until, busiest = time.monotonic() + 30, 0.0
    while busiest < 0.5 and time.monotonic() < until:
        for _ in range(20):
            matrix = torch.tanh(matrix @ matrix)
        torch.cuda.synchronize()
        busiest = max(busiest, readings(collector)["pagemill_gpu_utilization_ratio"])
    after = readings(collector)

    assert 0.5 <= busiest <= 1
    total = torch.cuda.get_device_properties(0).total_memory
    assert 0.95 * total < after["pagemill_gpu_memory_bytes"] < 1.1 * total
    assert matrix.nbytes < after["pagemill_gpu_memory_used_bytes"] <= after["pagemill_gpu_memory_bytes"]
    assert 20 < after["pagemill_gpu_power_watts"] < 2000
    assert after["pagemill_gpu_energy_joules_total"] > before["pagemill_gpu_energy_joules_total"]


def test_a_gpu_that_the_driver_does_not_know_shows_nothing() -> None:
    """
    The names are there, without a value.
    """
    assert {} == readings(GpuCollector(lambda: "GPU-00000000-0000-0000-0000-000000000000"))

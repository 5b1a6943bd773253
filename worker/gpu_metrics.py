"""
What the driver says of the GPU that the engine computes on; nothing where there is none.

The driver brings the library (NVML) along; it is loaded when metrics are asked for the first time.
"""

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

LIBRARY = "libnvidia-ml.so.1"


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


# what to show, how to ask for it, and how to read the answer
READINGS: tuple[tuple[Any, str, str, str, Any, Callable[[Any], float]], ...] = (
    (
        GaugeMetricFamily,
        "pagemill_gpu_utilization_ratio",
        "Share of the last second or less in which the GPU computed anything.",
        "nvmlDeviceGetUtilizationRates",
        _Utilization,
        lambda used: used.gpu / 100,
    ),
    (
        GaugeMetricFamily,
        "pagemill_gpu_memory_used_bytes",
        "Memory of the GPU in use, by all programs.",
        "nvmlDeviceGetMemoryInfo",
        _Memory,
        lambda memory: memory.used,
    ),
    (
        GaugeMetricFamily,
        "pagemill_gpu_memory_bytes",
        "Memory of the GPU.",
        "nvmlDeviceGetMemoryInfo",
        _Memory,
        lambda memory: memory.total,
    ),
    (
        GaugeMetricFamily,
        "pagemill_gpu_power_watts",
        "What the GPU draws.",
        "nvmlDeviceGetPowerUsage",
        ctypes.c_uint,
        lambda milliwatts: milliwatts.value / 1000,
    ),
    (
        CounterMetricFamily,
        "pagemill_gpu_energy_joules",
        "Energy since the driver was loaded.",
        "nvmlDeviceGetTotalEnergyConsumption",
        ctypes.c_ulonglong,
        lambda millijoules: millijoules.value / 1000,
    ),
)


class GpuCollector(Collector):
    """
    Args:
        uuid: Which GPU, as the engine's process knows it; empty while that is not known, or for none.
    """

    def __init__(self, uuid: Callable[[], str], library: str = LIBRARY) -> None:
        self._uuid = uuid
        self._library = library
        self._driver: Any = None
        self._device: ctypes.c_void_p | None = None
        self._failed = False

    def collect(self) -> Iterable[Metric]:
        device = self._find()
        for kind, name, text, function, answer, read in READINGS:
            told = self._ask(function, device, answer())
            yield kind(name, text, None if told is None else float(read(told)))

    def _find(self) -> ctypes.c_void_p | None:
        if self._device is None and not self._failed and (uuid := self._uuid()):
            self._device = self._open(uuid)
            self._failed = self._device is None
        return self._device

    def _open(self, uuid: str) -> ctypes.c_void_p | None:
        try:
            self._driver = ctypes.CDLL(self._library)
        except OSError:
            return None
        if self._driver.nvmlInit_v2() != 0:
            return None
        device = ctypes.c_void_p()
        found = self._driver.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device))
        return device if found == 0 else None

    def _ask(self, function: str, device: ctypes.c_void_p | None, answer: Any) -> Any:
        """Fill in an answer; None where the driver has none."""
        if device is None or getattr(self._driver, function)(device, ctypes.byref(answer)) != 0:
            return None
        return answer

"""The engine's CUDA backend: state by slot on the device, packed plans, graphs."""

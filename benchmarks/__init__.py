"""Measurements: the same requests for every engine, and what each of them made of it."""

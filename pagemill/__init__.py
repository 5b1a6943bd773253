"""The contract between producers and workers: schema, keys, scripts, clients, object store."""

__version__ = "0.1.0"

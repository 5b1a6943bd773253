"""Operations of the engine that have a GPU kernel, each beside its torch reference."""

__version__ = "0"

"""What a program lacks that an extra of the package brings, in words."""

from importlib.util import find_spec

from pagemill.errors import SettingsError


def need(extra: str, *modules: str) -> None:
    """
    Before any work: whether all modules can be imported, without importing them.

    Raises:
        SettingsError: one is missing; the message says what to install.
    """
    for module in modules:
        if find_spec(module) is None:
            raise SettingsError(how_to_get(module, extra))


def how_to_get(module: str | None, extra: str) -> str:
    """What to do about a module that is not there."""
    return f"{module} is not installed: in the checkout, `pip install --editable '.[{extra}]'` brings it"

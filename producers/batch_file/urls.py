"""URLs of places beside and inside of others: what follows a `?` stays at the end."""

from pathlib import Path


def absolute(url: str) -> str:
    """A path of this machine as a file:// URL; a URL as it is."""
    return url if "://" in url else Path(url).absolute().as_uri()


def beside(url: str, suffix: str) -> str:
    """The same place with more at the end of its name."""
    path, mark, options = absolute(url).partition("?")
    return f"{path}{suffix}{mark}{options}"


def inside(url: str, name: str) -> str:
    """A place in a folder."""
    path, mark, options = absolute(url).partition("?")
    return f"{path.rstrip('/')}/{name}{mark}{options}"


def split(url: str) -> tuple[str, str]:
    """The folder that a place is in, and its name; the name is empty where the place is a folder itself."""
    path, mark, options = absolute(url).partition("?")
    folder, _, name = path.rpartition("/")
    return f"{folder}{mark}{options}", "" if url.endswith("/") else name

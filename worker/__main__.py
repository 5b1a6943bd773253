"""
Starts a worker: reads the settings and runs it.

Whatever an operator can get wrong is one sentence on standard error that says what to do, and an
exit code (exits.py).
"""

import sys

from pagemill.errors import SettingsError
from worker import exits
from worker.settings import WorkerSettings


def main(flags: list[str] | None = None) -> int:
    try:
        settings = WorkerSettings.read(sys.argv[1:] if flags is None else flags)
    except SettingsError as error:
        print(f"pagemill worker: {error}", file=sys.stderr)
        return exits.SETTINGS
    # not above: a mistake in the settings shows without the wait for what these import
    from worker.process import run

    return run(settings)


if __name__ == "__main__":
    sys.exit(main())

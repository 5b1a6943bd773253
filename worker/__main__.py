"""
Starts a worker: reads the settings, and runs it in a process that is watched by this one.

Whatever an operator can get wrong is one sentence on standard error that says what to do, and an
exit code (exits.py).
"""

import sys

from pagemill.errors import SettingsError
from pagemill.logs import configure_logging
from worker import exits
from worker.settings import WorkerSettings


def main() -> int:
    try:
        settings = WorkerSettings.read(sys.argv[1:])
        configure_logging(settings, queue=settings.queue)
        # one of the two alone is imported: they take half a second and tens of megabytes
        if settings.supervisor and settings.supervised is None:
            from worker.supervisor import supervise

            return supervise(settings)
        from worker.process import run

        return run(settings)
    except SettingsError as error:
        print(f"pagemill worker: {error}", file=sys.stderr)
        return exits.SETTINGS


if __name__ == "__main__":
    sys.exit(main())

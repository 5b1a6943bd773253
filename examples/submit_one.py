"""
Ask one question and print the answer, waiting for it.

    python examples/submit_one.py "Why is the sky blue?"
"""

import sys

from pagemill.client import Client
from pagemill.errors import JobFailed
from pagemill.schema import Message, Options


def main() -> int:
    question = sys.argv[1] if len(sys.argv) > 1 else "Why is the sky blue?"
    with Client() as client:
        job = client.submit(
            messages=(Message(role="user", content=question),),
            options=Options(max_tokens=60),
            lane="interactive",
        )
        try:
            print(client.text(job.job_id, wait_s=120))
        except JobFailed as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

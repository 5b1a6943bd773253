"""Who may work on an output."""

import os
import subprocess
import sys
import threading

import pytest
from redis import Redis

from pagemill.bulk_client import BulkClient
from pagemill.keys import QueueKeys
from producers.bulk.errors import Occupied
from producers.bulk.lease import OutputLease, is_gone, lease_name
from tests.support.servers import wait_for

OUTPUT = "s3://bucket/out"


def test_it_is_free_again_afterwards(client: BulkClient) -> None:
    """
    Leaving the block gives it back, also after an error.
    """
    with pytest.raises(ZeroDivisionError), OutputLease(client, OUTPUT):
        _ = 1 / bool(not client.lease_holder(lease_name(OUTPUT)))

    assert "" == client.lease_holder(lease_name(OUTPUT))


def test_it_outlives_its_time_while_it_is_held(client: BulkClient) -> None:
    """
    The holder renews it: nobody gets it, however long the work takes.
    """
    with OutputLease(client, OUTPUT, lease_s=1.0) as first:
        with pytest.raises(Occupied, match=f"process {os.getpid()} on"):
            OutputLease(client, OUTPUT, lease_s=1.0).__enter__()
        first.check()


def test_outputs_do_not_block_each_other(client: BulkClient) -> None:
    """
    Each has its own; with and without a slash at the end it is the same.
    """
    with OutputLease(client, OUTPUT), OutputLease(client, f"{OUTPUT}-2"):
        assert lease_name(OUTPUT) == lease_name(f"{OUTPUT}/")


def test_a_dead_process_of_this_machine_holds_nobody_up(client: BulkClient) -> None:
    """
    After a kill the next run starts at once, and does not wait until the lease has run out.
    """
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    with OutputLease(client, OUTPUT, lease_s=600):
        mine = client.lease_holder(lease_name(OUTPUT))
    system, _, _ = mine.partition(" ")
    client.take_lease(lease_name(OUTPUT), f"{system} {dead.pid} 1", 600)

    with OutputLease(client, OUTPUT, lease_s=600) as lease:
        lease.check()

    assert not is_gone(mine)
    assert not is_gone(f"elsewhere {dead.pid} 1")


def test_another_machines_lease_runs_out(client: BulkClient) -> None:
    """
    What a process elsewhere left behind is waited for.
    """
    client.take_lease(lease_name(OUTPUT), "elsewhere 1 1", 0.2)

    with OutputLease(client, OUTPUT, lease_s=5) as lease:
        lease.check()


def test_who_has_lost_it_finds_out(client: BulkClient, redis: Redis, queue: str) -> None:
    """
    A process that was silent for too long stops when another one has taken over.
    """
    with OutputLease(client, OUTPUT, lease_s=0.2) as lease:
        # at once: between giving it back and taking it the renewal of its holder may come
        redis.set(f"{QueueKeys(queue).base}:lease:{lease_name(OUTPUT)}", "elsewhere 1 1", px=60_000)

        def lost() -> bool:
            try:
                lease.check()
            except Occupied:
                return True
            return False

        wait_for(lost)
    assert "elsewhere 1 1" == client.lease_holder(lease_name(OUTPUT))
    client.give_lease_back(lease_name(OUTPUT), "elsewhere 1 1")


def test_one_of_many_gets_it(server_url: str, queue: str) -> None:
    """
    Of threads that ask at the same time one is told that it has it, and all hear the same name.
    """
    heard: list[str] = []

    def ask(number: int) -> None:
        with BulkClient(server_url, queue=queue) as client:
            heard.append(client.take_lease("x", f"thread-{number}", 30)[0])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert 8 == len(heard)
    assert 1 == len(set(heard))

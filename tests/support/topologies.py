"""
Servers that stand together: a master with replicas and sentinels, or a cluster.

Each of the processes ends with the one that started it.
"""

import os
import signal
import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

from redis import Redis
from redis.exceptions import RedisError

from pagemill.moving_server import slot_of
from producers.child import Child
from producers.local_redis import find_server
from tests.support.certificates import Certificates, find_tls_server
from tests.support.servers import wait_for

NUM_SLOTS = 16384

# short, as tests wait for failovers; yet a server on a busy machine must not be taken for dead
DOWN_MS = 1500


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def free_node_port() -> int:
    """A port for a node of a cluster, whose bus has the one 10,000 above."""
    for port in range(20000 + free_port() % 9000, 32000):
        with suppress(OSError), socket.socket() as probe, socket.socket() as bus:
            probe.bind(("127.0.0.1", port))
            bus.bind(("127.0.0.1", port + 10000))
            return port
    raise AssertionError("no free port for a node")


class Node:
    """A server process that can be killed, paused, and started again where it was."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        port: int = 0,
        program: Path | None = None,
        certificates: Certificates | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = port or free_port()
        secure: dict[str, Any] = certificates.of_client if certificates else {}
        self.client = Redis(port=self.port, protocol=2, socket_timeout=10, **secure)
        self._stack = ExitStack()
        self._log = folder / "server.log"
        listens = ("--port", "0", "--tls-port", str(self.port)) if certificates else ("--port", str(self.port))
        self.command = [
            *(str(program or find_server()), *listens, "--bind", "127.0.0.1", "--dir", str(folder)),
            *(certificates.of_server if certificates else ()),
            *("--save", "", "--appendonly", "no", "--daemonize", "no", "--repl-diskless-sync-delay", "0"),
            *("--maxmemory-policy", "noeviction", *options),
        ]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> Self:
        self.child = self._stack.enter_context(Child(self.command, log=self._log, grace_s=5))
        wait_for(self._answers, 20)
        return self

    def kill(self) -> None:
        """End it at once, without a last word."""
        os.kill(self.child.pid, signal.SIGKILL)
        self._stack.close()

    def close(self) -> None:
        self._stack.close()
        self.client.close()

    def info(self, section: str) -> dict[str, Any]:
        return dict(self.client.info(section))

    def _answers(self) -> bool:
        assert self.child.exit_code() is None, self.child.last_lines()
        with suppress(RedisError):
            return bool(self.client.ping())
        return False


class SentinelTrio:
    """A master with two replicas, and three sentinels that watch it."""

    name = "mymaster"

    def __init__(self, folder: Path, *, certificates: Certificates | None = None) -> None:
        self._folder, self._certificates = folder, certificates
        self._program = find_tls_server() if certificates else find_server()
        self.nodes: list[Node] = []
        self.sentinels: list[Node] = []

    def __enter__(self) -> Self:
        options = ("--tls-replication", "yes") if self._certificates else ()
        self.nodes = [
            Node(
                self._folder / f"node-{number}", *options, program=self._program, certificates=self._certificates
            ).start()
            for number in range(3)
        ]
        master, *replicas = self.nodes
        for replica in replicas:
            replica.client.execute_command("REPLICAOF", "127.0.0.1", str(master.port))
        self.sentinels = [self._sentinel(number, master) for number in range(3)]
        wait_for(self.is_settled, 40)
        return self

    def __exit__(self, *_: object) -> None:
        for node in (*self.sentinels, *self.nodes):
            node.close()

    def _sentinel(self, number: int, master: Node) -> Node:
        folder = self._folder / f"sentinel-{number}"
        node = Node(folder, certificates=self._certificates)
        settings = folder / "sentinel.conf"
        words = self._certificates.of_server if self._certificates else ()
        secure = "".join(f"{name[2:]} {value}\n" for name, value in zip(words[::2], words[1::2], strict=True))
        listens = f"port 0\ntls-port {node.port}\ntls-replication yes" if self._certificates else f"port {node.port}"
        settings.write_text(
            f"{listens}\n{secure}bind 127.0.0.1\ndir {folder}\n"
            f"sentinel monitor {self.name} 127.0.0.1 {master.port} 2\n"
            f"sentinel down-after-milliseconds {self.name} {DOWN_MS}\n"
            f"sentinel failover-timeout {self.name} 6000\n"
        )
        node.command = [str(self._program), str(settings), "--sentinel"]
        return node.start()

    @property
    def url(self) -> str:
        hosts = ",".join(node.address for node in self.sentinels)
        if self._certificates:
            return f"rediss+sentinel://{hosts}/{self.name}/0?{self._certificates.query}"
        return f"redis+sentinel://{hosts}/{self.name}/0"

    @property
    def master(self) -> Node:
        """As the first sentinel sees it."""
        _, port = self.sentinels[0].client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.name)
        return next(node for node in self.nodes if node.port == int(port))

    def is_settled(self) -> bool:
        """Whether all sentinels know each other and the replicas, which have what the master has."""
        for sentinel in self.sentinels:
            facts = sentinel.info("sentinel").get("master0", {})
            if (facts.get("status"), facts.get("slaves"), facts.get("sentinels")) != ("ok", 2, 3):
                return False
        replicas = [node for node in self.nodes if node is not self.master]
        return all(node.info("replication").get("master_link_status") == "up" for node in replicas)


class Cluster:
    """
    Three masters that share the slots.

    Args:
        replicas: Of the first masters, one each.
    """

    def __init__(self, folder: Path, *, replicas: int = 0, certificates: Certificates | None = None) -> None:
        self._folder, self._num_nodes, self._certificates = folder, 3 + replicas, certificates
        self._program = find_tls_server() if certificates else None
        self.nodes: list[Node] = []

    def __enter__(self) -> Self:
        for number in range(self._num_nodes):
            options = ("--cluster-enabled", "yes", "--cluster-node-timeout", str(DOWN_MS))
            if self._certificates:
                options += ("--tls-cluster", "yes", "--tls-replication", "yes")
            node = Node(
                self._folder / f"{number}",
                *options,
                port=free_node_port(),
                program=self._program,
                certificates=self._certificates,
            )
            self.nodes.append(node.start())
            node.client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for part, node in enumerate(self.nodes[:3]):
            slots = range(part * NUM_SLOTS // 3, (part + 1) * NUM_SLOTS // 3)
            node.client.execute_command("CLUSTER", "ADDSLOTS", *slots)
        for node in self.nodes[1:]:
            node.client.execute_command("CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port)
        wait_for(
            lambda: all(self._cluster_info(node, "cluster_known_nodes") == self._num_nodes for node in self.nodes), 40
        )
        for master, replica in zip(self.nodes, self.nodes[3:], strict=False):
            replica.client.execute_command("CLUSTER", "REPLICATE", self.id_of(master))
        wait_for(self.is_settled, 40)
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.close()

    @property
    def url(self) -> str:
        hosts = ",".join(node.address for node in self.nodes[:3])
        if self._certificates:
            return f"rediss+cluster://{hosts}?{self._certificates.query}"
        return f"redis+cluster://{hosts}"

    def is_settled(self) -> bool:
        """Whether all nodes see all slots served, and replicas have what their masters have."""
        if any(self._cluster_info(node, "cluster_state") != "ok" for node in self.nodes):
            return False
        return all(node.info("replication").get("master_link_status") == "up" for node in self.nodes[3:])

    def owner(self, key: str) -> Node:
        """The master of a key's slot, as the nodes that are up and agree see it."""
        return self.nodes_by_port()[wait_for(lambda: self._owner_port(slot_of(key)), 20)]

    def nodes_by_port(self) -> dict[int, Node]:
        return {node.port: node for node in self.nodes}

    def up(self) -> list[Node]:
        return [node for node in self.nodes if node.child.exit_code() is None]

    def id_of(self, node: Node) -> str:
        return str(node.client.execute_command("CLUSTER", "MYID").decode())

    def key_at(self, node: Node, pattern: str) -> str:
        """The first of the names `pattern` % 0, 1, ... that belongs to a node."""
        names = (pattern % number for number in range(1000))
        return next(name for name in names if self.owner(f"{{pagemill:{name}}}") is node)

    def set_slot(self, key: str, *words: str, nodes: list[Node]) -> None:
        for node in nodes:
            node.client.execute_command("CLUSTER", "SETSLOT", slot_of(key), *words)

    def move_keys(self, key: str, source: Node, target: Node, *, most: int = NUM_SLOTS) -> int:
        """Send keys of a slot that is being moved; returns how many went."""
        names = source.client.execute_command("CLUSTER", "GETKEYSINSLOT", slot_of(key), most)
        if names:
            source.client.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 10_000, "KEYS", *names)
        return len(names)

    def _owner_port(self, slot: int) -> int | None:
        owners = set()
        for node in self.up():
            for first, last, master, *_ in node.client.execute_command("CLUSTER", "SLOTS"):
                if first <= slot <= last:
                    owners.add(int(master[1]))
        return owners.pop() if len(owners) == 1 else None

    def _cluster_info(self, node: Node, name: str) -> Any:
        lines = node.client.execute_command("CLUSTER", "INFO")
        text = lines.decode() if isinstance(lines, bytes) else ""
        values = dict(line.split(":", 1) for line in text.split("\r\n") if ":" in line)
        value = values.get(name, "")
        return int(value) if value.isdigit() else value

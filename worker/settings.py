"""The worker's settings: flags over PAGEMILL_* over pagemill.toml."""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, Literal, Self

from pydantic import ByteSize, Field, SecretStr
from pydantic_settings import CliSettingsSource, CliSuppress
from pydantic_settings.exceptions import SettingsError as ParserError

from pagemill.errors import SettingsError
from pagemill.settings import ClientSettings, LogSettings, Settings


class MetricsSettings(LogSettings):
    """
    Exports the metrics of one queue over HTTP, until SIGTERM.

    Every setting is a flag, a PAGEMILL_<NAME> in the environment, or a line of pagemill.toml,
    in this order of precedence.
    """

    redis_url: str = Field("redis://localhost:6379/0", description="The queue's server.")
    queue: str = Field("default", description="Name of the queue.")
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Serve /metrics, /autoscale, /healthz and /readyz there; 0 lets the system choose a port.",
    )
    metrics_host: str = Field("127.0.0.1", description="Address that they are served at; 0.0.0.0 in a container.")
    metrics_tenants: int = Field(
        0, ge=0, le=1000, description="Count the tokens of so many tenants by name, those that took most."
    )
    autoscale_target_s: float = Field(
        300.0, gt=0, description="So many workers are wanted as empty the backlog within that time."
    )
    autoscale_min_workers: int = Field(0, ge=0, description="Fewest workers that are wanted of an autoscaler.")
    autoscale_max_workers: int = Field(64, ge=1, description="Most workers that are wanted.")
    autoscale_tokens_per_s: float | None = Field(
        None, gt=0, description="Estimated tokens that a worker does a second, until that has been measured."
    )

    @classmethod
    def read(
        cls, flags: Sequence[str], *, also: Iterable[type[Settings]] = (), prog: str = "python -m worker.exporter"
    ) -> Self:
        """
        The settings of a command line; prints the help and exits where it asks for that.

        Args:
            also: Classes whose names may stand in the environment and the file too.

        Raises:
            SettingsError: a flag or setting is unknown, and the nearest known one; or a value is wrong.
        """
        return cls.load(also=also, **_parse(cls, flags, prog))


class WorkerSettings(MetricsSettings, ClientSettings):
    """
    Runs one engine that serves one queue, until SIGTERM.

    Every setting is a flag, a PAGEMILL_<NAME> in the environment, or a line of pagemill.toml,
    in this order of precedence. Sizes take units, as 2GiB.
    """

    # the queue
    redis_url: str = Field(
        "redis://localhost:6379/0", description="The queue's server; behind Sentinel or a cluster: see docs/client.md."
    )
    queue: str = Field("default", description="Name of the queue; it serves one model.")
    object_store: str | None = Field(
        None, description="Where large payloads and results are: file:///folder or s3://bucket/prefix."
    )
    max_queued_tokens: int = Field(
        1_000_000_000, ge=0, description="For clients in the same file: submits are refused above so many tokens."
    )
    lease_s: float = Field(30.0, ge=0.5, description="A worker that is silent for so long loses its jobs to its peers.")
    drain_s: float = Field(20.0, ge=0, description="How long running jobs may go on after SIGTERM.")
    look_ahead_jobs: int | None = Field(
        None, ge=0, description="Jobs claimed beyond what fits now; unset: an eighth of max_num_seqs, 4 at least."
    )
    inline_result_bytes: ByteSize = Field(
        ByteSize(65536), description="Larger results go to the object store, where there is one."
    )
    max_attempts: int = Field(
        8, ge=1, description="A job that was tried so many times without an end is failed, not run again."
    )
    webhook_secret: SecretStr | None = Field(
        None, description="Signs the webhooks of batches: whsec_ and the base64 of 24 to 64 bytes; unset: none is sent."
    )
    allow_private_webhooks: bool = Field(
        False, description="Send webhooks also to private, loopback and link-local addresses."
    )
    allow_unsafe_redis: bool = Field(False, description="Start even if the server's settings can lose jobs.")

    # the engine
    engine: Literal["paged", "fake"] = Field(
        "paged", description='"fake" answers with letters at a set speed: for load tests of a queue.'
    )
    model: str | None = Field(None, description="A folder, a .gguf file, a name of `pagemill models list`, a hub id.")
    served_model_name: str | None = Field(
        None, description="The name that jobs ask for; unset: what --model says, and the folder's name."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto is the GPU where torch was built for CUDA, and fails without one; else the CPU."
    )
    dtype: Literal["auto", "float32", "float64", "bfloat16", "float16"] = Field(
        "auto", description="What the model computes in; auto is the checkpoint's own on a GPU, float32 on a CPU."
    )
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        "auto",
        description="What keys and values are kept in; auto is what the model computes in; fp8 halves those of "
        "16 bits, with a scale for each token and head.",
    )
    block_size: int = Field(16, ge=1, description="Tokens of one KV block.")
    max_num_seqs: int | None = Field(
        None, ge=1, description="Most sequences that run at once; unset: 1024 on a GPU, 64 on a CPU."
    )
    max_num_batched_tokens: int | None = Field(
        None, ge=1, description="Token budget of one step; unset: 8192 on a GPU, 512 on a CPU."
    )
    max_model_len: int | None = Field(
        None, ge=2, description="Longest prompt plus answer; unset: the model's own limit."
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Share of the GPU's whole memory that the worker may use, from what others leave."
    )
    kv_cache_bytes: ByteSize | None = Field(
        None,
        description="Size of the KV cache; unset: what is left of the GPU's share; "
        "on a CPU a quarter of the free memory, 2 GiB at most.",
    )
    swap_space_bytes: ByteSize | None = Field(
        None,
        description="Host memory for preempted sequences; unset: a tenth of the free memory, "
        "4 GiB at most beside a GPU, 1 GiB on a CPU.",
    )
    cuda_graphs: bool = Field(True, description="Replay recorded steps on a GPU.")
    prefix_caching: bool = Field(True, description="Find KV blocks of equal prompts again.")
    shared_tenants: bool = Field(
        False,
        description="Tenants share cached prompts, under a hash that nobody can collide; else each has its own.",
    )
    cascade: bool = Field(
        True, description="On a GPU, read a cached prefix that running sequences share once for all of them."
    )
    cascade_min_seqs: int = Field(8, ge=2, description="Running sequences from which on a shared prefix is read once.")
    cascade_min_tokens: int = Field(512, ge=1, description="Tokens of a shared prefix from which on it is read once.")
    preemption: Literal["auto", "swap", "recompute"] = Field(
        "auto", description="How blocks are won back under pressure; auto takes the cheaper way."
    )
    policy: Literal["throughput", "fcfs"] = Field(
        "throughput", description="Bulk jobs in the order in which all end soonest, or as they come: fcfs."
    )
    load_format: Literal["auto", "dummy"] = Field("auto", description='"dummy" runs the model with random weights.')
    num_threads: int | None = Field(None, ge=1, description="Threads of the CPU backend; unset: torch decides.")

    # the fake engine
    fake_tokens_per_s: float | None = Field(
        None, gt=0, description="Speed of the fake engine, over all jobs; unset: at once."
    )
    fake_kv_tokens: int = Field(131072, ge=1, description="Size of the fake engine's KV cache, in tokens.")

    fake_poison: bool = Field(
        False,
        description='The fake engine dies of prompts with "poison:segv", exit, raise, hang, freeze, oom or cuda.',
    )

    # the process
    supervisor: bool = Field(
        True, description="A second process starts the worker, tells the queue how it died, and starts it again."
    )
    restart_s: float = Field(
        1.0, ge=0, description="Pause before a worker that died is started again; doubled when that dies soon too."
    )
    max_restart_s: float = Field(60.0, ge=0, description="Longest pause before a start.")
    supervised: CliSuppress[str | None] = Field(None, description="What a supervisor tells the worker it starts.")
    step_timeout_s: float = Field(
        300.0, gt=0, description="A worker whose step runs for longer is not healthy, and ends with all stacks shown."
    )
    intake_threads: int = Field(2, ge=1, description="Threads that read and tokenise jobs.")
    health_port: int | None = Field(
        None, ge=0, le=65535, description="Serve /healthz and /readyz alone there; 0 lets the system choose a port."
    )
    health_host: str = Field("127.0.0.1", description="Address of the health endpoint; 0.0.0.0 in a container.")
    vllm_metrics: bool = Field(False, description="Show the engine's metrics under vLLM's names too.")

    # traces
    tracing: bool = Field(
        False, description="Make a span of each job with OpenTelemetry, exported as the OTEL_* variables say."
    )
    trace_jobs: Literal["link", "child"] = Field(
        "link", description="A job's span is linked to its producer's, in a trace of its own, or is a child of it."
    )
    trace_content: bool = Field(False, description="Spans have the beginning of each prompt and answer.")
    trace_rows: bool = Field(
        False, description="For clients in the same file: the jobs of bulk runs and batch files have spans too."
    )

    @classmethod
    def read(cls, flags: Sequence[str], *, also: Iterable[type[Settings]] = (), prog: str = "pagemill worker") -> Self:
        return super().read(flags, also=also, prog=prog)


def _parse(settings: type[Settings], flags: Sequence[str], prog: str) -> dict[str, Any]:
    try:
        source: CliSettingsSource[Any] = CliSettingsSource(
            settings,
            cli_prog_name=prog,
            cli_parse_args=list(flags),
            cli_kebab_case=True,
            cli_implicit_flags=True,
            cli_exit_on_error=False,
            cli_hide_none_type=True,
            cli_avoid_json=True,
        )
    except ParserError as error:
        raise SettingsError(_explain(str(error), settings)) from None
    return source()


def _explain(message: str, settings: type[Settings]) -> str:
    unknown = re.search(r"unrecognized arguments: (--?[^\s=]+)", message)
    if unknown is None:
        return message.removeprefix("error parsing CLI: ")
    flag = unknown.group(1)
    known = ["--" + name.replace("_", "-") for name in settings.model_fields]
    near = get_close_matches(flag.replace("_", "-"), known, n=1)
    return f"unknown setting {flag}: " + (f"did you mean {near[0]}?" if near else "see --help for all settings")

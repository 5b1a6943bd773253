"""`pagemill tenants` and `pagemill lanes`: who gets how much of a queue, and how much may wait."""

import json
from typing import Annotated

import typer

from pagemill.cli_common import AsJson, open_client, to_json

tenants_app = typer.Typer(name="tenants", help="Weights and limits of tenants.", no_args_is_help=True)
lanes_app = typer.Typer(name="lanes", help="What waits in the lanes, and their limits.", no_args_is_help=True)

_Limit = typer.Option(help="Submits are busy while more estimated tokens would wait; 0 for no limit.", min=0)


@tenants_app.command("list")
def list_tenants(context: typer.Context, as_json: AsJson = False) -> None:
    """List the tenants; the limit of * is that of all who have none of their own."""
    from pagemill.cli_status import table

    with open_client(context) as client:
        tenants = client.tenants()
    if as_json:
        for one in tenants:
            print(to_json(one))
        return
    rows = [
        (
            *(one.tenant, f"{one.weight:g}", _limit(one.max_queued_tokens)),
            *(f"{tokens:,}" for tokens in one.queued_tokens.values()),
            *(f"{one.used_tokens:,}", f"{one.gpu_ms / 1000:,.1f}"),
        )
        for one in tenants
    ]
    header = ("tenant", "weight", "limit", "interactive", "standard", "bulk", "tokens used", "GPU s")
    print("\n".join(table(header, rows)))


@tenants_app.command("set")
def set_tenant(
    context: typer.Context,
    tenant: Annotated[str, typer.Argument(help="The tenant; * is all who have no limit of their own.")],
    weight: Annotated[float | None, typer.Option(help="Its share, 0.001 to 1000; others weigh 1.")] = None,
    max_queued_tokens: Annotated[int | None, _Limit] = None,
) -> None:
    """Set a tenant's weight, or its limit on what may wait in all lanes together."""
    if weight is None and max_queued_tokens is None:
        raise typer.BadParameter("give --weight, --max-queued-tokens or both")
    with open_client(context) as client:
        client.set_tenant(tenant, weight=weight, max_queued_tokens=max_queued_tokens)


@lanes_app.command("list")
def list_lanes(context: typer.Context, as_json: AsJson = False) -> None:
    """List the lanes, the most urgent first."""
    from pagemill.cli_status import table

    with open_client(context) as client:
        stats, limits = client.stats(), client.lane_limits()
    rows = [(lane, stats.queued[lane], stats.queued_tokens[lane], limits[lane]) for lane in limits]
    if as_json:
        for row in rows:
            print(json.dumps(dict(zip(("lane", "jobs", "tokens", "max_queued_tokens"), row, strict=True))))
        return
    shown = [(lane, f"{jobs:,}", f"{tokens:,}", _limit(limit)) for lane, jobs, tokens, limit in rows]
    print("\n".join(table(("lane", "jobs waiting", "tokens waiting", "limit"), shown)))


@lanes_app.command("set")
def set_lane(
    context: typer.Context,
    lane: Annotated[str, typer.Argument(help="interactive, standard or bulk.")],
    max_queued_tokens: Annotated[int, _Limit],
) -> None:
    """Set a lane's limit on what may wait in it."""
    with open_client(context) as client:
        client.set_lane_limit(lane, max_queued_tokens)


def _limit(tokens: int) -> str:
    return f"{tokens:,}" if tokens else "none"

"""The protocol's tests run against the oldest and the newest server."""

import pytest


@pytest.fixture(params=["newest", "oldest"])
def server_url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(f"{request.param}_server")
    return url

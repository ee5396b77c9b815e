"""Servers of tests close each connection that they have accepted."""

import asyncio
import socket

import pytest
from fakes.web import WebServer


@pytest.mark.parametrize("rounds", range(6))
async def test_a_connection_whose_handler_has_not_begun_is_closed(rounds):
    """Otherwise it is left to the garbage collection, which this test or a later one fails for."""
    async with WebServer() as server:
        with socket.create_connection((server.host, server.port)):
            for _ in range(rounds):
                await asyncio.sleep(0)

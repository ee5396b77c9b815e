"""`BrowserLayer`: runs `BrowserTransform` with one Chromium for all rows and a browser context per row."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from torchrl_agentic.errors import InfrastructureError, ToolError
from torchrl_agentic.messages import ToolResult
from torchrl_agentic.tools.legacy.base import TransformCall, children_of, end_trees
from torchrl_agentic.tools.legacy.layers import NamedLayer, outcome

T = TypeVar("T")


class BrowserLayer(NamedLayer):
    """Runs actions on an event loop of its own thread, each on the page of its row.

    The transform has a single page, which its `_reset` closes for all rows, and cannot be cloned. So each row
    gets a stand-in with the transform's attributes and methods, and its own page. The transform itself never
    opens a page.

    Args:
        transform: The transform.
    """

    rows_have_state = True

    @property
    def names(self) -> list[str]:
        """The name "browser"."""
        return ["browser"]

    def __init__(self, transform: Any) -> None:
        super().__init__(transform)
        kind = cast("type[Any]", type(transform))
        self._stand_in: Any = type(kind.__name__, (_OwnsNothing, kind), {})
        self._loop: _Loop | None = None
        self._launched: Any = None
        self._launching = asyncio.Lock()  # used on our loop alone
        self._rows: dict[int, Any] = {}
        self._stale: list[Any] = []

    async def run(self, call: TransformCall) -> ToolResult:
        """Run one action; actions of different rows overlap."""
        if call.name != "browser":
            return ToolResult.from_text(f"no tool named {call.name!r}; available: browser", is_error=True)
        _check_address(self.transform.allowed_domains, call.args)
        with self.lock:
            loop = self._loop = self._loop or _Loop()
        return outcome(await loop.run(self._act(call)))

    async def _act(self, call: TransformCall) -> dict[str, Any]:
        row = await self._row(call.row)
        try:
            return await row._execute_browser_action_async(**call.args)
        except KeyError as error:
            raise ToolError(f"the action {call.args.get('action')!r} needs the argument {error}") from None

    async def _row(self, index: int) -> Any:
        async with self._launching:
            await _close_contexts(self._stale)
            launched = self._launched
            if launched is None or (launched.browser is not None and not launched.browser.is_connected()):
                self._rows.clear()
                self._launched = await self._launch()
            if index not in self._rows:
                self._rows[index] = await self._open_page()
            return self._rows[index]

    async def _launch(self) -> Any:
        launched = self._copy()
        try:
            await launched._init_browser()
        except ImportError as error:
            raise InfrastructureError(
                f"BrowserTransform needs playwright and Chromium: {error}; run: pip install playwright"
            ) from error
        except Exception as error:
            raise InfrastructureError(f"the browser cannot be started: {error}") from error
        return launched

    async def _open_page(self) -> Any:
        row = self._copy()
        row.browser = self._launched.browser
        if row.browser is not None:
            row.context = await row.browser.new_context()
            row.context.set_default_timeout(1000 * self.transform.timeout)
            row.page = await row.context.new_page()
        return row

    def _copy(self) -> Any:
        copy: Any = object.__new__(self._stand_in)
        copy.__dict__.update(self.transform.__dict__)
        return copy

    def reset_rows(self, chosen: list[bool], tensordict: Any, tensordict_reset: Any) -> None:
        """Remove the pages of these rows; their contexts are closed at the next call."""
        del tensordict, tensordict_reset
        for row in [row for row in self._rows if row < len(chosen) and chosen[row]]:
            self._stale.append(self._rows.pop(row))

    def close_transform(self) -> None:
        """Close the browser, and end the driver process of playwright."""
        loop, self._loop = self._loop, None
        launched, self._launched = self._launched, None
        self._rows.clear()
        self._stale.clear()
        if loop is not None:
            loop.close(launched.browser.close() if launched is not None and launched.browser else None)
        super().close_transform()


class _OwnsNothing:
    """First base class of a stand-in, because a stand-in must not close the shared browser."""

    def close(self) -> None:
        """Do nothing."""

    def __del__(self) -> None:
        """Do nothing."""


async def _close_contexts(rows: list[Any]) -> None:
    while rows:
        context = rows.pop().context
        if context is not None:
            with contextlib.suppress(Exception):  # the browser may have ended with all its contexts
                await context.close()


def _check_address(allowed: list[str] | None, args: Any) -> None:
    """Check an address more strictly than the transform, which allows local files and domain suffixes.

    Raises:
        ToolError: If the address is not allowed.
    """
    url = args.get("url")
    if args.get("action") != "navigate" or not isinstance(url, str):
        return
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ToolError(f"{url[:80]!r} is not a valid URL: {error}") from None
    if parts.scheme not in ("http", "https"):
        raise ToolError(f"only http and https URLs are allowed; got {url[:80]!r}")
    hosts = {parts.hostname or "", parts.netloc.rpartition("@")[2].lower()}
    if allowed and not any(h == d.lower() or h.endswith("." + d.lower()) for h in hosts for d in allowed):
        raise ToolError(f"Domain not allowed. Must be one of: {allowed}")


class _Loop:
    """An event loop on its own thread, and the processes that it has started."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="legacy-browser")
        self._thread.start()
        self.thread_id = self._thread.native_id or 0

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def close(self, last: Coroutine[Any, Any, Any] | None) -> None:
        """Run a last coroutine, and end all processes and tasks of the loop. Blocks."""
        if last is not None:
            with contextlib.suppress(Exception):
                asyncio.run_coroutine_threadsafe(last, self._loop).result(10)
        end_trees(children_of(self.thread_id))
        asyncio.run_coroutine_threadsafe(self._cancel_others(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _cancel_others(self) -> None:
        # asyncio reports the end of a process to the loop that has started it, so the loop must still run.
        for _ in range(100):
            if not children_of(self.thread_id):
                break
            await asyncio.sleep(0.01)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

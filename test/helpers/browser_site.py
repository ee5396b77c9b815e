"""A small site for browsers, as an ASGI application."""

import asyncio
import threading

PAGE = b"""<html><body><h1 id=title>%s</h1><p id=cookie></p><input id=name><a id=link href="/other">on</a>
<script>document.getElementById("cookie").textContent = "of " + document.cookie</script></body></html>"""


class Site:
    """Sets a cookie at /set, makes visitors of /meet wait for each other, and never answers at /hang."""

    def __init__(self, meeting=2):
        self.meeting, self.left = threading.Barrier(meeting), []

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        headers = [(b"content-type", b"text/html")]
        if scope["path"] == "/meet":
            await asyncio.to_thread(self.meeting.wait, 60)
        if scope["path"] == "/hang":
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        if scope["path"] == "/set":
            headers.append((b"set-cookie", b"who=" + scope["query_string"]))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": PAGE % scope["path"].encode()})

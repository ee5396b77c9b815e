"""Two MCP servers over stdio: a lenient one, and one of the Python SDK, which demands "initialize".

Usage: python mcp_servers.py lenient | strict
"""

import json
import sys


def text(said, **more):
    """Return the result of a call."""
    return {"content": [{"type": "text", "text": said}], **more}


def answer(method, params):
    """Return the response of the lenient server, or None if it sends none."""
    if method == "tools/list":
        integers = {"a": {"type": "integer"}, "b": {"type": "integer"}}
        schema = {"type": "object", "properties": integers, "required": ["a", "b"]}
        add = {"name": "add", "description": "Add two numbers.", "inputSchema": schema}
        others = [{"name": name, "inputSchema": {"type": "object"}} for name in ("fail", "hang", "draw")]
        return {"tools": [add, *others]}
    name, args = params["name"], params.get("arguments") or {}
    if name == "add":
        return text(str(args["a"] + args["b"]))
    if name == "fail":
        return text("no such thing", isError=True)
    if name == "draw":
        return {"content": [{"type": "image", "data": "aGk=", "mimeType": "image/png"}]}
    return None


def lenient():
    """Answer each line."""
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message and (result := answer(message["method"], message.get("params"))) is not None:
            print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)


def strict():
    """Serve with the installed version of the SDK."""
    try:
        from mcp.server import MCPServer as Server
    except ImportError:
        from mcp.server.fastmcp import FastMCP as Server
    server = Server("strict")
    server.tool()(add)
    server.run("stdio")


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


if __name__ == "__main__":
    {"lenient": lenient, "strict": strict}[sys.argv[1]]()

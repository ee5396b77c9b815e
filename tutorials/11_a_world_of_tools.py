"""
11 · A world of tools
=====================

Benchmarks such as BFCL or τ-bench give a model ten or forty tools that all work on one object: a file system,
a shop, a car. Each trajectory has its own object, whose initial state is in the data set, and the score is
computed from its final state. Such an object is called a *world* here. A `Toolset` that defines ``session``
has one. This tutorial builds a file system with eight tools and scores its final state.
"""

# %%
# The world and its tools
# -----------------------
# The world is plain Python. ``session`` opens one for each trajectory, at its first call, and closes it once,
# at its end; the data set's row contains its files. The tools are typed functions: the parameter ``world``,
# annotated with ``Injected[...]``, is filled in, and the model does not see it.
import contextlib
from posixpath import join, normpath

from torchrl_agentic import Injected, ToolError, Toolset


class World:
    def __init__(self, files):
        self.cwd, self.files = "/", {"/": None, **files}  # a directory has no text

    def at(self, path, kind=None):
        path = normpath(join(self.cwd, path))
        if kind and (path not in self.files or (self.files[path] is None) != (kind == "directory")):
            raise ToolError(f"{path}: no such {kind}")
        return path


def pwd(world: Injected[World]) -> str:
    """Return the current directory."""
    return world.cwd


def ls(world: Injected[World]) -> list[str]:
    """List the current directory."""
    return sorted(path for path in world.files if path != "/" and world.at(join(path, "..")) == world.cwd)


def cd(path: str, world: Injected[World]) -> None:
    """Change to a directory."""
    world.cwd = world.at(path, "directory")


def mkdir(path: str, world: Injected[World]) -> None:
    """Make a directory."""
    world.files[world.at(path)] = None


def write(path: str, text: str, world: Injected[World]) -> None:
    """Write a file."""
    world.files[world.at(path)] = text


def cat(path: str, world: Injected[World]) -> str:
    """Read a file."""
    return world.files[world.at(path, "file")]


def mv(source: str, target: str, world: Injected[World]) -> None:
    """Move a file."""
    world.files[world.at(target)] = world.files.pop(world.at(source, "file"))


def rm(path: str, world: Injected[World]) -> None:
    """Remove a file."""
    del world.files[world.at(path, "file")]


class FileSystem(Toolset):
    name = "files"

    async def setup(self):
        return [pwd, ls, cd, mkdir, write, cat, mv, rm]

    async def teardown(self):
        pass

    @contextlib.asynccontextmanager
    async def session(self, trajectory, row):
        world = World(row.columns["files"])
        world.wanted = row.columns["wanted"]
        yield world

    async def final_reward(self, world):  # the reward of the whole trajectory
        return float(world.files == {"/": None, **world.wanted})


# %%
# A data set
# ----------
# ``collate_rows`` keeps each row whole, dictionaries included. Both rows must end with the same files, but
# start with different ones.
from torch.utils.data import DataLoader
from torchrl.envs.llm import DatasetChatEnv

from torchrl_agentic import EndTrajectory, ToolCompose, ToolRewardTransform, collate_rows

wanted = {"/old": None, "/old/notes.txt": "buy milk"}
rows = [
    {"query": "Put notes.txt into old/.", "files": {"/notes.txt": "buy milk"}, "wanted": wanted},
    {
        "query": "Put notes.txt into old/.",
        "files": {"/notes.txt": "buy milk", "/old": None},
        "wanted": wanted,
    },
]
env = DatasetChatEnv.from_dataloader(DataLoader(rows, batch_size=2, collate_fn=collate_rows), batch_size=(2,))
tools = ToolCompose([])
tools.add_toolset(FileSystem())
for transform in (tools, EndTrajectory(when_no_calls=True), ToolRewardTransform(place="end")):
    env.append_transform(transform)

# %%
# Calls keep their order
# ----------------------
# Tools of a toolset with a world write to it, unless they declare other ``effects``; so the calls of a
# trajectory run in the order in which the model wrote them, also within one message. Rows run concurrently.
# The model of the second row makes a mistake: it reads a file that it has moved.
import json

from torchrl_agentic.testing import ScriptedPolicy


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


first = [
    call("mkdir", path="old") + call("mv", source="notes.txt", target="old/notes.txt") + call("ls"),
    "Done.",
]
second = [call("mv", source="notes.txt", target="note.txt") + call("cat", path="notes.txt"), "Done."]
rollout = env.rollout(2, ScriptedPolicy([first, second]), break_when_any_done=False)
for row in rollout[:, -1]["next", "history"].prompt:
    print(*row.content[2:-1], sep="\n")
    print("---")

# %%
# The score of the final state
# ----------------------------
# ``final_reward`` runs once per trajectory, before its world closes. `ToolRewardTransform` adds the value to
# the reward.
rewards = rollout["next", "reward"][:, -1].flatten().tolist()
print("rewards:", rewards)
assert rewards == [1.0, 0.0]
env.close()

# %%
# Other tools in a later turn
# ---------------------------
# Some tasks add a tool in the middle of a trajectory. A row's ``tool_selection`` may list the tools by the
# turn from which they are available, ``{"0": ["ls"], "3": ["ls", "mv"]}``, or
# ``ToolCompose(tool_selection=...)`` may be a function of the trajectory, its turn and its row. The prompt
# still shows the tools of the first turn, so announce the others in a message.

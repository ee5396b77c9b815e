"""Images of tools and tasks reach an engine that takes them, in the order of their placeholders."""

import io

import pytest
from helpers.vision_processors import qwen
from PIL import Image

from torchrl_agentic import ImagePart, ToolCompose, ToolResult, tool
from torchrl_agentic.collectors import Task
from torchrl_agentic.collectors.requests import Requests
from torchrl_agentic.collectors.trajectory_run import TrajectoryRun
from torchrl_agentic.engines import ScriptedEngine
from torchrl_agentic.tensors import leaves
from torchrl_agentic.trajectory.spec import TrajectorySpec

CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


def picture(color):
    data = io.BytesIO()
    Image.new("RGB", (56, 56), color).save(data, "png")
    return data.getvalue()


@tool
def look() -> ToolResult:
    """Look at a picture."""
    return ToolResult((ImagePart(picture("red"), "image/png"),))


class Seeing(ScriptedEngine):
    """Keeps the images that it gets."""

    takes_media = True

    def __init__(self, *args):
        super().__init__(*args)
        self.seen = []

    async def sample(self, ids, *, max_tokens, key, on_ids=None, media=None):
        images = (media or {}).get("image", [])
        self.seen.append([image.getpixel((0, 0)) for image in images])
        return await super().sample(ids, max_tokens=max_tokens, key=key, on_ids=on_ids)


def task():
    import base64

    shown = {"type": "image", "base64": base64.b64encode(picture("blue")).decode(), "media_type": "image/png"}
    return Task("t", [{"role": "user", "content": [shown, {"type": "text", "text": "What is it?"}]}])


async def run(engine_class):
    processor = qwen("qwen2_5_vl")
    spec = TrajectorySpec.of(
        list(leaves(ToolCompose([look], media=True))),
        processor.tokenizer,
        max_turns=3,
        tokenizer_options={"processor": processor},
    )
    engine = engine_class([[CALL, "A red square."]], processor.tokenizer)
    trajectory = await TrajectoryRun(spec, Requests(engine), task(), name="t").run()
    return engine, trajectory, processor.tokenizer


async def test_an_engine_gets_all_images_so_far():
    engine, trajectory, tokenizer = await run(Seeing)
    blue, red = (0, 0, 255), (255, 0, 0)
    assert engine.seen == [[blue], [blue, red]]
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert list(trajectory.ledger.ids).count(pad) == 2 * 4  # 56 pixels are 4 patches of 28 x 28


async def test_an_engine_for_text_refuses_images():
    with pytest.raises(ValueError, match="takes no image"):
        await run(ScriptedEngine)

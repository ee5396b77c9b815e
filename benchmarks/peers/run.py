"""Measure all peers: `run.py [--out FILE] [--peers NAME ...] [--measures NAME ...] [--repeats N]`.

Each run is a process of its own, in the virtual environment of its peer; `make bench-peers` makes these. A
peer that speaks HTTP gets a server of the engine as a further process. Peers alternate within a measure, so
that a load of the machine that comes and goes meets all of them; "plain" is measured `--repeats` times, and
the run with the median processor time counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from load import LIMIT_S, MEASURES

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
START_S = 90.0
"""Seconds that a peer gets in addition to the limit of its measure, to start."""


@dataclass(frozen=True)
class Peer:
    """A row of the table.

    Attributes:
        script: Name of the program.
        venv: Folder of its virtual environment, below the root of this repository.
        has_server: Whether the engine is behind HTTP, in a process of its own.
        road: Further argument of the program.
        measures: What is measured.
    """

    script: str
    venv: str = ".venv"
    has_server: bool = False
    road: str = ""
    measures: tuple[str, ...] = ("plain", "stuck", "updates", "memory")


HTTP = ("plain", "stuck", "updates", "aborts", "memory")
PEERS = {
    "AgentCollector": Peer("peer_ours.py"),
    "verl ToolAgentLoop": Peer("peer_verl.py", ".venv-peers/verl"),
    "TorchRL LLMCollector": Peer("peer_llm_collector.py"),
    "AgentCollector, HTTP": Peer("peer_ours.py", has_server=True, road="http"),
    "TRL AsyncRolloutWorker, HTTP": Peer("peer_trl.py", ".venv-peers/trl", True, measures=HTTP),
    "AgentCollector, OpenAI API": Peer("peer_ours.py", has_server=True, road="openai"),
    "verifiers ToolEnv, OpenAI API": Peer("peer_verifiers.py", ".venv-peers/verifiers", True, measures=HTTP),
}


def run(peer: Peer, measure: str) -> dict[str, Any]:
    """Run a measure of a peer; return its figures, or the end of its messages as "error"."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "NONE": "none",  # the API key that a client insists on
    }
    server, url = None, ""
    with tempfile.TemporaryDirectory() as folder:
        if peer.has_server:
            command = [str(ROOT / ".venv/bin/python"), str(HERE / "engine.py"), measure]
            server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
            assert server.stdout is not None
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        out, messages = Path(folder, "figures.json"), Path(folder, "messages")
        python = str(ROOT / peer.venv / "bin/python")
        command = [python, "-W", "ignore", str(HERE / peer.script), measure, str(out), url]
        with messages.open("w") as file:
            process = subprocess.Popen(
                [*command, *filter(None, [peer.road])],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
            try:
                process.wait(LIMIT_S[measure] + START_S)
            except subprocess.TimeoutExpired:
                pass
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what it has left, too
                process.wait()
                if server is not None:
                    server.kill()
                    server.wait()
        if not out.exists():
            return {"measure": measure, "error": messages.read_text(errors="replace")[-2_000:]}
        return json.loads(out.read_text())


def median(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the run with the median processor time of an answer; one that failed, if any did."""
    failed = [figures for figures in runs if figures.get("cpu_ms_per_answer") is None]
    return failed[0] if failed else sorted(runs, key=lambda one: one["cpu_ms_per_answer"])[len(runs) // 2]


def cell(figures: dict[str, Any] | None, key: str, digits: int = 1) -> str:
    """Return a figure as text; a dash if there is none."""
    value = None if figures is None else figures.get(key)
    return "–" if value is None else f"{value:,.{digits}f}"


def makespan(figures: dict[str, Any] | None) -> str:
    """Return the makespan of a measure, or how far it came."""
    if figures is None or "error" in figures:
        return "–"
    if figures["makespan_s"] is not None:
        return f"{figures['makespan_s']:.1f} s"
    return f"not in {figures['limit_s']:.0f} s: {figures['trajectories']} of {figures['of']}"


def losses(figures: dict[str, Any] | None) -> str:
    """Return lost tokens as a share of the sampled ones, and trajectories that lack answers."""
    if figures is None or "error" in figures:
        return "–"
    kept, lost = figures["tokens_kept"], figures["tokens_lost"]
    share = 100 * lost / (kept + lost) if kept + lost else 0.0
    text = f"{lost:,} ({share:.1f} %), {figures['wrong']} cut"
    missing = figures["of"] - figures["trajectories"]
    text += f", {missing} missing" if missing else ""
    return f"{text}, ended by an error" if "failure" in figures else text


def table(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Return all figures in Markdown.

    Args:
        found: The figures by peer and measure.
    """
    head = (
        "",
        "answers/s",
        "processor time of an answer",
        "makespan",
        "makespan, 10 % stuck",
        "right then",
        "tokens lost, update each second",
        "the same, server aborts",
        "memory of a trajectory",
    )
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    for name, by_measure in found.items():
        plain, stuck = by_measure.get("plain"), by_measure.get("stuck")
        right = "–"
        if stuck is not None and "error" not in stuck:
            right = f"{stuck['trajectories'] - stuck['wrong']} of {stuck['of']}"
        row = (
            name,
            cell(plain, "answers_per_s", 0),
            cell(plain, "cpu_ms_per_answer", 2) + " ms",
            makespan(plain),
            makespan(stuck),
            right,
            losses(by_measure.get("updates")),
            losses(by_measure.get("aborts")),
            cell(by_measure.get("memory"), "memory_kb", 0) + " kB",
        )
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print each run, and write all figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--measures", nargs="*", default=list(MEASURES), choices=list(MEASURES))
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    missing = {PEERS[name].venv for name in options.peers if not (ROOT / PEERS[name].venv).exists()}
    if missing:
        raise SystemExit(f"no {', '.join(sorted(missing))}: run `make .venv-peers/ready`")
    found: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in options.peers}
    for measure in options.measures:
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in options.peers}
        for _ in range(options.repeats if measure == "plain" else 1):
            for name in options.peers:
                if measure in PEERS[name].measures:
                    runs[name].append(figures := run(PEERS[name], measure))
                    print(f"{name}: {json.dumps(figures)}", file=sys.stderr, flush=True)
                    found[name][measure] = median(runs[name])
                    options.out.write_text(json.dumps(found, indent=1))
    print(table(found))


if __name__ == "__main__":
    main()

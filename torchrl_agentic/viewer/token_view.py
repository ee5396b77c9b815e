"""The tokens of a trajectory, painted by who wrote them: the model, a prompt, the chat template, a call."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from torchrl_agentic.ledger import BOUNDARY, PROMPT, SAMPLED, Span
from torchrl_agentic.records import TrajectoryRecord
from torchrl_agentic.viewer.blocks import Block, masked


def tokens(record: TrajectoryRecord, mask: re.Pattern[str]) -> list[Block]:
    """Show each run of tokens of one source, with its text, or its ids where that is not known."""
    kept = record.tokens
    if kept is None:
        return [Block((("The tokens of this trajectory were not recorded.", "faint"),))]
    ledger = kept.ledger
    sampled = sum(ledger.mask)
    share = f"{sampled / len(ledger):.0%}" if len(ledger) else "–"
    head = Block(
        (
            (f"{len(ledger):,} tokens, {sampled:,} of them sampled ({share}) · ", "name"),
            (" sampled ", "token sampled"),
            (" prompt ", "token prompt"),
            (" boundary ", "token boundary"),
            (" call ", "token call"),
        )
    )
    names = [call.tool for _, call, _ in record.calls]
    ids, log_probs = ledger.ids, ledger.log_probs
    spans = list(ledger.spans())
    known = len(kept.texts) == len(spans)
    blocks = [head]
    for place, span in enumerate(spans):
        text = kept.texts[place] if known else " ".join(map(str, ids[span.start : span.stop]))
        tool = f" ({names[span.source]})" if 0 <= span.source < len(names) else ""
        size = span.stop - span.start
        title = f"{span.name}{tool} · {size:,} token{'s' if size > 1 else ''} [{span.start}, {span.stop})"
        mask_bit = f" · mask {int(span.source == SAMPLED)}"
        said = title + mask_bit + _likelihood(log_probs[span.start : span.stop])
        blocks.append(Block(((said, f"{_style(span)} title"),), text, _style(span)))
    return [masked(block, mask) for block in blocks]


def _likelihood(log_probs: Sequence[float]) -> str:
    known = [value for value in log_probs if not math.isnan(value)]
    if not known:
        return ""
    return f" · log-prob mean {sum(known) / len(known):.3f}, least {min(known):.3f}"


def _style(span: Span) -> str:
    return {SAMPLED: "token sampled", PROMPT: "token prompt", BOUNDARY: "token boundary"}.get(
        span.source, "token call"
    )

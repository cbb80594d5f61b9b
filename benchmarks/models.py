"""How every family of models runs, measured against transformers on tiny random models: the table of docs/models.md.

    python benchmarks/models.py > docs/models.md          # all families, about ten minutes on two cores
    python benchmarks/models.py Granite "Qwen3-MoE"       # some, with every number

Exact means, in fp32: greedy tokens are those of `generate`; log-probs that engine, scorer and trainer give are those of a
plain forward pass, before and after new weights and with a LoRA adapter, and gradients are those of plain passes, all within
1e-4; and in bf16 a gap to fp32 of at most twice that of transformers' own forward pass in bf16.
"""

from __future__ import annotations

import argparse
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from model_bench.configs import CONFIGS
from model_bench.measure import LARGEST_GAP, LARGEST_RATIO, Row, measure

from tba.models.cpu import use_cpu

HEAD = f"""# Models

How every family runs: through the native engine or through transformers' own forward pass (fallback), trained packed or one
sequence at a time. Measured by `python benchmarks/models.py > docs/models.md` on tiny random models, with transformers
{transformers.__version__} and PyTorch {torch.__version__.partition("+")[0]}.

- *fp32* is the largest gap, in nats per token, between what engine, scorer and trainer say (also after new weights, also
  with a LoRA adapter on all linear layers) and a plain forward pass, or between gradients as a share of their norm; the
  bound is {LARGEST_GAP:.0e}. Greedy tokens must be those of `generate`.
- *bf16* is the median gap to fp32 of engine and trainer, as a multiple of that of transformers' own forward pass in bf16,
  and the same of the gradient where there are no experts; the bound is {LARGEST_RATIO:.0f}. Of a mixture of experts it is
  noted how many tokens transformers' own pass sends to other experts in bf16 than in fp32.
- Models with rotary angles that change with the length (longrope) are generated as transformers' `generate` does it: where a
  sequence outgrows the short angles everything is read again. Trainer and scorer take a sequence as a plain forward pass
  takes it, with the angles of its whole length: of a response that crosses that length they say something else about the
  tokens before it than the engine said when it wrote them.

| family | verdict | training | fp32 | bf16 | why |
|---|---|---|---|---|---|"""


def line(row: Row) -> str:
    gap, ratio = max(row.gaps.values(), default=float("nan")), max(row.ratios.values(), default=float("nan"))
    return f"| {row.family} | {row.verdict} | {row.training} | {gap:.0e} | {ratio:.1f} | {row.notes} |"


def details(row: Row) -> str:
    numbers = [f"greedy {row.greedy:.2f}", *(f"{name} {gap:.1e}" for name, gap in row.gaps.items())]
    ratios = [f"{name} {ratio:.2f}" for name, ratio in row.ratios.items()]
    measured = f"fp32 {', '.join(numbers)}; bf16 {', '.join(ratios)}"
    return f"{row.family}: {row.verdict}, {row.training}; {measured}. {row.notes}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="names as in the table; none = all, as a table")
    chosen = parser.parse_args().families
    unknown = [name for name in chosen if name not in CONFIGS]
    if unknown:
        parser.error(f"{unknown[0]!r} is not one of {', '.join(CONFIGS)}")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    use_cpu(1)
    if not chosen:
        print(HEAD, flush=True)
    rows = []
    for family in chosen or CONFIGS:
        rows.append(measure(family))
        print(details(rows[-1]) if chosen else line(rows[-1]), flush=True)
    exact, refused = sum(row.verdict.endswith(", exact") for row in rows), sum(bool(row.refused) for row in rows)
    if not chosen:
        print(f"\n{exact} of {len(rows)} exact, {refused} refused, {sum(bool(row.crashed) for row in rows)} crashed.")
    return int(exact + refused < len(rows))


if __name__ == "__main__":
    sys.exit(main())

"""docs/from_trl.md: the table of names.py for people. `python -m tba.api.reference > docs/from_trl.md` writes it."""

from __future__ import annotations

from collections.abc import Mapping

from tba.api.names import FIELDS, TRAINER_ARGUMENTS, Name
from tba.objectives.trajectory_balance import TrajectoryBalance

INTRODUCTION = """# From TRL

Change the import, and nothing else:

```python
from tba import GRPOConfig, GRPOTrainer   # was: from trl import GRPOConfig, GRPOTrainer
```

`GRPOConfig` is `TBAConfig` and `GRPOTrainer` is `TBATrainer`. What is given keeps its meaning; what is left out is ours,
not TRL's: without `loss_type` the objective is `tb`, without `learning_rate` the rate finds itself, without `beta` it
is {beta:g}, or {beta_times_tokens:g} / `max_completion_length` where that is above {beta_tokens}, and falls where the policy
is so far from the reference that beta x KL would exceed {penalty:g}. Our own settings may stand
beside TRL's, as sections: `TBAConfig(max_steps=200, replay={{"lag": "drop"}})`. `output_dir` is the run folder.

After `train()`, `trainer.model` holds the trained weights, `trainer.state.log_history` the metrics; `evaluate()`,
`generate()`, `save_model()` and `push_to_hub()` work on them; `log_metrics()`, `save_metrics()` and `save_state()` write
what transformers' do, into the run folder. After a resume `trainer.state` has the history and the best metric of the steps
before, but for what a script itself has added by `trainer.log()`. Callbacks are transformers' own; `model` and
`processing_class` are those that are being trained, and before the run, where they were given by name, None. There is no
`optimizer`, `lr_scheduler` or data loader for them. Reward functions run in processes of their own, so that one that hangs
or dies costs its samples only; reward models may be given by name.

This page is made from the table that is used (`src/tba/api/names.py`), and a test compares it with the installed TRL.
"""
KINDS = {
    "setting": "Names that set something",
    "implied": "Names for what is always so",
    "no meaning": "Names without a meaning here: accepted, with one warning that says why",
    "refused": "Names that are refused: an error says what to use instead. Values that ask for nothing are accepted",
}


def document() -> str:
    """The whole page."""
    beta, tokens = TrajectoryBalance.default_beta, TrajectoryBalance.default_beta_tokens
    penalty = TrajectoryBalance.default_max_kl_penalty
    assert tokens is not None
    assert penalty is not None
    parts = [INTRODUCTION.format(beta=beta, beta_tokens=tokens, beta_times_tokens=beta * tokens, penalty=penalty)]
    for kind, title in KINDS.items():
        parts.append(f"## {title}\n\n{_table({name: found for name, found in FIELDS.items() if found.kind == kind})}")
    parts.append(f"## Arguments of GRPOTrainer\n\n{_table(TRAINER_ARGUMENTS, with_kind=True)}")
    return "\n".join(parts)


def _table(names: Mapping[str, Name], *, with_kind: bool = False) -> str:
    head = "| TRL | here |\n|---|---|\n"
    rows = (
        f"| `{name}` | {f'{found.kind}: ' if with_kind and found.kind != 'setting' else ''}{found.words} |\n"
        for name, found in names.items()
    )
    return head + "".join(rows)


if __name__ == "__main__":
    print(document(), end="")

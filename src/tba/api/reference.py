"""docs/from_trl.md: the tables of names.py for people. `python -m tba.api.reference > docs/from_trl.md` writes it."""

from __future__ import annotations

from collections.abc import Mapping

from tba.api.names import ARGUMENTS, REFUSED, REFUSED_ARGUMENTS, SETTINGS
from tba.objectives.trajectory_balance import TrajectoryBalance

INTRODUCTION = """# From TRL

Change the import, and nothing else:

```python
from tba import GRPOConfig, GRPOTrainer   # was: from trl import GRPOConfig, GRPOTrainer
```

`GRPOConfig` is `TBAConfig` and `GRPOTrainer` is `TBATrainer`. `ModelConfig`, `ScriptArguments`, `TrlParser` and the other
helpers of TRL's scripts may stand in the same import: they are TRL's own and need TRL installed.

**Arguments.** `GRPOConfig` is a dataclass with TRL's fields, for `TrlParser` and `HfArgumentParser` too. A given
field keeps its meaning. The defaults are ours, not TRL's:

- without `loss_type` the objective is `tb`, and without `learning_rate` the rate finds itself;
- without `beta` it is {beta:g}, or {beta_times_tokens:g} / `max_completion_length` beyond {beta_tokens} tokens, and
  beta x KL is kept below {penalty:g}. Rewards are then divided by their spread, so rewards of any scale learn alike
  (`objective.reward_unit`).

Our own settings stand beside TRL's as sections: `GRPOConfig(max_steps=200, replay={{"lag": "drop"}})`. With
`train={{"max_seconds": 600}}` a run ends by the clock, and `max_steps` may be left out.

**Files.** `output_dir` is the run folder. `output_dir/checkpoint-N` loads with `from_pretrained` and links to
`checkpoints/step-N`. All are kept without `save_total_limit`. `train(resume_from_checkpoint=...)` goes on from one
of them and drops the later ones; `True` is the newest. A second `train()` without it begins anew, as in TRL. It
moves the earlier run to `output_dir/earlier-N`; `overwrite_output_dir=True` removes it instead. Other files stay.

**The trainer.** `train()` returns transformers' TrainOutput; its `metrics` also hold summary.json. `trainer.model`
then has the trained weights, and is a PeftModel with `peft_config`. `evaluate()`, `generate()`, `save_model()` and
`push_to_hub()` work on them. `trainer.state` has the history, also from before a resume. `log_metrics()`,
`save_metrics()` and `save_state()` write as transformers' do. There is no optimizer, scheduler or data loader.

**Callbacks** are transformers' own. `model` is None before the run when it was given by name. `on_evaluate` comes
with the metrics: `state.global_step` is then the step that was evaluated.

**Rewards** run in worker processes. If one hangs or dies, only its samples are lost. `log_metric` and `log_extra`
write to `output_dir/logs`.
"""


def document() -> str:
    """The whole page."""
    beta, tokens = TrajectoryBalance.default_beta, TrajectoryBalance.default_beta_tokens
    penalty = TrajectoryBalance.default_max_kl_penalty
    assert tokens is not None
    assert penalty is not None
    refused = {name: f"refused: {words}" for name, words in REFUSED_ARGUMENTS.items()}
    parts = [
        INTRODUCTION.format(beta=beta, beta_tokens=tokens, beta_times_tokens=beta * tokens, penalty=penalty),
        f"## Names that set something\n\n{_table(SETTINGS)}",
        f"## Names that are refused, unless they ask for nothing\n\n{_table(REFUSED)}",
        "All other names of TRL's GRPOConfig are accepted and ignored; one warning lists those that were given.\n",
        f"## Arguments of GRPOTrainer\n\n{_table({**ARGUMENTS, **refused})}",
    ]
    return "\n".join(parts)


def _table(names: Mapping[str, str]) -> str:
    rows = (f"| `{name}` | {words.removeprefix('= ')} |\n" for name, words in names.items())
    return f"| TRL | here |\n|---|---|\n{''.join(rows)}"


if __name__ == "__main__":
    print(document(), end="")

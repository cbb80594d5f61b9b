"""Make the data and models of an embedded task again:

python -m recipes arithmetic | tldr | red_team | tools --output prepared
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recipes.arithmetic import prepare_arithmetic
from recipes.red_team import prepare_red_team
from recipes.tldr import prepare_tldr
from recipes.tools import prepare_tools
from tba.observe.files import check_new_folder

RECIPES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "arithmetic": prepare_arithmetic,
    "tldr": prepare_tldr,
    "red_team": prepare_red_team,
    "tools": prepare_tools,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m recipes", description=__doc__)
    parser.add_argument("task", choices=RECIPES)
    parser.add_argument("--output", type=Path, default=Path("prepared"))
    given = parser.parse_args()
    check_new_folder(given.output, may_hold="*")
    started = time.monotonic()
    made = RECIPES[given.task](given.output)
    print(json.dumps({**made, "seconds": round(time.monotonic() - started, 1)}))


main()

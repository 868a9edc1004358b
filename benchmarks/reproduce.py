"""The papers' tables on the papers' data, through the Python API.

    CROWDNAL_DATA=DIR python benchmarks/reproduce.py TABLE [--seeds 5] [--methods NAMES] [--json FILE] [--quick]

Rows: table, method, setting, metric, paper (the published number, by the authors' own selection of an epoch), mean,
std, seeds. ``accuracy_last`` is the last epoch's; ``accuracy_likelihood_selected`` that of the epoch at which held-out
annotations are most likely; ``accuracy_clean_selected`` that of the best epoch on a clean validation set.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from crowdnal.simulation import SETTINGS

TABLES = ("aggregation", "ccc", "cmm", "labelme", "lia", "music")


def data_root(argument: str | None) -> Path:
    """The folder of the data sets."""
    root = argument or os.environ.get("CROWDNAL_DATA")
    if not root or not Path(root).is_dir():
        sys.exit("no data: give --data DIR or set CROWDNAL_DATA to the folder that holds labelme/, music/, ...")
    return Path(root)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--data", help="folder of the data sets (default: CROWDNAL_DATA)")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="labelme, music: these rows only")
    parser.add_argument("--quick", action="store_true", help="a few epochs: does it run, not what it reaches")
    parser.add_argument("--patterns", nargs="+", choices=SETTINGS, metavar="NAME", help="ccc: IND-I to IV, COR-I to IV")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--plot", type=Path, help="draw them here (PNG), where the table has a picture")
    arguments = parser.parse_args()
    table = importlib.import_module(f"_tables.{arguments.table}")
    if arguments.plot and not hasattr(table, "plot"):
        parser.error(f"{arguments.table} has no picture: leave --plot out")
    options: dict[str, list[str]] = {}
    for name, tables in (("methods", ("labelme", "music")), ("patterns", ("ccc",))):
        if given := getattr(arguments, name):
            options[name] = given
            if arguments.table not in tables:
                parser.error(f"{arguments.table} has no --{name}: it is for {' and '.join(tables)}")
    rows: list[dict[str, Any]] = table.run(data_root(arguments.data), arguments.seeds, arguments.quick, **options)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    if arguments.plot:
        table.plot(rows, arguments.plot)


if __name__ == "__main__":
    main()

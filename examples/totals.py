"""Follow the orders as Arrow batches and print how many bytes each customer has ordered, until so many records came.

usage: totals.py ROOT RECORDS
"""

from __future__ import annotations

import sys

import pyarrow as pa
from pyarrow import compute

import wald


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: totals.py ROOT RECORDS")
    root, limit = sys.argv[1], int(sys.argv[2])
    parts = []
    for batch in wald.open(root).batches("orders", start="earliest", follow=True, limit=limit):
        columns = batch.to_arrow()  # no loop over records, and no copy
        parts.append(pa.table({"key": columns["key"], "size": compute.binary_length(columns["value"])}))
        total = pa.concat_tables(parts).group_by("key", use_threads=False).aggregate([("size", "sum")])
        parts = [total.rename_columns({"key": "key", "size_sum": "size"})]
        print(batch.last_sequence, {row["key"]: row["size"] for row in parts[0].to_pylist()}, flush=True)


if __name__ == "__main__":
    main()

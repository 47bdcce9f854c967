"""The same on Spark: everything into Parquet, the history of the log proven, and a question asked of the tables."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from demonstration.showing import REPOSITORY, expect, paint, show, title
from demonstration.text import ROUTES, Text

sys.path.insert(0, str(REPOSITORY))

from wald_spark.session import find_java

_WORDS = """
    SELECT word, {counts}, count(*) AS lines, CAST(round(avg(length(line))) AS INT) AS length
    FROM (SELECT route, CAST(value AS STRING) AS line FROM tables)
    LATERAL VIEW explode(array(regexp_extract(line, '^\\\\s*(\\\\w+)', 1))) AS word
    WHERE word <> '' GROUP BY word ORDER BY lines DESC, word LIMIT 8
"""


def spark_runs() -> bool:
    """Return True if PySpark and Java are installed."""
    return find_spec("pyspark") is not None and find_java() is not None


def export(root: Path, tables: Path) -> None:
    """Export every record to Parquet, before any of them is deleted."""
    title("Into tables", "executors write Parquet by route and day; no row goes through the JVM")
    if not spark_runs():
        print("  skipped, because Java 17 is not installed: `apt install default-jre-headless`")
        return
    show(root, "--out", str(tables), program="wald-export", lines_max=12)


def prove_and_ask(root: Path, tables: Path, texts: list[Text]) -> None:
    """Audit and query a log that is empty by now, from its ledgers, bundles and tables."""
    if not spark_runs():
        return
    title("Prove it", "every frame, digest, bundle, and every deletion by the cursors that it recorded")
    show(root, program="wald-audit", lines_max=20)
    title("Ask the tables", "first words of the lines, by input")
    from wald_spark.session import session

    with session("wald demo") as spark:
        spark.read.parquet(str(tables)).createOrReplaceTempView("tables")
        counted = {
            row.route: row.lines
            for row in spark.sql("SELECT route, count(*) AS lines FROM tables GROUP BY route").collect()
        }
        fed = {route: text.lines for route, text in zip(ROUTES, texts, strict=True)}
        expect(counted == fed, f"{fed} lines were fed, and the tables have {counted}")
        counts = ", ".join(f"count_if(route = '{route}') AS `{route}`" for route in ROUTES)
        found = spark.sql(_WORDS.format(counts=counts))
        print(paint("  SELECT word, … FROM tables GROUP BY word ORDER BY lines DESC LIMIT 8", "36"))
        print(f"    {found.columns[0]:12}" + "".join(f"{name:>12}" for name in found.columns[1:]))
        for word, *numbers in found.collect():
            print(f"    {word:12}" + "".join(f"{number:>12,}" for number in numbers))

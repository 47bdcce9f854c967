"""``python -m wald`` is ``wald``."""

from wald.cli import main

main()

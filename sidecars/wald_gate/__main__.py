"""``python -m wald_gate``."""

from wald_gate.command import main

main()

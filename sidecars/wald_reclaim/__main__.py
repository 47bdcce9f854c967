"""``python -m wald_reclaim`` is ``wald-reclaim``."""

from wald_reclaim.command import main

main()

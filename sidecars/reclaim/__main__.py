"""``python -m sidecars.reclaim`` is ``wald-reclaim``."""

from sidecars.reclaim.command import main

main()

"""``python -m wald_archive`` is ``wald-archive``."""

from wald_archive.command import main

main()

"""ARCHIVE: packs a route into bundles that ``tar`` and ``sha256sum`` can check, and moves the cursor last.

    DEST/<route>/<first>-<last>/             a BagIt bag (RFC 8493): what one run has packed
        bagit.txt  bag-info.txt  manifest-sha256.txt  tagmanifest-sha256.txt
        manifest.json                        which bundle holds what, and which one it follows
        README.txt                           how to get the records out without wald
        data/<route>-<first>.tar.zst         a bundle
        data/<route>-<first>.tar.zst.sha256  its digest, for ``sha256sum -c``

A run writes its intention into ``ledger/archive.jsonl``, then the bundles, then the tag files; each file is synced and
read back. Only then come the ledger's line about each bundle, the cursor, and the line that the run is finished. All
that decides the bytes is in the first line, so a run that was interrupted is done again and meets its own files: what
is whole is kept, what is torn is continued, and nothing is ever overwritten. A run is abandoned, and said to be, only
if its records cannot be read any more or the group's cursor was moved in between.
"""

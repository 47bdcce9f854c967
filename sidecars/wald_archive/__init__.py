"""Archives: a route packed into bundles that ``tar`` and ``sha256sum`` can check. The cursor moves last.

    DEST/<route>/<first>-<last>/             a BagIt bag (RFC 8493): the result of one run
        bagit.txt  bag-info.txt  manifest-sha256.txt  tagmanifest-sha256.txt
        manifest.json                        the contents of each bundle, and the bundle that it follows
        README.txt                           instructions to read the records without wald
        data/<route>-<first>.tar.zst         a bundle
        data/<route>-<first>.tar.zst.sha256  its digest, for ``sha256sum -c``

A run writes its intention into ``ledger/archive.jsonl``, then the bundles, then the tag files; each file is synced and
read back. The ledger's line about each bundle follows, then the cursor, and the line that the run is finished. The
first line determines the bytes, so an interrupted run is repeated and finds its own files: complete ones are kept, torn
ones are continued, and nothing is ever overwritten. A run is abandoned, which is reported, only if its records are no
longer readable or the group's cursor was moved in between.
"""

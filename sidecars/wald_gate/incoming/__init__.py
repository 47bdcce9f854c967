"""Records in: from the body of a request to the disk.

append      POST of records
bodies      a body as payloads: decompressed, cut into records
daemon      requests to the daemon, sent again when its connection is lost
"""

"""Use the Python client that openapi-generator generates for a gate, and print the gate's answers."""

import json
import sys

from openapi_client import ApiClient, ApiException, Configuration, DefaultApi
from openapi_client.models import Ack, CursorPosition, CursorPositionSequence, Lease, NewRecord

configuration = Configuration(host=sys.argv[1], access_token=sys.argv[2])
api = DefaultApi(ApiClient(configuration))

stored = api.append("orders", [NewRecord(value="one", key="ann"), NewRecord(value=[2], headers={"a": "b"})])
records = api.records("orders", var_from="earliest", to="2")
api.set_cursor("orders", "packing", CursorPosition(sequence=CursorPositionSequence(1)))
cursor = api.cursor("orders", "packing")
leased = api.lease("orders", "packing", Lease(worker="ann", max_records=5))
pending = api.pending("orders", "packing")
settled = api.ack("orders", "packing", Ack(worker="ann", sequences=[1, 2, 9]))
try:
    api.records("orders", var_from="99")
except ApiException as error:
    missing = [error.status, error.data.code]
try:
    api.append("secret", [NewRecord(value="no")])
except ApiException as error:
    refused = [error.status, error.data.code]

sys.stdout.write(
    json.dumps(
        {
            "stored": [stored.first, stored.last, stored.count],
            "records": [[each.sequence, each.value, each.key] for each in records],
            "times": all(each.append_time_ns > 10**18 for each in records),
            "cursor": [cursor.sequence, cursor.state],
            "leased": [[each.sequence, each.tries, each.value] for each in leased.records],
            "pending": [[each.actual_instance.kind, each.actual_instance.worker] for each in pending],
            "refused": [each.sequence for each in settled.refused],
            "problems": [missing, refused],
        }
    )
)

"""Work groups: many workers share a route, and each record is acknowledged by itself."""

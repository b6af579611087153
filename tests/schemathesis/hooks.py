"""Shortens the waits of generated requests, because long waits are not tested here."""

import schemathesis

LONGEST = 0.05


def _short(fields):
    if isinstance(fields, dict):
        wait = fields.get("wait_secs")
        if isinstance(wait, (int, float)) and not isinstance(wait, bool) and wait > LONGEST:
            fields["wait_secs"] = LONGEST
        elif isinstance(wait, str) and wait.replace(".", "", 1).isdigit():
            fields["wait_secs"] = str(LONGEST)
    return fields


@schemathesis.hook
def map_body(context, body):
    return _short(body)


@schemathesis.hook
def map_query(context, query):
    return _short(query)

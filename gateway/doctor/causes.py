"""Why a server does not answer, by the short line that `feeds.fetch` has for it, and what to change."""

from __future__ import annotations

import re

from gateway.doctor.window import Gateway, Server

KEY_WANTED = ("HTTP 401", "HTTP 403")

CAUSES: tuple[tuple[str, str], ...] = (
    (
        "TLS certificate was not accepted",
        "name the file with its authority in SSL_CERT_FILE, or use a name that it has",
    ),
    ("SSL|TLS", "it does not speak TLS as it should: http:// instead of https://, or another port"),
    ("not HTTP", "what answers there speaks no HTTP: correct the port, or take https://"),
    ("HTTP (404|3..)", "what answers there is neither an engine nor a gateway: correct its address"),
    ("HTTP 40[13]", "it wants a key even for its health: let /health and /metrics through what stands in front of it"),
    ("HTTP 5..", "it runs, but answers with errors: read its log"),
    ("no whole answer", "it listens and does not answer, so it hangs: restart it; keep its log"),
    ("no connection", "nothing says that it is there: correct its address, or let the doctor through a firewall"),
    ("Name or service|name resolution|nodename", "its name is not known here: correct it"),
)
"""The first pattern that is found counts; with none of them it does not run, or elsewhere."""

GATEWAY_KEY = "it asks for a key: name its variable, --gateway-key-env"
ADMIN_LISTENER = (
    "all its paths ask for a key, as those of an admin listener do: give the URL of the gateway itself ([server]), and "
    "the admin key in $WARMLANE_ADMIN_KEY, or --admin-key-env"
)


def remedy(server: Server, problem: str) -> str:
    """What to change; empty where the rule's own text fits."""
    if isinstance(server, Gateway) and problem in KEY_WANTED:
        return ADMIN_LISTENER if server.ready_problem in KEY_WANTED else GATEWAY_KEY
    return next((change for pattern, change in CAUSES if re.search(pattern, problem)), "")

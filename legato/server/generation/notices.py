"""Notices to the client about parts of its request that were cut or left out.

The response has no field for them, so they are sent in a header, which clients may ignore.
"""

from collections.abc import Sequence

NOTICE_HEADER = "X-Legato-Notice"
MAX_CHARS = 2000
"""The most characters of the header, after escaping. Clients and proxies limit the size of a response's
head."""


def notice_headers(notices: Sequence[str]) -> dict[str, str]:
    """The header with `notices`. Empty if there are none.

    A notice may quote the request, so everything but printable ASCII is escaped.
    """
    if not notices:
        return {}
    text = "; ".join(notices)[:MAX_CHARS]
    escaped = "".join(c if " " <= c <= "~" else c.encode("unicode_escape").decode() for c in text)
    return {NOTICE_HEADER: escaped[:MAX_CHARS]}

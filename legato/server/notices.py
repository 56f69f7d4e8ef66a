"""What a client is told beside the answer: parts of its request that were cut or left out.

An answer's fields have no place for it, so it is a header. Clients that do not know the header lose nothing.
"""

from collections.abc import Sequence

HEADER = "X-Legato-Notice"
MAX_CHARS = 2000
"""In one header, once it is escaped. Clients and proxies limit the size of a response's head."""


def notice_headers(notices: Sequence[str]) -> dict[str, str]:
    """The header that tells `notices`; none if there are none.

    A notice may quote the request, so all but printable ASCII is escaped.
    """
    if not notices:
        return {}
    told = "; ".join(notices)[:MAX_CHARS]
    escaped = "".join(c if " " <= c <= "~" else c.encode("unicode_escape").decode() for c in told)
    return {HEADER: escaped[:MAX_CHARS]}

"""One client after the other that reads its stream at once: prints the longest gap between two chunks.

A process of its own, since the soak's own event loop is busy with crowds. Arguments: port, seconds.
"""

import asyncio
import json
import sys
import time

from wire import line, request


async def gaps(port: int) -> float:
    """The longest gap of one stream, in seconds; 0 if it was refused."""
    body = {"prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": True, "stream": True}
    longest, last = 0.0, None
    async with line(port) as (reader, writer):
        writer.write(request("/v1/completions", json.dumps(body).encode()))
        while data := await reader.readline():
            if data.startswith(b"data: {"):
                now = time.monotonic()
                longest = max(longest, 0.0 if last is None else now - last)
                last = now
    return longest


async def main(port: int, seconds: float) -> float:
    until, longest = time.monotonic() + seconds, 0.0
    while time.monotonic() < until:
        longest = max(longest, await gaps(port))
        await asyncio.sleep(0.2)
    return longest


if __name__ == "__main__":
    print(asyncio.run(main(int(sys.argv[1]), float(sys.argv[2]))))

"""The body of an HTTP answer, whole and within a bound: what came with the first packet may pass for all of it."""

import aiohttp

PIECE_BYTES = 1 << 16


async def read_whole(content: aiohttp.StreamReader, bytes_max: int) -> bytes:
    """Everything up to the end.

    Raises:
        aiohttp.ClientError: the connection broke, or it is longer than that.
    """
    body = bytearray()
    async for piece in content.iter_chunked(PIECE_BYTES):
        body += piece
        if len(body) > bytes_max:
            raise aiohttp.ClientPayloadError(f"more than {bytes_max} bytes")
    return bytes(body)

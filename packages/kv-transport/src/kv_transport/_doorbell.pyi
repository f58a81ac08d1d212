def put(
    fd: int,
    to: memoryview,
    source: memoryview,
    source_offset: int,
    message: bytearray,
    seq: int,
    put: int,
    nonce: int,
    /,
) -> int: ...
def read(message: memoryview | bytes, header: bytes, /) -> tuple[int, int, int, int, int, int, bytes] | None: ...
def answered(page: memoryview, number: int, /) -> bool: ...
def answer(page: memoryview, number: int, /) -> bool: ...
def await_answers(page: memoryview, number: int, /) -> bool: ...
def admit(
    message: memoryview | bytes,
    header: bytes,
    nonces: bytearray,
    puts: bytearray,
    region: int,
    region_nbytes: int,
    nbytes_max: int,
    page: memoryview | None,
    /,
) -> tuple[int, bytes, bool] | None: ...

"""Codecs: what comes back, how long it is, what is refused, and which one is chosen."""

import dataclasses
import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kv_core.block import BlockGeometry
from kv_core.dtypes import DType
from kv_core.namespace import EXACT, Fidelity
from kv_transport import casting, limits
from kv_transport.casting import cast_cell
from kv_transport.codec_choice import (
    GAIN_MIN,
    CodecCost,
    CodecPolicy,
    LinkMeter,
    MovingCost,
    MovingMeter,
    choose_codec,
)
from kv_transport.codec_rates import CodecRates
from kv_transport.codecs import (
    Codec,
    compress,
    decode_cell,
    decompress,
    encode_cell,
    encoded_cell_nbytes,
)
from kv_transport.errors import CodecFailed, GeometryMismatch

LOSSY = [Codec.FP8_E4M3, Codec.INT8]
GEOMETRIES = st.builds(
    BlockGeometry,
    num_layers=st.just(1),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([1, 5, 16]),
    dtype=st.just(DType.BF16),
    block_size=st.sampled_from([1, 4, 16]),
    num_planes=st.integers(1, 2),
)


def cell_of(geometry: BlockGeometry, seed: int, scale: float) -> NDArray[np.uint16]:
    shape = (geometry.num_planes, geometry.num_kv_heads, geometry.block_size, geometry.head_dim)
    values = (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def floats(bits: NDArray[np.uint16]) -> NDArray[np.float64]:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def encoded(codec: Codec, geometry: BlockGeometry, cell: NDArray[np.uint16]) -> memoryview:
    out = memoryview(bytearray(encoded_cell_nbytes(codec, geometry)))
    encode_cell(codec, geometry, memoryview(cell.tobytes()), out)
    return out


def there_and_back(codec: Codec, geometry: BlockGeometry, cell: NDArray[np.uint16]) -> NDArray[np.uint16]:
    data = encoded(codec, geometry, cell)
    out = bytearray(cell.nbytes)
    decode_cell(codec, geometry, data, memoryview(out))
    return np.frombuffer(bytes(out), np.uint16).reshape(cell.shape)


@pytest.mark.parametrize("codec", LOSSY)
@given(geometry=GEOMETRIES, seed=st.integers(0, 2**32), scale=st.sampled_from([1e-20, 1e-12, 1.0, 3e4]))
def test_a_lossy_cell_comes_back_within_the_error_of_its_format(
    codec: Codec, geometry: BlockGeometry, seed: int, scale: float
) -> None:
    cell = cell_of(geometry, seed, scale)
    was, found = floats(cell), floats(there_and_back(codec, geometry, cell))
    error = np.abs(found - was)
    if codec is Codec.FP8_E4M3:
        # Half a step of 3 mantissa bits; below 2**-6 of the scale, half the smallest step: 2**-54 of the least scale
        # there is, and of one up to three quarters of an octave above it where that suits the channel better. Then
        # bf16's half step.
        top = np.abs(was).max(axis=2, keepdims=True)
        allowed = np.maximum(np.abs(was) / 16, np.maximum(top * 2.0**-17, 2.0**-53.25)) + np.abs(was) / 256
        assert (error <= allowed).all()
    else:
        # Half of one of 127 steps, which may be twice as large as needed: K along its tokens, V along its dims.
        top = np.abs(was).max(axis=2, keepdims=True) * np.ones_like(was)
        if geometry.num_planes > 1:
            top[1] = np.abs(was[1]).max(axis=2, keepdims=True)
        assert (error <= top / 127 * 1.02).all()


@pytest.mark.parametrize("codec", LOSSY)
@given(geometry=GEOMETRIES, seed=st.integers(0, 2**32))
def test_what_was_lossy_once_is_lossy_no_further(codec: Codec, geometry: BlockGeometry, seed: int) -> None:
    once = there_and_back(codec, geometry, cell_of(geometry, seed, 1.0))
    assert np.array_equal(there_and_back(codec, geometry, once), once)


@pytest.mark.parametrize("codec", LOSSY)
def test_the_default_block_is_at_most_0_54_of_its_bytes_with_scales(codec: Codec) -> None:
    geometry = BlockGeometry(num_layers=32, num_kv_heads=8, head_dim=128, dtype=DType.BF16, block_size=16)
    assert encoded_cell_nbytes(codec, geometry) / geometry.slot_layer_nbytes <= 0.54


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0])
def test_what_is_not_finite_is_said_and_not_encoded(codec: Codec, bits: int) -> None:
    geometry = BlockGeometry(num_layers=1, num_kv_heads=2, head_dim=4, dtype=DType.BF16, block_size=4)
    for place in (0, 63):
        cell = cell_of(geometry, 1, 1.0)
        cell.reshape(-1)[place] = bits
        with pytest.raises(CodecFailed, match="not finite"):
            encoded(codec, geometry, cell)


@pytest.mark.parametrize("codec", LOSSY)
@given(data=st.binary(max_size=120))
def test_any_bytes_are_a_cell_or_a_typed_error(codec: Codec, data: bytes) -> None:
    geometry = BlockGeometry(num_layers=1, num_kv_heads=1, head_dim=4, dtype=DType.BF16, block_size=4)
    out = memoryview(bytearray(geometry.slot_layer_nbytes))
    if len(data) >= 40:
        data = data[: encoded_cell_nbytes(codec, geometry)]
    try:
        decode_cell(codec, geometry, data, out)
    except CodecFailed:
        return
    values = floats(np.frombuffer(out, np.uint16))
    assert len(data) == encoded_cell_nbytes(codec, geometry) and values.shape == (32,)


def test_a_lossy_codec_is_for_bf16() -> None:
    geometry = BlockGeometry(num_layers=1, num_kv_heads=1, head_dim=4, dtype=DType.FP16, block_size=4)
    with pytest.raises(GeometryMismatch):
        encoded(Codec.FP8_E4M3, geometry, np.zeros(32, np.uint16))
    with pytest.raises(CodecFailed):
        encoded(Codec.LZ4, geometry, np.zeros(32, np.uint16))
    bf16 = dataclasses.replace(geometry, dtype=DType.BF16)
    with pytest.raises(CodecFailed, match="5 bytes for a cell"):
        encode_cell(Codec.INT8, bf16, memoryview(bytes(bf16.slot_layer_nbytes)), memoryview(bytearray(5)))


def test_only_what_is_exact_is_published_as_exact() -> None:
    assert [codec.fidelity for codec in (Codec.NONE, Codec.LZ4)] == [EXACT, EXACT]
    assert [codec.fidelity for codec in LOSSY] == [Fidelity("fp8_e4m3", 1), Fidelity("int8", 1)]


# LZ4.


@given(st.binary(max_size=200), st.integers(1, 40))
def test_lz4_gives_the_same_bytes_or_says_that_it_is_not_worth_it(piece: bytes, times: int) -> None:
    unit = piece * times
    packed = compress(unit)
    if packed is None:
        return
    assert len(packed) < len(unit) or not unit
    assert decompress(packed, len(unit)) == unit


def test_lz4_shrinks_what_repeats_and_leaves_noise_alone() -> None:
    assert compress(np.random.default_rng(1).bytes(100_000)) is None
    packed = compress(bytes(100_000))
    assert packed is not None and len(packed) < 1_000


@given(st.binary(max_size=100), st.integers(0, 300))
def test_no_bytes_make_more_than_was_said(data: bytes, nbytes: int) -> None:
    try:
        unit = decompress(data, nbytes)
    except CodecFailed:
        return
    assert len(unit) == nbytes


def test_a_bomb_is_refused() -> None:
    packed = compress(bytes(1 << 20))
    assert packed is not None
    for said in (0, 100, (1 << 20) - 1, (1 << 20) + 1, limits.UNIT_BYTES_MAX + 1, -1):
        with pytest.raises(CodecFailed):
            decompress(packed, said)


# The choice.

FP8 = CodecCost(Codec.FP8_E4M3, ratio=0.53, encode_rate=3e9, decode_rate=3e9)
SLOW_FP8 = CodecCost(Codec.FP8_E4M3, ratio=0.53, encode_rate=1e9, decode_rate=3e9)
LZ4 = CodecCost(Codec.LZ4, ratio=0.9, encode_rate=0.5e9, decode_rate=2e9)
ALL = list(Codec)
MOVING = MovingCost(send_rate=4e9, receive_rate=5e9)


def test_a_slow_link_takes_the_codec_and_a_fast_one_raw_bytes() -> None:
    slow, fast = (choose_codec(rate, [FP8, LZ4], ALL, MOVING, {}) for rate in (0.125e9, 5e9))
    assert (slow.codec, fast.codec) == (Codec.FP8_E4M3, Codec.NONE)
    assert slow.limits[Codec.FP8_E4M3] == "link" and fast.limits[Codec.FP8_E4M3] == "encode and send"
    assert slow.explain().startswith("fp8_e4m3 over a link of 0.12 GB/s: fp8_e4m3 0.24 GB/s (limited by link), ")
    assert "none 5.00 GB/s" in fast.explain()


def test_what_is_not_allowed_is_not_even_weighed() -> None:
    choice = choose_codec(0.125e9, [FP8, LZ4], [Codec.NONE, Codec.LZ4], MOVING, {})
    assert choice.codec is Codec.LZ4 and set(choice.rates) == {Codec.NONE, Codec.LZ4}


@given(
    st.floats(1e6, 1e11),
    st.lists(
        st.builds(
            CodecCost,
            st.sampled_from([Codec.LZ4, Codec.FP8_E4M3, Codec.INT8]),
            st.floats(0.1, 1.2),
            st.floats(1e7, 1e11),
            st.floats(1e7, 1e11),
        ),
        max_size=3,
        unique_by=lambda cost: cost.codec,
    ),
    st.lists(st.sampled_from(ALL), max_size=4),
    st.builds(MovingCost, st.floats(1e8, 1e11), st.floats(1e8, 1e11), st.integers(1, 4)),
    st.dictionaries(st.sampled_from([Codec.LZ4, Codec.FP8_E4M3, Codec.INT8]), st.floats(1e6, 1e11)),
)
def test_the_choice_is_never_slower_than_raw_bytes(
    link: float, costs: list[CodecCost], allowed: list[Codec], moving: MovingCost, achieved: dict[Codec, float]
) -> None:
    choice = choose_codec(link, costs, allowed, moving, achieved)
    times = {Codec.NONE: 1e9 / link}
    for cost in costs:
        if cost.codec in allowed:
            # Seconds for 1 GB of KV: of each end's threads, which do one thing after the other, and of the link.
            wire = 1e9 * cost.ratio
            ends = [
                1e9 / cost.encode_rate + wire / moving.send_rate,
                1e9 / cost.decode_rate + wire / moving.receive_rate,
            ]
            busy = max(ends) / moving.threads
            times[cost.codec] = max(busy, wire / link)
            if busy > wire / link and cost.codec in achieved and cost.codec is not Codec.LZ4:
                times[cost.codec] = 1e9 / achieved[cost.codec]
    fastest = min(times.values())
    assert choice.codec in times
    if choice.codec is Codec.NONE:
        assert times[Codec.NONE] <= fastest * GAIN_MIN * 1.000001
    else:
        assert times[choice.codec] == pytest.approx(fastest)
        assert times[choice.codec] * GAIN_MIN <= times[Codec.NONE] * 1.000001


def test_encoding_and_sending_by_one_thread_add_and_by_two_are_shared() -> None:
    """A link of 10 Gb/s and a codec as one core has it: encoding alone would keep ahead of it, but who encodes also
    sends."""
    codec = CodecCost(Codec.FP8_E4M3, ratio=0.53, encode_rate=1.5e9, decode_rate=3e9)
    alone = choose_codec(1.2e9, [codec], ALL, MovingCost(threads=1), {})
    one = choose_codec(1.2e9, [codec], ALL, MOVING, {})
    two = choose_codec(1.2e9, [codec], ALL, MovingCost(MOVING.send_rate, MOVING.receive_rate, threads=2), {})
    assert (alone.codec, one.codec, two.codec) == (Codec.FP8_E4M3, Codec.NONE, Codec.FP8_E4M3)
    assert one.rates[Codec.FP8_E4M3] == pytest.approx(1e9 / (1 / 1.5 + 0.53 / 4))
    assert two.rates[Codec.FP8_E4M3] == pytest.approx(1.2e9 / 0.53) and two.limits[Codec.FP8_E4M3] == "link"


def test_what_a_codec_did_goes_before_what_it_promised() -> None:
    promised = choose_codec(0.75e9, [SLOW_FP8], ALL, MOVING, {})
    did_worse = choose_codec(0.75e9, [SLOW_FP8], ALL, MOVING, {Codec.FP8_E4M3: 0.6e9})
    did_well = choose_codec(5e9, [SLOW_FP8], ALL, MOVING, {Codec.FP8_E4M3: 6e9})
    assert (promised.codec, did_worse.codec, did_well.codec) == (Codec.FP8_E4M3, Codec.NONE, Codec.FP8_E4M3)
    assert (
        did_worse.explain()
        == "none over a link of 0.75 GB/s: none 0.75 GB/s (limited by link), fp8_e4m3 0.60 GB/s (measured)"
    )
    # What LZ4 left of other data says nothing of this; and a link that limits is known by its rate.
    assert choose_codec(5e9, [LZ4], ALL, MOVING, {Codec.LZ4: 9e9}).limits[Codec.LZ4] == "encode and send"
    assert choose_codec(0.1e9, [SLOW_FP8], ALL, MOVING, {Codec.FP8_E4M3: 0.01e9}).codec is Codec.FP8_E4M3


def test_a_thread_tells_what_bytes_cost_it_and_stands_for_the_other_end() -> None:
    meter = MovingMeter()
    assert meter.cost(2) == MovingCost(threads=2)
    meter.received(1 << 20, 1 << 18)
    assert meter.cost(1) == MovingCost(4e9, 4e9, 1)
    meter.sent(1 << 20, 1 << 19)
    assert meter.cost(1) == MovingCost(2e9, 4e9, 1)


def test_a_codec_that_was_interrupted_is_as_fast_as_it_was() -> None:
    rates = CodecRates()
    for note in (rates.encoded, rates.decoded):
        started = rates.now_ns()
        time.sleep(0.2)
        note(Codec.FP8_E4M3, 1 << 20, started)
    geometry = BlockGeometry(num_layers=1, num_kv_heads=2, head_dim=16, dtype=DType.BF16, block_size=8)
    (cost,) = rates.costs(geometry, None)
    assert min(cost.encode_rate, cost.decode_rate) > (1 << 20) / 0.1


# The policy of one transfer.


def metered(rate: float, codec: Codec = Codec.NONE) -> LinkMeter:
    """A link of that rate."""
    meter = LinkMeter()
    if rate:
        meter.posted(0, codec)
        meter.settled(1 << 30, round((1 << 30) * 1e9 / rate), codec)
    return meter


def test_the_policy_takes_what_it_knows_and_says_why() -> None:
    policy = CodecPolicy([Codec.LZ4, Codec.FP8_E4M3])
    assert policy.pick("shm", False, metered(1e7), [FP8]) is Codec.NONE
    assert policy.explain() == "none: shm moves bytes as they are"
    assert policy.pick("tcp", True, metered(0), [FP8]) is Codec.NONE
    assert policy.explain() == "none: the rate of tcp is not known yet"
    assert policy.pick("tcp", True, metered(0.1e9), [FP8, LZ4]) is Codec.FP8_E4M3
    assert policy.pick("tcp", True, metered(9e9), [FP8, LZ4]) is Codec.NONE
    policy.fall_back(lz4=True)
    assert policy.pick("tcp", True, metered(9e9), [FP8, LZ4]) is Codec.LZ4
    assert policy.explain() == "lz4: another link broke, and tcp stands in for it"


def test_what_is_lossy_is_offered_no_lossy_codec() -> None:
    policy = CodecPolicy(ALL, fidelity=Codec.INT8.fidelity)
    assert [codec for codec in ALL if policy.allows(codec)] == [Codec.NONE, Codec.LZ4]
    assert policy.pick("tcp", True, metered(1e6), [FP8]) is Codec.NONE
    assert not any(CodecPolicy([]).allows(codec) for codec in ALL if codec is not Codec.NONE)


UNITS = st.lists(st.tuples(st.integers(1, 4 << 20), st.booleans()), min_size=40, max_size=80)


@given(UNITS, st.integers(1, 8))
def test_the_meter_finds_the_rate_of_a_link_whatever_is_in_flight(units: list[tuple[int, bool]], window: int) -> None:
    """A link of 1 GB/s takes one unit after the other; those that are encoded take their time. Pauses do not count."""
    meter, now, raw = LinkMeter(), 0, 0
    for begin in range(0, len(units), window):
        burst = units[begin : begin + window]
        for _, encoded in burst:
            meter.posted(now, Codec.FP8_E4M3 if encoded else Codec.NONE)
        for size, encoded in burst:
            now += size + 10**8 * encoded
            raw += size * (not any(encoded for _, encoded in burst))
            meter.settled(size, now, Codec.FP8_E4M3 if encoded else Codec.NONE)
        now += 10**9
    if meter.rate is not None:
        assert meter.rate == pytest.approx(1e9, rel=1e-6)
    if not any(encoded for _, encoded in units) and raw > 5_000_000 + (4 << 20):
        assert meter.rate is not None


def test_a_burst_after_a_stall_does_not_count_as_the_speed_of_the_link() -> None:
    """Acknowledgements that were read late come all at once: the average is by time, not by sample."""
    meter, now = LinkMeter(), 0
    for _ in range(50):
        for _ in range(8):
            meter.posted(now)
        now += 78_000_000
        for _ in range(8):
            now += 250_000  # 8 MiB in 80 ms: 0.105 GB/s
            meter.settled(1 << 20, now)
    assert meter.rate == pytest.approx((8 << 20) / 0.080, rel=0.25)


def test_a_rate_grows_stale_by_encoded_units_and_is_measured_again_by_raw_ones() -> None:
    meter, policy = LinkMeter(), CodecPolicy([Codec.FP8_E4M3])
    now = 0
    for _ in range(3):
        for _ in range(3):
            meter.posted(now)
            now += 10 << 20  # 0.1 GB/s
            meter.settled(1 << 20, now)
        assert not meter.stale
        assert meter.rate == pytest.approx(0.1e9, rel=0.01)
        for _ in range(128):
            assert not meter.stale
            assert policy.pick("tcp", True, meter, [FP8]) is Codec.FP8_E4M3
            meter.posted(now, Codec.FP8_E4M3)
            now += 1 << 22  # 0.25 GB/s of KV
            meter.settled(1 << 20, now, Codec.FP8_E4M3)
        assert meter.stale
        assert policy.pick("tcp", True, meter, [FP8]) is Codec.NONE
        assert policy.explain() == "none: the rate of tcp is being measured again"
        assert meter.rate == pytest.approx(0.1e9, rel=0.01), "encoded units say nothing of the link"
        assert meter.achieved == {Codec.FP8_E4M3: pytest.approx(0.25e9, rel=0.01)}


def test_a_codec_that_did_worse_than_promised_is_left_and_tried_again_after_a_while() -> None:
    meter, policy, now = metered(0.75e9), CodecPolicy([Codec.FP8_E4M3]), 10**10
    picks = []
    for _ in range(2000):
        codec = policy.pick("tcp", True, meter, [SLOW_FP8], MOVING)
        picks.append(codec)
        meter.posted(now, codec)
        now += round((1 << 20) / (0.6 if codec is Codec.FP8_E4M3 else 0.75))
        meter.settled(1 << 20, now, codec)
    tries = [at for at, codec in enumerate(picks) if codec is Codec.FP8_E4M3]
    runs = [at for at in tries if at - 1 not in tries]
    assert runs[0] == 0 and len(runs) == 4, "after 512 raw units each"
    assert all(500 < later - earlier < 530 for earlier, later in itertools.pairwise(runs))
    assert len(tries) <= 4 * 4, "a sample is enough"


def test_units_of_two_kinds_in_flight_say_nothing_of_either() -> None:
    meter, now = LinkMeter(), 0
    meter.posted(now, Codec.FP8_E4M3)
    for _ in range(20):
        meter.posted(now)
        now += 10**7
        meter.settled(1 << 20, now)
    meter.settled(1 << 20, now, Codec.FP8_E4M3)
    assert meter.rate is None and not meter.achieved


# Casts.


def test_a_cast_is_the_nearest_code_under_the_declared_scale_and_back_again() -> None:
    geometry = BlockGeometry(num_layers=1, num_kv_heads=1, head_dim=64, dtype=DType.BF16, block_size=512)
    bits = np.arange(1 << 16, dtype=np.uint16)
    for scale in (127, 120, 135):
        with np.errstate(invalid="ignore"):
            values = floats(bits)
        fits = np.isfinite(values) & (np.abs(values) <= 464 * 2.0 ** (scale - 127))
        cell = np.where(fits, bits, 0).astype(np.uint16)
        codes = bytearray(len(cell))
        cast_cell(geometry, memoryview(cell.tobytes()), DType.FP8_E4M3, scale, memoryview(codes))
        back = bytearray(cell.nbytes)
        small = dataclasses.replace(geometry, dtype=DType.FP8_E4M3)
        cast_cell(small, memoryview(codes), DType.BF16, scale, memoryview(back))
        was, found = floats(cell), floats(np.frombuffer(bytes(back), np.uint16))
        step = 2.0 ** (scale - 127 - 9)
        assert (np.abs(found - was) <= np.maximum(np.abs(was) / 16, step / 2)).all()
        once_more = bytearray(len(cell))
        cast_cell(geometry, memoryview(back), DType.FP8_E4M3, scale, memoryview(once_more))
        assert once_more == codes
        for bad in bits[~fits][:: len(bits[~fits]) // 50]:
            cell[:] = bad
            with pytest.raises(CodecFailed, match="fp8_cast: a value is not finite, or beyond"):
                cast_cell(geometry, memoryview(cell.tobytes()), DType.FP8_E4M3, scale, memoryview(codes))


def test_only_what_a_cast_is_defined_between_is_cast() -> None:
    pairs = [(a, b) for a in DType for b in DType if casting.defined(a, b)]
    assert pairs == [(DType.BF16, DType.FP8_E4M3), (DType.FP8_E4M3, DType.BF16)]

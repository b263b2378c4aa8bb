"""Messages come back as they were sent, and nothing else is taken for a message."""

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sync.base.errors import WireError
from sync.wire import (
    SCHEMA,
    Array,
    Generated,
    Ok,
    Routing,
    SamplingMask,
    Version,
    Wait,
    checks,
    decode,
    encode,
    pack,
    unpack,
)


def test_another_message_or_schema_is_refused_by_name() -> None:
    with pytest.raises(WireError, match="is not a Generated"):
        decode(encode(Wait()), Generated)
    with pytest.raises(WireError, match=f"schema {SCHEMA + 1}"):
        decode(encode(Ok(schema=SCHEMA + 1)), Ok)


@given(st.binary(max_size=200))
@example(b"\x81\xa1x" + b"\x91" * 5_000)
@example(b"\x82\xa4type\xa9Generated\xa2id\xa1\xff")
def test_garbage_is_refused_with_one_error(body: bytes) -> None:
    with pytest.raises(WireError):
        decode(body, Generated)


@pytest.mark.parametrize("dtype", ["u1", "i4", "i8", "f2", "f4", "bf16"])
def test_arrays_of_every_dtype_come_back_equal_whatever_their_memory_order(dtype: str) -> None:
    """Those of bfloat16 as their bits."""
    values = np.arange(12).reshape(3, 4).astype("u2" if dtype == "bf16" else dtype)
    for array in (values, values.T):
        message = pack(array, dtype if dtype == "bf16" else None)
        assert message.dtype == dtype
        assert np.array_equal(unpack(message), array)


@pytest.mark.parametrize(
    ("shape", "data"),
    [((2, 2), bytes(12)), ((-1, -4), bytes(16)), ((3,), b""), ((1 << 40,), bytes(4))]
    + [(beyond, b"") for beyond in ((2**33, 2**33), (2**62, 4), (0, 2**64 - 1), (2**63,))],
)
def test_an_array_whose_bytes_do_not_fill_its_shape_is_refused(shape: tuple[int, ...], data: bytes) -> None:
    """A shape beyond any machine too, whose product may not wrap around."""
    with pytest.raises(WireError, match=r"array .*shape \("):
        unpack(Array("i4", shape, data))


def test_dtypes_outside_the_wire_are_refused() -> None:
    with pytest.raises(WireError, match="complex128"):
        pack(np.zeros(2, np.complex128))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(["O", [1], b"x"]), type=Array)


def test_versions_sort_by_lineage_then_step_and_read_back() -> None:
    versions = [Version(1, 2), Version(0, 11), Version(0, 2), Version(1234, 10**9)]
    assert sorted(versions) == [Version(0, 2), Version(0, 11), Version(1, 2), Version(1234, 10**9)]
    assert str(Version(0, 12)) == "L000-v00000012"
    assert [Version.parse(str(v)) for v in versions] == versions
    assert sorted(str(v) for v in versions[:3]) == [str(v) for v in sorted(versions[:3])]


@pytest.mark.parametrize(
    "text",
    ["", "default", "L0v1", "L000-00000012", "Lx-v1", "L1-v2-v3", "L0-v1", "L000-v0000001",
     "L000-v00000001\n", "L٠٠٠-v00000001", "L0000-v00000001", "L-1-v00000001"],
)  # fmt: skip
def test_what_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(WireError, match="is not a version"):
        Version.parse(text)


def mask_of(sizes: list[int], ids: list[int]) -> SamplingMask:
    return SamplingMask(pack(np.array(sizes, "i4")), pack(np.array(ids, "i4")))


MASK, TOKENS = mask_of([2, 1, 3], [4, 9, 5, 6, 0, 8]), pack(np.array([9, 5, 6], "i4"))


def test_masks_are_joined_cut_and_padded() -> None:
    both = SamplingMask.joined([MASK.cut(2), SamplingMask.none(1), MASK])
    rows = [[4, 9, -1], [5, -1, -1], [-1, -1, -1], [4, 9, -1], [5, -1, -1], [6, 0, 8]]
    assert both.padded().tolist() == rows
    assert MASK.cut(0).padded().shape == SamplingMask.none(0).padded().shape == (0, 1)


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (MASK, None),
        (None, "mask is missing"),
        (MASK.cut(2), "mask.sizes is of shape [2], and must be of shape [3]"),
        (mask_of([2, 0, 4], [4, 9, 5, 6, 0, 8]), "mask.sizes is 0"),
        (mask_of([2, 1, 4], [4, 9, 5, 6, 0, 8]), "mask.ids is of shape [6]"),
        (mask_of([2, 1, 3], [4, 9, 5, 6, 0, 10]), "mask.ids is 10"),
        (mask_of([2, 1, 3], [4, 9, 5, 6, 8, 8]), "mask.ids is one id twice"),
        (mask_of([2, 1, 3], [4, 9, 7, 6, 0, 8]), "without the sampled token"),
    ],
)
def test_a_mask_holds_different_ids_and_the_sampled_token(
    mask: SamplingMask | None, says: str | None
) -> None:
    problem = checks.mask(mask, TOKENS, 10, top_k=3)
    assert problem is None if says is None else says in str(problem)


def test_a_mask_is_there_where_it_was_asked_for_and_nowhere_else() -> None:
    assert "left out: it was not asked for" in str(checks.mask(MASK, TOKENS, 10, top_k=0))
    assert checks.mask(None, TOKENS, 10, top_k=0) is None


ROUTES = np.arange(3 * 2 * 2).reshape(3, 2, 2).astype("u1") % 4


@pytest.mark.parametrize(
    ("routes", "says"),
    [
        (pack(ROUTES), None),
        (None, "routes is missing"),
        (pack(ROUTES[:2]), "routes is of shape [2, 2, 2], and must be of shape [3, 2, 2]"),
        (pack(ROUTES.astype("i4")), "routes is of dtype i4"),
        (pack(ROUTES + 1), "routes is 4 in one place or more"),
        (pack(ROUTES * 0), "routes is 0 twice in a row"),
    ],
)
def test_routes_are_of_every_token_and_of_experts_there_are(routes: Array | None, says: str | None) -> None:
    problem = checks.routes(routes, 3, Routing(layers=2, chosen=2, experts=4))
    assert problem is None if says is None else says in str(problem)
    assert "left out" in str(checks.routes(pack(ROUTES), 3, None))
    assert checks.routes(None, 3, None) is None


def test_a_mask_may_exceed_top_k_by_ties_and_no_more() -> None:
    mask, token = mask_of([40], [*range(40)]), pack(np.array([7], "i4"))
    assert checks.mask(mask, token, 1000, top_k=8) is None
    assert "mask.sizes is 40" in str(checks.mask(mask, token, 1000, top_k=7))

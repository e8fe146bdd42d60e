"""Sizes are read exactly as people write them, or refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merge_stream.errors import UsageError
from merge_stream.units import format_bytes, format_duration, one_line, parse_bytes, parse_memory


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("1B", 1),
        ("1k", 1000),
        ("32G", 32 * 10**9),
        ("32GB", 32 * 10**9),
        ("32gb", 32 * 10**9),
        ("32Gi", 32 << 30),
        ("32GiB", 32 << 30),
        ("1.5GiB", 3 << 29),
        (" 500 M ", 500 * 10**6),
        ("2T", 2 * 10**12),
        ("1P", 10**15),
        ("0.5k", 500),
        ("4.35M", 4_350_000),  # 4349999 in binary floating point
        ("1.001G", 1_001_000_000),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "G", "-1G", "1,5G", "32Q", "i", "4i", "4iB", "1e9", "80%", "0", "0.4", "0.0001k", "1 0G", "nan", "inf"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_bytes(text)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(1, 10**7), st.integers(0, 3), st.sampled_from("KMGT"))
def test_every_decimal_of_three_places_is_exact(mantissa: int, places: int, unit: str) -> None:
    text = f"{mantissa // 10**places}.{mantissa % 10**places:0{places}d}" if places else str(mantissa)
    wanted = mantissa * 1000 ** ("KMGT".index(unit) + 1) // 10**places
    assert parse_bytes(f"{text}{unit}") == wanted


def test_a_huge_number_is_a_size_and_no_crash() -> None:
    assert parse_bytes("9" * 400) > 10**399


@pytest.mark.parametrize(("text", "size"), [("50%", 500), ("100%", 1000), ("0.5 %", 5), ("2k", 2000)])
def test_memory_may_be_a_share(text: str, size: int) -> None:
    assert parse_memory(text, total=1000) == size


@pytest.mark.parametrize("text", ["0%", "-5%", "101%", "%", "nan%", "inf%", "x%"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_memory(text, total=1000)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (3_600_000_000, "3.60 GB"),
        (9_996_000, "10.0 MB"),
        (99_960_000, "100 MB"),
        (999_600, "1.00 MB"),
        (2 * 10**18, "2000 PB"),
    ],
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.84, "0.8 s"),
        (59.94, "59.9 s"),
        (59.97, "1 min 00 s"),
        (125, "2 min 05 s"),
        (3599.7, "1 h 00 min"),
        (12000, "3 h 20 min"),
    ],
)
def test_durations_for_people(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ü 模型", "plain ü 模型"),
        ("a\nerror: b", r"a\x0aerror: b"),
        ("two:\n  one\n  two", "two:\n  one\n  two"),
        ("\x1b[2Ja\r\x7f", r"\x1b[2Ja\x0d\x7f"),
        ("\u202egnp.\u2066\u200b\ufeff", r"\u202egnp.\u2066\u200b\ufeff"),
        ("a\u2028b\U000e0041", r"a\u2028b\U000e0041"),
        ("\udcff", r"\xff"),
    ],
)
def test_a_name_cannot_act_on_a_terminal_or_pass_for_a_line(text: str, shown: str) -> None:
    assert one_line(text) == shown

"""Counts, sizes and times as `jaxrl plan` prints them."""

import pytest

from jaxrl.commands.plan.units import count_of, parameter_text, percent_text, size_text, time_text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (count_of(1, "chip"), "1 chip"),
        (count_of(0, "chip"), "0 chips"),
        (count_of(1024, "chip"), "1,024 chips"),
        (count_of(2, "microbatch", "microbatches"), "2 microbatches"),
        (parameter_text(928), "928"),
        (parameter_text(17_600), "17.6K"),
        (parameter_text(999_960), "1.0M"),
        (parameter_text(1_234_567), "1.2M"),
        (parameter_text(134_515_008), "134.5M"),
        (parameter_text(596_049_920), "0.6B"),
        (parameter_text(30_532_122_624), "30.5B"),
        (size_text(0), "0 B"),
        (size_text(1023), "1,023 B"),
        (size_text(69_206), "67.6 KiB"),
        (size_text(0.56 * 2**30), "573.4 MiB"),
        (size_text(2**30), "1.0 GiB"),
        (size_text(2.8221e12), "2,628.3 GiB"),
        (percent_text(0.2), "20 %"),
        (percent_text(0.006), "0.6 %"),
        (percent_text(0.389), "39 %"),
        (percent_text(1), "100 %"),
        (time_text(7e-7), "under 1 ms"),
        (time_text(0.0429), "42.9 ms"),
        (time_text(0.2413), "0.241 s"),
        (time_text(2.8221), "2.82 s"),
        (time_text(2258.4), "2,258 s"),
    ],
)
def test_numbers_have_a_fitting_unit(text, expected):
    assert text == expected

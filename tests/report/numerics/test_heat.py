"""The heat map of exponents, as values."""

from halfstep.precision.formats import BF16, FP16
from halfstep.report.numerics.heat import heat_maps
from halfstep.report.numerics.view import TensorRow


def row(name, bins, kind="gradient"):
    return TensorRow(name, kind, 10, 0, 0.0, 0.0, 0.0, 1.0, bins=bins)


def test_a_cell_stands_in_the_column_of_its_exponent():
    """All tensors of a kind share one scale, kinds have their own map, and tensors without elements none."""
    maps = heat_maps([row("a", {-3: 1, 0: 3}), row("b", {2: 1}), row("w", {5: 1}, "weight"), row("none", {})], FP16)
    assert [m["kind"] for m in maps] == ["gradient", "weight"]
    cells = {line["name"]: [(c["x"], c["title"]) for c in line["cells"]] for line in maps[0]["lines"]}
    assert cells == {"a": [(0, "2^-3: 25 %"), (3, "2^0: 75 %")], "b": [(5, "2^2: 100 %")]}
    assert (maps[0]["num_columns"], maps[0]["ticks"]) == (6, [{"x": 3, "label": "2^0"}])


def test_the_limit_of_the_format_is_drawn_where_it_is_in_sight():
    """fp16 flushes below 2^-25; bf16 does not here, so that its map has neither a line nor a caption."""
    rows = [row("a", {-30: 1, -25: 1, 0: 1})]
    (of_fp16,), (of_bf16,) = heat_maps(rows, FP16), heat_maps(rows, BF16)
    assert of_fp16["limits"] == [5]
    assert "below 2^-25, a cast to fp16 gives 0" in of_fp16["caption"]
    assert (of_bf16["limits"], of_bf16["caption"]) == ([], "")


def test_both_limits_of_the_format_are_drawn():
    """fp16 overflows from 2^16 on; other kinds than the usual ones can be requested."""
    (heat,) = heat_maps([row("a", {-30: 1, 17: 1}, "update")], FP16, ("update",))
    assert heat["limits"] == [5, 46]
    assert heat["caption"].endswith("From the dashed line at 2^16 on, it overflows.")


def test_a_long_name_is_shortened_at_its_beginning_and_the_map_makes_room():
    """The full name stays available, and the space for names grows with the longest that is shown."""
    (short,), (long,) = heat_maps([row("a", {0: 1})], FP16), heat_maps([row("x" * 50 + ".weight", {0: 1})], FP16)
    (line,) = long["lines"]
    assert (line["name"], line["short"]) == ("x" * 50 + ".weight", f"..{'x' * 37}.weight")
    assert long["gutter"] > short["gutter"] + 200


def test_tensors_that_are_left_out_are_counted():
    """120 of them are drawn."""
    (heat,) = heat_maps([row(str(i), {0: 1}) for i in range(130)], FP16)
    assert (len(heat["lines"]), heat["left_out"]) == (120, 10)

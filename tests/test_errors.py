"""Errors: their tree and their words."""

from halfstep.errors import HalfstepError, MissingError, OverflowStop, SettingError, nearest, unknown


def test_errors_are_also_the_builtin_a_caller_would_catch():
    """Each error can be caught as ours or as Python's."""
    assert issubclass(SettingError, HalfstepError)
    assert issubclass(SettingError, ValueError)
    assert issubclass(MissingError, ImportError)
    assert issubclass(OverflowStop, RuntimeError)


def test_nearest_finds_what_was_meant_whatever_the_case():
    """Close names are suggested, distant ones are not."""
    assert nearest("BF61", ["bf16", "fp16"]) == "bf16"
    assert nearest("zzz", ["bf16"]) is None


def test_unknown_says_what_was_seen_and_what_is_known():
    """The message carries the value, the guess, the list and the advice."""
    text = str(unknown("preset", "bf61", ["bf16", "fp16"], "See the docs."))
    assert text == "Unknown preset 'bf61'. Did you mean 'bf16'? Known: bf16, fp16. See the docs."
    assert "Did you mean" not in str(unknown("preset", "zzz", ["bf16"]))


def test_a_long_list_of_known_names_is_cut_to_the_similar_ones():
    """A message of a hundred names hides what is wrong."""
    names = [f"HS{n}" for n in range(100, 200)]
    text = str(unknown("rule", "HS1044", names, "See the docs."))
    assert (
        text == "Unknown rule 'HS1044'. Did you mean 'HS144'? Also similar: HS104, HS194, HS190, HS184. See the docs."
    )
    assert str(unknown("rule", "zzz", names)) == "Unknown rule 'zzz'."

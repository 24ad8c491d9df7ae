"""[tool.halfstep.check] in pyproject.toml."""

import pytest

from check_toys import use_toys
from halfstep.check.project import PerFileIgnore, Project, find_project
from halfstep.errors import SettingError


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    """Toy rules, and no cached projects of other tests."""
    use_toys(monkeypatch)
    find_project.cache_clear()


def project(folder, text):
    (folder / "pyproject.toml").write_text(text)
    return find_project(folder)


def test_every_key_is_read(tmp_path):
    """All six keys are read from the nearest file that has the table."""
    inner = tmp_path / "src" / "deep"
    inner.mkdir(parents=True)
    (tmp_path / "src" / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    text = """
[tool.halfstep.check]
select = ["HS9"]
ignore = ["advice", "bad-word"]
exclude = ["third_party"]
deepspeed = "0.16.4"
gpu = "A100"
per-file-ignores = { "tests/*" = ["HS901"] }
"""
    (tmp_path / "pyproject.toml").write_text(text)
    expected = Project(
        tmp_path,
        select=("HS9",),
        ignore=("advice", "bad-word"),
        per_file_ignores=(PerFileIgnore("tests/*", ("HS901",)),),
        exclude=("third_party",),
        deepspeed="0.16.4",
        gpu="A100",
    )
    assert find_project(inner) == expected


def test_without_a_table_everything_is_default(tmp_path):
    """A missing file and a file without the table both give the defaults."""
    assert find_project(tmp_path / "none") == Project()
    assert project(tmp_path, "[tool.other]\nx = 'halfstep'\n") == Project()


def test_the_search_ends_at_the_repository(tmp_path):
    """Settings above the root of the repository do not apply."""
    (tmp_path / "pyproject.toml").write_text("[tool.halfstep.check]\nignore = ['HS9']\n")
    inner = tmp_path / "repo"
    (inner / ".git").mkdir(parents=True)
    assert find_project(inner) == Project()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("selct = ['HS9']", "Did you mean 'select'?"),
        ("select = 'HS9'", "select is 'HS9'; write a list of strings"),
        ("ignore = ['HS999']", "ignore: no rule is called 'HS999'"),
        ("gpu = 4", "gpu is 4; write a string"),
        ("unsafe-fixes = 'no'", "unsafe-fixes is 'no'; write true or false"),
        ("per-file-ignores = ['HS9']", "write a table of pattern"),
        ("per-file-ignores = { a = 'HS9' }", "write a list of strings"),
        ("x = ", "not valid TOML"),
    ],
)
def test_mistakes_are_named(tmp_path, text, words):
    """The errors for unknown keys, wrong types and unknown rules explain what to write."""
    with pytest.raises(SettingError) as error:
        project(tmp_path, "[tool.halfstep.check]\n" + text)
    assert words in str(error.value)
    assert "pyproject.toml" in str(error.value)


def test_a_value_in_place_of_the_table_is_rejected(tmp_path):
    """`check = true` is not a table and raises."""
    with pytest.raises(SettingError, match="make it a table"):
        project(tmp_path, "[tool.halfstep]\ncheck = true\n")

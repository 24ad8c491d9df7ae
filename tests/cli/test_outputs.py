"""Files that a command is to write, checked before its work."""

import pytest

from halfstep.cli import main
from halfstep.cli.outputs import check_file
from halfstep.errors import SettingError


def test_an_existing_file_keeps_its_content_and_a_new_one_is_not_left(tmp_path):
    """The check itself changes nothing."""
    (tmp_path / "old.html").write_text("old")
    check_file("--html", tmp_path / "old.html")
    check_file("--html", tmp_path / "new.html")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("old.html", "old")]


@pytest.mark.parametrize("name", ["folder", "missing/page.html", "file/page.html", "x" * 300])
def test_what_cannot_be_written_is_rejected_with_the_option(tmp_path, name):
    """A directory, a missing parent, a file as the parent, and a name that the system rejects."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(SettingError, match=r"^--html .* cannot be written"):
        check_file("--html", tmp_path / name)


@pytest.mark.parametrize(
    "args",
    [
        ("plan", "--memory", "8GiB", "--html", "file/page.html"),
        ("rehearse", "--html", "file/page.html"),
        ("rehearse", "--confirm", "--out", "file/below"),
        ("train", "--out", "file/below"),
        ("check", "--cache-dir", "file/below"),
        ("check", "--write-baseline", "folder_of_file"),
        ("plan", "--memory", "8GiB", "--epochs", "1", "--record", "file"),
    ],
)
def test_a_command_rejects_its_files_before_it_works(tmp_path, monkeypatch, capsys, args):
    """One message with the path, exit code 1, and nothing on standard output."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "folder_of_file").mkdir()
    with pytest.raises(SystemExit) as stop:
        main(list(args))
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert "file" in err


@pytest.mark.parametrize(
    "args",
    [
        ("train", "--out", ""),
        ("compare", "--from", ""),
        ("export", ""),
        ("watch", ""),
        ("plan", "--html", ""),
        ("rehearse", "--data", ""),
        ("check", "--baseline", ""),
        ("learn", "practice", "2", "-o", ""),
    ],
)
def test_an_empty_path_is_a_usage_error(tmp_path, monkeypatch, capsys, args):
    """`--out "$OUT"` without the variable does not mean the current directory."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(list(args))
    out, err = capsys.readouterr()
    assert (stop.value.code, out, list(tmp_path.iterdir())) == (2, "", [])
    assert "The path is empty" in err


def test_a_practice_script_has_to_be_python(tmp_path, capsys):
    """Exit code 2 at once, before anything is run; an explanation may be any text."""
    (tmp_path / "notes.txt").write_text("loss.backward()\n")
    with pytest.raises(SystemExit) as stop:
        main(["learn", "practice", "2", str(tmp_path / "notes.txt")])
    assert stop.value.code == 2
    assert "is not a Python file" in capsys.readouterr().err

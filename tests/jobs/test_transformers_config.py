import json
import sys

import pytest

from halfstep.errors import MissingError, SettingError
from halfstep.jobs.targets import load_target
from halfstep.jobs.transformers_config import outside_vocabulary, read_config

transformers = pytest.importorskip("transformers", reason="Requires: [transformers]")

TINY = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 40, "n_positions": 16}


def read(text):
    return read_config(transformers, f"transformers:{text}")


def fails(text):
    """The error message for an invalid target."""
    with pytest.raises(SettingError) as caught:
        load_target(f"transformers:{text}")
    return str(caught.value)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A function that writes a config.json into a folder of the current directory."""
    monkeypatch.chdir(tmp_path)

    def write(name, settings):
        (tmp_path / name).mkdir(exist_ok=True)
        text = settings if isinstance(settings, str) else json.dumps(settings)
        (tmp_path / name / "config.json").write_text(text)
        return tmp_path / name

    return write


def test_classes_and_model_types_have_their_defaults():
    """A class and its model type are the same configuration."""
    by_class, by_type = read("GPT2Config"), read("gpt2")
    assert type(by_class.config) is type(by_type.config) is transformers.GPT2Config
    assert by_class.config.n_layer == 12
    assert (by_class.source, by_type.source) == ("transformers:GPT2Config", "transformers:gpt2")


def test_folders_and_files_are_read(folder, monkeypatch):
    """A folder and its config.json are the same configuration, and the source loads it from any folder."""
    path = folder("tiny", TINY)
    by_folder, by_file = read("tiny"), read("tiny/config.json")
    assert by_folder.config.to_dict() == by_file.config.to_dict()
    assert by_folder.config.n_embd == 8
    assert by_folder.source == f"transformers:{path}"
    monkeypatch.chdir("/")
    assert load_target(f"{by_folder.source},length=8").source == f"transformers:{path},length=8"


def test_settings_are_json_or_text():
    """Numbers, booleans, null, lists and text replace the values of the configuration."""
    reading = read(
        "swin,depths=[1,2],num_heads=[1,2],qkv_bias=false,hidden_act=relu,drop_path_rate=0.25,head=image-classification"
    )
    config = reading.config
    assert (config.depths, config.qkv_bias, config.hidden_act, config.drop_path_rate) == ([1, 2], False, "relu", 0.25)
    assert reading.head == "image-classification"
    assert read("gpt2,n_inner=null,length=32").length == 32


def test_other_names_of_a_setting_are_accepted(folder):
    """A name in the class's attribute map replaces the value of a file, whatever name the file uses."""
    folder("tiny", TINY)
    assert read("tiny,hidden_size=16").config.n_embd == 16


def test_a_number_of_labels_replaces_the_names_of_labels(folder):
    """num_labels is effective although the file names other classes."""
    folder("tiny", {**TINY, "id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}})
    assert read("tiny").config.num_labels == 2
    assert read("tiny,num_labels=5").config.num_labels == 5


def test_ids_outside_a_smaller_vocabulary_become_zero(caplog):
    """Reserved ids that do not fit are replaced without a warning of transformers, and an explicit one is an error."""
    config = read("gpt2,vocab_size=50").config
    assert (config.bos_token_id, config.eos_token_id) == (0, 0)
    assert not caplog.records
    assert "pad_token_id=60" in fails("gpt2,vocab_size=50,pad_token_id=60")
    assert outside_vocabulary({"vocab_size": 10, "eos_token_id": [1, 10], "bos_token_id": 9, "pad_token_id": None}) == [
        "eos_token_id"
    ]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ("names no configuration", "transformers:GPT2Config")),
        ("openai/gpt2", ("looks like a model on the hub; nothing is downloaded", "Download its config.json yourself")),
        ("bert-base-uncased", ("Unknown model type", "for a model of the hub, pass a folder with its config.json")),
        ("gtp2", ("Unknown model type 'gtp2'. Did you mean 'gpt2'?",)),
        ("GPT2Confg", ("Unknown configuration class 'GPT2Confg'. Did you mean 'GPT2Config'?",)),
        pytest.param(
            "GPT2Model",
            ("transformers.GPT2Model is not the configuration class of a model. Did you mean 'GPT2Config'?",),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "PretrainedConfig",
            ("transformers.PretrainedConfig is not the configuration class of a model",),
            marks=pytest.mark.slow,  # a search in all names of transformers, as the two above
        ),
        ("./nowhere", ("The configuration nowhere does not exist.",)),
        ("nowhere.json", ("The configuration nowhere.json does not exist.",)),
        ("gpt2,n_layers=2", ("Unknown setting of GPT2Config: 'n_layers'. Did you mean 'n_layer'?",)),
        ("gpt2,n_layer=two", ("GPT2Config rejects the settings", "n_layer", "'two'")),
        ("gpt2,n_layer=NaN", ("GPT2Config rejects the settings", "'NaN'")),
        ("gpt2,n_layer=2,n_layer=3", ("has 'n_layer' twice",)),
        ("gpt2,", ("has an empty setting",)),
        ("gpt2,n_layer", ("has no value for 'n_layer'",)),
        ("gpt2,length=long", ("length='long'", "is not an integer")),
        ("gpt2,dtype=bfloat16", ("'dtype'", "--precision decides the rest")),
        ("gpt2,trust_remote_code=true", ("'trust_remote_code'", "never run")),
        ("gpt2,use_cache=true", ("'use_cache'", "always false in training")),
    ],
)
def test_invalid_text_is_rejected_with_what_to_do(text, parts, tmp_path, monkeypatch):
    """Each mistake has one message, on one line, with the remedy."""
    monkeypatch.chdir(tmp_path)
    message = fails(text)
    assert all(part in message for part in parts), message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ('{"a": ', "is not valid JSON"),
        ("[1]", "has no model_type"),
        ({"n_layer": 2}, "has no model_type"),
        ({"model_type": "gtp2"}, "Unknown model type in bad/config.json: 'gtp2'. Did you mean 'gpt2'?"),
        ({**TINY, "auto_map": {"AutoModel": "theirs.Model"}}, "has an auto_map"),
        ({**TINY, "quantization_config": {"quant_method": "gptq"}}, "has a quantization_config"),
    ],
)
def test_unusable_files_are_rejected(folder, settings, part):
    """The error for a file that cannot be used has its reason."""
    folder("bad", settings)
    assert part in fails("bad")


def test_a_folder_without_a_configuration_lists_its_files(folder):
    """The error for a folder without config.json has the names in it."""
    (folder("other", "{}") / "config.json").rename("other/weights.bin")
    assert "The folder other has no config.json; it has weights.bin." in fails("other")


def test_a_missing_library_raises_an_install_command(monkeypatch):
    """The error has the command that installs transformers."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingError, match=r'pip install "halfstep\[transformers\]"'):
        load_target("transformers:gpt2")


def test_a_data_folder_is_rejected():
    """The synthetic batches are the job's own data."""
    with pytest.raises(SettingError, match="no effect on the target 'transformers:gpt2'"):
        load_target("transformers:gpt2", data_dir=".")

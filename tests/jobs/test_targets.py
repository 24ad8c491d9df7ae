import multiprocessing
import pickle
import sys
import textwrap
from types import ModuleType, SimpleNamespace

import pytest

from halfstep.errors import MissingError, SettingError
from halfstep.jobs import files as target_files
from halfstep.jobs import targets
from halfstep.jobs.job import Job, JobError
from halfstep.jobs.targets import BUILT_IN, Target, load_target

JOB = """
from halfstep.jobs.job import Job

class Item:
    def __init__(self, value):
        self.value = value

job = Job(model=lambda: None, data=lambda split: [Item(split)], loss=lambda model, batch: 0, optimizer=lambda params: None)
other = Job(model=lambda: None, data=lambda: ["other"], loss=lambda model, batch: 0, optimizer=lambda params: None)
number = 3
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """A function that writes a file into the current folder; modules loaded from there are unloaded afterwards."""
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)

    def write_file(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    yield write_file
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and sys.modules[name].__file__.startswith(str(tmp_path)):
            del sys.modules[name]
    target_files._folders.clear()
    target_files._siblings.clear()


def fails(text, **options):
    """The error message for an invalid target."""
    with pytest.raises(SettingError) as caught:
        load_target(text, **options)
    assert "Traceback" not in str(caught.value)
    return str(caught.value)


# ---- files ------------------------------------------------------------------------------------------------------


def test_a_file_provides_its_job(write):
    """A path loads the file's `job`, and a name after a colon another one."""
    path = write("mine.py", JOB)
    target = load_target("mine.py")
    assert target == Target("mine.py", target.job, f"{path}:job")
    assert load_target("mine.py:other").name == "mine.py:other"
    assert load_target(f"{path}:other").job.call("data") == ["other"]
    assert isinstance(target.job, Job)


def test_source_loads_the_same_target_from_anywhere(write, monkeypatch):
    """The source of a target does not depend on the current folder."""
    path = write("mine.py", JOB)
    source = load_target("mine.py:other").source
    monkeypatch.chdir(path.parent.parent)
    assert load_target(source).source == source


def test_a_file_runs_once_until_it_changes(write):
    """Two targets in one file share its classes; an edited file is run again."""
    write("mine.py", JOB)
    first = load_target("mine.py").job
    assert load_target("mine.py").job is first
    write("mine.py", JOB.replace("number = 3", "number = 4"))
    assert load_target("mine.py").job is not first


def test_sys_path_is_restored(write):
    """Loading does not change sys.path, even if the file raises."""
    before = list(sys.path)
    write("mine.py", JOB)
    load_target("mine.py")
    write("bad.py", "import sys; sys.path.append('x'); 1 / 0")
    fails("bad.py")
    assert sys.path == before


def test_siblings_of_a_file_can_be_imported(write):
    """A file can import modules from its folder, at the top or later inside a function."""
    write("a/early_sibling.py", "VALUE = 1")
    write("a/late_sibling.py", "VALUE = 2")
    data = "def data():\n    import late_sibling\n    return [early_sibling.VALUE, late_sibling.VALUE]\n"
    write(
        "a/mine.py",
        "import early_sibling\n" + data + JOB + "\nlate = Job(job.model, data, job.loss, job.optimizer)\n",
    )
    assert load_target("a/mine.py:late").job.call("data") == [1, 2]


def test_siblings_of_the_same_name_are_not_confused(write):
    """Two files that import `model_code` each get the one in their folder."""
    for folder in ("a", "b"):
        write(f"{folder}/model_code.py", f"VALUE = {folder!r}")
        write(
            f"{folder}/mine.py",
            "import model_code\n"
            + JOB
            + "job = Job(job.model, lambda v=model_code.VALUE: [v], job.loss, job.optimizer)",
        )
    assert load_target("a/mine.py").job.call("data") == ["a"]
    assert load_target("b/mine.py").job.call("data") == ["b"]


def test_installed_packages_below_a_file_are_not_unloaded(write):
    """Packages in a .venv next to the file stay loaded when the next file is loaded; sibling modules do not."""
    write("a/.venv/installed_thing/__init__.py", "VALUE = 1")
    write("a/own_package/__init__.py", "")
    write("a/own_package/part.py", "")
    write(
        "a/mine.py",
        "import sys; sys.path.append(r'{}')\nimport installed_thing, own_package.part\n".format("a/.venv") + JOB,
    )
    write("b/mine.py", JOB)
    load_target("a/mine.py")
    installed = sys.modules["installed_thing"]
    assert "own_package.part" in sys.modules
    load_target("b/mine.py")
    assert sys.modules["installed_thing"] is installed
    assert "own_package.part" not in sys.modules
    assert "own_package" not in sys.modules


def test_classes_of_a_file_pickle_to_a_spawned_process(write):
    """A new process locates the file by the name of its module."""
    write("mine.py", JOB)
    (item,) = load_target("mine.py").job.call("data", split="val")
    assert pickle.loads(pickle.dumps(item)).value == "val"
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(getattr, (item, "value")) == "val"


def test_a_name_without_an_encoded_path_is_not_found():
    """The finder handles only names that `module_name` returns."""
    with pytest.raises(ModuleNotFoundError):
        __import__("halfstep.jobs.files.xnothex")
    with pytest.raises(ModuleNotFoundError):
        __import__("halfstep.jobs.files.other")


def test_a_missing_file_suggests_the_nearest(write):
    """The error for a misspelt path has the most similar file, or the missing folder."""
    write("train_job.py", JOB)
    assert "train_jb.py does not exist; did you mean train_job.py?" in fails("train_jb.py")
    assert "nowhere/x.py does not exist, nor does its folder nowhere" in fails("nowhere/x.py")
    assert "nowhere/x does not exist" in fails("nowhere/x")
    assert "Unknown target 'train_job'. Did you mean 'train_job.py'?" in fails("train_job")


def test_a_file_that_changes_the_working_directory_can_be_loaded_again(write):
    """The source of a target is the path before its file changed the working directory."""
    path = write("going.py", f"import os\nos.mkdir('there')\nos.chdir('there')\n{JOB}")
    assert load_target("going.py").source == f"{path}:job"


def test_an_error_in_a_file_has_type_message_and_line(write):
    """The user's exception becomes one line with its location, also if a sibling module raised it."""
    path = write("bad.py", "x = 1\n\nraise KeyError('weights')\n")
    assert fails("bad.py") == f"The job file bad.py failed while it was loaded at {path}:3: KeyError: 'weights'"
    inner = write("sibling.py", "y = 1\n1 / 0\n")
    write("worse.py", "import sibling\n")
    assert f"at {inner}:2: ZeroDivisionError: division by zero" in fails("worse.py")


def test_a_file_that_failed_can_be_loaded_after_it_is_fixed(write):
    """A failed load leaves nothing behind."""
    write("mine.py", "1 / 0")
    fails("mine.py")
    write("mine.py", JOB)
    assert load_target("mine.py").name == "mine.py"


def test_an_invalid_job_in_a_file_keeps_its_message(write):
    """An error of Halfstep is shown unchanged, with the line."""
    path = write(
        "bad.py",
        "from halfstep.jobs.job import Job\njob = Job(lambda: 0, lambda: 0, lambda modle: 0, lambda params: 0)",
    )
    message = fails("bad.py")
    assert f"at {path}:2: Job(loss=...) has an unknown argument 'modle'. Did you mean 'model'?" in message


def test_a_file_that_is_not_python_shows_the_line(write):
    """A syntax error has file and line."""
    path = write("bad.py", "x = 1\ny = = 2\n")
    assert fails("bad.py") == f"The job file bad.py is not valid Python at {path}:2: invalid syntax."


def test_a_file_that_exits_raises_with_advice(write):
    """The error for a file that exits while it is loaded suggests a `__main__` guard."""
    write("bad.py", "import sys\nsys.exit(4)\n")
    message = fails("bad.py")
    assert "exit 4" in message
    assert '__name__ == "__main__"' in message


def test_a_file_without_job_lists_the_jobs_it_has(write):
    """The error lists the jobs of the file, or states that there is none."""
    write("mine.py", JOB.replace("job = ", "first = ", 1))
    assert "mine.py has no 'job'. It has these jobs: mine.py:first, mine.py:other" in fails("mine.py")
    write("empty.py", "x = 1")
    assert "empty.py has no 'job'. It has no Job; write job = halfstep.Job(...)" in fails("empty.py")


def test_a_name_that_is_not_a_job_is_rejected(write):
    """The error has the type of the value."""
    write("mine.py", JOB)
    assert "'number' in mine.py is of type int, not a halfstep.Job" in fails("mine.py:number")


def test_folders_and_other_files_are_rejected(write):
    """The error for a folder lists its Python files; a file without .py is reported as such."""
    write("jobs/one.py", JOB)
    assert "jobs is a folder (it has one.py); name a job file in it, such as jobs/one.py" in fails("jobs")
    write("empty/x.txt", "")
    assert "empty is a folder; name a job file in it, such as empty/job.py" in fails("empty")
    (write("x/y.txt", "").parent / "odd.py").mkdir()
    assert "x/odd.py is a folder, not a job file" in fails("x/odd.py")
    assert "is not a Python file" in fails("x/y.txt")


# ---- modules ----------------------------------------------------------------------------------------------------


def test_a_module_provides_its_job(write):
    """package.module:name also imports from the current folder."""
    write("mypkg/__init__.py", "")
    write("mypkg/jobs.py", JOB)
    target = load_target("mypkg.jobs:job")
    assert (target.name, target.source) == ("mypkg.jobs:job", "mypkg.jobs:job")
    assert "mypkg.jobs has no 'jib'" in fails("mypkg.jobs:jib")


def test_a_module_that_cannot_be_imported_is_reported(write):
    """A missing module, a missing import in it and an exception have three different errors."""
    assert "no module 'nowhere_at_all'" in fails("nowhere_at_all.jobs:job")
    write("broken_import.py", "import not_installed_anywhere\n")
    message = fails("broken_import:job")
    assert "The module broken_import failed" in message
    assert "No module named 'not_installed_anywhere'" in message
    path = write("raising_module.py", "\nraise ValueError('no')\n")
    assert f"at {path}:2: ValueError: no" in fails("raising_module:job")


def test_a_module_without_a_job_name_is_rejected():
    """The error for package.module without a name shows the complete form."""
    assert "write some.module:job" in fails("some.module")


# ---- built-in names ---------------------------------------------------------------------------------------------


def test_unknown_names_list_the_forms_and_the_nearest():
    """The error for a misspelt built-in name has a suggestion and every form of a target."""
    message = fails("vit_b16")
    assert "Did you mean 'vit_b_16'?" in message
    assert all(name in message for name in (*BUILT_IN, "timm:NAME", "transformers:DIR_OR_CONFIG"))
    assert "The target is empty." in fails(" ")
    assert "Unknown target 'zzzzz'. A target is" in fails("zzzzz")
    assert "Unknown target 'a b:c'" in fails("a b:c")


def test_digits_is_the_default():
    """Without a target the job is digits, and its parts fit together."""
    torch = pytest.importorskip("torch")
    target = load_target()
    assert (target.name, target.source) == ("digits", "digits")
    job = target.job
    model = job.call("model")
    assert sum(p.numel() for p in model.parameters()) == 26_538
    optimizer = job.call("optimizer", model=model)
    scheduler = job.call("scheduler", optimizer=optimizer, batch_size=1000)
    data = job.call("data", split="val")
    batch = next(iter(data))
    assert len(batch[1]) == 64
    assert job.call("loss", model=model, batch=batch).dtype == torch.float32
    assert 0 <= job.call("metric", model=model, batch=batch) <= 1
    rates = []
    for _ in range(30):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates[1] == max(rates) == 5e-3
    assert rates[-1] == pytest.approx(5e-5)


def test_data_dir_without_effect_is_rejected(write):
    """A data folder for a job with its own data raises an error."""
    write("mine.py", JOB)
    assert "no effect on the target 'mine.py'" in fails("mine.py", data_dir=".")
    assert "no effect on the target 'digits'" in fails("digits", data_dir=".")


@pytest.mark.parametrize("name", BUILT_IN[1:])
def test_vits_train_on_synthetic_images(name):
    """Every ViT name is a job whose data fits its model."""
    torch = pytest.importorskip("torch")
    job = load_target(name).job
    with torch.device("meta"):
        model = job.call("model")
        optimizer = job.call("optimizer", model=model)
    batch = next(iter(job.call("data", split="train", batch_size=2, device="meta")))
    assert batch[0].shape == (2, 3, 224, 224)
    assert job.call("loss", model=model, batch=batch).shape == ()
    assert job.call("scheduler", optimizer=optimizer).get_last_lr() == [pytest.approx(3e-4 / 500)]


def test_a_data_folder_determines_the_classes(write):
    """With a folder, the model has as many classes as the folder."""
    pytest.importorskip("torch")
    image = pytest.importorskip("PIL.Image")
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            path = write(f"pets/{split}/{label}/1.png", "")
            image.new("RGB", (8, 8)).save(path)
    target = load_target("vit_t_16", data_dir="pets")
    assert target.data_dir == str(path.parents[2])
    assert target.job.call("model").head.out_features == 2
    images, labels = next(iter(target.job.call("data", split="val", batch_size=2)))
    assert images.shape == (2, 3, 224, 224)
    assert labels.tolist() == [0, 1]


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_a_missing_library_raises_an_install_command(monkeypatch, library):
    """The error has the command that installs the library."""
    pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingError, match=r'pip install "halfstep\[vision\]"'):
        load_target(f"{library}:resnet18")


def test_a_library_built_for_another_torch_has_its_own_error(write, monkeypatch):
    """The error for a torchvision that raises RuntimeError on import has torch's version."""
    torch = pytest.importorskip("torch")
    path = write("torchvision.py", "raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.syspath_prepend(path.parent)
    with pytest.raises(MissingError) as caught:
        load_target("torchvision:resnet18")
    assert "(operator torchvision::nms does not exist). Its build" in str(caught.value)
    assert f"does not match torch {torch.__version__}" in str(caught.value)


def test_built_ins_without_torch_raise_an_error(monkeypatch):
    """The default target without torch raises a MissingError that names torch."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingError, match="torch"):
        load_target()


def fake_model(torch, num_classes):
    """A classifier that returns auxiliary outputs, as Inception does."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.line = torch.nn.Linear(3, num_classes)

        def forward(self, x):
            out = self.line(x.mean((2, 3)))
            return out, out

    return Net()


def test_timm_names_become_jobs(monkeypatch):
    """A timm model is built without weights at its image size; the error for unknown names suggests the nearest."""
    torch = pytest.importorskip("torch")
    timm = ModuleType("timm")
    timm.list_models = lambda: ["resnet18", "vit_tiny"]
    timm.get_pretrained_cfg = lambda name: SimpleNamespace(input_size=(3, 32, 32)) if name == "resnet18" else None
    timm.create_model = lambda name, num_classes: fake_model(torch, num_classes)
    monkeypatch.setitem(sys.modules, "timm", timm)
    job = load_target("timm:resnet18.some_weights").job
    batch = next(iter(job.call("data", split="val", batch_size=2)))
    assert batch[0].shape[-1] == 32
    model = job.call("model")
    assert job.call("loss", model=model, batch=batch).ndim == 0
    assert job.call("metric", model=model, batch=batch) >= 0
    assert load_target("timm:vit_tiny").name == "timm:vit_tiny"
    assert "among its 2 models. Did you mean timm:resnet18?" in fails("timm:resnet17")
    assert "no classifier 'zzz' among its 2 models." in fails("timm:zzz")


def test_torchvision_names_become_jobs(monkeypatch):
    """A torchvision classifier is built without weights at its image size."""
    torch = pytest.importorskip("torch")
    weights = SimpleNamespace(DEFAULT=SimpleNamespace(transforms=lambda: SimpleNamespace(crop_size=[40])))
    vision = ModuleType("torchvision")
    vision.models = SimpleNamespace(
        list_models=lambda module: ["inception_v3"],
        get_model_weights=lambda name: weights,
        get_model=lambda name, weights, num_classes: fake_model(torch, num_classes),
    )
    monkeypatch.setitem(sys.modules, "torchvision", vision)
    job = load_target("torchvision:inception_v3").job
    assert next(iter(job.call("data", split="val", batch_size=1)))[0].shape[-1] == 40
    assert job.call("model").line.out_features == 1000


def test_an_error_of_a_built_in_job_names_the_job():
    """The error for a wrong batch has the job's name."""
    pytest.importorskip("torch")
    job = load_target("digits").job
    with pytest.raises(JobError, match="The loss of job 'digits' failed at"):
        job.call("loss", model=job.call("model"), batch=3)


def test_target_names_are_all_known_to_the_models():
    """The built-in targets are digits and every ViT size."""
    vit = pytest.importorskip("halfstep.jobs.models.vit")
    assert set(targets.BUILT_IN) == {"digits", *vit.SIZES}


def test_the_default_batch_size_of_a_job_is_a_default_of_its_target(write):
    """Files and modules alike; every command reads it from there."""
    write("sized.py", JOB.replace("data=lambda split:", "data=lambda split, batch_size=16:"))
    assert load_target("sized.py").defaults == (("batch", 16),)
    assert load_target("sized:job").defaults == (("batch", 16),)
    assert load_target("sized.py:other").defaults == ()

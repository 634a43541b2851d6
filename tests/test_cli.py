"""The command: what it refuses, what it prints, which exit code it ends with, what it leaves behind."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import eagle3.stages
from eagle3 import cli, runs
from eagle3.artifacts import write_json
from tests.commands import eagle3 as command
from tests.commands import start, write_stages


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder with the test stages, and the environment in which child processes have them."""
    folder = tmp_path_factory.mktemp("staged")
    return folder, write_stages(folder)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, staged: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Each test works in a folder of its own, with the test stages at hand, and leaves no stage imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(eagle3.stages, "__path__", [*eagle3.stages.__path__, str(staged[0] / "more_stages")])
    imported = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("eagle3.stages.")}
    attributes = dict(vars(eagle3.stages))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("eagle3.stages.")]:
        del sys.modules[name]
    sys.modules.update(imported)
    vars(eagle3.stages).clear()
    vars(eagle3.stages).update(attributes)


def eagle(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The command in this process; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["eagle3", *arguments])
    try:
        return cli.command()
    except SystemExit as ended:
        return int(ended.code or 0)


def only_run(here: Path) -> Path:
    (folder,) = (here / "outputs" / "runs").glob("*/*")
    return folder


def result(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


def test_a_dry_run_fetches_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The demo, with an empty cache: its model and data would be fetched first, and ids depend on them."""
    for words in (["+experiment=demo"], ["stage=train"]):
        assert eagle(monkeypatch, *words, "dry_run=true", f"cache_dir={here / 'cache'}") == 0
        shown = capfd.readouterr().err
        assert "dry run: would fetch asset:smollm2-135m-instruct (93 MB)" in shown
        assert ("asset:sharegpt (27 MB)" in shown) == (words != ["stage=train"])
        assert not (here / "cache").exists()


def test_a_dry_run_asks_for_what_will_be_read_only(
    here: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Packaged prompts count where they are asked; sources no longer, once their prepared set is there or is named."""
    cache = here / "cache"
    cache.mkdir()
    chats = [[{"role": "user", "content": f"What is {i}?"}, {"role": "assistant", "content": "A"}] for i in range(9)]
    (cache / "sharegpt.json").write_text(json.dumps([{"messages": messages} for messages in chats]))
    words = [f"cache_dir={cache}", "model=llama", f"model.path={tiny_target}", "evaluate.sets=[mt_bench]"]
    words += ["dataset=jsonl", "dataset.sources.train.path=asset:sharegpt", "dataset.answers=given"]
    words += ["dataset.max_length=64", "drafter.draft_vocab_size=64", "hardware=cpu"]

    def shown(*more: str) -> str:
        assert eagle(monkeypatch, *words, *more, "dry_run=true") == 0
        return capfd.readouterr().err

    for stage in ("pipeline", "evaluate", "serve_check"):
        assert "dry run: would fetch asset:mt_bench (2 MB)" in shown(f"stage={stage}")
    assert eagle(monkeypatch, *words, "stage=prepare") == 0
    (cache / "sharegpt.json").unlink()
    assert "prepare: hit" in shown("stage=prepare")
    (made,) = (here / "outputs" / "artifacts" / "prepared").iterdir()
    words += ["output_dir=elsewhere"]
    assert "dry run: would fetch asset:sharegpt (27 MB)" in shown("stage=prepare")
    assert "prepare: hit" in shown("stage=prepare", f"inputs.prepared={made}")
    assert not list(cache.iterdir())


def test_a_closed_terminal_stops_nothing(tmp_path: Path) -> None:
    for closed in (">&-", "2>&-", ">&- 2>&-"):
        line = f'"$0" -m eagle3 stage=adapters {closed}'
        done = subprocess.run(["bash", "-c", line, sys.executable], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert {result(folder)["status"] for folder in tmp_path.glob("outputs/runs/*/*")} == {"done"}


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--help"], "Stages (stage=NAME)"),
        (["model=kimi_k25", "hardware=rtx_pro_6000_x8", "--cfg", "job", "--resolve"], "tensor_parallel_size: 8"),
        (["--info", "searchpath"], "pkg://eagle3.conf"),
        (["-sc", "query=bash"], "model=kimi_k25"),
    ],
    ids=["help", "cfg", "info", "completion"],
)
def test_listings_answer_without_torch(arguments: list[str], shown: str, tmp_path: Path) -> None:
    """--help, --cfg, --info and tab completion print, exit 0, leave no folder and import no torch."""
    code = (
        "import sys\nfrom eagle3 import cli\n"
        "try:\n    code = cli.command()\nexcept SystemExit as e:\n    code = e.code or 0\n"
        "heavy = [m for m in ('torch', 'transformers', 'lightning') if m in sys.modules]\n"
        "print('HEAVY', heavy)\nsys.exit(code)"
    )
    env = {"COMP_LINE": "eagle3 model=", "COMP_POINT": "13", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout
    assert "HEAVY []" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["+typo=1"], ["typo: there is no field 'typo'"]),
        (["logger.loggers.csv.tags=[a]"], ["no value here that could be replaced", "+logger.loggers.csv.tags=VALUE"]),
        (["hardware.engine_options.seed=5"], ["add one with +hardware.engine_options.seed=VALUE"]),
        (["layers.idz=3"], ["layers.idz: there is no such field; did you mean layers.ids?"]),
        (["trainer.lrr=3"], ["did you mean trainer.lr?"]),
        (["modl=llama"], ["modl: there is no such field; did you mean model?"]),
        (["model=lama"], ["model=lama: there is no such option", "smollm2_135m", "did you mean model=llama?"]),
        (["hydra.launcher.n_job=2"], ["Hydra lists no such setting", "may take it as +hydra.launcher.n_job=VALUE"]),
        (["+experiment=dmo"], ["did you mean experiment=demo?"]),
        (["trainer.max_epochs=abc"], ["trainer.max_epochs: found 'abc', expected a whole number"]),
        (["dataset.on_bad_row=foo"], ["dataset.on_bad_row: found 'foo', expected skip or stop"]),
        (["drafter.draft_vocab_size=0"], ["drafter.draft_vocab_size: found 0, expected a number of at least 1"]),
        (["model=llama", "dataset=jsonl"], ["2 faults", "model.path=VALUE", "dataset.sources.train.path=VALUE"]),
        (["output_dir=null"], ["output_dir: found null, expected a value"]),
        (["train"], ["did you mean stage=train?"]),
        (["trian"], ["did you mean stage=train?"]),
        (["demo_please"], ["demo_please: is no override", "see `eagle3 --help`"]),
        (["="], ["=: is no override, expected FIELD=VALUE"]),
        (["experiment=demo"], ["experiment=demo: ", "write +experiment=demo"]),
        (["stage.name=nothing"], ["stage.name: found 'nothing', expected one of", "pipeline"]),
        (["layers=[2,30,58]"], ["layers=[2,30,58]", "'layers.ids=[2,15,27]' (in quotes)"]),
        (["layers.ids=[2,", "30,", "58]"], ["layers.ids: cannot read the value '[2,'", "'layers.ids=[1, 2, 3]'"]),
        (["output_dir=two wörds"], ["output_dir: cannot read the value 'two wörds'", "\"output_dir='two wörds'\""]),
        (["-cp", "nowhere"], ["-cp nowhere: no such folder", "`eagle3 stage=runs` lists them"]),
        (["--config-dir", "nowhere"], ["--config-dir nowhere: no such folder"]),
        (["--stage", "train"], ["--stage: is no flag, expected", "did you mean stage=train?"]),
        (["--lr=1e-4", "stage=train"], ["did you mean trainer.lr=1e-4?"]),
        (["stage=train", "--dry-run"], ["--dry-run: is no flag", "did you mean dry_run=true?"]),
        (["--nonsense"], ["--nonsense: is no flag", "see `eagle3 --help`"]),
        (["stage", "train"], ["stage: is no override", "did you mean stage=train?"]),
        (["demo"], ["did you mean +experiment=demo?"]),
        (["evaluate.sets=heldout"], ["expected a list; write 'evaluate.sets=[heldout]' (in quotes)"]),
        (["seed=${nowhere}"], ["seed: Interpolation key 'nowhere' not found"]),
    ],
)
def test_a_wrong_request_is_one_clear_message_and_exit_2(
    arguments: list[str],
    words: list[str],
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert eagle(monkeypatch, *arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("eagle3: ")
    assert "Traceback" not in err
    for word in words:
        assert word in err
    assert not list(here.iterdir())


def test_the_version_is_ours(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert eagle(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"eagle3 {eagle3.__version__}\n"


def test_a_comma_without_a_list_shows_the_right_quoting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """C2: `layers.ids=2,30,58` without -m is refused with what to write instead."""
    assert eagle(monkeypatch, "layers.ids=2,30,58") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "'layers.ids=[2,30,58]'" in err
    assert "-m" in err


@pytest.mark.parametrize("ids", ["[2,30,58]", "[2, 30, 58]"])
def test_a_list_of_layers_is_one_job(ids: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C2: a list, with or without spaces in its brackets, is one value; it wins over the preset's fractions."""
    assert eagle(monkeypatch, f"layers.ids={ids}", "layers=late", "stage.name=echo") == 0
    config = yaml.safe_load((only_run(here) / "config.yaml").read_text())
    assert config["layers"]["ids"] == [2, 30, 58]


def test_sources_are_added_on_the_command_line(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["dataset=jsonl", "dataset.sources.train.path=a.jsonl", "dataset.sources.train.limit=5"]
    more = ["+dataset.sources.more.path=b.jsonl", "+dataset.sources.held={path: c.jsonl, role: heldout}"]
    assert eagle(monkeypatch, *words, *more, "stage.name=echo") == 0
    sources = yaml.safe_load((only_run(here) / "config.yaml").read_text())["dataset"]["sources"]
    assert {name: (s["path"], s["role"], s["limit"]) for name, s in sources.items()} == {
        "train": ("a.jsonl", "train", 5),
        "more": ("b.jsonl", "train", None),
        "held": ("c.jsonl", "heldout", None),
    }


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("dataset.sources.mine.path=x", "no such source; add one with +dataset.sources.mine.path=FILE"),
        ("+dataset.sources.mine.limit=3", "dataset.sources.mine.path: has no value"),
        ("+dataset.sources.mine={path: x, rolle: train}", "did you mean dataset.sources.mine.role?"),
        (
            "+dataset.sources.mine={path: x, limit: many}",
            "dataset.sources.mine.limit: found 'many', expected a whole number",
        ),
        (
            "+dataset.sources.mine={path: x, role: test}",
            "dataset.sources.mine.role: found 'test', expected train or heldout",
        ),
    ],
)
def test_sources_are_checked(
    given: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert eagle(monkeypatch, given, "stage.name=echo") == 2
    assert words in capsys.readouterr().err


def test_words_may_come_in_any_order(here: Path) -> None:
    """Hydra wants overrides in one block and takes --config-path as relative to a module."""
    (here / "a=b").mkdir()
    words = ["x=1", "-m", "-cp", "a=b", "y=2", "--cfg", "job", "~z", "--config-dir=a=b", "--info", "+q=3"]
    folder = str(here / "a=b")
    assert cli.arranged(words) == [
        *("x=1", "y=2", "~z", "+q=3"),
        *("-m", "-cp", folder, "--cfg", "job", "--config-dir", folder, "--info"),
    ]
    assert cli.arranged(["-cp", "a=b", "-sc", "query=bash"]) == ["query=bash", "-cp", folder, "-sc"]


def test_unknown_adapters_and_their_fields_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """C7: the message names the config path; before anything loads."""
    assert eagle(monkeypatch, "stage.name=echo", "model.adapter._target_=eagle3.adapters.llama.Lama") == 2
    assert "model.adapter._target_: found 'eagle3.adapters.llama.Lama'" in capsys.readouterr().err
    assert eagle(monkeypatch, "stage.name=echo", "+model.adapter.colour=red") == 2
    assert "model.adapter: eagle3.adapters.llama.LlamaAdapter does not take these fields" in capsys.readouterr().err


def test_a_finished_stage(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert eagle(monkeypatch, "stage.name=echo", "layers=late") == 0
    folder = only_run(here)
    found = result(folder)
    assert (found["status"], found["stage"], found["exit_code"]) == ("done", "echo", 0)
    assert found["metrics"]["layers"] == "late"
    assert yaml.safe_load((folder / "overrides.yaml").read_text()) == ["stage.name=echo", "layers=late"]
    assert folder.name.endswith("-echo-smollm2_135m")
    assert capsys.readouterr().err == f"layers late\necho done: {folder.relative_to(here)}\n"
    assert "layers late" in (folder / "run.log").read_text()


def test_a_crash_tells_type_and_cause_and_where_the_rest_is(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An exception without a message, too, is told; the traceback is in run.log, not on the terminal."""
    assert eagle(monkeypatch, "stage.name=boom") == 1
    err = capsys.readouterr().err
    folder = only_run(here)
    assert "eagle3: boom failed: RuntimeError <- ValueError: the inner cause" in err
    assert f"full traceback in {(folder / 'run.log').relative_to(here)}" in err
    assert "Traceback" not in err
    log = (folder / "run.log").read_text()
    assert "Traceback" in log
    assert "raise ValueError" in log
    found = result(folder)
    assert (found["status"], found["exit_code"]) == ("failed", 1)
    assert "the inner cause" in found["error"]


@pytest.mark.parametrize(
    ("stage", "sent", "words"),
    [
        ("slow", signal.SIGTERM, "slow was stopped by SIGTERM"),
        ("polite", signal.SIGTERM, "polite was stopped by SIGTERM"),
        ("slow", signal.SIGINT, "slow was stopped by Ctrl-C"),
    ],
)
def test_a_signal_leaves_a_result(
    stage: str, sent: signal.Signals, words: str, here: Path, staged: tuple[Path, dict[str, str]]
) -> None:
    process = start(f"stage.name={stage}", cwd=here, env=staged[1])
    wait_for(lambda: list(here.glob("outputs/runs/*/*/waiting")), process)
    process.send_signal(sent)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert words in err
    assert "Traceback" not in err
    found = result(only_run(here))
    assert (found["status"], found["exit_code"]) == ("interrupted", 1)


@pytest.mark.parametrize("also", [(), ("result.json",)])
def test_a_full_disk_is_said_though_the_run_folder_cannot_say_it(
    also: tuple[str, ...], here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(path: Path, value: object) -> None:
        if path.name in also:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_json(path, value)

    monkeypatch.setattr(runs, "write_json", write)
    assert eagle(monkeypatch, "stage.name=full") == 1
    err = capsys.readouterr().err
    assert "full failed: OSError: [Errno 28] No space left on device; the disk is full: make room" in err
    assert ("could not be written either (No space left on device)" in err) == bool(also)
    assert "Traceback" not in err


def test_a_stage_that_leaves_by_itself_has_failed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert eagle(monkeypatch, "stage.name=leaves") == 1
    assert result(only_run(here))["error"] == "leaves failed: SystemExit: 0"


def wait_for(condition, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("output", ["file", "file/deeper"])
def test_an_unwritable_output_folder_is_exit_2(
    output: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "file").touch()
    assert eagle(monkeypatch, "stage.name=echo", f"output_dir={output}") == 2
    assert f"output_dir={output}: cannot write there" in capsys.readouterr().err
    assert eagle(monkeypatch, "stage.name=echo", f"hydra.run.dir={output}") == 2
    assert "file" in capsys.readouterr().err


def test_a_run_folder_alone_repeats_the_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C9: the repeated run has the same config hash; an override given with it is applied and recorded."""
    (here / "more").mkdir()
    (here / "more" / "experiment").mkdir()
    (here / "more" / "experiment" / "mine.yaml").write_text("# @package _global_\ntrainer:\n  lr: 0.5\n")
    words = ["-cd", "more", "+experiment=mine", "stage.name=echo", "layers=late", "dataset=jsonl"]
    assert eagle(monkeypatch, *words, "dataset.sources.train.path='a b=c.jsonl'", "model.chat_template='{% x %}'") == 0
    first = only_run(here)
    assert eagle(monkeypatch, "-cp", str(first.relative_to(here))) == 0
    (second,) = {*(here / "outputs" / "runs").glob("*/*")} - {first}
    assert result(first)["metrics"] == result(second)["metrics"]
    assert (first / "config.yaml").read_text() == (second / "config.yaml").read_text()
    assert eagle(monkeypatch, "-cp", str(first), "trainer.lr=0.25") == 0
    (third,) = {*(here / "outputs" / "runs").glob("*/*")} - {first, second}
    assert yaml.safe_load((third / "config.yaml").read_text())["trainer"]["lr"] == 0.25
    assert yaml.safe_load((third / "overrides.yaml").read_text()) == ["trainer.lr=0.25"]
    assert result(third)["metrics"]["hash"] != result(first)["metrics"]["hash"]


def test_a_group_given_on_a_repeat_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """C9: an override that cannot be applied is rejected, never dropped silently."""
    assert eagle(monkeypatch, "stage.name=echo") == 0
    assert eagle(monkeypatch, "-cp", str(only_run(here)), "layers=late") == 2
    assert "layers" in capsys.readouterr().err


def test_an_explicit_run_folder_is_used_once(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """C8: a second run in the same folder is refused and changes nothing."""
    assert eagle(monkeypatch, "stage.name=echo", "hydra.run.dir=mine") == 0
    before = (here / "mine" / "config.yaml").read_text()
    assert eagle(monkeypatch, "stage.name=echo", "hydra.run.dir=mine", "seed=3") == 2
    assert "holds a run already" in capsys.readouterr().err
    assert (here / "mine" / "config.yaml").read_text() == before
    assert not (here / "outputs" / "runs").exists()


@pytest.mark.parametrize("words", [["--help"], ["stage=runs"]])
def test_a_reader_that_leaves_is_no_failure(words: list[str], here: Path) -> None:
    """`eagle3 --help | head -1`: the reader closes the pipe early."""
    (here / "outputs").mkdir()
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "eagle3", *words]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, "Broken" in done.stderr) == (0, False), done.stderr


def test_ranks_share_one_run_folder(here: Path, staged: tuple[Path, dict[str, str]]) -> None:
    """C4: a rank that Lightning starts by repeating the command line joins the run of rank 0."""
    done = command("stage.name=ranks", cwd=here, env=staged[1])
    assert done.returncode == 0, done.stderr
    folder = only_run(here)
    assert (folder / "seen-by-0").read_text() == (folder / "seen-by-1").read_text()
    assert (folder / "seen-by-0").read_text().startswith(str(folder))
    assert (folder / "rank-1.log").exists()


def test_the_pipeline_nests_the_metrics_of_its_stages(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five stages in one run, announced one by one, in a package of stand-ins with the real stages' names."""
    stand_ins = here / "stand_ins"
    stand_ins.mkdir()
    for name in ("prepare", "extract", "train", "export", "evaluate"):
        text = f"def run(cfg, run):\n    return {{'stage': cfg.stage.name, 'rank': run.rank, 'is': {name!r}}}\n"
        text += "def check_config(cfg): ...\ndef prepared(cfg, artifacts): ...\n"
        (stand_ins / f"{name}.py").write_text(text)
    monkeypatch.setattr(eagle3.stages, "__path__", [str(stand_ins), *eagle3.stages.__path__])
    monkeypatch.setattr(cli, "TRAINING_STAGES", ())
    assert eagle(monkeypatch, "output_dir=o", "evaluate.sets=[heldout]") == 0
    (folder,) = (here / "o" / "runs").glob("*/*")
    metrics = result(folder)["metrics"]
    assert list(metrics) == ["prepare", "extract", "train", "export", "evaluate"]
    assert all(metrics[name]["stage"] == name == metrics[name]["is"] for name in metrics)
    assert "3/5 train" in capsys.readouterr().err
    assert set(json.loads((folder / "provenance.json").read_text())["seconds_of"]) == set(metrics)

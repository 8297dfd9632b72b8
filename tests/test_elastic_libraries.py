"""Jobs of transformers' Trainer and of accelerate that lose a rank: the others go on, with one process's losses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import ROOT, clean_environment, guide

_LAUNCH = [sys.executable, "-m", "autoparallel", "launch", "--ranks", "4", "--min-ranks", "2", "--"]
#: Arguments of `examples/run_clm.py`; 12 samples a step, on any number of ranks.
_CLM = ["--output_dir", "out", "--max_steps", "8", "--logging_steps", "1", "--save_steps", "2", "--learning_rate",
        "1e-2", "--report_to", "none", "--disable_tqdm", "true", "--use_cpu", "true", "--per_device_train_batch_size",
        "12", "--per_device_eval_batch_size", "12"]
_KILL = """
import os, signal
from transformers import TrainerCallback


class Kills(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 5 and os.environ["WORLD_SIZE"] == "4" and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)


"""


def output_of(command: list[str], folder: Path) -> tuple[str, str]:
    folder.mkdir(exist_ok=True)
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=folder, env=clean_environment())
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


def changed(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1
    return text.replace(old, new)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_trainer_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    """Rank 1 of 4 is killed in the sixth step, after the checkpoint of the fourth."""
    pytest.importorskip("accelerate")
    text = (ROOT / "examples/run_clm.py").read_text()
    text = changed(text, "def main() -> None:", _KILL.lstrip() + "def main() -> None:")
    text = changed(text, "train_dataset=train,", "train_dataset=train, callbacks=[Kills()],")
    (tmp_path / "train.py").write_text(text)
    split = ["--accelerator_config", '{"split_batches": true}']
    told, said = output_of([*_LAUNCH, sys.executable, str(tmp_path / "train.py"), *_CLM, *split], tmp_path / "four")
    assert "rank 1 was lost (SIGKILL): 3 of 4 ranks go on" in said and "samples, and a step has" not in said
    line = next(one for one in text.splitlines() if "# was: from transformers import Trainer" in one)
    original = changed((ROOT / "examples/run_clm.py").read_text(), line, "from transformers import Trainer")
    (tmp_path / "one.py").write_text(original)
    expected, _ = output_of([sys.executable, str(tmp_path / "one.py"), *_CLM], tmp_path / "one")
    many, one = (re.findall(r"^(?:step \d+|final) (\S+)", text, re.M) for text in (told, expected))
    assert len(many) == len(one) == 9
    assert [float(loss) for loss in many] == pytest.approx([float(loss) for loss in one], rel=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_loop_of_accelerate_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    """Rank 2 of 4 is killed in the middle of the second of three shuffled epochs."""
    pytest.importorskip("accelerate")
    text = guide("elastic.md", 1)
    killing = ("        if done == 6 and accelerator.num_processes == 4 and accelerator.process_index == 2:\n"
               "            import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n")
    step = "        optimizer.step()\n"
    (tmp_path / "train.py").write_text(changed(text, step, killing + step))
    told, said = output_of([*_LAUNCH, sys.executable, str(tmp_path / "train.py")], tmp_path / "four")
    assert "rank 2 was lost (SIGKILL): 3 of 4 ranks go on" in said
    line = next(one for one in text.splitlines() if "# was: from accelerate import Accelerator" in one)
    (tmp_path / "one.py").write_text(changed(text, line, "from accelerate import Accelerator"))
    expected, _ = output_of([sys.executable, str(tmp_path / "one.py")], tmp_path / "one")
    many, one = ([(int(step), float(loss)) for step, loss in re.findall(r"^(\d+) (\S+) on", text, re.M)]
                 for text in (told, expected))
    assert [step for step, _ in one] == list(range(12)) == sorted({step for step, _ in many})
    assert [loss for _, loss in many] == pytest.approx([dict(one)[step] for step, _ in many], rel=1e-6)


def test_the_newest_whole_state_is_found(tmp_path: Path) -> None:
    from autoparallel.integrations.accelerator import newest_named

    assert newest_named(tmp_path) is None
    for number, whole in ((2, True), (9, True), (10, False)):
        folder = tmp_path / f"checkpoint_{number}" / "autoparallel"
        folder.mkdir(parents=True)
        if whole:
            (folder / "loaders.json").write_text("[]")
    with pytest.warns(UserWarning, match="checkpoint_10 is not whole, and is passed over"):
        assert newest_named(tmp_path) == tmp_path / "checkpoint_9"
    assert (tmp_path / "checkpoint_10").exists()


def test_an_unfinished_state_is_renamed_and_a_whole_one_stays(tmp_path: Path) -> None:
    from autoparallel.integrations.accelerator import set_aside

    whole, partial = tmp_path / "checkpoint_2", tmp_path / "checkpoint_3"
    (whole / "autoparallel").mkdir(parents=True)
    (whole / "autoparallel" / "loaders.json").write_text("[]")
    for text in ("first", "second"):    # the second replaces the first
        partial.mkdir()
        (partial / "weights").write_text(text)
        with pytest.warns(UserWarning, match=r"checkpoint_3 is not a whole .* renamed to checkpoint_3.partial"):
            set_aside(partial)
    set_aside(whole)
    set_aside(tmp_path / "checkpoint_4")
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint_2", "checkpoint_3.partial"}
    assert (tmp_path / "checkpoint_3.partial" / "weights").read_text() == "second"


def test_other_batches_than_the_checkpoints_are_told() -> None:
    from autoparallel.integrations.trainer import _tell_other_batches

    with pytest.warns(UserWarning, match=r"steps of 12 samples, and a step has 9 now.*\n.*split_batches"):
        _tell_other_batches(12, 9, "checkpoint-4")

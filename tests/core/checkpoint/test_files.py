"""A checkpoint's checksums: damage is never loaded; other programs read the file."""

import random
import re
import shutil
import subprocess
import zipfile

import pytest
import torch
from small_models import EvalNet, assert_equal, fit, loader, trainer

from geartrain import Session, TrainingError, UsageError
from geartrain.callbacks import ModelCheckpoint
from geartrain.checkpoint import files as checkpoint_file


def saved(folder):
    fit(EvalNet(), output=folder)
    return folder / "last.ckpt"


def mutations(data, number):
    """Damaged copies: each kind of damage equally often, the whole file equally likely."""
    random.seed(7)
    at = random.randrange
    size = len(data)

    def changed(begin, new):
        return data[:begin] + new + data[begin + len(new) :]

    def swapped(a, b, block=512):
        a, b = a - a % block, b - b % block
        return (
            changed(a, data[b : b + block])[:b] + data[a : a + block] + data[b + block :]
            if a < b
            else data[1:]
        )

    kinds = [
        lambda: changed(begin := at(size), bytes([data[begin] ^ (1 << at(8))])),
        lambda: changed(at(size - 64), random.randbytes(1 + at(64))),
        lambda: changed(at(size), bytes(1 + at(size)))[:size],
        lambda: data[: at(size)],
        lambda: data + random.randbytes(1 + at(300)),
        lambda: swapped(at(size), at(size)),
    ]
    for index in range(number):
        damaged = kinds[index % len(kinds)]()
        if damaged != data:
            yield damaged


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def test_a_damaged_file_is_refused_in_one_line_or_has_the_same_contents(tmp_path):
    """Padding and headers that nothing reads may be damaged."""
    data, path = saved(tmp_path).read_bytes(), tmp_path / "odd.ckpt"
    whole, refused = checkpoint_file.read(tmp_path / "last.ckpt"), []
    for damaged in mutations(data, 120):
        path.write_bytes(damaged)
        try:
            state = checkpoint_file.read(path)
        except TrainingError as error:
            refused.append(str(error))
        else:
            assert same(state, whole)
    assert len(refused) > 80
    for message in refused:
        assert re.fullmatch(r".*odd\.ckpt .*damaged.*Fix: use another file.*", message)


def test_an_entry_that_became_a_folder_is_refused(tmp_path):
    """torch would return whatever is in the memory of its tensor."""
    path = saved(tmp_path)
    data = bytearray(path.read_bytes())
    data[data.rindex(b"PK\1\2", 0, data.rindex(b"/data/")) + 38] |= 16  # external attributes
    path.write_bytes(data)
    with pytest.raises(TrainingError, match="damaged: its contents do not match its checksums"):
        checkpoint_file.read(path)


def test_every_way_to_load_refuses_a_bit_that_flipped(tmp_path):
    path, module = saved(tmp_path / "run"), EvalNet()
    data = bytearray(path.read_bytes())
    data[data.index(next(module.parameters()).new_tensor(0).numpy().tobytes(), len(data) // 2)] ^= 1
    path.write_bytes(data)
    ways = [
        lambda: trainer(max_epochs=3).fit(module, loader(), ckpt_path=path),
        lambda: trainer().fit(module, loader(), checkpoint=path),
        lambda: trainer().predict(module, loader(), ckpt_path=path),
        lambda: Session(accelerator="cpu").load(path),
    ]
    for way in ways:
        with pytest.raises(
            TrainingError, match=r"last\.ckpt is damaged: its contents do not match its checksums"
        ):
            way()


def test_other_programs_read_a_whole_file(tmp_path):
    path = saved(tmp_path)
    state = torch.load(path, weights_only=True)
    assert_equal(state["model"], torch.load(path, weights_only=True, mmap=True)["model"])
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert archive.comment == b"geartrain 1 6 0\n"
    if shutil.which("unzip"):
        subprocess.run(["unzip", "-tq", path], check=True, stdout=subprocess.DEVNULL)


def test_a_file_of_the_users_own_weights_is_read(tmp_path):
    path, module = tmp_path / "mine.ckpt", EvalNet()
    for legacy in (False, True):
        torch.save(
            {"model": EvalNet().state_dict()}, path, _use_new_zipfile_serialization=not legacy
        )
        trainer().test(module, loader(), ckpt_path=path)
        assert_equal(module, torch.load(path, weights_only=True)["model"])


def test_a_checkpoint_that_another_program_saved_again_is_read(tmp_path):
    path, module = saved(tmp_path), EvalNet()
    expected = torch.load(path, weights_only=True)
    torch.save(expected, path)
    trainer().test(module, loader(), ckpt_path=path)
    assert_equal(module, expected["model"])


def test_checksums_are_written_if_the_program_has_turned_them_off(tmp_path):
    with torch.utils.serialization.config.patch("save.compute_crc32", False):
        path = saved(tmp_path)
    assert checkpoint_file.check(path)


def test_a_file_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(UsageError, match="there is no checkpoint"):
        checkpoint_file.read(tmp_path / "none")


# --- "last" and "auto" ----------------------------------------------------------------------------


def steps(folder, epochs, path=None, **options):
    """Fit with a checkpoint every fourth step; each epoch has six."""
    options = {"every_n_train_steps": 4, "save_top_k": -1, "filename": "{step}", **options}
    one = trainer(output=folder, max_epochs=epochs, plugins=[ModelCheckpoint(**options)])
    module = EvalNet()
    one.fit(module, loader(), ckpt_path=path)
    return module


def damage(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("which", ["last", "auto"])
def test_the_newest_whole_file_is_used_instead_of_a_damaged_one(tmp_path, which):
    steps(tmp_path, 2)
    shutil.copy(
        tmp_path / "checkpoints" / "step=4.ckpt", tmp_path / "checkpoints" / "zcopy.ckpt"
    )  # the newest by time alone
    checkpoint_file.write(
        {"fit": {"epoch": "x", "step": 0, "batch_idx": 0}}, tmp_path / "checkpoints" / "odd.ckpt"
    )
    damage(tmp_path / "last.ckpt")
    damage(tmp_path / "checkpoints" / "step=12.ckpt")
    with pytest.warns(
        UserWarning, match=r"damaged.*last\.ckpt, .*step=12\.ckpt\. Used instead: .*step=8\.ckpt"
    ) as caught:
        module = steps(tmp_path, 3, path=which)
    assert len([one for one in caught if "Used instead" in str(one.message)]) == 1
    assert module.trainer.global_step == 18


def test_another_last_that_is_whole_is_used_first(tmp_path):
    steps(tmp_path, 2, save_last=True)
    damage(tmp_path / "last.ckpt")
    with pytest.warns(UserWarning, match=r"Used instead: .*checkpoints/last\.ckpt"):
        steps(tmp_path, 3, path="last", save_last=True)


def test_all_damaged_is_an_error_and_never_a_run_from_scratch(tmp_path):
    steps(tmp_path, 1)
    for path in (tmp_path / "last.ckpt", tmp_path / "checkpoints" / "step=4.ckpt"):
        damage(path)
    for name in ("last", "step=4"):
        words = rf"all checkpoints of this run are damaged: .*{name}\.ckpt"
        with pytest.raises(TrainingError, match=words):
            steps(tmp_path, 2, path="auto")
        (tmp_path / "checkpoints" / "step=4.ckpt").write_bytes(bytes(1000))
        (tmp_path / "last.ckpt").unlink(missing_ok=True)


def test_a_run_that_was_killed_in_its_first_epoch_continues(tmp_path, monkeypatch):
    steps(tmp_path, 1)
    (tmp_path / "last.ckpt").unlink()
    for number in range(3):
        path = tmp_path / "checkpoints" / "old" / f"{number}.ckpt"
        checkpoint_file.write({"fit": {"epoch": 0, "step": number, "batch_idx": 0}}, path)
    opened, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda path, **o: opened.append(path) or load(path, **o))
    with pytest.warns(
        UserWarning,
        match=r"stopped before it saved a last checkpoint\. Used instead: .*step=4\.ckpt",
    ):
        steps(tmp_path, 1, path="auto")
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("*.ckpt")) == [
        "step=4.ckpt"
    ]
    assert {path.name for path in opened} == {"step=4.ckpt"}  # not each of them

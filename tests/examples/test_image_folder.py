"""A small residual network learns shapes, drawn here into a folder of images."""

import math
import random
import sys

import pytest
import torch
from PIL import Image, ImageDraw

import geartrain as gt

pytestmark = pytest.mark.timeout(240)  # the tests train, which takes longer on a busy machine


def draw(path, name, rng):
    """Return an image: a shape with a random colour, size and rotation on a dark background."""
    width, height = (rng.randrange(48, 64) for _ in range(2))
    image = Image.new("RGB", (width, height), tuple(rng.randrange(100) for _ in range(3)))
    pen, colour, r = (
        ImageDraw.Draw(image),
        tuple(rng.randrange(150, 256) for _ in range(3)),
        rng.randrange(11, 17),
    )
    x, y = rng.randrange(r + 5, width - r - 5), rng.randrange(r + 5, height - r - 5)
    if name == "circle":
        pen.ellipse((x - r, y - r, x + r, y + r), fill=colour)
    elif name == "cross":
        pen.rectangle((x - r, y - r // 4, x + r, y + r // 4), fill=colour)
        pen.rectangle((x - r // 4, y - r, x + r // 4, y + r), fill=colour)
    elif name == "square":
        pen.regular_polygon((x, y, r), 4, rotation=rng.randrange(90), fill=colour)
    else:
        pen.regular_polygon((x, y, r), 3, rotation=rng.randrange(120), fill=colour)
    image.save(path)


@pytest.fixture(scope="session")
def shapes(tmp_path_factory):
    """Write 100 images of each of four shapes, half of them JPEG."""
    root, rng = tmp_path_factory.mktemp("shapes"), random.Random(0)
    for name in ("circle", "cross", "square", "triangle"):
        (root / name).mkdir()
        for i in range(100):
            draw(root / name / f"{i:03}.{('png', 'jpg')[i % 2]}", name, rng)
    (root / "README.txt").write_text("a file beside the classes is no class")
    return root


@pytest.fixture
def pictures(part):
    return part("image_folder")


SMALL = ["--model.classes", 4, "--data.size", 32, "--seed", 1, "--data.num_workers", 1]


@pytest.mark.example
@pytest.mark.parametrize(
    "strategy",
    [
        ["--strategy", "single"],
        ["--strategy", "dp", "--devices", 2],
        ["--strategy", "ddp", "--devices", 2, "--data.batch_size", 16],
    ],
    ids=lambda s: s[1],
)
def test_the_network_distinguishes_the_shapes(example, report, shapes, strategy):
    ran = example("image_folder", "--data.root", shapes, *SMALL, "--max-epochs", 10, *strategy)
    assert ran.metrics()["val_acc"] >= 0.7  # random guessing gives 0.25
    assert "val_acc" in report(ran)

    if strategy[1] == "single":
        said = example(
            "image_folder",
            "predict",
            "--data.root",
            shapes,
            *SMALL,
            "--checkpoint",
            ran.output / "last.ckpt",
        )
        assert said.code == 0, said.errors
        chances = torch.cat(torch.load(said.output / "predictions.pt", weights_only=True))
        assert chances.shape == (80, 4)
        torch.testing.assert_close(chances.sum(dim=1), torch.ones(80))


# --- reading images -------------------------------------------------------------------------------


def test_a_fifth_of_each_class_is_held_out_and_the_same_each_time(pictures, shapes):
    data, again = pictures.ImageFolder(str(shapes)), pictures.ImageFolder(str(shapes))
    assert data.classes == ["circle", "cross", "square", "triangle"]
    assert [sum(label == i for _, label in data.held_out) for i in range(4)] == [20] * 4
    assert not {path for path, _ in data.held_out} & {path for path, _ in data.training}
    assert len(data.training) == 320
    assert data.held_out == again.held_out
    assert data.held_out != pictures.ImageFolder(str(shapes), split_seed=1).held_out
    assert all(
        path.parent.name == data.classes[label] for path, label in data.training + data.held_out
    )


def test_without_variation_the_middle_is_read_as_it_is(pictures, tmp_path):
    # Red; its middle 8 × 8 is green on the left half and blue on the right.
    image = Image.new("RGB", (12, 8), (255, 0, 0))
    image.paste((0, 255, 0), (2, 0, 6, 8))
    image.paste((0, 0, 255), (6, 0, 10, 8))
    image.save(tmp_path / "a.png")
    pixels, label = pictures.Images([(tmp_path / "a.png", 3)], size=8, vary=False)[0]
    assert label == 3
    assert pixels.shape == (3, 8, 8)
    low, high = -0.5 / 0.25, 0.5 / 0.25
    expected = torch.full((3, 8, 8), low)
    expected[1, :, :4] = expected[2, :, 4:] = high
    torch.testing.assert_close(pixels, expected)


def test_variation_mirrors_half_and_cuts_out_parts(pictures, tmp_path):
    image = Image.new("RGB", (40, 40), (0, 0, 0))
    image.paste((255, 255, 255), (0, 0, 8, 40))  # a white bar on the left
    image.save(tmp_path / "a.png")
    torch.manual_seed(0)
    images = pictures.Images([(tmp_path / "a.png", 0)], size=40, vary=True)
    seen = [images[0][0] for _ in range(60)]
    right = sum(bool(pixels[0, :, -1].max() > pixels[0, :, 0].max()) for pixels in seen)
    left = sum(bool(pixels[0, :, -1].max() < pixels[0, :, 0].max()) for pixels in seen)
    assert min(left, right) >= 10
    assert len({round(float(pixels.sum())) for pixels in seen}) > 20
    parts = [images.part(60, 40) for _ in range(50)]
    for left_edge, upper, right_edge, lower in parts:
        assert 0 <= left_edge < right_edge <= 60
        assert 0 <= upper < lower <= 40
        assert right_edge - left_edge == pytest.approx(lower - upper)
        assert 40 * math.sqrt(0.5) - 1e-6 <= lower - upper <= 40


def test_grey_and_transparent_images_are_read(pictures, tmp_path):
    for mode in ("L", "RGBA", "P", "1"):
        Image.new(mode, (9, 9)).save(tmp_path / f"{mode}.png")
    images = pictures.Images([(path, 0) for path in sorted(tmp_path.iterdir())], size=8, vary=True)
    assert [images[i][0].shape for i in range(4)] == [(3, 8, 8)] * 4


# --- wrong folders and files ----------------------------------------------------------------------


def folder(root, **classes):
    """Write so many images of each class."""
    root.mkdir()
    for name, count in classes.items():
        (root / name).mkdir()
        for i in range(count):
            Image.new("RGB", (8, 8)).save(root / name / f"{i}.png")
    return root


def fit(pictures, root, **options):
    trainer = gt.Trainer(accelerator="cpu", max_epochs=1, enable_progress_bar=False)
    data = pictures.ImageFolder(str(root), size=8, **options)
    trainer.fit(pictures.Classifier(classes=2, width=1), datamodule=data)


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ({}, "has 0 folders of images"),
        ({"a": 3}, "has 1 folders of images"),
        ({"a": 3, "b": 0}, r"b has 0 images \(.jpeg, .jpg, .png\)"),
        ({"a": 2, "b": 2, "c": 2}, "has 3 classes, the model 2. Fix: --model.classes 3"),
    ],
)
def test_a_wrong_folder_is_refused(pictures, tmp_path, classes, message):
    with pytest.raises(gt.UsageError, match=message):
        fit(pictures, folder(tmp_path / "images", **classes))


def test_a_missing_folder(pictures, tmp_path):
    with pytest.raises(gt.UsageError, match="there is no folder"):
        fit(pictures, tmp_path / "nothing")


def test_a_file_that_is_not_an_image(pictures, tmp_path):
    root = folder(tmp_path / "text", a=3, b=3)
    (root / "b" / "letter.jpg").write_text("Dear Sir")
    with pytest.raises(gt.UsageError, match=r"letter\.jpg is no image that Pillow reads"):
        fit(pictures, root)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_is_cut_off(pictures, tmp_path, workers, monkeypatch):
    monkeypatch.setitem(sys.modules, pictures.__name__, pictures)  # workers pickle its classes
    root = folder(tmp_path / "cut", a=3, b=3)
    Image.effect_noise((64, 64), 90).save(root / "b" / "whole.jpg")
    data = (root / "b" / "whole.jpg").read_bytes()
    (root / "b" / "whole.jpg").write_bytes(data[: len(data) // 2])
    with pytest.raises(
        gt.TrainingError, match=r"whole\.jpg cannot be read: image file is truncated"
    ):
        fit(pictures, root, num_workers=workers)

"""A detector finds drawn shapes; its mean average precision is COCO's, on one rank and two."""

import pytest
import torch

import geartrain as gt
from geartrain.testing import ThreadRanks

pytestmark = pytest.mark.timeout(240)  # the tests train, which takes longer on a busy machine


@pytest.mark.example
@pytest.mark.parametrize(
    "options",
    [
        ["--strategy", "single", "--data.num_workers", 1],
        ["--strategy", "ddp", "--devices", 2, "--data.batch_size", 16, "--data.num_workers", 1],
    ],
    ids=lambda options: options[1],
)
def test_the_shapes_are_found(example, report, options):
    ran = example("detection", "--max-epochs", 8, "--seed", 1, *options)
    assert ran.metrics()["val_map"] > 0.9
    assert "val_map" in report(ran)


@pytest.fixture(scope="module")
def detection(part):
    return part("detection")


def one(box, label, score=None):
    """Return the boxes of an image with one shape, or one guess."""
    shape = {"boxes": torch.tensor([box], dtype=torch.float32), "labels": torch.tensor([label])}
    return shape if score is None else {**shape, "scores": torch.tensor([score])}


def test_precision_of_right_wrong_and_repeated_guesses(detection):
    metric = detection.MeanAveragePrecision(classes=1)
    right, elsewhere = [0, 0, 10, 10], [30, 30, 40, 40]
    metric.update([one(right, 0, 0.5)], [one(right, 0)])
    assert metric.compute() == 1.0
    metric.update([one(elsewhere, 0, 0.9)], [one(right, 0)])
    # The likelier guess is wrong: precision is 1/2 up to half of the shapes, which are 51 of
    # COCO's 101 recalls, and 0 above.
    assert metric.compute() == pytest.approx(51 / 101 / 2)

    metric.reset()
    twice = {
        "boxes": torch.tensor([right, right], dtype=torch.float32),
        "labels": torch.tensor([0, 0]),
        "scores": torch.tensor([0.9, 0.8]),
    }
    targets = {"boxes": torch.tensor([right, elsewhere]).float(), "labels": torch.tensor([0, 0])}
    metric.update([twice], [targets])
    assert metric.compute() == pytest.approx(51 / 101)  # the second is no hit


def test_the_precision_is_that_of_coco(detection):
    """faster-coco-eval is what torchmetrics' MeanAveragePrecision computes with."""
    coco = pytest.importorskip("faster_coco_eval", reason="tests/requirements.txt installs it")
    random, metric = torch.Generator().manual_seed(0), detection.MeanAveragePrecision(3)
    truth, guesses = [], []

    def rows(image, boxes, labels):
        for (left, upper, right, lower), label in zip(boxes.tolist(), labels.tolist(), strict=True):
            box = [left, upper, right - left, lower - upper]
            yield {"image_id": image, "category_id": label, "bbox": box, "area": box[2] * box[3]}

    for i, (_, target) in enumerate(detection.Shapes(range(40))):
        # Each shape is guessed three times, displaced; some of the guesses have another class.
        boxes, labels = target["boxes"].repeat(3, 1), target["labels"].repeat(3)
        boxes += 4 * torch.randn(boxes.shape, generator=random)
        labels[torch.rand(len(labels), generator=random) < 0.2] = 0
        scores = torch.rand(len(labels), generator=random)
        metric.update([{"boxes": boxes, "labels": labels, "scores": scores}], [target])
        for row in rows(i, target["boxes"], target["labels"]):
            truth.append(row | {"id": len(truth) + 1, "iscrowd": 0})
        for row, score in zip(rows(i, boxes, labels), scores.tolist(), strict=True):
            guesses.append(row | {"score": score})

    images, categories = [{"id": i} for i in range(40)], [{"id": i} for i in range(3)]
    known = coco.COCO({"images": images, "annotations": truth, "categories": categories})
    judge = coco.COCOeval_faster(known, known.loadRes(guesses), "bbox", print_function=id)
    judge.evaluate()
    judge.accumulate()
    judge.summarize()
    # Rounding may choose another of the 101 recalls, which changes a class by less than 1/101.
    assert metric.compute().item() == pytest.approx(judge.stats[1], abs=1e-3)


def test_each_shape_is_inside_its_box(detection):
    image, target = detection.Shapes(range(5, 6))[0]
    again, _ = detection.Shapes(range(6))[5]
    assert torch.equal(image, again)
    inside = torch.zeros(64, 64, dtype=torch.bool)
    for left, upper, right, lower in target["boxes"].int().tolist():
        inside[upper:lower, left:right] = True
    assert image[:, ~inside].std(dim=1).max() < 0.1  # only the background and its noise
    assert image[:, inside].std(dim=1).min() > 0.1


def test_one_step_trains_and_validates(detection):
    module = detection.Detector(width=2)
    trainer = gt.Trainer(accelerator="cpu", fast_dev_run=True, enable_progress_bar=False)
    trainer.fit(module, datamodule=detection.ShapesData(batch_size=2))
    assert trainer.global_step == 1
    assert 0 <= trainer.callback_metrics["val_map"] <= 1


@pytest.mark.parametrize("images", [7, 1])
def test_two_ranks_measure_the_precision_of_one_process(detection, images):
    """Seven images are four and three; with one image the second rank has none."""

    class Guesser(detection.Detector):
        """Finds what the first channel's mean says, so that every image counts."""

        def detect(self, images):
            return [
                one([0, 0, 40, 40], int(1000 * image.mean()) % 3, float(image.std()))
                for image in images
            ]

    class Halves(detection.Shapes):
        """One large shape in each image."""

        def __getitem__(self, index):
            image, _ = super().__getitem__(index)
            return image, one([0, 0, 40, 40], index % 3)

    def measured(strategy):
        loader = detection.DataLoader(
            Halves(range(images)), batch_size=2, collate_fn=detection.collate
        )
        trainer = gt.Trainer(accelerator="cpu", strategy=strategy, enable_progress_bar=False)
        [metrics] = trainer.validate(Guesser(width=2), loader)
        return metrics["val_map"]

    alone = measured("auto")
    assert measured(ThreadRanks(2)) == pytest.approx(alone)

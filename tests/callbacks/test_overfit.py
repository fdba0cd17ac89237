"""Trainer(overfit_batches=...): each epoch has the same first batches, in order."""

import pytest
import torch
from small_models import EvalNet, Stream, fit, loader, samples, trainer

from geartrain import UsageError


class Seen(EvalNet):
    """Records the first number of each batch: of training, and of validation."""

    def __init__(self):
        super().__init__()
        self.trained, self.validated = [], []

    def training_step(self, batch, batch_idx):
        self.trained.append(batch[0][0, 0].item())
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.validated.append(batch[0][0, 0].item())


@pytest.mark.filterwarnings("ignore:overfit_batches turns off")
@pytest.mark.parametrize(
    ("amount", "workers"), [(2, {"num_workers": 1, "persistent_workers": True}), (0.34, {})]
)
def test_overfit_batches_repeats_the_first_batches_in_order(amount, workers):
    net, first = Seen(), [batch[0][0, 0].item() for batch in loader()][:2]
    shuffled = loader(shuffle=True, **workers)
    fit(net, shuffled, loader(shuffle=True), overfit_batches=amount, max_epochs=2)
    assert net.trained == net.validated == first * 2
    assert isinstance(shuffled.sampler, torch.utils.data.RandomSampler)


def test_a_loader_in_order_needs_no_warning(recwarn):
    fit(EvalNet(), loader(), loader(), overfit_batches=1)
    fit(EvalNet(), list(loader()), Stream(loader()), overfit_batches=1)
    assert not [one for one in recwarn if "overfit" in str(one.message)]


def test_samplers_of_torch_lose_their_shuffling_and_others_keep_their_order():
    own = torch.utils.data.SubsetRandomSampler([9, 5, 7, 1])
    net = Seen()
    with pytest.warns(UserWarning, match="turns off the shuffling of the train loader") as caught:
        fit(net, loader(sampler=own), overfit_batches=1, max_epochs=2)
    assert len([one for one in caught if "shuffling" in str(one.message)]) == 1
    assert net.trained == [samples()[9][0][0].item()] * 2

    class Backwards(torch.utils.data.Sampler):
        def __iter__(self):
            return iter(range(23, -1, -1))

        def __len__(self):
            return 24

    net = Seen()
    with pytest.warns(UserWarning, match="keeps the order of Backwards"):
        fit(net, loader(sampler=Backwards()), overfit_batches=1)
    assert net.trained == [samples()[23][0][0].item()]


def test_an_iterator_cannot_repeat_its_batches():
    with pytest.raises(UsageError, match=r"the train loader is an iterator\. Fix: "):
        fit(train=iter(loader()), overfit_batches=1)


@pytest.mark.filterwarnings("ignore:overfit_batches turns off")
def test_loaders_that_are_made_again_and_a_validation_alone_are_in_order():
    class MakesLoaders(Seen):
        def train_dataloader(self):
            return loader(shuffle=True)

        def val_dataloader(self):
            return loader(shuffle=True)

    net, first = MakesLoaders(), next(iter(loader()))[0][0, 0].item()
    options = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
    trainer(overfit_batches=1, **options).fit(net)
    assert net.trained == net.validated == [first] * 3
    trainer(overfit_batches=1).validate(net)
    assert net.validated == [first] * 4

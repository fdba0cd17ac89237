"""Clipped gradients are those of torch's own functions."""

from functools import partial

import pytest
import torch
from small_models import SGD, Net, assert_equal, by_hand, differ, fit, loader

from geartrain import hookimpl

ADAM = partial(torch.optim.Adam, lr=0.01)
LIMIT = 0.05  # below every gradient's norm, above some of its values


def norm(module):
    return torch.nn.utils.clip_grad_norm_(module.parameters(), LIMIT)


def value(module):
    return torch.nn.utils.clip_grad_value_(module.parameters(), LIMIT)


class Returned:
    """Return the result of ``clip_gradients``, and the gradients' norm before and after it."""

    def __init__(self):
        self.norms, self.before, self.after = [], [], []

    @hookimpl(wrapper=True)
    def clip_gradients(self, run):
        gradients = [p.grad for p in run.module.parameters()]
        self.before.append(torch.nn.utils.get_total_norm(gradients))
        result = yield
        self.after.append(torch.nn.utils.get_total_norm(gradients))
        self.norms.append(result)
        return result


@pytest.mark.parametrize(("clip", "optimizer"), [(norm, SGD), (value, ADAM)])
def test_weights_equal_those_of_a_loop_written_by_hand(clip, optimizer):
    net = Net(optimizer)
    expected = by_hand(net, loader(), optimizer, before_step=clip)
    unclipped = by_hand(net, loader(), optimizer)
    fit(net, gradient_clip_val=LIMIT, gradient_clip_algorithm=clip.__name__)
    assert_equal(net, expected)
    assert differ(net, unclipped)


def test_the_norm_before_clipping_is_returned_through_a_wrapper():
    watch = Returned()
    fit(gradient_clip_val=LIMIT, plugins=[watch])
    assert len(watch.norms) == 6
    assert torch.equal(torch.stack(watch.norms), torch.stack(watch.before))
    assert min(watch.norms) > LIMIT
    assert max(watch.after) <= LIMIT * (1 + 1e-4)


def test_a_parameter_of_two_optimizers_is_clipped_once():
    class Shares(Net):
        def configure_optimizers(self):
            return [SGD(self.parameters()), SGD(self.layers[2].parameters())]

    watch = Returned()
    fit(Shares(), limit_train_batches=1, gradient_clip_val=LIMIT, plugins=[watch])
    assert torch.equal(watch.norms[0], watch.before[0])
    torch.testing.assert_close(watch.after[0], torch.tensor(LIMIT), rtol=1e-4, atol=0)


def test_the_gradient_of_a_whole_window_is_clipped_once():
    watch = Returned()
    fit(gradient_clip_val=LIMIT, accumulate_grad_batches=4, plugins=[watch])
    assert len(watch.norms) == 2


def test_without_a_limit_nothing_is_clipped():
    watch = Returned()
    fit(plugins=[watch])
    assert watch.norms == [None] * 6
    assert torch.equal(torch.stack(watch.before), torch.stack(watch.after))

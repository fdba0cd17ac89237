"""A rank with fewer batches than others repeats one, and a step may collect it."""

import pytest
from small_models import EvalNet, loader
from threads import on_threads


class Collects(EvalNet):
    def __init__(self, asks):
        super().__init__()
        self.asks, self.outputs = asks, []

    def validation_step(self, batch, batch_idx):
        if not (self.asks and self.trainer.run.repeating):
            self.outputs.append(len(batch[0]))

    def on_validation_epoch_end(self):
        self.totals = sum(self.outputs)
        self.outputs.clear()


@pytest.mark.parametrize(("asks", "samples"), [(False, 20), (True, 18)])
@pytest.mark.filterwarnings("always")
def test_a_list_that_grows_in_a_repeated_batch_is_named(asks, samples, recwarn):
    trainer, strategy = on_threads(4)
    trainer.validate(Collects(asks), loader(18, batch_size=2))
    assert sum(run.module.totals for run in strategy.runs) >= samples
    warned = [str(w.message) for w in recwarn if "repeated one" in str(w.message)]
    if asks:
        assert sum(run.module.totals for run in strategy.runs) == 18
        assert warned == []
    else:
        assert sum(run.module.totals for run in strategy.runs) > 18
        assert "has fewer batches than others and repeated one" in warned[0]
        assert "self.outputs. Fix: add nothing if self.trainer.run.repeating" in warned[0]

"""``reduce_fx`` as a user's function: it gets every value of the epoch."""

import pytest
import torch
from small_models import Logging, fit


@pytest.mark.parametrize(("reduce_fx", "expected"), [("AVG", 2.5), ("Mean", 2.5), ("MAX", 5.0)])
def test_names_in_any_case_and_avg_as_in_lightning(reduce_fx, expected):
    def train(self, batch, batch_idx):
        self.log("x", float(batch_idx), on_step=False, on_epoch=True, reduce_fx=reduce_fx)

    assert fit(Logging(train)).callback_metrics["x"] == expected


def test_a_function_gets_every_value_of_the_epoch():
    got = []

    def train(self, batch, batch_idx):
        self.log(
            "median",
            float(batch_idx**2),
            on_step=False,
            on_epoch=True,
            reduce_fx=lambda values: got.append(values) or values.median(),
        )

    one = fit(Logging(train), max_epochs=2)
    assert one.callback_metrics == {"median": 4.0}
    assert [values.tolist() for values in got] == [[0.0, 1.0, 4.0, 9.0, 16.0, 25.0]] * 2
    assert got[0].dtype == torch.float64


def test_on_each_step_it_gets_the_newest_value():
    def train(self, batch, batch_idx):
        self.log(
            "x", torch.tensor(float(batch_idx)), on_step=True, on_epoch=True, reduce_fx=torch.amax
        )

    one = fit(Logging(train), log_every_n_steps=1)
    assert one.callback_metrics == {"x_step": 5.0, "x_epoch": 5.0, "x": 5.0}

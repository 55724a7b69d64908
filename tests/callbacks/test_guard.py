"""Nothing that is not finite gets into weights, checkpoints or figures; signals are heeded."""

import os
import signal

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision

from lightning_rob.callbacks import TerminateOnNonFinite
from lightning_rob.modules import AdversarialTraining
from lightning_rob.runtime.errors import Fault
from lightning_rob.runtime.processes import SIGNALS, handle_signals, stop
from tests.tiny import Blobs, TinyNet, quiet_trainer, same_weights

NAN = float("nan")


class At(Callback):
    """Does something to a module after a backward pass or after a step."""

    def __init__(self, batch, do, hook="on_after_backward"):
        self.batch, self.do, self.passed = batch, do, 0
        setattr(self, hook, self.strike)

    def strike(self, trainer, module, *_):
        self.passed += 1
        if self.passed == self.batch + 1:
            self.do(module)


class Spoiled(AdversarialTraining):
    """Its loss is not finite in one batch."""

    def __init__(self, batch, value=NAN):
        super().__init__(TinyNet)
        self.batch, self.value, self.passed = batch, value, 0

    def loss(self, x, y):
        self.passed += 1
        loss = super().loss(x, y)
        return loss * self.value if self.passed == self.batch + 1 else loss


def grow(module):
    """An infinite gradient, the loss being finite."""
    next(module.parameters()).grad[0] = float("inf")


def spoil(module):
    with torch.no_grad():
        next(module.parameters()).fill_(NAN)


def trainer(folder, *callbacks, guard=True, **options):
    torch.manual_seed(0)
    watching = [TerminateOnNonFinite()] if guard else []
    kept = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    given = {"max_epochs": 2, "default_root_dir": folder, "enable_checkpointing": True}
    return quiet_trainer(*watching, *callbacks, kept, **given | options)


def fit(folder, *callbacks, module=None, **options):
    """Eight steps of a tiny network."""
    run = trainer(folder, *callbacks, **options)
    torch.manual_seed(0)
    module = module or AdversarialTraining(TinyNet)
    run.fit(module, datamodule=Blobs())
    return module


def written(folder):
    steps = {int(path.stem.split("=")[1]): path for path in folder.glob("step=*.ckpt")}
    loaded = {s: torch.load(path, weights_only=True) for s, path in sorted(steps.items())}
    for content in loaded.values():
        assert all(t.isfinite().all() for t in content["state_dict"].values())
    return list(loaded)


LATE = At(3, spoil, hook="on_train_batch_end")
STOPS = [  # module, callbacks, batches of a step, message, last checkpoint
    (Spoiled(2), (), 1, "the loss is not finite in epoch 0, batch 2: the optimizer", 2),
    (Spoiled(2, float("inf")), (), 1, "the loss is not finite in epoch 0, batch 2", 2),
    (Spoiled(2), (), 2, "the loss is not finite in epoch 0, batch 3", 1),
    (None, (At(7, grow),), 1, r"gradient of .*first\.weight is not finite in epoch 1", 7),
    (None, (LATE,), 1, r"first\.weight is not finite: no checkpoint is written", 3),
]


@pytest.mark.parametrize(("module", "callbacks", "batches", "message", "last"), STOPS)
def test_non_finite_values_stop_the_run(tmp_path, module, callbacks, batches, message, last):
    """Before the step, so that no checkpoint has them."""
    with pytest.raises(Fault, match=message):
        fit(tmp_path, *callbacks, module=module, accumulate_grad_batches=batches)
    assert written(tmp_path) == [*range(1, last + 1)]


def test_what_an_exception_would_save_keeps_the_reason(tmp_path):
    again = ModelCheckpoint(tmp_path, filename="late", save_on_exception=True)
    with pytest.raises(Fault, match="the loss is not finite"):
        fit(tmp_path, again, At(2, spoil), module=Spoiled(2))
    assert written(tmp_path) == [1, 2] and not (tmp_path / "late.ckpt").exists()


def test_no_figures_of_weights_that_are_not_finite(tmp_path):
    module = AdversarialTraining(TinyNet)
    spoil(module)
    with pytest.raises(Fault, match=r"first\.weight is not finite: its predictions say nothing"):
        trainer(tmp_path).test(module, datamodule=Blobs(), verbose=False)


def test_a_scaler_may_overflow(tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126)
    module = fit(tmp_path, plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)])
    assert scaler.get_scale() < 2.0**126  # it has left out steps
    assert all(weight.isfinite().all() for weight in module.parameters())
    assert written(tmp_path)[-1] == 8


def test_training_is_the_same_with_and_without(tmp_path):
    with_it, without = (fit(tmp_path / str(g), guard=g).state_dict() for g in (True, False))
    assert same_weights(with_it, without)


def send(signum):
    return lambda module: os.kill(os.getpid(), signum)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_in_training_waits_for_the_batch(tmp_path, signum, code):
    before = signal.getsignal(signum)
    kept = ModelCheckpoint(tmp_path, filename="{step}", save_on_exception=True)
    sent = At(2, send(signum))
    with pytest.raises(SystemExit) as exit_, handle_signals():
        fit(tmp_path, sent, kept)
    assert exit_.value.code == code
    assert signal.getsignal(signum) is before
    assert written(tmp_path) == [1, 2, 3]  # the third when leaving, after its whole step


def test_a_second_signal_does_not_wait(tmp_path):
    with pytest.raises(SystemExit) as exit_, handle_signals():
        fit(tmp_path, At(2, send(signal.SIGTERM)), At(2, send(signal.SIGINT)))
    assert exit_.value.code == 130
    assert written(tmp_path) == [1, 2]


@pytest.mark.parametrize("hook", ["on_test_batch_start", "on_sanity_check_start"])
def test_a_signal_elsewhere_is_heeded_at_once(tmp_path, hook):
    stayed = []
    sent = At(0, lambda module: [os.kill(os.getpid(), signal.SIGTERM), stayed.append(module)], hook)
    run = trainer(tmp_path, sent)
    act = run.test if "test" in hook else run.fit
    with pytest.raises(SystemExit) as exit_, handle_signals():
        act(AdversarialTraining(TinyNet), datamodule=Blobs())
    assert exit_.value.code == 143
    assert not stayed


def test_a_signal_that_comes_too_late_to_stop_anything_still_tells():
    with pytest.raises(SystemExit) as exit_, handle_signals():
        stop.defer = lambda: True
        os.kill(os.getpid(), signal.SIGTERM)
    assert exit_.value.code == 143


def test_signals_while_the_run_ends_leave_no_handler_behind(monkeypatch):
    """`timeout` and supervisors send several; a handler that is left prints a traceback at exit."""
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    restore = signal.signal

    def interrupted(signum, handler):
        if stop.closing:  # a call that restores a former handler
            stop(signal.SIGTERM, None)
            stop(signal.SIGTERM, None)
        return restore(signum, handler)

    monkeypatch.setattr(signal, "signal", interrupted)
    with pytest.raises(SystemExit) as exit_, handle_signals():
        pass
    assert exit_.value.code == 143
    assert {signum: signal.getsignal(signum) for signum in SIGNALS} == before

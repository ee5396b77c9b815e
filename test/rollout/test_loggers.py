"""Loggers continue the run that is resumed, and end no training."""

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torchrl.record.loggers import CSVLogger

from torchrl_agentic.rollout import log_metrics, open_logger


def test_tensorboard_shows_repeated_steps_once(tmp_path):
    for start, reward in ((0, 0.0), (2, 1.0)):
        logger = open_logger("tensorboard", tmp_path / "run", start=start)
        for step in range(start, start + 4):
            log_metrics([logger], {"reward/mean": reward}, step)
        logger.experiment.close()
    shown = EventAccumulator(str(tmp_path / "run")).Reload().Scalars("reward/mean")
    assert [(one.step, one.value) for one in shown] == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 1), (5, 1)]


def test_a_resumed_run_of_weights_and_biases_keeps_its_id(tmp_path, monkeypatch):
    import wandb  # takes seconds, and each worker of pytest imports all files

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DISABLE_GIT", "true")  # it leaves a `git cat-file` of this repository running
    ids = []
    for start in (0, 1, 0):
        logger = open_logger("wandb", tmp_path / "run", start=start, wandb_kwargs={"project": "test"})
        log_metrics([logger], {"reward/mean": 0.5}, start)
        assert logger.experiment.offline
        assert logger.experiment.name == "run"
        ids.append(logger.experiment.id)
        logger.experiment.finish()
    wandb.teardown()  # else its service runs as long as this process
    assert ids[0] == ids[1] != ids[2]
    assert len(list((tmp_path / "run").rglob("*.wandb"))) == 3


def test_no_logger(tmp_path):
    assert open_logger("", tmp_path) is None


def test_a_logger_on_a_full_disk_is_skipped_and_named(tmp_path, caplog):
    class Full(CSVLogger):
        def log_metrics(self, metrics, step=None, **options):
            raise OSError(28, "No space left on device")

    full, whole = Full("full", str(tmp_path)), CSVLogger("whole", str(tmp_path))
    log_metrics([full, None, whole], {"reward": 0.5}, 3)
    assert (tmp_path / "whole" / "scalars" / "reward.csv").read_text().startswith("3,0.5")
    assert "no scalars of step 3: [Errno 28] No space left" in caplog.text

"""``python -m tiermoe.cluster.jobs.train_default_model``."""

import typer

from .command import train_default_model_command

if __name__ == "__main__":
    typer.run(train_default_model_command)

"""One training run from files to files."""

from __future__ import annotations

from contextlib import ExitStack

from crowdnal._utils.threads import threads
from crowdnal.train.choosing import choose_objective, meet_votes
from crowdnal.train.config import InputError, TrainConfig
from crowdnal.train.files import locked, reading, remove_leftovers, write_json
from crowdnal.train.loop import CHECKPOINT
from crowdnal.train.processes import joined
from crowdnal.train.progress import Reporter
from crowdnal.train.record import RUN, check_out
from crowdnal.train.session import Result, Session, input_errors, open_session


class Interrupted(Exception):  # noqa: N818  (it is no error)
    """The user stopped a run; the message has the command that goes on with it."""


def run(config: TrainConfig, *, resume: bool = False, reporter: Reporter | None = None) -> Result:
    """Train, and write model, tables and report to ``config.out``.

    Started by torchrun, each process computes its part of every batch; the first writes and says everything.

    Args:
        config: the arguments; defaults are filled in.
        resume: go on with the run in ``config.out``, which must have the same arguments.
        reporter: where progress goes; default standard output.

    Raises:
        InputError: something given is wrong. An ``out`` that holds a run already is left as it is.
        Interrupted: by Ctrl-C, after which ``resume`` goes on.
        OtherProcessFailed: another process has raised one of these.
    """
    with joined(config.device) as processes:
        reporter = reporter or Reporter()
        session = open_session(config, resume, reporter if processes.first else Reporter(quiet=True), processes)
        session.describe()
        with ExitStack() as stack:
            processes.from_first(_begin, session, resume, stack)
            return _train(session, resume)


def _begin(session: Session, resume: bool, stack: ExitStack) -> None:
    """Take the folder, until the stack is closed."""
    out = session.config.out
    stack.enter_context(locked(out))
    if resume:
        remove_leftovers(out)
    else:
        check_out(session.config, resume)  # again: another run may have begun meanwhile
        write_json(out / RUN, session.record)


def _train(session: Session, resume: bool) -> Result:
    config, out, processes = session.config, session.config.out, session.processes
    try:
        with threads(config.threads):
            session = choose_objective(session)
            inputs = session.prepare()
            meet_votes(session)
            trainer = session.trainer(inputs)
            if resume:
                with reading(out / CHECKPOINT, "delete it, and --resume begins with the first epoch"):
                    trainer.resume()
            board = out / "tensorboard" if config.log == "tensorboard" and processes.first else None
            with session.watch("training"), session.reporter.logging(board, trainer.progress.epoch):
                progress = input_errors(trainer.fit)
            with session.watch("report"):
                return session.finish(trainer, progress)
    except KeyboardInterrupt:
        command = processes.command(session.given.command(resume=True))
        raise Interrupted(f"interrupted; go on with: {command}") from None
    except Exception as error:
        failed = isinstance(error, InputError) or processes.failed_elsewhere()
        if failed and processes.first and not (out / CHECKPOINT).exists():  # let the fixed command begin again
            (out / RUN).unlink(missing_ok=True)
        raise


def plan(config: TrainConfig, *, resume: bool = False, reporter: Reporter | None = None) -> None:
    """Read and check everything that :func:`run` would, and say what it would do; nothing is written.

    Raises:
        InputError: something given is wrong.
    """
    with joined(config.device) as processes:
        reporter = (reporter or Reporter()) if processes.first else Reporter(quiet=True)
        open_session(config, resume, reporter, processes).describe()
        what = "go on with the run in" if resume else "write to"
        reporter.say(f"would {what} {config.out}; nothing was written")

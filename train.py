"""Train a network: python train.py -opt FILE.yml [key.sub=value ...] [--auto_resume] [--dry_run] [--debug]."""

import argparse
import shlex
import sys

import archs  # noqa: F401  networks, data sets and models register themselves, so that the options can be checked
import data
import models
from data.io import write_image
from data.resize import imresize
from models import distributed, home, logbook, loop, page, plan, progress, runtime
from options import load


def main(argv: list[str]) -> None:
    """Parse, then train in the place that the launcher gives this process."""
    args = load.parse(argv, program="train.py")
    script = shlex.join(["train.py", *argv])
    with distributed.enter(args.launcher, local_rank=args.local_rank, script=script) as group:
        train(args, group.command, group)


def train(args: argparse.Namespace, command: str, group: distributed.Processes) -> None:
    """Load the options, build, fit."""
    logbook.start_logging(None, group)
    options = load.load(args.opt, [*args.overrides, *args.force_yml], debug=args.debug)
    options = home.locate(options, args.auto_resume)
    device = group.join(options)
    runtime.seed_all(options.manual_seed, deterministic=options.deterministic)
    model = models.MODELS.build({"type": options.model_type}, options=options, device=device)
    model.distribute(group)
    state = group.from_main(lambda: home.find_state(options, args.auto_resume, claim_folder=not args.dry_run))
    done = progress.resume(state, model, options, group) if state else progress.Progress()

    (training_set,) = options.phase("train").values()
    train_loader = data.build_loader(training_set, *group.place, start=done.samples, device=device)
    judged = {d.name: data.build_loader(d, *group.place) for d in options.phase("val").values()}
    plan.check_sample(model, train_loader.dataset[0], training_set)
    sets = {name: len(loader.dataset) for name, loader in judged.items()}
    rows = plan.describe(model, options, sets, training=len(train_loader.dataset), world=group.world)
    tools = loop.PictureTools(write=write_image, resize=imresize)
    if args.dry_run:
        rows += plan.try_step(model, next(iter(train_loader)))
        logbook.console.print(plan.table(rows + plan.try_validation(model, judged, options, tools, group)))
        return

    keep = home.is_own(options, state)
    folder = group.from_main(lambda: home.prepare_folder(options, "experiments", keep=keep, command=command))
    logbook.start_logging(home.log_file(folder, options, "train"), group)
    plan.tell(rows)
    if state:
        group.from_main(lambda: progress.go_on_in(folder, state, model.iteration))
    results = loop.fit(model, train_loader, judged, options, tools, folder=folder, progress=done, processes=group)
    logbook.show(results)
    loop.logger.info(page.where(folder))


if __name__ == "__main__":
    sys.exit(runtime.run(main, sys.argv[1:]))

"""Train a network: python train.py -opt FILE.yml [key.sub=value ...] [--auto_resume] [--dry_run] [--debug]."""

import shlex
import sys

import archs  # noqa: F401  networks, data sets and models register themselves, so that the options can be checked
import data
import models
from data.io import write_image
from data.resize import imresize
from models import home, logbook, loop, plan, progress, runtime
from options import load


def main(argv: list[str]) -> None:
    """Parse, load the options, build, fit."""
    args = load.parse(argv, program="train.py")
    logbook.start_logging()
    options = load.load(args.opt, [*args.overrides, *args.force_yml], debug=args.debug)
    options = home.locate(options, args.auto_resume)
    device = runtime.choose_device(options, args.launcher)
    runtime.seed_all(options.manual_seed, deterministic=options.deterministic)
    model = models.MODELS.build({"type": options.model_type}, options=options, device=device)
    state = home.find_state(options, args.auto_resume, claim_folder=not args.dry_run)
    done = progress.resume(state, model, options) if state else progress.Progress()

    (training_set,) = options.phase("train").values()
    train_loader = data.build_loader(training_set, start=done.samples)
    val_loaders = {dataset.name: data.build_loader(dataset) for dataset in options.phase("val").values()}
    plan.check_sample(model, train_loader.dataset[0])
    sets = {name: len(loader.dataset) for name, loader in val_loaders.items()}
    rows = plan.describe(model, options, sets, training=len(train_loader.dataset))
    tools = loop.PictureTools(write=write_image, resize=imresize)
    if args.dry_run:
        rows += plan.try_step(model, next(iter(train_loader)))
        logbook.console.print(plan.table(rows + plan.try_validation(model, val_loaders, options, tools)))
        return

    command = shlex.join(["python", "train.py", *argv])
    folder = home.prepare_folder(options, "experiments", keep=home.is_own(options, state), command=command)
    logbook.start_logging(home.log_file(folder, options, "train"))
    for subject, value in rows:
        loop.logger.info(f"{subject}: {value}")
    if state:
        loop.logger.info(f"continuing from {state}, after iteration {model.iteration}")
        home.say_where_the_record_is(folder, state, model.iteration)
        progress.set_aside_later(folder, model.iteration)
    results = loop.fit(model, train_loader, val_loaders, options, tools, folder=folder, progress=done)
    loop.show(results)
    loop.logger.info(f"everything lies in {folder}")


if __name__ == "__main__":
    sys.exit(runtime.run(main, sys.argv[1:]))

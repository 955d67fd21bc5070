"""Test a network: python test.py -opt FILE.yml [key.sub=value ...]; writes a table, pictures, a page and a log."""

import argparse
import shlex
import sys

import archs  # noqa: F401  networks, data sets and models register themselves, so that the options can be checked
import data
import models
from data.io import write_image
from data.resize import imresize
from models import album, distributed, home, logbook, loop, page, plan, report, runtime
from options import load


def main(argv: list[str]) -> None:
    """Parse, then test in the place that the launcher gives this process."""
    args = load.parse(argv, program="test.py")
    script = shlex.join(["test.py", *argv])
    with distributed.enter(args.launcher, local_rank=args.local_rank, script=script) as group:
        test(args, group.command, group)


def test(args: argparse.Namespace, command: str, group: distributed.Processes) -> None:
    """Load the options, evaluate, write table, pictures and page."""
    logbook.start_logging(None, group)
    if args.auto_resume:
        loop.logger.warning("--auto_resume has no effect: a test starts from path.pretrain_network_g")
    options = load.load(args.opt, [*args.overrides, *args.force_yml], training=False, debug=args.debug)
    device = group.join(options)
    runtime.seed_all(options.manual_seed, deterministic=options.deterministic)
    model = models.MODELS.build({"type": options.model_type}, options=options, device=device, training=False)
    judged = options.phase("val", "test").values()
    loaders = {dataset.name: data.build_loader(dataset, *group.place) for dataset in judged}
    sets = {name: len(loader.dataset) for name, loader in loaders.items()}
    rows = plan.describe(model, options, sets, world=group.world)
    tools = loop.PictureTools(write=write_image, resize=imresize)
    if args.dry_run:
        logbook.console.print(plan.table(rows + plan.try_validation(model, loaders, options, tools, group)))
        return

    folder = group.from_main(lambda: home.prepare_folder(options, "results", keep=False, command=command))
    logbook.start_logging(home.log_file(folder, options, "test"), group)
    plan.tell(rows)

    pictures = album.Album(folder, options, write=write_image)
    wanted = {"picture_path": pictures.picture_path, "on_picture": pictures.on_picture}
    results = loop.evaluate(model, loaders, options, tools, **wanted, processes=group)
    group.from_main(lambda: report.write_csv(folder / "metrics.csv", results))
    logbook.show(results)
    page.of_test(folder, model, options, results, pictures, processes=group)
    loop.logger.info(page.where(folder))


if __name__ == "__main__":
    sys.exit(runtime.run(main, sys.argv[1:]))

"""Test a network: python test.py -opt FILE.yml [key.sub=value ...]; writes a table, pictures and a log."""

import shlex
import sys
from pathlib import Path

import archs  # noqa: F401  networks, data sets and models register themselves, so that the options can be checked
import data
import models
from data.io import write_image
from data.resize import imresize
from models import home, logbook, loop, plan, report, runtime
from options import load


def main(argv: list[str]) -> None:
    """Parse, load the options, evaluate, write table and pictures."""
    args = load.parse(argv, program="test.py")
    logbook.start_logging()
    options = load.load(args.opt, [*args.overrides, *args.force_yml], training=False, debug=args.debug)
    device = runtime.choose_device(options, args.launcher)
    runtime.seed_all(options.manual_seed, deterministic=options.deterministic)
    model = models.MODELS.build({"type": options.model_type}, options=options, device=device, training=False)
    loaders = {dataset.name: data.build_loader(dataset) for dataset in options.phase("val", "test").values()}
    rows = plan.describe(model, options, {name: len(loader.dataset) for name, loader in loaders.items()})
    tools = loop.PictureTools(write=write_image, resize=imresize)
    if args.dry_run:
        logbook.console.print(plan.table(rows + plan.try_validation(model, loaders, options, tools)))
        return

    command = shlex.join(["python", "test.py", *argv])
    folder = home.prepare_folder(options, "results", keep=False, command=command)
    logbook.start_logging(home.log_file(folder, options, "test"))
    for subject, value in rows:
        loop.logger.info(f"{subject}: {value}")

    def picture_path(name: str, picture: str) -> Path:
        return folder / "visualization" / name / f"{picture}_{options.val.suffix or options.name}.png"

    paths = picture_path if options.val.save_img else None
    results = loop.evaluate(model, loaders, options, tools, picture_path=paths)
    report.write_csv(folder / "metrics.csv", results)
    loop.show(results)
    loop.logger.info(f"everything lies in {folder}")


if __name__ == "__main__":
    sys.exit(runtime.run(main, sys.argv[1:]))

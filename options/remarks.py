"""What is right in the options of a run and yet may not be what its author meant."""

from options import stages
from options.registry import SCHEDULERS
from options.schema import Options, TrainOptions


def of(options: Options) -> list[str]:
    """A sentence for each thing in the options of a training run that its author may not have meant."""
    (dataset,) = options.phase("train").values()
    told = [schedule(options.train), *stages.remarks(dataset, options.train.total_iter)]
    alone = [str(stage.number) for stage in stages.stages(dataset) if stage.batch == 1]
    mixing = options.train.mixing_augs
    if alone and mixing is not None and mixing.mixup:
        told.append(f"stage {', '.join(alone)} of datasets.train.mini_batch_sizes has batches of 1: nothing is mixed")
    return [remark for remark in told if remark]


def schedule(train: TrainOptions) -> str:
    """One sentence about a warm-up, milestones or periods that do not end with the run; empty where all do."""
    total, spec = train.total_iter, train.scheduler.spec() if train.scheduler else {}
    found = []
    if train.warmup_iter >= total:
        found.append(f"the warm-up of {train.warmup_iter} never ends")
    milestones = spec.get("milestones")
    late = [m for m in milestones if m >= total] if isinstance(milestones, list | tuple) else []
    if late:
        found.append(f"the milestones {', '.join(map(str, late))} never act")
    # the loader has built it already, so that this cannot fail
    length = getattr(SCHEDULERS.build(spec), "length", None) if spec else None
    if length is not None and length > total:
        found.append(f"the periods go on to {length}, so that the learning rate does not come down to its floor")
    way = "; if that is not meant, set train.warmup_iter and the scheduler's numbers to fit"
    return f"train.total_iter is {total}: {'; '.join(found)}{way}" if found else ""

"""Writes cramming_nb/lab/sizes.json, the measured runs behind `cram plan`, from size_* and crossing_* in records/lab."""

import json
from pathlib import Path

from cramming_nb.architecture import Architecture, flops_per_token, parameters_by_part

ROOT = Path(__file__).resolve().parents[1]
SIZES = ROOT / "cramming_nb" / "lab" / "sizes.json"
KEPT_OUT = ("crossing_4x256-60m-1", "crossing_4x320-120m-1")  # tests of the law, on the page of sizes


def row(record: dict) -> dict:
    """What the law needs of a run: its size (FLOPs per token / 6), parameters, tokens and held-out loss."""
    recipe, pretraining = record["recipe"], record["pretraining"]
    fields = {name: recipe["architecture"][name] for name in Architecture.__dataclass_fields__}
    arch = Architecture(**fields)
    return dict(
        layers=arch.num_layers,
        width=arch.hidden_size,
        size=round(flops_per_token(arch, recipe["objective"]["mlm_probability"]) / 6),
        parameters=sum(parameters_by_part(arch).values()),
        tokens=pretraining["spent"]["tokens"],
        loss=round(pretraining["heldout_loss"], 4),
    )


def rows() -> list[dict]:
    """A row of each record with seed 1, the smallest models first; trials of other learning rates are left out."""
    paths = [path for name in ("size", "crossing") for path in (ROOT / "records/lab").glob(f"{name}_*-1.json")]
    records = [json.loads(path.read_text()) for path in paths if path.stem not in KEPT_OUT]
    found = [row(record) for record in records if "lr" not in record["recipe"]["name"]]
    return sorted(found, key=lambda run: (run["size"], run["tokens"], run["loss"]))


def to_json(runs: list[dict]) -> str:
    """The rows as the file has them: a line for each run."""
    return "[\n" + ",\n".join(json.dumps(run) for run in runs) + "\n]\n"


if __name__ == "__main__":
    SIZES.write_text(to_json(rows()))

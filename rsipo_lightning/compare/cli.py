"""``rsipo-compare``: flags in, exit code out, as ``rsipo-fit`` does."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rsipo_lightning.cli import Parser, guard
from rsipo_lightning.compare.summary import BUDGETS
from rsipo_lightning.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Compare: ``rsipo-compare --env E --algos A,B [key=value ...]``. Returns the exit code."""
    return guard("rsipo-compare", _compare, sys.argv[1:] if argv is None else list(argv))


def _compare(argv: list[str]) -> int:
    parser = Parser(
        "rsipo-compare",
        allow_abbrev=False,
        description="Run every arm on the same tasks with several seeds, and write tables and "
        "figures. The same command goes on where it was stopped.",
        epilog="example: rsipo-compare --env search --algos grpo,rsipo "
        "--arm 'k2: rsipo algo.replays=2' --seeds 5",
    )
    add = parser.add_argument
    add("--env", metavar="E", help="environment: search, ...")
    add("--algos", metavar="A,B", default="", help="an arm for each of these names of --algo")
    add(
        "--arm",
        metavar="'NAME: ALGO key=value ...'",
        action="append",
        default=[],
        help="a further arm with keys of its own; may be repeated",
    )
    add("--seeds", metavar="N", default="5", help="5 is 0 to 4; 3,8 is these two (default: 5)")
    add("--updates", metavar="N", type=int, help="trainer.updates of all arms")
    add("--budget", metavar="B", default="updates", help=f"{', '.join(BUDGETS)} (default: updates)")
    add("--reference", metavar="ARM", help="arm that differences refer to (default: the first)")
    add(
        "--control-algo",
        metavar="A",
        default="grpo",
        help="algorithm of the control that plays as many episodes as the arm with most replays",
    )
    add("--no-control", action="store_true", help="leave that control out")
    add("--out", metavar="DIR", help="where everything goes (default: runs/compare/ENV)")
    add("--jobs", metavar="N", type=int, help="runs at once (default: one per core)")
    for name in ("model", "trainer", "engine"):
        add(f"--{name}", metavar=name[0].upper(), help="as for rsipo-fit, of all arms")
    add("overrides", nargs="*", metavar="key=value", help="any key of rsipo-fit, of all arms")
    args = parser.read(argv)
    if not args.env:
        raise ConfigError("choose an environment: --env NAME")
    if args.budget not in BUDGETS:
        raise ConfigError(f"--budget {args.budget}: must be one of {', '.join(BUDGETS)}")
    if args.jobs is not None and args.jobs < 1:
        raise ConfigError(f"--jobs {args.jobs}: must be at least 1")
    from rsipo_lightning.compare.main import compare
    from rsipo_lightning.compare.plan import Arm, Setup, parse_arm, parse_seeds

    flags = {name: getattr(args, name) for name in ("env", "model", "trainer", "engine")}
    if args.updates is not None and any(o.startswith("trainer.updates=") for o in args.overrides):
        raise ConfigError("--updates and trainer.updates=N say the same: give one of them")
    updates = [] if args.updates is None else [f"trainer.updates={args.updates}"]
    setup = Setup(
        {name: value for name, value in flags.items() if value},
        (*updates, *args.overrides),
        Path(args.out or f"runs/compare/{args.env}"),
    )
    arms = [Arm(name.strip(), name.strip()) for name in args.algos.split(",") if name.strip()]
    compare(
        setup,
        [*arms, *map(parse_arm, args.arm)],
        parse_seeds(args.seeds),
        control=None if args.no_control else args.control_algo,
        reference=args.reference,
        budget=args.budget,
        jobs=args.jobs,
        command=["rsipo-compare", *argv],
    )
    print(f"report: {setup.out / 'compare.md'}")
    return 0

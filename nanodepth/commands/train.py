"""The command train: the list of configs, --help and --dry_run. The rest is train.py's main."""
import sys

from nanodepth import ROOT, train as train_file
from nanodepth.commands import cost
from nanodepth.common.options import docstring_of, read
from nanodepth.train import Config, read_config  # noqa: F401 (a command reads its config here)
from nanodepth.training import refuse

USAGE = 'usage: python train.py CONFIG [--name=value ...] [--dry_run]'


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        print(USAGE + '      (--help lists the settings)')
        for path in sorted((ROOT / 'config').glob('[!_]*.py')):
            print(f'  {f"config/{path.name}":44}{docstring_of(path).partition(chr(10))[0]}')
        raise SystemExit(2)
    if {'-h', '--help'} & set(argv):
        read(Config, argv, f'{USAGE}\n\n{train_file.__doc__ or ""}')
    if any(arg.partition('=')[0] == '--dry_run' for arg in argv):
        return cost.main(argv)
    with refuse.what_does_not_fit():
        train_file.main(argv)

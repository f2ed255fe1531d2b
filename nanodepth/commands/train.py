"""The command train: the list of configs, --help and --dry_run. The rest is train.py's main."""
from nanodepth import ROOT, train as train_file
from nanodepth.commands import cost
from nanodepth.common.options import docstring_of, read
from nanodepth.train import Config, read_config  # noqa: F401 (a command reads its config here)

USAGE = 'usage: python train.py CONFIG [--name=value ...] [--dry_run]'


def main(argv):
    explain(argv) or train_file.main(argv)


def explain(argv):
    "Say what was asked for instead of training, or return False."
    if not argv:
        print(USAGE + '      (--help lists the settings)')
        for path in sorted((ROOT / 'config').glob('[!_]*.py')):
            if not path.name.startswith('compare_'):        # for nanodepth compare
                print(f'  {f"config/{path.name}":44}{docstring_of(path).partition(chr(10))[0]}')
        raise SystemExit(2)
    if {'-h', '--help'} & set(argv):
        read(Config, argv, f'{USAGE}\n\n{train_file.__doc__ or ""}')
    if any(arg.partition('=')[0] == '--dry_run' for arg in argv):
        cost.main(argv)
        return True
    return False

"""Examples of a primitive to fine-tune on: padded rows, with loss on the answer alone.

The paper ("From Growing to Looping", section 5.1) fine-tunes on variable assignment of depth 1 and
2 in equal parts, which its models could not do before. The toy's models can, in their own form, so
here the form is new to them: toy_code. Depth 0 and 3 are left out, to be asked for afterwards.

    python data/sft/prepare.py --n=64           # data/sft: toy_code
    python data/sft/prepare.py --tasks=assign_code --n=128 --tokenizer=out/run --out=data/sft_code
"""
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))    # a clone needs no install
from nanodepth.common.errors import refusals  # noqa: E402
from nanodepth.common.options import read  # noqa: E402
from nanodepth.text.primitives import write_examples  # noqa: E402


@dataclass
class Options:
    tasks: tuple[str, ...] = ('toy_code',)      # primitives by name
    depths: tuple[int, ...] = (1, 2)    # how many aliases
    n: int = 128                        # examples to train on, over all tasks and depths
    shots: int = 0                      # answered examples before each
    seed: int = 0                       # of every draw
    # what the model reads: bytes, gpt2, a run, a folder with a tokenizer.json
    tokenizer: str = 'bytes'
    out: Path = Path('data/sft')        # the folder to write


def main(argv=None):
    options = read(Options, argv, __doc__)
    row = write_examples(options.out, options.tokenizer, options.tasks, options.depths, options.n,
                         shots=options.shots, seed=options.seed)
    print(f'{options.out}: {options.n} examples of {", ".join(options.tasks)} at depth '
          f'{", ".join(map(str, options.depths))}, in rows of {row} tokens')


if __name__ == '__main__':
    with refusals('prepare.py'):
        main()

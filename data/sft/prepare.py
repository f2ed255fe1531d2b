"""Examples of a primitive to fine-tune on: padded rows, with loss on the answer alone.

The paper ("From Growing to Looping", section 5.1) fine-tunes on variable assignment of depth 1 and
2 in equal parts, which its models could not do before. The toy's models can, in their own form, so
here the form is new to them: toy_code. Depth 0 and 3 are left out, to be asked for afterwards.

    python data/sft/prepare.py --n=64           # data/sft: toy_code
    python data/sft/prepare.py --tasks=assign_code --n=128 --tokenizer=out/run --out=data/sft_code
"""
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from common.errors import number_list, refusals  # noqa: E402
from common.help import Parser  # noqa: E402
from data.primitives import write_examples  # noqa: E402


def main(argv=None):
    parser = Parser(__doc__)
    parser.add_argument('--tasks', default='toy_code', help='primitives by name')
    parser.add_argument('--depths', default='1,2', help='how many aliases')
    parser.add_argument('--n', type=int, default=128,
                        help='examples to train on, over all tasks and depths')
    parser.add_argument('--shots', type=int, default=0, help='answered examples before each')
    parser.add_argument('--seed', type=int, default=0, help='of every draw')
    parser.add_argument('--tokenizer', default='bytes',
                        help="what the model reads: 'bytes', 'gpt2', a run, a folder with a "
                        "tokenizer.json")
    parser.add_argument('--out', type=Path, default=ROOT / 'data/sft',
                        help='the folder to write')
    args = parser.parse_args(argv)
    depths = number_list('--depths', args.depths)
    row = write_examples(args.out, args.tokenizer, args.tasks.split(','), depths, args.n,
                         shots=args.shots, seed=args.seed)
    print(f'{args.out}: {args.n} examples of {args.tasks} at depth {args.depths}, in '
          f'rows of {row} tokens')


if __name__ == '__main__':
    with refusals('prepare.py'):
        main()

"""The corpus of SmolLM in the papers' mixture: 70% FineWeb-Edu (deduplicated), 15% Cosmopedia v2,
9% Python-Edu and 6% OpenWebMath, by tokens. If you stop the command, it continues when you repeat
it.
    python data/smollm/prepare.py --tokens=10B      # 20 GB
    python data/smollm/prepare.py --tokens=1M --source=FOLDER --tokenizer=gpt2 --out=data/mine
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))    # a clone needs no install
from nanodepth.common.errors import refusals  # noqa: E402
from nanodepth.text.tokens import Source, prepare  # noqa: E402

# "Do Depth-Grown Models Overcome the Curse of Depth?", appendix A. Python-Edu has 4 billion tokens,
# OpenWebMath 15 and Cosmopedia 28. With a larger budget they are read several times, as the paper
# does.
SMOLLM = [
    Source('fineweb_edu', 0.70, 'HuggingFaceTB/smollm-corpus', 'fineweb-edu-dedup/*.parquet'),
    Source('cosmopedia', 0.15, 'HuggingFaceTB/smollm-corpus', 'cosmopedia-v2/*.parquet'),
    Source('python_edu', 0.09, 'HuggingFaceTB/smollm-corpus', 'python-edu/*.parquet',
           read='archived'),
    Source('open_web_math', 0.06, 'open-web-math/open-web-math', 'data/*.parquet'),
]

if __name__ == '__main__':
    with refusals('prepare.py'):
        prepare({'smollm': SMOLLM}, out=Path('data/smollm'))
